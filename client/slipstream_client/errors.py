"""Errors of the client side that a user can act on; the command line prints them as one line."""

from __future__ import annotations


class SlipstreamError(Exception):
    """Something failed in a way that its message explains; never shown with a traceback."""
