"""Recipes by NumPy in float64, written from their definitions; casts are those of ml_dtypes."""

import dataclasses
import itertools
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

E4M3, E5M2, E2M1 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, ml_dtypes.float4_e2m1fn
MOST = {E4M3: 448.0, E5M2: 57344.0, E2M1: 6.0, np.int8: 127.0}
SIGNS = np.array([1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1])


def cast(x: Any, dtype: Any) -> Any:
    """Returns float32 numbers rounded to a type, ties to even, and clipped to its largest number."""
    x = np.asarray(x, np.float32)
    most = np.float32(MOST[dtype])
    clipped = np.where(np.isfinite(x), np.clip(x, -most, most), np.nan)
    if dtype is np.int8:
        return np.rint(np.nan_to_num(clipped)).astype(np.float64)
    return clipped.astype(dtype).astype(np.float64)


def scale_of(amax: Any, dtype: Any) -> Any:
    amax = np.asarray(amax, np.float32)
    usable = (amax > 0) & np.isfinite(amax)
    scale = np.float32(MOST[dtype]) / np.where(usable, amax, np.float32(1))
    return np.where(usable, np.minimum(scale, np.float32(2.0**126)), np.float32(1)).astype(np.float32)


def inverse_of(amax: Any, most: float, least: float = 2.0**-126) -> Any:
    amax = np.asarray(amax, np.float32)
    inverse = np.maximum(amax * np.float32(1 / most), np.float32(least))
    return np.where((amax > 0) & np.isfinite(amax), inverse, np.float32(1)).astype(np.float32)


class Quantized(NamedTuple):
    """Numbers in few bits, times the scales of their blocks, and the float32 factor that restores each row."""

    numbers: Any
    inverse: Any


def shared(x: Any, axes: Any, dtype: Any) -> Quantized:
    """Returns numbers that share a scale along axes."""
    amax = np.abs(x).max(axes, keepdims=True, initial=0)
    scale = scale_of(amax, dtype)
    inverse = np.where(np.isfinite(amax) | (dtype is not np.int8), inverse_of(amax, MOST[dtype]), np.float32(np.nan))
    return Quantized(cast(x * scale, dtype), inverse)


def blocks_of(x: Any, terms: int, rows: int, dtype: Any, kind: str) -> Quantized:
    """Returns a matrix in blocks."""
    numbers, whole, most = np.zeros(x.shape), np.abs(x).max(initial=0), np.float32(MOST[dtype])
    encode, decode = np.float32(1), np.float32(1)
    if kind == "e4m3" and 0 < whole < np.inf:
        encode = np.minimum(np.float32(MOST[dtype] * 448.0) / np.float32(whole), np.float32(2.0**112))
        decode = inverse_of(whole, MOST[dtype] * 448.0, 2.0**-112)
    for i, j in itertools.product(range(0, x.shape[0], rows), range(0, x.shape[1], terms)):
        block = x[i : i + rows, j : j + terms]
        amax = np.abs(block).max(initial=0)
        if kind == "float32":
            scale = scale_of(amax, dtype)
            decoded = inverse_of(amax, MOST[dtype])
        elif kind == "e8m0":
            ratio = np.float64(amax / most)
            exponent = max(np.ceil(np.log2(ratio)), -126) if 0 < ratio < np.inf else -126
            decoded = 2.0**exponent if np.isfinite(ratio) else 1.0
            scale = np.float32(1 / decoded)
        else:
            decoded = cast(np.float32(amax / most) * encode, E4M3)
            scale = encode / np.float32(decoded) if decoded != 0 else np.float32(0)
        of_block = cast(block * scale, dtype) * np.float64(decoded)
        numbers[i : i + rows, j : j + terms] = of_block.astype(np.float32)
    return Quantized(numbers, np.full((1, 1), decode))


def spread(x: Any) -> Any:
    """Returns the Hadamard transform of each 16 columns, filled up with zeros."""
    hadamard = np.array([[(-1) ** (i & j).bit_count() for j in range(16)] for i in range(16)])
    filled = np.pad(np.asarray(x, np.float64), [(0, 0), (0, -x.shape[1] % 16)])
    moved = filled.reshape(x.shape[0], -1, 16) @ (SIGNS[:, None] * hadamard / 4)
    return moved.reshape(filled.shape).astype(np.float32)


@dataclasses.dataclass(frozen=True)
class Definition:
    """What a recipe makes of a matrix whose columns are contracted."""

    kind: str
    forward: Any = E4M3
    backward: Any = E4M3
    terms: int = 0
    rows: int = 1
    hadamard: bool = False

    def quantized(self, x: Any, *, weight: bool = False, gradient: bool = False, spreads: bool = False) -> Quantized:
        dtype = self.backward if gradient else self.forward
        x = spread(x) if spreads and self.hadamard else x
        if self.terms == 0:
            return shared(x, (0, 1) if self.kind == "whole" else (1,), dtype)
        return blocks_of(x, self.terms, self.rows if weight else 1, dtype, self.kind)

    def products(self, x: Any, w: Any, g: Any) -> tuple[Any, Any, Any]:
        """Returns x @ w and the gradients of x and w for the cotangent g: sums in float64, scaled in float32."""
        x, w, g = (np.asarray(a, np.float32) for a in (x, w, g))
        q = self.quantized
        out = restored(q(x), q(w.T, weight=True))
        of_x = restored(q(g, gradient=True), q(w, weight=True))
        of_w = restored(q(x.T, spreads=True), q(g.T, gradient=True, spreads=True))
        return out, of_x, of_w


def ragged_products(definition: Definition, x: Any, w: Any, g: Any, sizes: Any) -> tuple[Any, Any, Any]:
    """Returns the same of groups of rows with a matrix each; rows after the last group do not count."""
    q, ends = definition.quantized, np.cumsum(sizes)
    x, g = (np.where(np.arange(len(a))[:, None] < ends[-1], a, 0) for a in (x, g))
    out, of_x, of_w = np.zeros(g.shape, np.float32), np.zeros(x.shape, np.float32), np.zeros(w.shape, np.float32)
    turned = q(x.T), q(g.T, gradient=True)
    for i, rows in enumerate(slice(end - size, end) for end, size in zip(ends, sizes, strict=True)):
        some, some_g = (Quantized(a.numbers[rows], _of(a.inverse, rows)) for a in (q(x), q(g, gradient=True)))
        out[rows] = restored(some, q(w[i].T, weight=True))
        of_x[rows] = restored(some_g, q(w[i], weight=True))
        of_w[i] = restored(*(Quantized(a.numbers[:, rows], a.inverse) for a in turned))
    return out, of_x, of_w


def _of(inverse: Any, rows: slice) -> Any:
    return inverse[rows] if len(inverse) > 1 else inverse


def restored(lhs: Quantized, rhs: Quantized) -> Any:
    """Returns the product of two matrices whose columns are contracted."""
    with np.errstate(invalid="ignore"):
        sums = (lhs.numbers @ rhs.numbers.T).astype(np.float32)
        return sums * np.minimum(lhs.inverse, rhs.inverse.T) * np.maximum(lhs.inverse, rhs.inverse.T)


DEFINITIONS = {
    "Float8CurrentScaling": Definition("whole", backward=E5M2),
    "DelayedScaling": Definition("whole", backward=E5M2),
    "Float8RowwiseScaling": Definition("rows"),
    "Int8RowwiseScaling": Definition("rows", np.int8, np.int8),
    "Float8BlockScaling": Definition("e8m0", terms=128, rows=128),
    "MXFP8BlockScaling": Definition("e8m0", terms=32),
    "NVFP4BlockScaling": Definition("e4m3", E2M1, E2M1, terms=16, rows=16, hadamard=True),
}
