"""Matmuls of a step by all threads of a team, over weights packed in panels of 16 columns."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit

from slipstream.models.kernels.cpu_math import OPTIONS, exp
from slipstream.models.kernels.cpu_team import barrier, take
from slipstream.models.kernels.cpu_tile import LANES, multiply_panel, multiply_two_panels

# A piece of work is two panels; with fewer rows than these they are computed side by side.
_FEW_ROWS = 6
_CACHED_ELEMENTS = 1 << 16  # 256 KiB
_TWO_PANELS = 2 * LANES
_ONE = np.float32(1.0)


class Matrix(NamedTuple):
    """The weights of one projection in all layers."""

    panels: np.ndarray  # [num_layers, num_panels, depth, 16] fp16 as uint16, or float32
    bias: np.ndarray  # [num_layers, num_panels * 16] float32


@njit(**OPTIONS)
def matmul(team, x, num_rows, matrix, layer, out):
    """out[:num_rows] = x[:num_rows] @ weights + bias; x: [rows, depth], out: [rows, num_panels * 16]."""
    panels, bias = matrix.panels[layer], matrix.bias[layer]
    num_panels, depth = panels.shape[0], panels.shape[1]
    width = out.shape[1]
    rows_of_item = _rows_of_item(depth)
    pairs = (num_panels + 1) // 2
    while True:
        item = take(team)
        row, first = item // pairs * rows_of_item, item % pairs * 2
        if row >= num_rows:
            break
        rows, count = min(rows_of_item, num_rows - row), min(2, num_panels - first)
        place = row * width + first * LANES
        _multiply(rows, out, place, width, bias, first * LANES, x, row * depth, panels, first, count)
    barrier(team)


@njit(**OPTIONS)
def gated_matmul(team, x, num_rows, matrix, layer, out):
    """out = silu(x @ gate) * (x @ up) (Shazeer, 2020), where panels of the two alternate; out: [rows, width]."""
    panels, bias = matrix.panels[layer], matrix.bias[layer]
    depth = panels.shape[1]
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
            _multiply(count, both, 0, _TWO_PANELS, bias, pair * _TWO_PANELS, x, row * depth, panels, 2 * pair, 2)
            for i in range(count):
                for lane in range(LANES):
                    gate = both[i * _TWO_PANELS + lane]
                    up = both[i * _TWO_PANELS + LANES + lane]
                    out[row + i, pair * LANES + lane] = gate / (_ONE + exp(-gate)) * up
    barrier(team)


@njit(**OPTIONS)
def _rows_of_item(depth):
    """How many rows of x are multiplied by all panels before the next ones are: what stays in a core's cache."""
    return max(_FEW_ROWS, _CACHED_ELEMENTS // depth // _FEW_ROWS * _FEW_ROWS)


@njit(**OPTIONS)
def _multiply(num_rows, out, out_at, out_stride, bias, bias_at, x, x_at, panels, first, count):
    """Rows of x from flat place `x_at` on, times `count` panels from `first` on."""
    depth = panels.shape[1]
    size = depth * LANES
    if count == 2 and num_rows <= 2:
        multiply_two_panels(
            num_rows, out, out_at, out_stride, bias, bias_at, 0, x, x_at, depth, panels, first * size, size, depth
        )
        return
    for row in range(0, num_rows, _FEW_ROWS):
        rows = min(_FEW_ROWS, num_rows - row)
        for panel in range(count):
            multiply_panel(
                rows, out, out_at + row * out_stride + panel * LANES, out_stride, bias, bias_at + panel * LANES, 0,
                x, x_at + row * depth, depth, panels, (first + panel) * size, depth,
            )  # fmt: skip
