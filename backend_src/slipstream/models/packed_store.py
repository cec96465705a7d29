"""Packed weights kept on the disk at set-up, so that a start reads them instead of packing them anew.

Importing this module is cheap; torch and the kernels are imported where something is packed or loaded.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slipstream.models.atomic_folder import build_folder
from slipstream.models.cache_folder import cache_directory

if TYPE_CHECKING:
    import numpy as np

    from slipstream.models.kernels.cpu_step import Weights
    from slipstream.models.weights import ModelConfig

_MANIFEST = "packed.json"
# Raised when packing writes something else than before.
_FORMAT = 1


def read_packed(folder: Path, storage: str) -> dict[str, np.ndarray] | None:
    """The kept arrays of a model folder's packed weights by name, or None where none are kept that are its.

    The embedding is mapped, of which few rows are ever read. What each step reads is copied into memory, where its
    pages are large: mapped matrices made a step of one token 17 % slower.
    """
    import numpy as np

    kept = packed_folder(folder, storage)
    if not _is_of(kept, folder):
        return None
    # Copy on write: numba has a type of its own for what may not be written.
    return {
        file.stem: np.asarray(np.load(file, mmap_mode="c" if file.stem == "embedding" else None))
        for file in kept.glob("*.npy")
    }


def load_weights(
    config: ModelConfig, folder: Path, storage: str, packed: dict[str, np.ndarray] | None = None
) -> Weights:
    """The packed weights of a model folder: those kept by `keep_packed`, else packed now.

    Args:
        packed: what `read_packed` has read of them.

    Raises:
        ConfigError: a width that the kernels do not compute.
    """
    from slipstream.models.cpu_weights import pack_weights
    from slipstream.models.kernels.cpu_matmul import Matrix
    from slipstream.models.kernels.cpu_step import Weights
    from slipstream.models.weights import Checkpoint

    arrays = packed or read_packed(folder, storage)
    if arrays is None:
        return pack_weights(config, Checkpoint(folder), storage)

    def field(name: str) -> Any:
        if name in arrays:
            return arrays[name]
        return Matrix(*(arrays[f"{name}.{part}"] for part in Matrix._fields))

    return Weights(*(field(name) for name in Weights._fields))


def keep_packed(folder: Path, storage: str) -> Path:
    """Pack a model's weights and keep them, unless that is done already; twice, or two at once, is harmless.

    Raises:
        ConfigError: a width that the kernels do not compute.
        StorageFailed: the disk refused; nothing half-done stays.
    """
    import numpy as np

    from slipstream.models.cpu_weights import pack_weights
    from slipstream.models.kernels.cpu_matmul import Matrix
    from slipstream.models.weights import Checkpoint, ModelConfig

    def build(_scratch: Path, result: Path) -> None:
        weights = pack_weights(ModelConfig.from_folder(folder), Checkpoint(folder), storage)
        for name, value in weights._asdict().items():
            if isinstance(value, Matrix):
                for part, array in value._asdict().items():
                    np.save(result / f"{name}.{part}.npy", array)
            else:
                np.save(result / f"{name}.npy", value)
        (result / _MANIFEST).write_text(json.dumps(_identity(folder)))

    size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    return build_folder(
        packed_folder(folder, storage),
        build,
        is_complete=lambda kept: _is_of(kept, folder),
        needed_bytes=2 * size,  # at most: float32 from 16 bits, and the embedding a second time
        on_wait=lambda: None,
    )


def is_kept(folder: Path, storage: str) -> bool:
    """Whether a model folder's packed weights are on the disk."""
    return _is_of(packed_folder(folder, storage), folder)


def packed_folder(folder: Path, storage: str) -> Path:
    """Where a model folder's packed weights are kept."""
    path = str(folder.resolve())
    return cache_directory() / "packed" / f"{folder.name}-{hashlib.sha256(path.encode()).hexdigest()[:12]}-{storage}"


def _is_of(kept: Path, folder: Path) -> bool:
    """Whether kept weights were packed from what a model folder holds now."""
    try:
        return bool(json.loads((kept / _MANIFEST).read_text()) == _identity(folder))
    except (OSError, ValueError):
        return False


def _identity(folder: Path) -> dict[str, object]:
    files = sorted([*folder.glob("*.safetensors"), folder / "config.json"])
    return {
        "format": _FORMAT,
        "files": [[file.name, file.stat().st_size, file.stat().st_mtime_ns] for file in files],
    }
