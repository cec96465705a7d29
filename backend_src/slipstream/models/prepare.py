"""What is done once at set-up so that no start has to: packing a model's weights and compiling the kernels."""

from __future__ import annotations

from pathlib import Path

from slipstream.config import DEFAULT_WEIGHTS, EngineConfig
from slipstream.models.cache_folder import compiled_folder
from slipstream.models.fetch import Progress
from slipstream.models.packed_store import is_kept, keep_packed


def prepare(folder: Path, weights: str, progress: Progress) -> None:
    """Make a model ready for engines on this machine's CPU, unless it is; where CUDA is used there is nothing to do.

    Args:
        folder: a model folder.
        weights: `auto`, `fp16`, `fp32` or `int8`, see EngineConfig.
        progress: called with what is being done.

    Raises:
        ConfigError: a model that the kernels do not compute.
        StorageFailed: the disk refused.
    """
    storage = DEFAULT_WEIGHTS["cpu"] if weights == "auto" else weights
    compiled = compiled_folder() / f"{storage}.done"
    if is_kept(folder, storage) and compiled.exists():
        return
    from slipstream.models.runner import ModelRunner, choose_device

    if weights == "auto" and choose_device("auto") != "cpu":
        return
    if not is_kept(folder, storage):
        progress("pack", 0, 0)
        keep_packed(folder, storage)
    if not compiled.exists():
        progress("compile", 0, 0)
        config = EngineConfig("prepare", model=str(folder), device="cpu", weights=storage)
        ModelRunner(config, folder)  # runs a step of each kind
        compiled.parent.mkdir(parents=True, exist_ok=True)
        compiled.touch()
