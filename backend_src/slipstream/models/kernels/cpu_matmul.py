"""Matmuls of a step by all threads of a team, over weights packed in panels of 16 columns.

Weights in float multiply the activations as they are. Weights in int8 multiply activations that are quantised row by
row, to 16 bits at most, so that no row depends on another and the sums are exact.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import njit, types
from numba.extending import overload

from slipstream.models.kernels.cpu_math import OPTIONS, exp
from slipstream.models.kernels.cpu_team import ROWS_AT_ONCE, barrier, take
from slipstream.models.kernels.cpu_tile import LANES, multiply_panel, multiply_two_panels

MOST_WEIGHT = 127  # of an int8 weight's magnitude
_FEW_ROWS = 6
_TWO_PANELS = 2 * LANES
# Elements of x that stay in a core's cache while all panels are multiplied with them: 256 KiB of float32.
_CACHED_ELEMENTS = 1 << 16
_INLINED: Any = OPTIONS  # numba's own annotation of them is narrower than what it takes
_ZERO = np.float32(0.0)
_ONE = np.float32(1.0)


class Matrix(NamedTuple):
    """The weights of one projection in all layers."""

    panels: np.ndarray  # [num_layers, num_panels, depth, 16] fp16 as uint16, or float32; int8 in pairs, see pack_panels
    bias: np.ndarray  # [num_layers, num_panels * 16] float32
    scales: np.ndarray  # [num_layers, num_panels * 16] float32 of int8 weights, what 1 stands for; else [num_layers, 0]


class Quantised(NamedTuple):
    """Where activations are kept while int8 weights multiply them."""

    values: np.ndarray  # [rows * the widest depth] int16, [rows, depth] of the matmul under way
    scales: np.ndarray  # [rows] float32, what 1 stands for


@njit(**OPTIONS)
def matmul(team, x, num_rows, matrix, layer, quantised, out):
    """out[:num_rows] = x[:num_rows] @ weights + bias; x: [rows, depth], out: [rows, num_panels * 16]."""
    panels, bias, scales = matrix.panels[layer], matrix.bias[layer], matrix.scales[layer]
    num_panels, depth, width = panels.shape[0], x.shape[1], out.shape[1]
    activations = _activations(team, x, num_rows, panels, quantised)
    rows_of_item = _rows_of_item(depth)
    pairs = (num_panels + 1) // 2
    while True:
        item = take(team)
        row, first = item // pairs * rows_of_item, item % pairs * 2
        if row >= num_rows:
            break
        rows, count = min(rows_of_item, num_rows - row), min(2, num_panels - first)
        place = row * width + first * LANES
        _multiply(rows, out, place, width, bias, activations, row, depth, panels, first, count)
        _rescale(rows, out, place, width, panels, bias, scales, quantised, row, first, count)
    barrier(team)


@njit(**OPTIONS)
def gated_matmul(team, x, num_rows, matrix, layer, quantised, out):
    """out = silu(x @ gate) * (x @ up) (Shazeer, 2020), where panels of the two alternate; out: [rows, width]."""
    panels, bias, scales = matrix.panels[layer], matrix.bias[layer], matrix.scales[layer]
    depth = x.shape[1]
    activations = _activations(team, x, num_rows, panels, quantised)
    rows_of_item = _rows_of_item(depth)
    pairs = panels.shape[0] // 2
    both = np.empty(_FEW_ROWS * _TWO_PANELS, np.float32)
    while True:
        item = take(team)
        start, pair = item // pairs * rows_of_item, item % pairs
        if start >= num_rows:
            break
        stop = min(start + rows_of_item, num_rows)
        for row in range(start, stop, _FEW_ROWS):
            count = min(_FEW_ROWS, stop - row)
            _multiply(count, both, 0, _TWO_PANELS, bias, activations, row, depth, panels, 2 * pair, 2)
            _rescale(count, both, 0, _TWO_PANELS, panels, bias, scales, quantised, row, 2 * pair, 2)
            for i in range(count):
                for lane in range(LANES):
                    gate = both[i * _TWO_PANELS + lane]
                    up = both[i * _TWO_PANELS + LANES + lane]
                    out[row + i, pair * LANES + lane] = gate / (_ONE + exp(-gate)) * up
    barrier(team)


@njit(**OPTIONS)
def _rows_of_item(depth):
    """How many rows of x are multiplied by all panels before the next ones are."""
    return max(_FEW_ROWS, _CACHED_ELEMENTS // depth // _FEW_ROWS * _FEW_ROWS)


@njit(**OPTIONS)
def _multiply(num_rows, out, place, width, bias, x, first_row, depth, panels, first, count):
    """Rows of x from `first_row` on, times `count` panels from `first` on, to the flat place of `out` and beside it."""
    size = depth * LANES
    x_at, bias_at = first_row * depth, first * LANES
    if count == 2 and num_rows <= 2:
        multiply_two_panels(
            num_rows, out, place, width, bias, bias_at, 0, x, x_at, depth, panels, first * size, size, depth
        )
        return
    for row in range(0, num_rows, _FEW_ROWS):
        rows = min(_FEW_ROWS, num_rows - row)
        for panel in range(count):
            multiply_panel(
                rows, out, place + row * width + panel * LANES, width, bias, bias_at + panel * LANES, 0,
                x, x_at + row * depth, depth, panels, (first + panel) * size, depth,
            )  # fmt: skip


def _activations(team: Any, x: Any, num_rows: Any, panels: Any, quantised: Any) -> Any:
    """What the panels are multiplied with: x itself, or its rows quantised for int8 weights."""
    raise NotImplementedError  # compiled code has the overloads below


@overload(_activations, jit_options=_INLINED)
def _overload_activations(team, x, num_rows, panels, quantised):
    if panels.dtype == types.int8:

        def quantise(team, x, num_rows, panels, quantised):
            _quantise_rows(team, x, num_rows, quantised)
            return quantised.values

        return quantise
    return lambda team, x, num_rows, panels, quantised: x


@njit(**OPTIONS)
def _quantise_rows(team, x, num_rows, quantised):
    """Each row to whole numbers that are as large as sums of products with int8 weights allow in 32 bits."""
    depth = x.shape[1]
    most = np.float32(min(32767, (2**31 - 1) // (MOST_WEIGHT * depth)))
    while True:
        first = take(team) * ROWS_AT_ONCE
        if first >= num_rows:
            break
        for row in range(first, min(first + ROWS_AT_ONCE, num_rows)):
            values = x[row]
            largest, nothing = np.float32(1e-30), _ZERO
            for i in range(depth):
                largest = max(largest, abs(values[i]))
                nothing += values[i] * _ZERO  # NaN where one is NaN or infinite
            factor = most / largest
            for i in range(depth):
                quantised.values[row * depth + i] = np.int16(np.rint(values[i] * factor))
            # What is not finite has no whole number, but must not look as if it had one.
            quantised.scales[row] = largest / most + nothing
    barrier(team)


def _rescale(
    num_rows: Any, out: Any, place: Any, width: Any, panels: Any, bias: Any, scales: Any, quantised: Any, row: Any,
    first: Any, count: Any,
) -> Any:  # fmt: skip
    """Turn sums of whole numbers into what they stand for, and add the bias; sums of floats are what they are."""
    raise NotImplementedError  # compiled code has the overloads below


@overload(_rescale, jit_options=_INLINED)
def _overload_rescale(num_rows, out, place, width, panels, bias, scales, quantised, row, first, count):
    if panels.dtype != types.int8:
        return lambda num_rows, out, place, width, panels, bias, scales, quantised, row, first, count: None

    def rescale(num_rows, out, place, width, panels, bias, scales, quantised, row, first, count):
        flat = out.reshape(out.size)
        for i in range(num_rows):
            row_scale = quantised.scales[row + i]
            for j in range(count * LANES):
                column = first * LANES + j
                at = place + i * width + j
                flat[at] = flat[at] * (row_scale * scales[column]) + bias[column]

    return rescale
