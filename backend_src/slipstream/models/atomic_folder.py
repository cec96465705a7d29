"""Build a folder so that it is there whole or not at all, whoever else builds it and whenever the process dies.

The work is done in a hidden sibling on the same file system, written through to the disk, and renamed into place under
a lock. A process that is killed leaves at most that sibling, which the next build removes.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from slipstream.errors import SlipstreamError


class StorageFailed(SlipstreamError):
    """The cache folder cannot take the files: no room, no permission, no such file system."""


def build_folder(
    final: Path,
    build: Callable[[Path, Path], None],
    *,
    is_complete: Callable[[Path], bool],
    needed_bytes: int,
    on_wait: Callable[[], None],
) -> Path:
    """Return `final`, building it first unless `is_complete(final)`.

    Args:
        build: fills its second argument, the folder that will become `final`; its first is a folder for what is needed
            on the way, on the same file system, removed before `final` appears.
        needed_bytes: room that the build takes at its peak; with less, nothing is begun.
        on_wait: called once if another process is building the same folder; its result is then used.

    Raises:
        StorageFailed: the file system refused; nothing half-done is left. Errors of `build` pass through likewise.
    """
    if is_complete(final):
        return final
    with _explained(final.parent, needed_bytes):
        final.parent.mkdir(parents=True, exist_ok=True)
        with _locked(final.with_name(f".{final.name}.lock"), on_wait):
            if is_complete(final):
                return final
            for leftover in final.parent.glob(f".{final.name}.building-*"):
                shutil.rmtree(leftover, ignore_errors=True)
            if shutil.disk_usage(final.parent).free < needed_bytes:
                raise OSError(errno.ENOSPC, "not enough room")
            # A name of its own for every build: a child of a killed one may still be writing into the old folder.
            building = Path(tempfile.mkdtemp(prefix=f".{final.name}.building-", dir=final.parent))
            try:
                scratch, result = building / "scratch", building / "result"
                scratch.mkdir()
                result.mkdir()
                build(scratch, result)
                shutil.rmtree(scratch)
                _sync_tree(result)
                if final.exists():
                    final.rename(building / "replaced")
                result.rename(final)
                _sync(final.parent)
            finally:
                shutil.rmtree(building, ignore_errors=True)
    return final


@contextmanager
def _locked(path: Path, on_wait: Callable[[], None]) -> Iterator[None]:
    """Hold an exclusive lock on `path`. The kernel frees it when its process dies; the empty file stays."""
    with path.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            on_wait()
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextmanager
def _explained(folder: Path, needed_bytes: int) -> Iterator[None]:
    """Turn what a file system refuses into one line that says where, and what would mend it."""
    mend = "or set SLIPSTREAM_CACHE to a folder on another disk"
    try:
        yield
    except SlipstreamError:
        raise
    except Exception as error:
        if _is_disk_full(error):
            free = shutil.disk_usage(folder).free
            raise StorageFailed(
                f"not enough room in {folder}: {needed_bytes / 1e6:.0f} MB are needed, {free / 1e6:.0f} MB are free; "
                f"make room, {mend}"
            ) from error
        if isinstance(error, OSError) and error.strerror:
            place = error.filename or folder
            raise StorageFailed(f"cannot write to {place}: {error.strerror}; mend that, {mend}") from error
        raise


def _is_disk_full(error: BaseException | None) -> bool:
    """Whether the disk or a quota is the cause; safetensors reports it as text in an exception of its own."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            return True
        if "No space left on device" in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False


def _sync_tree(folder: Path) -> None:
    for path in folder.rglob("*"):
        _sync(path)
    _sync(folder)


def _sync(path: Path) -> None:
    """Write a file or a directory's entries through to the disk, so that a rename never names unwritten data."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
