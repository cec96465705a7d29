"""Where things lie on this machine."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from pathlib import Path


def cache_folder() -> Path:
    """The folder of everything that can be made again: `$SLIPSTREAM_CACHE`, or the user's cache directory."""
    explicit = os.environ.get("SLIPSTREAM_CACHE")
    if explicit:
        return Path(explicit).expanduser().absolute()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "slipstream"


def make_server_folder(longest: int) -> Path:
    """Make an empty folder, private to this user, for one server that this process owns, and return its path.

    It lies among the temporary files, or directly in /tmp where `longest` bytes are not enough for a path there.
    Folders of owners that were killed are removed on the way; the owner's process id is part of the name.
    """
    base = Path(tempfile.gettempdir())
    prefix = f"slipstream-{os.getpid()}-"
    if len(os.fsencode(base / prefix)) + len("12345678") > longest:
        base = Path("/tmp")
    for folder in base.glob("slipstream-[0-9]*-*"):
        owner = folder.name.split("-")[1]
        with contextlib.suppress(OSError):
            if owner.isdigit() and folder.stat().st_uid == os.getuid() and not Path(f"/proc/{owner}").exists():
                shutil.rmtree(folder, ignore_errors=True)
    return Path(tempfile.mkdtemp(prefix=prefix, dir=base))
