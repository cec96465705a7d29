"""Where things lie on this machine."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")
_REGIONS = "shared-memory-regions"


def cache_folder() -> Path:
    """The folder of everything that can be made again: `$SLIPSTREAM_CACHE`, or the user's cache directory."""
    explicit = os.environ.get("SLIPSTREAM_CACHE")
    if explicit:
        return Path(explicit).expanduser().absolute()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "slipstream"


def make_server_folder(longest: int) -> Path:
    """Make an empty folder, private to this user, for one server that this process owns, and return its path.

    It lies among the temporary files, or directly in /tmp where `longest` bytes are not enough for a path there.
    Folders of owners that were killed are removed on the way, with the shared memory that is noted in them; the owner's
    process id is part of the name.
    """
    base = Path(tempfile.gettempdir())
    prefix = _own_prefix()
    if len(os.fsencode(base / prefix)) + len("12345678") > longest:
        base = Path("/tmp")
    for folder in base.glob("slipstream-[0-9]*-*"):
        owner = folder.name.split("-")[1]
        with contextlib.suppress(OSError):
            if owner.isdigit() and folder.stat().st_uid == os.getuid() and not Path(f"/proc/{owner}").exists():
                _remove_regions(folder)
                shutil.rmtree(folder, ignore_errors=True)
    return Path(tempfile.mkdtemp(prefix=prefix, dir=base))


@contextlib.contextmanager
def scratch_folder() -> Iterator[Path]:
    """An empty folder for the time of the block; where its owner is killed, the next server's start removes it."""
    with tempfile.TemporaryDirectory(prefix=_own_prefix()) as folder:
        yield Path(folder)


def note_regions(folder: Path, regions: list[str]) -> None:
    """Note shared memory in a server's folder: it outlives a server whose owner was killed."""
    with (folder / _REGIONS).open("a", encoding="utf-8") as names:
        names.writelines(f"{region}\n" for region in regions)


def _own_prefix() -> str:
    return f"slipstream-{os.getpid()}-"


def _remove_regions(folder: Path) -> None:
    noted = folder / _REGIONS
    for region in noted.read_text(encoding="utf-8").split() if noted.exists() else []:
        with contextlib.suppress(OSError):
            (SHARED_MEMORY / Path(region).name).unlink()
