"""What the CPU kernels share: compile options and an exponential that vectorises."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from slipstream.models.cache_folder import compiled_folder

# Before any kernel is declared, which is when numba looks.
numba.config.CACHE_DIR = str(compiled_folder())  # type: ignore[attr-defined]

# Reassociation fixes one vectorised order at compile time; no flag here lets a result depend on the data.
_FASTMATH = {"reassoc", "contract", "nsz", "arcp"}
OPTIONS: dict[str, Any] = {"fastmath": _FASTMATH, "cache": True, "nogil": True, "boundscheck": False}
INLINE: dict[str, Any] = {**OPTIONS, "cache": False, "inline": "always"}

_LOG2_E = np.float32(1.44269504088896341)
_LN2_HIGH = np.float32(0.693359375)
_LN2_LOW = np.float32(-2.12194440e-4)
_C0 = np.float32(1.9875691500e-4)
_C1 = np.float32(1.3981999507e-3)
_C2 = np.float32(8.3334519073e-3)
_C3 = np.float32(4.1665795894e-2)
_C4 = np.float32(1.6666665459e-1)
_C5 = np.float32(5.0000001201e-1)
_LEAST = np.float32(-87.0)
_MOST = np.float32(88.0)
_HALF = np.float32(0.5)
_ONE = np.float32(1.0)


@intrinsic
def _bits_as_float(typingctx: Any, bits: Any) -> Any:
    """Reinterpret an int32 as a float32."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ir.FloatType())

    return types.float32(types.int32), generate


@njit(**INLINE)
def exp(x):
    """exp(x) in float32 for x in [-87, 88], clamped beyond, to 4e-7 relative: the polynomial of Cephes' expf."""
    x = min(max(x, _LEAST), _MOST)
    n = np.floor(x * _LOG2_E + _HALF)
    r = x - n * _LN2_HIGH - n * _LN2_LOW
    p = ((((_C0 * r + _C1) * r + _C2) * r + _C3) * r + _C4) * r + _C5
    p = p * r * r + r + _ONE
    return p * _bits_as_float((np.int32(n) + np.int32(127)) << np.int32(23))
