"""Threads that compute one step together: they share out work by a counter and wait for each other between its parts.

Each runs the same compiled function. A part of a step is done when every thread has come to the barrier behind it,
which costs about a microsecond: waking sleeping threads for each of some two hundred parts would cost fifty times that.
"""

from __future__ import annotations

import platform
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from slipstream.models.kernels.cpu_math import OPTIONS

ROWS_AT_ONCE = 4  # that a thread takes of work that is done row by row
# Places in a team's state, a cache line apart.
_THREADS, _NEXT, _ARRIVED, _ROUND = 0, 8, 16, 24
# So many looks at a barrier, some 20 us, before a thread lets others run: on a busy machine the one that is waited for
# may not have a core.
_LOOKS = 1000


def make_team(num_threads: int) -> np.ndarray:
    """The shared state of that many threads."""
    team = np.zeros(32, np.int64)
    team[_THREADS] = num_threads
    return team


@njit(**OPTIONS)
def take(team):
    """The number of the next piece of work in this part of the step, from 0 on; each goes to one thread."""
    return _add(team, _NEXT, 1)


@njit(**OPTIONS)
def barrier(team):
    """Wait until every thread is here, and so this part of the step is done."""
    current = _load(team, _ROUND)
    if _add(team, _ARRIVED, 1) == team[_THREADS] - 1:
        team[_ARRIVED] = 0
        team[_NEXT] = 0
        _add(team, _ROUND, 1)
        return
    looks = 0
    while _load(team, _ROUND) == current:
        looks += 1
        if looks < _LOOKS:
            _pause()
        else:
            _let_others_run()


@intrinsic
def _add(typingctx: Any, array: Any, index: Any, value: Any) -> Any:
    """Add to an element atomically; returns what it was."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.atomic_rmw("add", _pointer(context, builder, signature, arguments), arguments[2], "seq_cst")

    return types.int64(array, types.intp, types.int64), generate


@intrinsic
def _load(typingctx: Any, array: Any, index: Any) -> Any:
    """An element as other threads have last written it, and what they had written before."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.load_atomic(_pointer(context, builder, signature, arguments), "seq_cst", align=8)

    return types.int64(array, types.intp), generate


@intrinsic
def _pause(typingctx: Any) -> Any:
    """Tell the core that this is a waiting loop, where it has a word for that."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        if platform.machine() in ("x86_64", "AMD64"):
            kind = ir.FunctionType(ir.VoidType(), [])
            builder.call(cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.sse2.pause"), [])
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic
def _let_others_run(typingctx: Any) -> Any:
    """sched_yield(2)."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind = ir.FunctionType(ir.IntType(32), [])
        builder.call(cgutils.get_or_insert_function(builder.module, kind, "sched_yield"), [])
        return context.get_dummy_value()

    return types.void(), generate


def _pointer(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
    data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
    return builder.gep(data, [arguments[1]])


@njit(**OPTIONS)
def lap(seconds, part):
    """Add the time since the last lap to `seconds[part]`; the last element of `seconds` is when that was."""
    now = _monotonic()
    seconds[part] += now - seconds[-1]
    seconds[-1] = now


@intrinsic
def _monotonic(typingctx: Any) -> Any:
    """Seconds by clock_gettime(2) with CLOCK_MONOTONIC."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        number, real = ir.IntType(64), ir.DoubleType()
        pair = ir.LiteralStructType([number, number])
        kind = ir.FunctionType(ir.IntType(32), [ir.IntType(32), pair.as_pointer()])
        read = cgutils.get_or_insert_function(builder.module, kind, "clock_gettime")
        place = cgutils.alloca_once(builder, pair)
        builder.call(read, [ir.Constant(ir.IntType(32), 1), place])
        whole, nanoseconds = (builder.sitofp(_field(builder, place, i), real) for i in (0, 1))
        return builder.fadd(whole, builder.fmul(nanoseconds, ir.Constant(real, 1e-9)))

    return types.float64(), generate


def _field(builder: Any, place: Any, index: int) -> Any:
    number = ir.IntType(32)
    return builder.load(builder.gep(place, [ir.Constant(number, 0), ir.Constant(number, index)]))
