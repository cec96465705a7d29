"""Where everything is kept that can be fetched, converted or compiled again."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path


def cache_directory(environment: Mapping[str, str] = os.environ) -> Path:
    """The folder of everything that can be fetched again: `$SLIPSTREAM_CACHE`, or the user's cache directory."""
    explicit = environment.get("SLIPSTREAM_CACHE")
    if explicit:
        return Path(explicit).expanduser().absolute()
    return Path(environment.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "slipstream"


def compiled_folder() -> Path:
    """The folder of compiled kernels of this version.

    It is named by all their sources: a compiled function holds what it calls, and numba itself only looks whether the
    function's own file has changed.
    """
    sources = sorted((Path(__file__).parent / "kernels").glob("*.py"))
    digest = hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()
    return cache_directory() / "kernels" / digest[:16]
