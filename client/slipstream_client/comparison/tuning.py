"""The best that Triton's dynamic batcher can do with a workload, so that no comparison handicaps it.

Every pair of a stated grid is tried: how long the batcher waits for a batch to fill, and how large a batch may be. What
gives the most useful tokens per second is what is compared.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from slipstream_client.comparison.variants import Variant, set_switches

DELAYS_MS = (0, 20)
# Of the configured batch size.
SIZES = (1.0, 0.5)

Settings = dict[str, int]
Figures = dict[str, Any]


def grid(max_batch_size: int) -> list[Settings]:
    """The settings to be tried, for a model that is configured with `max_batch_size`."""
    sizes = dict.fromkeys(max(int(max_batch_size * share), 1) for share in SIZES)
    return [
        {"max_queue_delay_microseconds": delay * 1000, "max_batch_size": size} for size in sizes for delay in DELAYS_MS
    ]


def is_tunable(variant: Variant) -> bool:
    """Whether the comparison may set its batcher: it is the model `dynamic`, and nobody has set it by hand."""
    return variant.model == "dynamic" and variant.url is None and not {*grid(1)[0]} & {*variant.switches}


def tune(
    variants: Sequence[Variant],
    repository: Path,
    max_batch_size: int,
    load: Callable[[Variant], None],
    measure: Callable[[Variant, str], Figures],
) -> dict[str, Any]:
    """Try the grid with the first of `variants` and set all of them to the best.

    Args:
        variants: those of the dynamic batcher; those with other switches get what is best for the first.
        repository: where their models' configurations lie.
        max_batch_size: as it is configured.
        load: makes the server read a variant's configuration again.
        measure: a short run of a variant, called what it is told, with its `output_tokens_per_s` and `mean_batch`.

    Returns: what results.json says of it.
    """
    first = variants[0]
    tried: list[dict[str, Any]] = []
    for settings in grid(max_batch_size):
        _apply(first, settings, repository, load)
        said = f"max_queue_delay {settings['max_queue_delay_microseconds'] / 1000:g} ms, "
        figures = measure(first, said + f"max_batch_size {settings['max_batch_size']}")
        tried.append(settings | {key: figures[key] for key in ("output_tokens_per_s", "mean_batch", "failures")})
    sound = [each for each in tried if not each["failures"]] or tried
    best = max(sound, key=lambda each: each["output_tokens_per_s"])
    chosen = {key: best[key] for key in grid(1)[0]}
    for variant in variants:
        _apply(variant, chosen, repository, load)
    return {
        "variants": [variant.name for variant in variants],
        "tried_with": first.name,
        "grid": tried,
        "chosen": chosen,
    }


def _apply(variant: Variant, settings: Settings, repository: Path, load: Callable[[Variant], None]) -> None:
    set_switches(repository / variant.served_name, {key: str(value) for key, value in settings.items()})
    load(variant)
