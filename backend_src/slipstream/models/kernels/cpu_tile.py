"""A few rows times sixteen columns, in registers: what the CPU's matmuls and its attention are both made of.

Every sum is one chain of fused multiply-adds in the order of its terms. So a row's result has the same bits however
many rows are computed beside it, which is what makes answers independent of the batch. The register tile is that of
Goto and van de Geijn, "Anatomy of High-Performance Matrix Multiplication", 2008.
"""

from __future__ import annotations

import math
import platform
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from slipstream.models.kernels.cpu_math import OPTIONS

LANES = 16  # columns of a panel
_UNROLL = 4
_INT8, _INT16, _INT32, _INT64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
_FLOAT = ir.FloatType()
_SUMS = ir.VectorType(_FLOAT, LANES)
_EVERYWHERE = ir.Constant(ir.VectorType(_INT32, LANES), None)  # shuffles lane 0 to all lanes
_STORED = {types.uint16: ir.HalfType(), types.float32: _FLOAT, types.int8: _INT8}


@intrinsic(prefer_literal=True)
def _tile(
    typingctx: Any,
    rows: Any,
    panels: Any,
    out: Any,
    out_at: Any,
    out_stride: Any,
    initial: Any,
    initial_at: Any,
    initial_stride: Any,
    x: Any,
    x_at: Any,
    x_stride: Any,
    w: Any,
    w_at: Any,
    w_stride: Any,
    depth: Any,
) -> Any:
    """out[row, :] = initial[row, :] + the sum over k < depth of x[row, k] * w[k, :], for constant numbers of both.

    Places and strides are in elements of the flat arrays. Panels lie `w_stride` apart, their columns side by side in
    `out` and `initial`. `w` holds float32, or fp16 as uint16. Where it holds int8, x holds int16, the sums are exact
    32-bit integers, and `out` gets them as floats without `initial`.
    """
    num_rows, num_panels = rows.literal_value, panels.literal_value
    multiply = _multiply_integers if w.dtype == types.int8 else _multiply_floats

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        def pointer(index: int, place: Any) -> Any:
            array = context.make_array(signature.args[index])(context, builder, arguments[index])
            return builder.gep(array.data, [place])

        def places(first: Any, stride: Any, count: int) -> list[Any]:
            return [builder.add(first, builder.mul(stride, ir.Constant(_INT64, i))) for i in range(count)]

        def vectors(index: int, first: Any, stride: Any) -> list[Any]:
            """Pointers to the lanes of every row and panel of `out` or `initial`."""
            return [
                builder.bitcast(
                    pointer(index, builder.add(row, ir.Constant(_INT64, panel * LANES))), _SUMS.as_pointer()
                )
                for row in places(first, stride, num_rows)
                for panel in range(num_panels)
            ]

        (_, _, _, out_at, out_stride, _, initial_at, initial_stride, _, x_at, x_stride, _, w_at, w_stride, depth) = (
            arguments
        )
        x_rows = [pointer(8, place) for place in places(x_at, x_stride, num_rows)]
        w_panels = [pointer(11, place) for place in places(w_at, w_stride, num_panels)]
        starts = [builder.load(vector, align=4) for vector in vectors(5, initial_at, initial_stride)]
        sums = multiply(builder, x_rows, w_panels, depth, starts, _STORED[w.dtype])
        for vector, total in zip(vectors(2, out_at, out_stride), sums, strict=True):
            builder.store(total, vector, align=4)
        return context.get_dummy_value()

    place = types.intp
    arguments = (rows, panels, out, place, place, initial, place, place, x, place, place, w, place, place, place)
    return types.void(*arguments), generate


def _multiply_floats(
    builder: Any, x_rows: list[Any], w_panels: list[Any], depth: Any, sums: list[Any], stored: Any
) -> list[Any]:
    """One fused multiply-add after the other."""
    w_panels = [builder.bitcast(panel, ir.VectorType(stored, LANES).as_pointer()) for panel in w_panels]
    fma = cgutils.get_or_insert_function(builder.module, ir.FunctionType(_SUMS, [_SUMS] * 3), f"llvm.fma.v{LANES}f32")

    def add_products(sums: list[Any], k: Any) -> list[Any]:
        columns = [builder.load(builder.gep(panel, [k]), align=2) for panel in w_panels]
        if stored is not _FLOAT:
            columns = [builder.fpext(column, _SUMS) for column in columns]
        new = []
        for row, x_row in enumerate(x_rows):
            value = _broadcast(builder, builder.load(builder.gep(x_row, [k])))
            for panel, column in enumerate(columns):
                new.append(builder.call(fma, [value, column, sums[row * len(columns) + panel]]))
        return new

    whole = builder.and_(depth, ir.Constant(_INT64, -_UNROLL))
    sums = _loop(builder, sums, ir.Constant(_INT64, 0), whole, _UNROLL, add_products)
    return _loop(builder, sums, whole, depth, 1, add_products)


def _multiply_integers(
    builder: Any, x_rows: list[Any], w_panels: list[Any], depth: Any, _starts: list[Any], _stored: Any
) -> list[Any]:
    """Two products at a time, of neighbours in depth, which processors add in one instruction."""
    pair_of_x, pairs_of_w = _INT32.as_pointer(), ir.VectorType(_INT8, 2 * LANES).as_pointer()
    x_rows = [builder.bitcast(row, pair_of_x) for row in x_rows]
    w_panels = [builder.bitcast(panel, pairs_of_w) for panel in w_panels]
    pairs = ir.VectorType(_INT16, 2 * LANES)

    def add_products(sums: list[Any], k: Any) -> list[Any]:
        columns = [builder.sext(builder.load(builder.gep(panel, [k]), align=1), pairs) for panel in w_panels]
        new = []
        for row, x_row in enumerate(x_rows):
            value = builder.bitcast(_broadcast(builder, builder.load(builder.gep(x_row, [k]), align=2)), pairs)
            for panel, column in enumerate(columns):
                products = _add_pairs(builder, value, column)
                new.append(builder.add(sums[row * len(columns) + panel], products))
        return new

    zeros = [ir.Constant(ir.VectorType(_INT32, LANES), None) for _ in range(len(x_rows) * len(w_panels))]
    half = builder.lshr(depth, ir.Constant(_INT64, 1))
    whole = builder.and_(half, ir.Constant(_INT64, -_UNROLL))
    sums = _loop(builder, zeros, ir.Constant(_INT64, 0), whole, _UNROLL, add_products)
    return [builder.sitofp(total, _SUMS) for total in _loop(builder, sums, whole, half, 1, add_products)]


def _add_pairs(builder: Any, a: Any, b: Any) -> Any:
    """Products of 32 16-bit integers, neighbours added: 16 32-bit integers."""
    if platform.machine() in ("x86_64", "AMD64"):
        eight, sixteen = ir.VectorType(_INT32, 8), ir.VectorType(_INT16, 16)
        multiply_add = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(eight, [sixteen, sixteen]), "llvm.x86.avx2.pmadd.wd"
        )

        def lanes(vector: Any, numbers: range) -> Any:
            mask = ir.Constant(ir.VectorType(_INT32, len(numbers)), list(numbers))
            return builder.shuffle_vector(vector, vector, mask)

        halves = [
            builder.call(multiply_add, [lanes(a, numbers), lanes(b, numbers)]) for numbers in (range(16), range(16, 32))
        ]
        return builder.shuffle_vector(*halves, ir.Constant(ir.VectorType(_INT32, 16), list(range(16))))
    wide = ir.VectorType(_INT32, 2 * LANES)
    products = builder.mul(builder.sext(a, wide), builder.sext(b, wide))
    even, odd = (
        builder.shuffle_vector(products, products, ir.Constant(ir.VectorType(_INT32, LANES), list(range(i, 32, 2))))
        for i in (0, 1)
    )
    return builder.add(even, odd)


def _broadcast(builder: Any, value: Any) -> Any:
    """A scalar in every lane."""
    undefined = ir.Constant(ir.VectorType(value.type, LANES), ir.Undefined)
    first = builder.insert_element(undefined, value, ir.Constant(_INT32, 0))
    return builder.shuffle_vector(first, undefined, _EVERYWHERE)


def _loop(builder: Any, sums: list[Any], start: Any, stop: Any, unroll: int, body: Any) -> list[Any]:
    """`sums = body(sums, k)` for k from start to stop, a multiple of `unroll` apart; sums stay in registers."""
    before = builder.block
    head, inside, behind = (builder.append_basic_block(name) for name in ("tile.head", "tile.body", "tile.end"))
    builder.branch(head)
    builder.position_at_end(head)
    k = builder.phi(_INT64)
    k.add_incoming(start, before)
    carried = [builder.phi(total.type) for total in sums]
    for phi, total in zip(carried, sums, strict=True):
        phi.add_incoming(total, before)
    builder.cbranch(builder.icmp_signed("<", k, stop), inside, behind)
    builder.position_at_end(inside)
    new = carried
    for step in range(unroll):
        new = body(new, builder.add(k, ir.Constant(_INT64, step)))
    k.add_incoming(builder.add(k, ir.Constant(_INT64, unroll)), inside)
    for phi, total in zip(carried, new, strict=True):
        phi.add_incoming(total, inside)
    builder.branch(head)
    builder.position_at_end(behind)
    return carried


@njit(**OPTIONS)
def multiply_panel(
    rows, out, out_at, out_stride, initial, initial_at, initial_stride, x, x_at, x_stride, w, w_at, depth
):
    """As `_tile`, for any number of rows and one panel."""
    while rows >= 6:
        _tile(6, 1, out, out_at, out_stride, initial, initial_at, initial_stride, x, x_at, x_stride, w, w_at, 0, depth)
        rows, out_at = rows - 6, out_at + 6 * out_stride
        initial_at, x_at = initial_at + 6 * initial_stride, x_at + 6 * x_stride
    if rows == 5:
        _tile(5, 1, out, out_at, out_stride, initial, initial_at, initial_stride, x, x_at, x_stride, w, w_at, 0, depth)
    elif rows == 4:
        _tile(4, 1, out, out_at, out_stride, initial, initial_at, initial_stride, x, x_at, x_stride, w, w_at, 0, depth)
    elif rows == 3:
        _tile(3, 1, out, out_at, out_stride, initial, initial_at, initial_stride, x, x_at, x_stride, w, w_at, 0, depth)
    elif rows == 2:
        _tile(2, 1, out, out_at, out_stride, initial, initial_at, initial_stride, x, x_at, x_stride, w, w_at, 0, depth)
    elif rows == 1:
        _tile(1, 1, out, out_at, out_stride, initial, initial_at, initial_stride, x, x_at, x_stride, w, w_at, 0, depth)


@njit(**OPTIONS)
def multiply_two_panels(
    rows, out, out_at, out_stride, initial, initial_at, initial_stride, x, x_at, x_stride, w, w_at, w_stride, depth
):
    """As `_tile`, for one or two rows and two panels: with so few rows more sums are under way at once."""
    if rows == 2:
        _tile(
            2, 2, out, out_at, out_stride, initial, initial_at, initial_stride, x, x_at, x_stride,
            w, w_at, w_stride, depth,
        )  # fmt: skip
    else:
        _tile(
            1, 2, out, out_at, out_stride, initial, initial_at, initial_stride, x, x_at, x_stride,
            w, w_at, w_stride, depth,
        )  # fmt: skip


@njit(**OPTIONS)
def highest(values):
    """The highest of a contiguous array [count]; what is NaN may be passed over."""
    whole = values.shape[0] // LANES * LANES
    most = _highest_of_lanes(values, whole)
    for i in range(whole, values.shape[0]):
        most = max(most, values[i])
    return most


def pack_panels(weight: np.ndarray) -> np.ndarray:
    """A matrix [columns, depth] as panels [ceil(columns / 16), depth, 16]; the last is filled up with zeros.

    int8 lies in pairs that are neighbours in depth, [.., depth / 2, 16, 2], in an array of the same shape.
    """
    columns, depth = weight.shape
    padded = np.zeros((-(-columns // LANES) * LANES, depth), weight.dtype)
    padded[:columns] = weight
    panels = padded.reshape(-1, LANES, depth).transpose(0, 2, 1)
    if weight.dtype == np.int8:
        panels = panels.reshape(-1, depth // 2, 2, LANES).transpose(0, 1, 3, 2).reshape(-1, depth, LANES)
    return np.ascontiguousarray(panels)


@intrinsic
def load_stored(typingctx: Any, array: Any, index: Any) -> Any:
    """The element at a flat place of an array that holds float32, or fp16 as uint16."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        stored = _STORED[array.dtype]
        value = builder.load(builder.bitcast(builder.gep(data, [arguments[1]]), stored.as_pointer()))
        return value if stored is _FLOAT else builder.fpext(value, _FLOAT)

    return types.float32(array, types.intp), generate


@intrinsic
def store_stored(typingctx: Any, array: Any, index: Any, value: Any) -> Any:
    """Write to a flat place of such an array, rounding to the nearest."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        stored = _STORED[array.dtype]
        number = arguments[2] if stored is _FLOAT else builder.fptrunc(arguments[2], stored)
        builder.store(number, builder.bitcast(builder.gep(data, [arguments[1]]), stored.as_pointer()))
        return context.get_dummy_value()

    return types.void(array, types.intp, types.float32), generate


@intrinsic
def prefetch(typingctx: Any, array: Any, index: Any) -> Any:
    """Ask for the cache line of the element at a flat place of an array, which need not exist."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        place = builder.bitcast(builder.gep(data, [arguments[1]]), ir.IntType(8).as_pointer())
        kind = ir.FunctionType(ir.VoidType(), [place.type, _INT32, _INT32, _INT32])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0i8")
        builder.call(function, [place, *(ir.Constant(_INT32, value) for value in (0, 3, 1))])
        return context.get_dummy_value()

    return types.void(array, types.intp), generate


@intrinsic
def _highest_of_lanes(typingctx: Any, array: Any, count: Any) -> Any:
    """The highest of the first `count` elements, a multiple of 16; minus infinity of none."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data

        def compare(most: list[Any], k: Any) -> list[Any]:
            place = builder.bitcast(builder.gep(data, [builder.mul(k, ir.Constant(_INT64, LANES))]), _SUMS.as_pointer())
            values = builder.load(place, align=4)
            return [builder.select(builder.fcmp_ordered(">", values, most[0]), values, most[0])]

        lowest = ir.Constant(_SUMS, [-math.inf] * LANES)
        vectors = builder.sdiv(arguments[1], ir.Constant(_INT64, LANES))
        (most,) = _loop(builder, [lowest], ir.Constant(_INT64, 0), vectors, 1, compare)
        result = ir.Constant(_FLOAT, -math.inf)
        for lane in range(LANES):
            value = builder.extract_element(most, ir.Constant(_INT32, lane))
            result = builder.select(builder.fcmp_ordered(">", value, result), value, result)
        return result

    return types.float32(array, types.intp), generate
