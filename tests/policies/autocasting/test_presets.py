"""Each operation of the presets: its dtype, its value and its gradients against float64."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from promotion import promoting

from jmp_train.policies.autocasting.rules import APEX_O1, TORCH_CPU, TORCH_CUDA, AutocastRules
from jmp_train.policies.autocasting.transform import autocast

pytestmark = [pytest.mark.quick, pytest.mark.newest]

F16, F32, BF16 = "float16", "float32", "bfloat16"


RANDOM = np.random.default_rng(0)


def normal(*shape: int) -> np.ndarray:
    return RANDOM.normal(size=shape)


def positive(*shape: int) -> np.ndarray:
    return RANDOM.uniform(0.5, 2.0, shape)


def unit(*shape: int) -> np.ndarray:
    return RANDOM.uniform(-0.9, 0.9, shape)


class Row(NamedTuple):
    """An operation, its arguments, and whether autocast gives half for float32, and for half."""

    fn: Callable[..., Any]
    args: tuple[np.ndarray, ...]
    lowers: bool
    keeps_half: bool


X, Y, W, V = normal(4, 6), normal(4, 6), normal(6, 3), normal(6)


IMAGE, KERNEL = normal(2, 8, 8, 3), normal(3, 3, 3, 4)


LABELS = np.array([0, 1, 2, 0], np.int32)


def lower(fn: Any, *args: Any) -> Row:
    return Row(fn, args, True, True)


def float32(fn: Any, *args: Any) -> Row:
    return Row(fn, args, False, False)


def as_is(fn: Any, *args: Any) -> Row:
    return Row(fn, args, False, True)


def conv(x: Any, k: Any) -> Any:
    dims = ("NHWC", "HWIO", "NHWC")
    return lax.conv_general_dilated(x, k, (1, 1), "SAME", dimension_numbers=dims)


# What a single primitive does, `test_primitives` has in its list, and `test_derivative_rules` at all magnitudes.
ROWS = {
    # LOWER
    "conv2d": lower(conv, IMAGE, KERNEL),
    "conv_transpose": lower(lambda x, k: lax.conv_transpose(x, k, (2, 2), "SAME"), IMAGE, KERNEL),
    "matmul": lower(jnp.matmul, X, W),
    "bmm": lower(jnp.matmul, normal(2, 3, 4), normal(2, 4, 5)),
    "dot": float32(jnp.dot, V, V),
    "outer einsum": as_is(functools.partial(jnp.einsum, "i,j->ij"), V, V),
    "outer einsum of a batch": as_is(functools.partial(jnp.einsum, "bi,bj->bij"), X, Y),
    "highest": float32(functools.partial(jnp.matmul, precision="highest"), X, W),
    "high": lower(functools.partial(jnp.matmul, precision="high"), X, W),
    "addmm": lower(lambda b, x, w: x @ w + b, normal(3), X, W),
    "einsum": lower(functools.partial(jnp.einsum, "bi,ij,bj->b"), X, normal(6, 6), Y),
    "vecdot": lower(jnp.linalg.vecdot, X, Y),
    "attention": lower(lambda q: jax.nn.dot_product_attention(q, q, q), normal(1, 4, 2, 8)),
    # FP32
    "acos": float32(jnp.arccos, unit(5)),
    "asin": float32(jnp.arcsin, unit(5)),
    "tan": float32(jnp.tan, unit(5)),
    "exp": float32(jnp.exp, V),
    "log": float32(jnp.log, positive(5)),
    "log2": float32(jnp.log2, positive(5)),
    "log1p": float32(jnp.log1p, positive(5)),
    "pow": float32(jnp.power, positive(5), normal(5)),
    "reciprocal": float32(jnp.reciprocal, positive(5)),
    "rsqrt": float32(lax.rsqrt, positive(5)),
    "erfinv": float32(lax.erf_inv, unit(5)),
    "softplus": float32(jax.nn.softplus, V),
    "log_sigmoid": float32(jax.nn.log_sigmoid, V),
    "norm": float32(jnp.linalg.norm, V),
    "frobenius_norm": float32(jnp.linalg.norm, X),
    "global_norm": float32(optax.tree.norm, V),
    "cosine_similarity": float32(optax.cosine_similarity, V, normal(6)),
    "softmax": float32(jax.nn.softmax, X),
    "log_softmax": float32(jax.nn.log_softmax, X),
    "logsumexp": float32(jax.nn.logsumexp, X),
    "sum": float32(jnp.sum, X),
    "prod": float32(jnp.prod, positive(5)),
    "cumsum": float32(jnp.cumsum, V),
    "cumprod": float32(jnp.cumprod, positive(5)),
    "mean": float32(jnp.mean, X),
    "var": float32(jnp.var, X),
    "std": float32(jnp.std, X),
    "standardize": float32(jax.nn.standardize, X),
    "resize": float32(lambda x: jax.image.resize(x, (6, 5), "linear"), normal(3, 4)),
    "avg_pool": float32(lambda x: lax.reduce_window(x, 0.0, lax.add, (2,), (2,), "VALID"), V),
    "l2_loss": float32(optax.l2_loss, X, Y),
    "huber": float32(optax.huber_loss, X, Y),
    "cross_entropy": float32(
        lambda x: optax.softmax_cross_entropy_with_integer_labels(x, LABELS), X
    ),
    "binary_cross_entropy_with_logits": float32(
        lambda x: optax.sigmoid_binary_cross_entropy(x, jnp.asarray(LABELS[:, None] > 0, x.dtype)),
        X,
    ),
    "kl_div": float32(
        lambda p, q: optax.kl_divergence(jax.nn.log_softmax(p), jax.nn.softmax(q)), X, Y
    ),
    "scatter_add": float32(lambda x: jnp.zeros(4, x.dtype).at[np.array([0, 1, 1])].add(x), V[:3]),
    "segment_sum": float32(lambda x: jax.ops.segment_sum(x, LABELS, 3), X),
    "cholesky": float32(lambda x: jnp.linalg.cholesky(x @ x.T + 8 * jnp.eye(4)), X),
    "solve": float32(lambda x: jnp.linalg.solve(x + 6 * jnp.eye(4), x[:, 0]), normal(4, 4)),
    # as they come
    "relu": as_is(jax.nn.relu, X),
    "silu": as_is(jax.nn.silu, X),
    "tanh": as_is(jnp.tanh, X),
    "sigmoid": as_is(jax.nn.sigmoid, X),
    "sqrt": as_is(jnp.sqrt, positive(5)),
    "max": as_is(jnp.max, V),
    "max_pool": as_is(lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (2,), (2,), "VALID"), V),
    "embedding": as_is(lambda x: x[LABELS], X),
    "add": as_is(jnp.add, X, Y),
    "div": as_is(jnp.divide, X, positive(4, 6)),
    "outer": as_is(jnp.outer, V, V),
    "cross": as_is(jnp.cross, normal(3), normal(3)),
    "stack": as_is(lambda x, y: jnp.stack([x, y]), X, Y),
    "sort": as_is(jnp.sort, V),
    "python_number": as_is(lambda x: 2.5 * x + 1, X),
}  # fmt: skip


def scalar(fn: Callable[..., Any]) -> Callable[..., jax.Array]:
    """A weighted sum of the results, in float32 as a loss is."""

    def total(*args: Any) -> jax.Array:
        out = promoting(fn)(*args)
        dtype = jnp.float64 if args[0].dtype == jnp.float64 else jnp.float32
        weights = jnp.asarray(np.cos(np.arange(out.size)).reshape(out.shape), dtype)
        return jnp.sum(out.astype(dtype) * weights)

    return total


def value_and_grads(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the results of a function and the gradients of their weighted sum, in one program."""

    def run(*args: Any) -> Any:
        return fn(*args), jax.grad(scalar(fn), tuple(range(len(args))))(*args)

    return jax.jit(run)


@functools.cache
def exact_value_and_grads(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the same of the function without autocast: for float64, one program for all cases of a row."""
    return value_and_grads(promoting(fn))


def close(actual: Any, expected: Any, dtype: str) -> None:
    """Within some roundings of the half type, beside the size of the whole."""
    expected = np.asarray(expected, np.float64)
    actual = np.asarray(actual, np.float64)
    epsilon = float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(actual, expected, rtol=8 * epsilon, atol=8 * epsilon * np.abs(expected).max())


# Where the leaner table for bfloat16 differs: transcendental functions keep their dtype.
KEPT_ON_CPU = "acos asin tan exp log log2 log1p pow reciprocal rsqrt erfinv softplus"
CPU_ROWS = ROWS | {name: as_is(ROWS[name].fn, *ROWS[name].args) for name in KEPT_ON_CPU.split()}
CPU_ROWS |= {
    "quantile": float32(lambda x: jnp.quantile(x, jnp.asarray(0.3, x.dtype)), V),
    "fft": float32(lambda x: jnp.abs(jnp.fft.fft(x)), V),
    "trace": float32(jnp.trace, X),
    "triangular_solve": float32(
        lambda x: lax.linalg.triangular_solve(x + 6 * jnp.eye(4), x, left_side=True, lower=True), normal(4, 4)
    ),
    "qr": float32(lambda x: jnp.abs(jnp.linalg.qr(x)[1]), X.T),
    "svd": float32(lambda x: jnp.linalg.svd(x, compute_uv=False), X),
    "pad": as_is(lambda x: jnp.pad(x, 1, mode="reflect"), X),
}
IN_APEX = "matmul conv2d exp softmax cross_entropy var std resize pow relu tanh add stack"
APEX_ROWS = {name: ROWS[name] for name in IN_APEX.split()}
APEX_ROWS |= {
    "gelu": float32(jax.nn.gelu, X),
    "erf gelu": float32(functools.partial(jax.nn.gelu, approximate=False), X),
    "softmin": float32(lambda x: jax.nn.softmax(-x), X),
    "normalize": float32(lambda x: x / jnp.linalg.norm(x, axis=1, keepdims=True), X),
}


CASES = [
    *((TORCH_CUDA, F16, name, row, given) for name, row in ROWS.items() for given in (F32, F16)),
    *((TORCH_CPU, BF16, name, row, BF16) for name, row in CPU_ROWS.items()),
    *((APEX_O1, F16, name, row, F16) for name, row in APEX_ROWS.items()),
]


PRESETS = {TORCH_CUDA: "cuda", TORCH_CPU: "cpu", APEX_O1: "apex"}


@pytest.mark.quick_cases(8)
@pytest.mark.parametrize(
    ("rules", "half", "name", "row", "given"),
    CASES,
    ids=[f"{PRESETS[rules]}-{name}-{given}" for rules, _, name, _, given in CASES],
)
def test_a_row_of_a_preset(rules: AutocastRules, half: str, name: str, row: Row, given: str) -> None:
    args = [jnp.asarray(x, given) for x in row.args]
    out, grads = value_and_grads(autocast(promoting(row.fn), half, rules=rules))(*args)
    in_half = row.lowers if given == F32 else row.keeps_half
    assert out.dtype == (half if in_half else F32)
    assert {grad.dtype.name for grad in grads} == {given}
    with jax.enable_x64(True):
        exact_out, exact_grads = exact_value_and_grads(row.fn)(*(np.asarray(x, np.float64) for x in args))
    close(out, exact_out, half)
    for grad, exact_grad in zip(grads, exact_grads, strict=True):
        close(grad, exact_grad, half)


def test_where_plain_half_fails_autocast_is_right() -> None:
    many, large = np.zeros(70_000, np.float16), np.full(3, 300, np.float16)
    cases: list[tuple[Any, np.ndarray, Any]] = [  # a function, its argument, and what the first of its result is
        (jax.nn.softmax, many, pytest.approx(1 / 70_000)),
        (jax.nn.logsumexp, many, pytest.approx(np.log(70_000))),
        (jax.nn.log_softmax, many, pytest.approx(-np.log(70_000))),
        (jnp.linalg.norm, large, pytest.approx(300 * 3**0.5)),
        (optax.tree.norm, large, pytest.approx(300 * 3**0.5)),
        (jax.nn.standardize, np.array([300, -300], np.float16), pytest.approx(1)),
        (jnp.sum, np.full(70_000, 2, np.float16), 140_000),
        (lambda x: jax.ops.segment_sum(x, jnp.zeros(13_161, jnp.int32), 1), np.ones(13_161, np.float16), 13_161),
        (lambda x: x / (jnp.linalg.norm(x) + 1e-8), np.full(4, 1e-4, np.float16), pytest.approx(0.5, rel=1e-2)),
    ]

    @jax.jit
    def run(arguments: list[Any]) -> list[Any]:
        return [autocast(fn)(x) for (fn, *_), x in zip(cases, arguments, strict=True)]

    for found, (*_, wanted) in zip(run([x for _, x, _ in cases]), cases, strict=True):
        assert float(np.ravel(found)[0]) == wanted
