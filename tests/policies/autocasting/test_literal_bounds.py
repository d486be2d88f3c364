import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from jax.extend.core import Literal

from jmp_train.policies.autocasting.literal_bounds import UNKNOWN, fits, literal_bounds, result_bounds

pytestmark = pytest.mark.quick

FUNCTIONS: dict[str, Callable[[Any, Any], Any]] = {
    "add": lax.add,
    "sub": lax.sub,
    "mul": lax.mul,
    "div": lax.div,
    "max": lax.max,
    "clamp": lambda a, b: lax.clamp(-jnp.abs(b), a, jnp.abs(b)),
    "neg": lambda a, _: lax.neg(a),
    "cube": lambda a, _: lax.integer_pow(a, 3),
    "inverse cube": lambda a, _: lax.integer_pow(a, -3),
    "square": lambda a, _: lax.square(a),
    "sqrt": lambda a, _: lax.sqrt(lax.abs(a)),
    "rsqrt": lambda a, _: lax.rsqrt(lax.abs(a)),
    "log": lambda a, _: lax.log(lax.abs(a)),
    "exp": lambda a, _: lax.exp(a),
    "tanh": lambda a, _: lax.tanh(a),
    "sin": lambda a, _: lax.sin(a),
    "reshape": lambda a, b: lax.concatenate([lax.reshape(a, (4,)), lax.reshape(b, (4,))], 0),
    "pad": lambda a, b: lax.pad(a, b[0, 0], ((1, 0, 0), (0, 1, 0))),
    "select": lambda a, b: lax.select(jnp.array([[True, False], [False, True]]), a, b),
    "sum": lambda a, _: jnp.sum(a, 0),
    "cumsum": lambda a, _: lax.cumsum(a),
    "convert": lambda a, _: lax.convert_element_type(a, jnp.int32),
    "chain": lambda a, b: 1.0 / lax.sqrt(lax.abs(a) + 1.0) * b - 3.0,
}
arrays = st.lists(st.floats(-1e3, 1e3, width=32, allow_subnormal=False), min_size=4, max_size=4).map(
    lambda numbers: np.reshape(np.array(numbers, np.float32), (2, 2))
)


def bounds_of(fn: Callable[..., Any], *arrays: Any) -> tuple[float, float]:
    """Returns the bounds of a function's result, made out equation by equation."""
    jaxpr = jax.make_jaxpr(fn)(*arrays)
    opened, constants = getattr(jaxpr, "jaxpr", jaxpr), getattr(jaxpr, "consts", ())
    known = dict(zip(opened.invars, map(literal_bounds, arrays), strict=True))
    known |= dict(zip(opened.constvars, map(literal_bounds, constants), strict=True))
    for equation in opened.eqns:
        atoms = equation.invars
        inputs = [literal_bounds(a.val) if isinstance(a, Literal) else known[a] for a in atoms]
        known[equation.outvars[0]] = result_bounds(equation, inputs)
    return known[opened.outvars[0]]


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize("name", FUNCTIONS)
@settings(max_examples=40, deadline=None, derandomize=True)
@given(arrays, arrays)
def test_results_are_within_their_bounds(name: str, a: np.ndarray, b: np.ndarray) -> None:
    fn = FUNCTIONS[name]
    least, greatest = bounds_of(fn, a, b)
    magnitudes = np.abs(np.asarray(jax.jit(fn)(a, b), np.float64))
    finite = magnitudes[np.isfinite(magnitudes)]
    assert (finite >= least * (1 - 1e-5) - 1e-30).all()
    assert (finite <= greatest * (1 + 1e-5) + 1e-4).all()
    assert finite.size == magnitudes.size or greatest > 1e38 or np.isinf(greatest)


def test_bounds_are_tight_for_scalars() -> None:
    scalar = np.float32(16)
    assert bounds_of(lambda x: 1.0 / lax.sqrt(x), scalar) == (0.25, 0.25)
    assert bounds_of(lambda x: x * x - 1.0, scalar) == (255, 257)
    assert bounds_of(lambda x: lax.integer_pow(x, -2), scalar) == (1 / 256, 1 / 256)


def test_what_is_not_known_is_unknown() -> None:
    assert bounds_of(lambda x: lax.lgamma(x), np.float32(2)) == UNKNOWN
    assert bounds_of(lambda x: lax.exp(x), np.float32(1e5)) == UNKNOWN
    assert bounds_of(lambda x: lax.div(x, x), np.zeros(2, np.float32)) == UNKNOWN
    assert bounds_of(lambda x: lax.log(x), np.zeros(2, np.float32)) == UNKNOWN


def test_infinities_and_nan_are_not_numbers() -> None:
    assert literal_bounds(np.array([np.inf, -3.0, np.nan, 2.0])) == (2, 3)
    assert literal_bounds(-np.inf) == (0, 0)
    assert literal_bounds(np.zeros(0)) == (0, 0)
    assert literal_bounds(True) == (1, 1)


@pytest.mark.parametrize(
    ("half", "greatest", "fits_it"),
    [
        ("float16", 65504.0, True),
        ("float16", 65505.0, False),
        ("bfloat16", 3.38e38, True),
        ("bfloat16", 3.4e38, False),
        ("float16", math.inf, False),
    ],
)
def test_overflow(half: str, greatest: float, fits_it: bool) -> None:
    assert fits((0.0, greatest), jnp.dtype(half), scales=False) is fits_it


def test_underflow_counts_where_values_are_scaled() -> None:
    half = jnp.dtype(jnp.float16)
    assert fits((1e-5, 1e-5), half, scales=False)
    assert not fits((1e-5, 1e-5), half, scales=True)
    assert fits((0.0, 0.0), half, scales=True)
    assert fits((1e-4, 1e-4), half, scales=True)
    assert fits((1e-30, 1e-30), jnp.dtype(jnp.bfloat16), scales=True)
