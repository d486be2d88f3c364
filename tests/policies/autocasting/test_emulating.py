"""An emulation makes the choices of autocast itself, and rounds as half precision does."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from promotion import promoting

from jmp_train import MOSTLY_HALF, TORCH_CUDA, AutocastRules, autocast, autocast_as, explain_autocast
from jmp_train.policies.autocasting.emulating import COMPILER_OPTIONS, emulated_autocast, rounded

pytestmark = pytest.mark.quick

F16, F32 = jnp.float16, jnp.float32
HALVES = [jnp.float16, jnp.bfloat16]
KEY = jax.random.key(0)


def values_of(half: Any) -> np.ndarray:
    """Returns all numbers of a half type, as float32."""
    return np.arange(2**16, dtype=np.uint16).view(jnp.dtype(half)).astype(np.float32)


def bits(x: Any) -> np.ndarray:
    return np.asarray(x, np.float32).view(np.uint32)


@pytest.mark.parametrize("half", HALVES)
def test_rounding_is_the_cast_of_each_number_and_around_every_boundary(half: Any) -> None:
    every = values_of(half)
    values = np.unique(every[np.isfinite(every)].astype(np.float64))
    middle = ((values[1:] + values[:-1]) / 2).astype(np.float32)
    largest = float(jnp.finfo(half).max)
    ends = np.array([largest, largest * (1 + 2.0**-12), largest * (1 + 2.0**-8), 3e38, np.inf], np.float32)
    around = [middle, *(np.nextafter(middle, np.float32(side * np.inf)) for side in (1, -1)), ends, -ends]
    x = np.concatenate([every[~np.isnan(every)], *around])
    with np.errstate(over="ignore"):
        wanted = x.astype(jnp.dtype(half)).astype(np.float32)
    run = jax.jit(lambda x, active: rounded(x, half, active), compiler_options=COMPILER_OPTIONS)
    np.testing.assert_array_equal(bits(run(x, True)), bits(wanted))
    np.testing.assert_array_equal(bits(run(x, False)), bits(x))
    assert np.isnan(run(every[np.isnan(every)], True)).all()


@pytest.mark.parametrize("half", HALVES)
def test_the_gradient_is_rounded_too(half: Any) -> None:
    values = np.array([1.0, 1.001, 1e-7, 70000.0], np.float32)
    run = jax.jit(lambda x, g: jax.vjp(lambda x: rounded(x, half), x)[1](g)[0], compiler_options=COMPILER_OPTIONS)
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(run(np.ones(4, np.float32), values), values.astype(jnp.dtype(half)))


class Block(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        h = nn.LayerNorm()(x)
        h = nn.MultiHeadDotProductAttention(num_heads=2)(h)
        h = nn.Dense(x.shape[-1])(nn.gelu(h))
        return x + nn.BatchNorm(use_running_average=False)(h)


def arrays(*shapes: tuple[int, ...]) -> tuple[jax.Array, ...]:
    return tuple(jax.random.normal(jax.random.fold_in(KEY, i), shape) for i, shape in enumerate(shapes))


def module() -> tuple[Callable[..., Any], tuple[Any, ...]]:
    block = Block()
    (x,) = arrays((2, 4, 8))
    variables = promoting(block.init)(KEY, x)

    def run(variables: Any, x: Any) -> Any:
        y, _ = block.apply(variables, x, mutable=["batch_stats"])
        return y

    return run, (variables, x)


def convolution() -> tuple[Callable[..., Any], tuple[Any, ...]]:
    def run(w: Any, b: Any, x: Any) -> Any:
        h = jax.lax.conv(x, w, (1, 1), "SAME") + b[:, None, None]
        h = nn.max_pool(jnp.moveaxis(jax.nn.relu(h), 1, -1), (2, 2), (2, 2))
        return jax.nn.log_softmax(h.mean((1, 2)))

    return run, arrays((4, 3, 3, 3), (4,), (2, 3, 8, 8))


def loops() -> tuple[Callable[..., Any], tuple[Any, ...]]:
    def run(w: Any, x: Any) -> Any:
        def body(h: Any, w: Any) -> Any:
            return jax.nn.softplus(h @ w) * jnp.tanh(h), jnp.exp(h).sum()

        h, sums = jax.lax.scan(jax.checkpoint(body), x, w)
        h = jax.lax.cond(x.sum() > 0, lambda h: jnp.exp(h @ w[0]), lambda h: jnp.sin(h @ w[1]), h)
        h = jax.lax.fori_loop(0, 3, lambda _, h: jnp.tanh(h @ w[2]) + 0.5 * h, h)
        return h, sums

    return run, arrays((3, 4, 4), (2, 4))


def odd_ends() -> tuple[Callable[..., Any], tuple[Any, ...]]:
    def run(w: Any, x: Any) -> Any:
        h = x @ w
        average = 0.9 * x.mean(0) + 0.1 * h.mean(0)  # float32 all along
        masked = jnp.where(h > 0, h, -1e9)  # half cannot hold it
        picked = jnp.take(h, jnp.array([0, 1, 1]), axis=0) * jnp.concatenate([h, x])[:3]
        counted = h * jnp.arange(4000.0, 4000.0 + h.shape[0])[:, None]  # nor these
        exact = autocast_as("float32")(lambda h: jnp.exp(h @ w))(h)
        stored = (h.astype(F16) * jnp.asarray(2, F16)).astype(F32)
        inner = autocast(lambda h: jnp.tanh(h @ w), F16, rules=TORCH_CUDA)(h).astype(F32)
        outer = jnp.outer(h[0], h[1])
        return average, jax.nn.softmax(masked), picked, counted, exact, stored, inner, outer, jnp.linalg.norm(h)

    return run, arrays((4, 4), (2, 4))


def derivatives() -> tuple[Callable[..., Any], tuple[Any, ...]]:
    @jax.custom_vjp
    def clipped(x: Any) -> Any:
        return jnp.clip(x, -1, 1)

    clipped.defvjp(lambda x: (clipped(x), x), lambda x, g: (g * jnp.exp(-x * x),))

    def run(w: Any, x: Any) -> Any:
        def potential(x: Any) -> Any:
            return jnp.sum(jnp.tanh(clipped(x @ w)) ** 2)

        return jax.grad(potential)(x), jax.jvp(lambda x: jnp.sin(x @ w), (x,), (x,))[1]

    return run, arrays((4, 4), (2, 4))


PROGRAMS = {f.__name__: f for f in (module, convolution, loops, odd_ends, derivatives)}
RULES = {
    "mostly half": MOSTLY_HALF,
    "two in float32": MOSTLY_HALF.replace(operations={":exp@": "float32", ":tanh@": "float32", "LayerNorm": "float32"}),
    "products in float32": MOSTLY_HALF.replace(primitives={"dot_general": "float32"}),
}


def half_of_autocast(fn: Callable[..., Any], args: Any, rules: AutocastRules) -> list[tuple[str, str]]:
    """Returns which operations autocast runs in half precision by choice: paths and primitives, in their order."""
    report = explain_autocast(autocast(promoting(fn), F16, rules=rules), *args)
    chosen = [row for row in report.operations if row.rule in ("lower", "demote") and "float16" in row.dtypes_in]
    return [(row.path, row.operation) for row in chosen]


def half_of_emulation(fn: Callable[..., Any], args: Any, rules: AutocastRules) -> list[tuple[str, str]]:
    found = []

    def run(run: Callable[..., Any], arrays: Any, active: Any, addresses: tuple[str, ...], *, wide: bool) -> Any:
        del active, wide
        heads = [address.partition("@")[0].rpartition(":") for address in addresses]
        found.extend((path, primitive) for path, _, primitive in heads)
        results = run(*arrays)
        return results if isinstance(results, list | tuple) else [results]

    emulated = emulated_autocast(promoting(fn), F16, lambda *_: True, rules=rules, run=run)
    jax.eval_shape(emulated, *args)
    return found


CASES = [(program, rules) for rules in RULES for program in PROGRAMS if program != "loops" or rules == "mostly half"]


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(("program", "rules"), CASES)
def test_what_may_be_half_is_what_autocast_runs_in_half(program: str, rules: str) -> None:
    fn, args = PROGRAMS[program]()
    wanted = half_of_autocast(fn, args, RULES[rules])
    assert set(half_of_emulation(fn, args, RULES[rules])) == set(wanted)
    assert wanted or rules != "mostly half"


def gradients_of(fn: Callable[..., Any], args: Any, **options: Any) -> np.ndarray:
    def objective(*args: Any) -> Any:
        return 64 * sum(jnp.sum(jnp.sin(x.astype(F32))) for x in jax.tree.leaves(fn(*args)))

    found = jax.jit(jax.grad(objective), **options)(*args)
    return np.concatenate([np.ravel(x).astype(np.float64) for x in jax.tree.leaves(found)])


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("program", ["module", "convolution", "derivatives"])
@pytest.mark.filterwarnings("ignore:the gradient taken at")  # of the program `derivatives`
def test_gradients_are_off_as_those_of_autocast(program: str) -> None:
    fn, args = PROGRAMS[program]()
    exact = gradients_of(promoting(fn), args)
    ours = emulated_autocast(promoting(fn), F16, lambda *_: jnp.asarray(True))
    found = gradients_of(ours, args, compiler_options=COMPILER_OPTIONS)
    wanted = gradients_of(autocast(promoting(fn), F16, rules=MOSTLY_HALF), args, compiler_options=COMPILER_OPTIONS)
    errors = [np.linalg.norm(x - y) for x, y in ((found, exact), (wanted, exact), (found, wanted))]
    assert 0.5 < errors[0] / errors[1] < 2
    assert errors[2] < 1.5 * errors[1]


@pytest.mark.full
def test_a_flag_is_an_operation() -> None:
    def run(w: Any, x: Any) -> Any:
        return jnp.exp(jnp.tanh(x @ w) * 3)

    def flags(addresses: tuple[str, ...], equations: tuple[Any, ...]) -> bool:
        del equations
        return not any(":exp@" in address for address in addresses)

    w, x = arrays((4, 4), (2, 4))
    found = emulated_autocast(run, F16, flags)(w, x)
    by_rules = autocast(run, F16, rules=MOSTLY_HALF.replace(operations={":exp@": "float32"}))(w, x)
    assert by_rules.dtype == F32
    np.testing.assert_allclose(found, by_rules, rtol=5e-3)
    assert not np.array_equal(rounded(found, F16), found)


@pytest.mark.full
def test_derivatives_that_leave_half_are_emulated_in_float32() -> None:
    def run(x: Any, w: Any) -> Any:
        return (jnp.exp2(x @ w) / (x @ w + 300)).sum()

    x, w = jnp.linspace(-8, 8, 64)[:, None].repeat(2, 1), jnp.full((2, 1), 0.5)
    found = jax.grad(emulated_autocast(run, F16, lambda *_: True))(x, w)
    np.testing.assert_allclose(found, jax.grad(autocast(run, F16, rules=MOSTLY_HALF))(x, w), rtol=0.01)
    np.testing.assert_allclose(found, jax.grad(run)(x, w), rtol=0.01, atol=1e-6)


def test_within_shard_map() -> None:
    mesh = Mesh(jax.devices()[:2], ("data",))
    w, x = arrays((4, 4), (4, 4))
    run = jax.shard_map(lambda w, x: jnp.exp(x @ w), mesh=mesh, in_specs=(P(), P("data")), out_specs=P("data"))
    found = jax.jit(emulated_autocast(run, F16, lambda *_: jnp.asarray(True)))(w, x)
    np.testing.assert_array_equal(found, autocast(run, F16, rules=MOSTLY_HALF)(w, x).astype(F32))
