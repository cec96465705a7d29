"""Packed matmuls, and the row counts at which their rows do not depend on each other."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.errors import ConfigError
from slipstream.models.linear import PackedFp16Linear, compute_dtype, is_batch_invariant, make_linear, pad_rows

CPU = torch.device("cpu")


@given(st.integers(0, 10_000))
def test_padded_rows_never_leave_a_last_group_of_one_or_two(rows: int) -> None:
    padded = pad_rows(rows, "fp16")
    assert rows <= padded <= rows + 2
    assert padded % 6 not in (1, 2)
    assert padded == rows or rows % 6 in (1, 2)
    assert pad_rows(rows, "fp32") == pad_rows(rows, "bf16") == rows


def test_packed_weights_multiply_as_their_fp16_values() -> None:
    """fp32 activations and accumulation: against float64, only the order of 96 additions remains."""
    generator = torch.Generator().manual_seed(0)
    weight, bias = torch.randn(80, 96, generator=generator), torch.randn(80, generator=generator)
    x = torch.randn(9, 96, generator=generator)
    exact = x.double() @ weight.half().double().T + bias.double()
    torch.testing.assert_close(PackedFp16Linear(weight, bias)(x).double(), exact, rtol=1e-5, atol=1e-5)


@settings(max_examples=40)
@given(rows=st.lists(st.integers(0, 95), min_size=1, max_size=60, unique=True))
def test_a_rows_bits_depend_on_nothing_else_in_a_padded_batch(rows: list[int]) -> None:
    """Any rows in any order, filled up with zeros."""
    generator = torch.Generator().manual_seed(1)
    linear = PackedFp16Linear(torch.randn(72, 64, generator=generator), None)
    x = torch.randn(96, 64, generator=generator)
    batch = torch.zeros(pad_rows(len(rows), "fp16"), 64)
    batch[: len(rows)] = x[rows]
    assert torch.equal(linear(batch)[: len(rows)], linear(x)[rows])


def test_the_probe_tells_an_invariant_matmul_from_another() -> None:
    weight = torch.randn(72, 64, generator=torch.Generator().manual_seed(2))
    packed = PackedFp16Linear(weight, None)
    assert is_batch_invariant(packed, 64)
    assert not is_batch_invariant(lambda x: packed(x) * (1 + 1e-6 * len(x)), 64)


def test_the_packed_storage_is_refused_on_cuda() -> None:
    with pytest.raises(ConfigError, match="weights is 'fp16', which is the packed CPU storage; on cuda use"):
        make_linear(torch.zeros(8, 8), None, "fp16", torch.device("cuda"))


@pytest.mark.parametrize(
    ("storage", "dtype"), [("fp16", torch.float32), ("fp32", torch.float32), ("bf16", torch.bfloat16)]
)
def test_activations_have_the_dtype_that_goes_with_the_weights(storage: str, dtype: torch.dtype) -> None:
    x = torch.ones(3, 8, dtype=dtype)
    assert compute_dtype(storage) == dtype
    assert make_linear(torch.eye(8), torch.ones(8), storage, CPU)(x).dtype == dtype
    assert torch.equal(make_linear(torch.eye(8), torch.ones(8), storage, CPU)(x), 2 * x)
