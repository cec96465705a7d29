"""Errors that reach a user: what was wrong, in which field, with which value, and what is allowed."""

from __future__ import annotations


class SlipstreamError(Exception):
    """Base of every expected failure; its text is shown without a traceback."""


class InvalidRequest(SlipstreamError):
    """A request that can never be served as it was sent (INVALID_ARG)."""


class Unavailable(SlipstreamError):
    """A good request that cannot be served now: queue full, engine down or draining (UNAVAILABLE)."""


class Cancelled(SlipstreamError):
    """A request ended because its client asked for it (CANCELLED)."""


class ConfigError(SlipstreamError):
    """A configuration value outside what is allowed; names the field, the value and the limits."""


class ModelNotFound(SlipstreamError):
    """A model name or folder that does not resolve to weights and a tokenizer."""


class OutOfMemory(SlipstreamError):
    """A step that the device has no memory for; it may have it for half of the step."""
