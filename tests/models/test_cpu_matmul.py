"""Matmuls over packed weights, and that their rows do not depend on each other."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.models.cpu_weights import pack_matrix
from slipstream.models.kernels.cpu_matmul import Matrix, Quantised, gated_matmul, matmul
from slipstream.models.kernels.cpu_team import make_team
from slipstream.models.kernels.cpu_tile import pack_panels

STORAGES = ("fp16", "fp32", "int8")


def random(*shape: int, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


def packed(weight: torch.Tensor, bias: torch.Tensor | None, storage: str) -> Matrix:
    panels, scales = pack_matrix(weight, storage)
    columns = np.zeros(len(panels) * 16, np.float32)
    if bias is not None:
        columns[: len(bias)] = bias.numpy()
    return Matrix(panels[None], columns[None], scales[None])


def run(kernel: Any, x: torch.Tensor, matrix: Matrix, width: int, threads: int = 1) -> torch.Tensor:
    rows, depth = x.shape
    out, team = torch.zeros(rows, width), make_team(threads)
    quantised = Quantised(np.zeros(rows * depth, np.int16), np.zeros(rows, np.float32))
    with ThreadPoolExecutor(threads) as pool:
        arguments = (team, x.numpy(), rows, matrix, 0, quantised, out.numpy())
        for done in [pool.submit(kernel, *arguments) for _ in range(threads)]:
            done.result()
    return out


def stored(weight: torch.Tensor, storage: str) -> torch.Tensor:
    """The values that a storage keeps, in float64."""
    if storage == "fp16":
        return weight.half().double()
    if storage == "int8":
        scale = weight.abs().amax(1, keepdim=True) / 127
        return (weight / scale).round().double() * scale.double()
    return weight.double()


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 6, 7, 50])
@pytest.mark.parametrize("storage", STORAGES)
def test_a_product_is_that_of_the_stored_weights(storage: str, rows: int, threads: int) -> None:
    """Against float64: for floats the order of 96 additions remains; int8 rounds activations to one in 22369 of the
    row's largest, 1.6e-5 of about 3.5 in each of 96 products of size 1: some 5e-4 of sums of size 10."""
    weight, bias, x = random(80, 96), random(80, seed=1), random(rows, 96, seed=2)
    exact = x.double() @ stored(weight, storage).T + bias.double()
    out = run(matmul, x, packed(weight, bias, storage), 80, threads)
    tolerance = 2e-3 if storage == "int8" else 2e-5
    torch.testing.assert_close(out.double(), exact, rtol=1e-5, atol=tolerance)


@pytest.mark.parametrize("rows", [1, 7])
@pytest.mark.parametrize("storage", STORAGES)
def test_columns_are_filled_up_to_whole_panels(storage: str, rows: int) -> None:
    """Five panels, the last of 9 columns: an odd number of them, and zeros behind."""
    weight, x = random(73, 64), random(rows, 64, seed=1)
    out = run(matmul, x, packed(weight, None, storage), 80)
    torch.testing.assert_close(out[:, :73].double(), x.double() @ stored(weight, storage).T, rtol=1e-4, atol=2e-3)
    assert not out[:, 73:].any()


@settings(max_examples=40)
@given(rows=st.lists(st.integers(0, 95), min_size=1, max_size=60, unique=True), storage=st.sampled_from(STORAGES))
def test_a_rows_bits_depend_on_nothing_else_in_a_batch(rows: list[int], storage: str) -> None:
    """Any rows in any order."""
    matrix, x = packed(random(72, 64, seed=1), None, storage), random(96, 64, seed=2, scale=3.0)
    assert torch.equal(run(matmul, x[rows], matrix, 80), run(matmul, x, matrix, 80)[rows])


@pytest.mark.parametrize("storage", STORAGES)
def test_a_row_that_is_not_finite_breaks_no_other_and_stays_so(storage: str) -> None:
    matrix, x = packed(random(80, 64), None, storage), random(7, 64, seed=1)
    expected = run(matmul, x, matrix, 80)
    x[2, 5], x[4, 60] = torch.nan, torch.inf
    out = run(matmul, x, matrix, 80)
    assert not torch.isfinite(out[[2, 4]]).any()
    others = [0, 1, 3, 5, 6]
    assert torch.equal(out[others], expected[others])


@pytest.mark.parametrize("storage", STORAGES)
def test_a_row_of_zeros_gives_the_bias(storage: str) -> None:
    bias = random(80, seed=1)
    assert torch.equal(run(matmul, torch.zeros(2, 64), packed(random(80, 64), bias, storage), 80)[1], bias)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("rows", [1, 6, 50])
@pytest.mark.parametrize("storage", STORAGES)
def test_a_gated_product(storage: str, rows: int, threads: int) -> None:
    """Gates from about -40 to 40; see the tolerance of the plain product."""
    gate, up, x = random(48, 64, scale=1.5), random(48, 64, seed=1), random(rows, 64, seed=2)
    weight = torch.stack([gate.unflatten(0, (-1, 16)), up.unflatten(0, (-1, 16))], 1).flatten(0, 2)
    gated, ungated = (x.double() @ stored(part, storage).T for part in (gate, up))
    out = run(gated_matmul, x, packed(weight, None, storage), 48, threads)
    tolerance = 2e-2 if storage == "int8" else 2e-4
    torch.testing.assert_close(out.double(), gated * torch.sigmoid(gated) * ungated, rtol=1e-4, atol=tolerance)


def test_many_rows_are_multiplied_in_pieces_that_fit_a_cache() -> None:
    """More rows than one piece has, at a depth at which a piece has few."""
    weight, x = random(32, 4096), random(40, 4096, seed=1)
    out = run(matmul, x, packed(weight, None, "fp32"), 32, threads=2)
    torch.testing.assert_close(out.double(), x.double() @ weight.double().T, rtol=1e-4, atol=1e-3)


def test_panels_hold_columns_side_by_side_and_int8_in_pairs() -> None:
    weight = np.arange(20 * 4, dtype=np.float32).reshape(20, 4)
    panels = pack_panels(weight)
    assert panels.shape == (2, 4, 16)
    np.testing.assert_array_equal(panels[0, 2], weight[:16, 2])
    np.testing.assert_array_equal(panels[1, 3], [*weight[16:, 3], *[0.0] * 12])
    pairs = pack_panels(weight.astype(np.int8)).reshape(2, 2, 16, 2)
    np.testing.assert_array_equal(pairs[0, 1, 5], weight[5, 2:4])
