"""A step that the device has no memory for: the engine hears of it when what it had allocated is free again."""

from __future__ import annotations

import weakref

import pytest
import torch

from slipstream.engine.batch import StepOutput
from slipstream.errors import OutOfMemory
from slipstream.models.runner import run_within_memory


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (MemoryError, "none left"),
        (torch.OutOfMemoryError, "CUDA out of memory"),
        (RuntimeError, "DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"),
    ],
)
def test_what_the_step_had_allocated_is_free_when_it_is_told(error: type[Exception], text: str) -> None:
    allocated: list[weakref.ref[torch.Tensor]] = []

    def step() -> StepOutput:
        tensor = torch.zeros(1)
        allocated.append(weakref.ref(tensor))
        raise error(text)

    with pytest.raises(OutOfMemory) as caught:
        run_within_memory(step, "cpu")
    assert str(caught.value) == f"{error.__name__}: {text}"
    assert [tensor() for tensor in allocated] == [None]


def test_another_error_stays_what_it_is() -> None:
    def step() -> StepOutput:
        raise RuntimeError("the device is on fire")

    with pytest.raises(RuntimeError, match="the device is on fire"):
        run_within_memory(step, "cpu")


def test_a_step_is_computed_without_gradients() -> None:
    assert run_within_memory(lambda: StepOutput([int(torch.is_inference_mode_enabled())]), "cpu").token_ids == [1]
