"""What lies between the products and the attention of a transformer, as loops over tokens that
numba compiles; in float32 on a CPU. Shape letters: models.model, and C tokens of a chunk.

Each reads and writes once what torch's operators read and write several times, in the same order
of operations: bits are those of torch where it takes AVX2 or AVX-512 (but for a SiLU over a width
that is no multiple of 32, whose last elements torch computes in another way).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, reduce
from typing import Any

import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba import njit
from numba.core import types
from numba.extending import intrinsic

__all__ = ["Floats", "Ints", "Kernels", "Store", "compile_kernels", "compile_store"]

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]

MATRIX, VECTOR, INTS = "f4[:,::1]", "f4[::1]", "i8[::1]"
"""Types of arguments, in numba's words."""
N_LANES, N_SUMS, STEP, N_LEVELS = 8, 4, 16, 4
"""Of torch's sums, see _sum: elements of a vector (even with AVX-512), vectors that are summed side
by side, and how many sums are summed at a time (in 4 million elements)."""
LOG2_E = np.float32(1.4426950408889634)
LN_2_HIGH, LN_2_LOW = np.float32(0.693145751953125), np.float32(1.428606765330187045e-06)
P6, P5 = np.float32(0.000198527617612853646278381), np.float32(0.00139304355252534151077271)
P4, P3 = np.float32(0.00833336077630519866943359), np.float32(0.0416664853692054748535156)
P2, P1 = np.float32(0.166666671633720397949219), np.float32(0.5)
"""Of the exponential, see _exp: the logarithm of 2 in two parts, the first of few bits, and the
polynomial."""
LEAST, MOST = np.float32(-104), np.float32(100)
"""Below and above, it is 0 and infinite."""


@dataclass(frozen=True, slots=True)
class Kernels:
    """All arrays are contiguous; what is not said to be written is not."""

    add_norm: Callable[[Floats, Floats, Floats, np.float32, Floats], None]
    """(h_CD, delta_CD, weight_D, eps, x_CD): add to `h_CD`, then write its RMSNorm to `x_CD`."""
    swiglu: Callable[[Floats, Floats], None]
    """(gate_up_CY, x_CF): write SiLU of the gate times the other factor."""
    rotate: Callable[[Floats, Ints, Floats, Floats, Floats], None]
    """(x_CX, positions_C, cos_PA, sin_PA, out_CX): write queries and keys rotated, and values as
    they are; the sines of the first half are negative."""


Store = Callable[[Floats, int, Ints, Floats], None]
"""(x, stride, slots_C, pool_SX): write one row of a pool for each slot; in `x` one begins every
`stride` elements."""


@cache
def compile_kernels(*, d_model: int, head_dim: int, n_rotated: int) -> Kernels:
    """For a model whose products give `n_rotated` heads to rotate, then others. Takes a second."""
    rotate = _rotate(head_dim // 2, n_rotated)
    return Kernels(
        add_norm=_compiled(_add_norm(d_model), MATRIX, MATRIX, VECTOR, "f4", MATRIX),
        swiglu=_compiled(_swiglu, MATRIX, MATRIX),
        rotate=_compiled(rotate, MATRIX, INTS, MATRIX, MATRIX, MATRIX),
    )


@cache
def compile_store() -> Store:
    """See Store."""
    store: Store = _compiled(_store, VECTOR, "i8", INTS, MATRIX)
    return store


def _compiled(function: Any, *arguments: str) -> Any:
    """Not kept by numba's cache, which does not check what it loads."""
    return njit(f"void({','.join(arguments)})", nogil=True, error_model="numpy")(function)


# --- kernels --------------------------------------------------------------------------------------


def _add_norm(width: int) -> Callable[..., None]:
    def add_norm(
        h_CD: Floats, delta_CD: Floats, weight_D: Floats, eps: np.float32, x_CD: Floats
    ) -> None:
        for c in range(len(h_CD)):
            h_D, delta_D, x_D = h_CD[c], delta_CD[c], x_CD[c]
            for d in range(width):
                h_D[d] += delta_D[d]
            scale = np.float32(1) / np.sqrt(_squares(h_D, width) / np.float32(width) + eps)
            for d in range(width):
                x_D[d] = h_D[d] * scale * weight_D[d]

    return add_norm


def _emit_squares(_typing: Any, x: Any, width: Any) -> Any:
    """Sum of the squares of `width` elements, in the order of torch's sum: by vectors, of which
    then the lanes are added up, behind the elements that fill no vector."""
    n = width.literal_value
    vector, n_whole = ir.VectorType(ir.FloatType(), N_LANES), n - n % N_LANES

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        array = context.make_array(signature.args[0])(context, builder, values[0])

        def square(first: int, kind: Any) -> Any:
            at = builder.gep(array.data, [context.get_constant(types.intp, first)])
            x = builder.load(builder.bitcast(at, kind.as_pointer()), align=4)
            return builder.fmul(x, x)

        vectors = [square(first, vector) for first in range(0, n_whole, N_LANES)]
        parts = [square(first, vector.element) for first in range(n_whole, n)]
        if not vectors:
            return _sum(parts, builder.fadd)
        lanes = _sum(vectors, builder.fadd)
        indices = (context.get_constant(types.int32, lane) for lane in range(N_LANES))
        parts += [builder.extract_element(lanes, index) for index in indices]
        return reduce(builder.fadd, parts)

    return types.float32(x, width), generate


def _sum(values: Sequence[Any], add: Callable[[Any, Any], Any]) -> Any:
    """Sum of one vector or number, or more, in the order of ATen's cascade_sum (SumKernel.cpp)."""
    n = len(values) // N_SUMS
    n_whole = n * N_SUMS
    columns = [_cascade(values[start:n_whole:N_SUMS], add) for start in range(N_SUMS if n else 0)]
    return reduce(add, [*columns[:1], *values[n_whole:], *columns[1:]])


def _cascade(values: Sequence[Any], add: Callable[[Any, Any], Any]) -> Any:
    """Sums over STEP values, sums over STEP of those, and so on, then what is left of each."""
    sums: list[Any] = [None] * N_LEVELS
    n_whole = len(values) - len(values) % STEP
    for end in range(STEP, n_whole + 1, STEP):
        sums[0] = reduce(add, values[end - STEP : end])
        for level in range(1, N_LEVELS):
            below, sums[level - 1] = sums[level - 1], None
            sums[level] = below if sums[level] is None else add(sums[level], below)
            if end // STEP**level % STEP:
                break
    return reduce(add, [*values[n_whole:], *(each for each in sums if each is not None)])


def _swiglu(gate_up_CY: Floats, x_CF: Floats) -> None:
    n, width = x_CF.shape
    for c in range(n):
        gate_F, up_F, x_F = gate_up_CY[c, :width], gate_up_CY[c, width:], x_CF[c]
        for f in range(width):
            x_F[f] = gate_F[f] / (np.float32(1) + _exp(-gate_F[f])) * up_F[f]


def _exponential(x: np.float32) -> np.float32:
    """2**n times a polynomial, as Sleef (Shibata and Petrogalli, 2019) computes it within 1 unit in
    the last place, and torch's SiLU with it."""
    n = np.rint(x * LOG2_E)
    r = _fma(n, -LN_2_LOW, _fma(n, -LN_2_HIGH, x))
    p = _fma(_fma(_fma(_fma(_fma(P6, r, P5), r, P4), r, P3), r, P2), r, P1)
    power = np.int32(n)
    part = power >> np.int32(1)  # in two parts, so that neither is beyond float32
    y = np.float32(1) + _fma(r * r, p, r)
    y *= np.int32((part + np.int32(127)) << np.int32(23)).view(np.float32)
    y *= np.int32((power - part + np.int32(127)) << np.int32(23)).view(np.float32)
    y = np.float32(0) if x < LEAST else y
    return np.float32(np.inf) if x > MOST else y


def _emit_fma(_typing: Any, x: Any, y: Any, z: Any) -> Any:
    """x * y + z, rounded once."""

    def generate(_context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        return builder.fma(*values)

    return x(x, y, z), generate


def _rotate(half: int, n_rotated: int) -> Callable[..., None]:
    width, n_first = 2 * half, 2 * half * n_rotated

    def rotate(
        x_CX: Floats, positions_C: Ints, cos_PA: Floats, sin_PA: Floats, out_CX: Floats
    ) -> None:
        for c in range(len(x_CX)):
            x_X, out_X, position = x_CX[c], out_CX[c], positions_C[c]
            for first in range(0, n_first, width):
                _turn(out_X, x_X, first, cos_PA[position], sin_PA[position], half)
            values, out = x_X[n_first:], out_X[n_first:]
            for i in range(len(values)):
                out[i] = values[i]

    return rotate


def _emit_turn(
    _typing: Any, out: Any, x: Any, first: Any, cos_A: Any, sin_A: Any, half: Any
) -> Any:
    """Rotate the head that begins at `first`, as two vectors. Loops would be made of them only if
    the compiler knew that arrays do not overlap."""
    vector = ir.VectorType(ir.FloatType(), half.literal_value).as_pointer()

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        def at(which: int, index: Any) -> Any:
            array = context.make_array(signature.args[which])(context, builder, values[which])
            return builder.bitcast(builder.gep(array.data, [index]), vector)

        def mixed(a: Any, a_by: Any, b: Any, b_by: Any) -> Any:
            return builder.fadd(builder.fmul(a, a_by), builder.fmul(b, b_by))

        zero, middle = (context.get_constant(types.intp, n) for n in (0, half.literal_value))
        starts = values[2], builder.add(values[2], middle)
        low, high = (builder.load(at(1, start), align=4) for start in starts)
        cos = [builder.load(at(3, index), align=4) for index in (zero, middle)]
        sin = [builder.load(at(4, index), align=4) for index in (zero, middle)]
        builder.store(mixed(low, cos[0], high, sin[0]), at(0, starts[0]), align=4)
        builder.store(mixed(high, cos[1], low, sin[1]), at(0, starts[1]), align=4)
        return context.get_dummy_value()

    return types.void(out, x, first, cos_A, sin_A, half), generate


def _store(x: Floats, stride: int, slots_C: Ints, pool_SX: Floats) -> None:
    width = pool_SX.shape[1]
    for c in range(len(slots_C)):
        first = c * stride
        x_X, pool_X = x[first : first + width], pool_SX[slots_C[c]]
        for i in range(width):
            pool_X[i] = x_X[i]


_squares: Any = intrinsic(prefer_literal=True)(_emit_squares)
_fma: Any = intrinsic(_emit_fma)
_turn: Any = intrinsic(prefer_literal=True)(_emit_turn)
_exp: Any = njit(inline="always")(_exponential)
