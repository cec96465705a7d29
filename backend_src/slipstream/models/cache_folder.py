"""Where everything is kept that can be fetched, converted or compiled again."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path


def cache_directory(environment: Mapping[str, str] = os.environ) -> Path:
    """The folder of everything that can be fetched again: `$SLIPSTREAM_CACHE`, or the user's cache directory."""
    explicit = environment.get("SLIPSTREAM_CACHE")
    if explicit:
        return Path(explicit).expanduser().absolute()
    return Path(environment.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "slipstream"
