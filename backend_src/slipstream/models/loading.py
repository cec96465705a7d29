"""Loading the runner of an engine: the weights are read while torch is imported, which takes longer."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from slipstream.config import DEFAULT_WEIGHTS, EngineConfig
from slipstream.models.packed_store import read_packed
from slipstream.models.store import resolve

if TYPE_CHECKING:
    from slipstream.models.runner import Runner


def load_runner(config: EngineConfig) -> Runner:
    """The configured executor with its model.

    Raises:
        ModelNotFound: there is no such model.
        ConfigError: a configuration that the model or the device cannot serve.
    """
    folder = resolve(config.model)
    storage = DEFAULT_WEIGHTS["cpu"] if config.weights == "auto" else config.weights
    may_need_packed = config.executor == "native" and config.device != "cuda"
    with ThreadPoolExecutor(1) as pool:
        packed = pool.submit(lambda: read_packed(folder, storage) if may_need_packed else None)
        from slipstream.models.runner import make_runner

        return make_runner(config, folder, packed.result)
