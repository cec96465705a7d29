"""Vectors of float32 lanes inside numba kernels: each sum has the order that is written, and stays in registers."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, models, register_model

_FLOAT = ir.FloatType()


class Vector(types.Type):
    """So many float32 lanes; LLVM splits what is wider than a register."""

    def __init__(self, width: int) -> None:
        super().__init__(name=f"float32x{width}")
        self.width = width


@register_model(Vector)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, manager: Any, vector: Vector) -> None:
        super().__init__(manager, vector, _lanes(vector.width))


@intrinsic(prefer_literal=True)
def zeros(typingctx: Any, width: Any) -> Any:
    """A vector of that many zeros; the width is a constant."""
    vector = Vector(width.literal_value)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return ir.Constant(_lanes(vector.width), None)

    return vector(width), generate


@intrinsic(prefer_literal=True)
def load(typingctx: Any, array: Any, index: Any, width: Any) -> Any:
    """The lanes from a flat index of a contiguous array on; the width is a constant."""
    vector = Vector(width.literal_value)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.load(_pointer(context, builder, signature, arguments, vector.width), align=4)

    return vector(array, types.intp, width), generate


@intrinsic
def store(typingctx: Any, array: Any, index: Any, vector: Any) -> Any:
    """Write all lanes from a flat index of a contiguous array on."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        builder.store(arguments[2], _pointer(context, builder, signature, arguments, vector.width), align=4)
        return context.get_dummy_value()

    return types.void(array, types.intp, vector), generate


@intrinsic
def element(typingctx: Any, array: Any, index: Any) -> Any:
    """The float at a flat index of a contiguous array."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        return builder.load(builder.gep(data, [arguments[1]]))

    return types.float32(array, types.intp), generate


@intrinsic
def add(typingctx: Any, a: Any, b: Any) -> Any:
    """Lane by lane."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.fadd(*arguments)

    return a(a, b), generate


@intrinsic
def fma(typingctx: Any, scalar: Any, vector: Any, total: Any) -> Any:
    """scalar * vector + total, rounded once."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        lanes = _lanes(vector.width)
        undefined = ir.Constant(lanes, ir.Undefined)
        first = builder.insert_element(undefined, arguments[0], ir.Constant(ir.IntType(32), 0))
        everywhere = ir.Constant(ir.VectorType(ir.IntType(32), vector.width), None)
        many = builder.shuffle_vector(first, undefined, everywhere)
        name = f"llvm.fma.v{vector.width}f32"
        function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(lanes, [lanes] * 3), name)
        return builder.call(function, [many, arguments[1], arguments[2]])

    return total(types.float32, vector, total), generate


def _lanes(width: int) -> ir.VectorType:
    return ir.VectorType(_FLOAT, width)


def _pointer(context: Any, builder: Any, signature: Any, arguments: Any, width: int) -> Any:
    data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
    return builder.bitcast(builder.gep(data, [arguments[1]]), _lanes(width).as_pointer())
