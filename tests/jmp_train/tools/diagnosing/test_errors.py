"""Local and inherited errors of random programs, against float64."""

import dataclasses
from collections.abc import Callable
from typing import Any

import hypothesis
import hypothesis.strategies as st
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jmp_train as jt

pytestmark = pytest.mark.quick

SIZE = 32
# By name: the operation of jax, and the same in float64.
UNARY: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "exp": (lax.exp, np.exp),
    "tanh": (lax.tanh, np.tanh),
    "logistic": (lax.logistic, lambda x: 1 / (1 + np.exp(-x))),
    "sin": (lax.sin, np.sin),
    "square": (lax.square, np.square),
    "cumsum": (lax.cumsum, np.cumsum),
    "sum": (lambda x: lax.broadcast(jnp.sum(x, dtype=x.dtype), (SIZE,)), lambda x: np.full(SIZE, x.sum())),
}
BINARY: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "add": (lax.add, np.add),
    "sub": (lax.sub, np.subtract),
    "mul": (lax.mul, np.multiply),
    "div": (lax.div, np.divide),
}


@dataclasses.dataclass(frozen=True)
class Program:
    """Operations on vectors: of each its name and which of the values before it reads; the first two are given."""

    operations: tuple[tuple[str, int, int], ...]
    dtype: str

    def values(self, first: Any, second: Any, side: int) -> list[Any]:
        """Runs it with jax's operations (side 0) or with those of float64 (side 1)."""
        values = [first, second]
        for name, i, j in self.operations:
            values.append(apply(name, side, values[i], values[j]))
        return values[2:]


def apply(name: str, side: int, first: Any, second: Any) -> Any:
    if name in UNARY:
        return UNARY[name][side](first)
    return BINARY[name][side](first, second)


@st.composite
def programs(draw: st.DrawFn) -> Program:
    operations = []
    for count in range(2, 2 + draw(st.integers(3, 7))):
        reads = [draw(st.integers(0, count - 1)) for _ in range(2)]
        operations.append((draw(st.sampled_from([*UNARY, *BINARY])), *reads))
    return Program(tuple(operations), draw(st.sampled_from(["float16", "bfloat16"])))


def relative(values: np.ndarray, exact: np.ndarray) -> float:
    """Returns the error of finite numbers, as a row says it."""
    error = np.where(np.isfinite(values), np.abs(values - exact), 0)
    return float(error.sum() / np.abs(exact).sum())


@pytest.mark.full
@hypothesis.settings(max_examples=12, deadline=None)
@hypothesis.given(program=programs(), seed=st.integers(0, 2**16))
def test_errors_are_those_against_float64(program: Program, seed: int) -> None:
    dtype = jnp.dtype(program.dtype)
    rng = np.random.default_rng(seed)
    given = [jnp.asarray(rng.uniform(0.25, 2.0, SIZE), dtype) for _ in range(2)]
    with np.errstate(all="ignore"):  # such programs are left out
        exact = program.values(*(np.asarray(x, np.float64) for x in given), side=1)
    hypothesis.assume(all(np.isfinite(x).all() and np.abs(x).max() < 1e4 and np.abs(x).min() > 1e-3 for x in exact))

    rows = jt.diagnose(lambda x, y: program.values(x, y, side=0), *given).rows
    actual = [np.asarray(x, np.float64) for x in program.values(*given, side=0)]
    everything = [*(np.asarray(x, np.float64) for x in given), *exact]
    half_eps = float(jnp.finfo(dtype).eps)
    for place, (row, (name, i, j)) in enumerate(zip(rows, program.operations, strict=True)):
        operands = [jnp.asarray(everything[k], dtype) for k in (i, j)]
        local = np.asarray(apply(name, 0, *operands), np.float64)
        # The shadow is float32, which has an error of its own, far below that of one rounding. How a sum is rounded is
        # the compiler's affair, and so is what it makes of several operations: a / (b / c) becomes (a * c) / b.
        sums = sum(before in ("sum", "cumsum") for before, *_ in program.operations[: place + 1])
        of_a_sum = SIZE / 2 * half_eps
        slack = of_a_sum if name in ("sum", "cumsum") else half_eps / 64
        check(row.local_error, relative(local, exact[place]), slack)
        check(row.inherited_error, relative(actual[place], exact[place]), half_eps + sums * of_a_sum)


def check(found: float, wanted: float, slack: float) -> None:
    assert found <= 2 * wanted + slack
    assert wanted <= 2 * found + slack
