import functools
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from promotion import promoting
from pytrees import assert_bitwise_equal

from jmp_train.policies.autocasting.region import BannedOperationError
from jmp_train.policies.autocasting.rules import APEX_O1, TORCH_CPU, TORCH_CUDA, AutocastRules
from jmp_train.policies.autocasting.transform import autocast, autocast_as

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
    """An operation, its arguments, and the dtype that autocast gives it for float32 and for half."""

    fn: Callable[..., Any]
    args: tuple[np.ndarray, ...]
    full: str
    half: str


X, Y, W, V = normal(4, 6), normal(4, 6), normal(6, 3), normal(6)
IMAGE, KERNEL = normal(2, 8, 8, 3), normal(3, 3, 3, 4)
LABELS = np.array([0, 1, 2, 0], np.int32)


def lower(fn: Any, *args: Any) -> Row:
    return Row(fn, args, F16, F16)


def float32(fn: Any, *args: Any) -> Row:
    return Row(fn, args, F32, F32)


def as_is(fn: Any, *args: Any) -> Row:
    return Row(fn, args, F32, F16)


def conv(x: Any, k: Any) -> Any:
    dims = ("NHWC", "HWIO", "NHWC")
    return lax.conv_general_dilated(x, k, (1, 1), "SAME", dimension_numbers=dims)


ROWS = {
    # LOWER
    "conv2d": lower(conv, IMAGE, KERNEL),
    "conv1d": lower(
        lambda x, k: lax.conv_general_dilated(
            x, k, (1,), "VALID", dimension_numbers=("NWC", "WIO", "NWC")
        ),
        normal(2, 9, 3), normal(3, 3, 4),
    ),
    "conv_transpose": lower(lambda x, k: lax.conv_transpose(x, k, (2, 2), "SAME"), IMAGE, KERNEL),
    "matmul": lower(jnp.matmul, X, W),
    "mv": lower(jnp.matmul, X, V),
    "bmm": lower(jnp.matmul, normal(2, 3, 4), normal(2, 4, 5)),
    "dot": float32(jnp.dot, V, V),
    "outer einsum": as_is(functools.partial(jnp.einsum, "i,j->ij"), V, V),
    "outer einsum of a batch": as_is(functools.partial(jnp.einsum, "bi,bj->bij"), X, Y),
    "highest": float32(functools.partial(jnp.matmul, precision="highest"), X, W),
    "high": lower(functools.partial(jnp.matmul, precision="high"), X, W),
    "addmm": lower(lambda b, x, w: x @ w + b, normal(3), X, W),
    "einsum": lower(functools.partial(jnp.einsum, "bi,ij,bj->b"), X, normal(6, 6), Y),
    "multi_dot": lower(lambda a, b, c: jnp.linalg.multi_dot([a, b, c]), X, W, normal(3, 2)),
    "tensordot": lower(lambda a, b: jnp.tensordot(a, b, 1), X, W),
    "vecdot": lower(jnp.linalg.vecdot, X, Y),
    "attention": lower(lambda q: jax.nn.dot_product_attention(q, q, q), normal(1, 4, 2, 8)),
    # FP32
    "acos": float32(jnp.arccos, unit(5)),
    "asin": float32(jnp.arcsin, unit(5)),
    "cosh": float32(jnp.cosh, V),
    "sinh": float32(jnp.sinh, V),
    "tan": float32(jnp.tan, unit(5)),
    "exp": float32(jnp.exp, V),
    "exp2": float32(jnp.exp2, V),
    "expm1": float32(jnp.expm1, V),
    "log": float32(jnp.log, positive(5)),
    "log10": float32(jnp.log10, positive(5)),
    "log2": float32(jnp.log2, positive(5)),
    "log1p": float32(jnp.log1p, positive(5)),
    "pow": float32(jnp.power, positive(5), normal(5)),
    "integer_pow": float32(lambda x: x**3, V),
    "square": float32(jnp.square, V),
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
    "mse": float32(lambda x, y: jnp.mean((x - y) ** 2), X, Y),
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
    "abs": as_is(jnp.abs, V),
    "max": as_is(jnp.max, V),
    "min": as_is(jnp.min, V),
    "max_pool": as_is(lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (2,), (2,), "VALID"), V),
    "embedding": as_is(lambda x: x[LABELS], X),
    "add": as_is(jnp.add, X, Y),
    "mul": as_is(jnp.multiply, X, Y),
    "div": as_is(jnp.divide, X, positive(4, 6)),
    "outer": as_is(jnp.outer, V, V),
    "cross": as_is(jnp.cross, normal(3), normal(3)),
    "atan2": as_is(jnp.arctan2, X, Y),
    "concatenate": as_is(lambda x, y: jnp.concatenate([x, y]), X, Y),
    "stack": as_is(lambda x, y: jnp.stack([x, y]), X, Y),
    "where": as_is(lambda x, y: jnp.where(x > y, x, y), X, Y),
    "clip": as_is(lambda x: jnp.clip(x, -0.5, 0.5), X),
    "sort": as_is(jnp.sort, V),
    "transpose": as_is(jnp.transpose, X),
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
CPU_ROWS = ROWS | {
    name: ROWS[name]._replace(half=BF16)
    for name in [
        "acos",
        "asin",
        "cosh",
        "sinh",
        "tan",
        "exp",
        "exp2",
        "expm1",
        "log",
        "log10",
        "log2",
        "log1p",
        "pow",
        "integer_pow",
        "reciprocal",
        "rsqrt",
        "erfinv",
        "softplus",
        "relu",
        "silu",
        "tanh",
        "sigmoid",
        "sqrt",
        "abs",
        "max",
        "min",
        "max_pool",
        "embedding",
        "add",
        "mul",
        "div",
        "outer",
        "outer einsum",
        "outer einsum of a batch",
        "cross",
        "atan2",
        "concatenate",
        "stack",
        "where",
        "clip",
        "sort",
        "transpose",
        "python_number",
    ]
}
CPU_ROWS |= {
    "quantile": float32(lambda x: jnp.quantile(x, jnp.asarray(0.3, x.dtype)), V),
    "fft": float32(lambda x: jnp.abs(jnp.fft.fft(x)), V),
    "trace": float32(jnp.trace, X),
    "triangular_solve": float32(
        lambda x: lax.linalg.triangular_solve(x + 6 * jnp.eye(4), x, left_side=True, lower=True),
        normal(4, 4),
    ),
    "qr": float32(lambda x: jnp.abs(jnp.linalg.qr(x)[1]), X.T),
    "svd": float32(lambda x: jnp.linalg.svd(x, compute_uv=False), X),
    "pad": as_is(lambda x: jnp.pad(x, 1, mode="reflect"), X)._replace(half=BF16),
}
APEX_ROWS = {
    name: ROWS[name]
    for name in [
        "matmul",
        "conv2d",
        "exp",
        "softmax",
        "cross_entropy",
        "var",
        "std",
        "resize",
        "pow",
        "relu",
        "tanh",
        "add",
        "stack",
    ]
}
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
    wanted = row.full if given == F32 else row.half
    assert out.dtype == (half if wanted == F16 else wanted)
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


MASKS: dict[str, Callable[[jax.Array, jax.Array], jax.Array]] = {
    "where": lambda y, mask: jnp.where(mask, y, -1e9),
    "least": lambda y, mask: jnp.where(mask, y, jnp.finfo(jnp.float32).min),
    "added": lambda y, mask: y + (1.0 - mask.astype(jnp.float32)) * -1e9,
    "subtracted": lambda y, mask: y - 1e9 * (1 - mask.astype(jnp.int32)),
    "in a jit": lambda y, mask: y + jax.jit(lambda m: (1.0 - m.astype(jnp.float32)) * -1e9)(mask),
}


@pytest.mark.parametrize("half", [F16, jnp.bfloat16], ids=["float16", "bfloat16"])
@pytest.mark.parametrize("mask", MASKS)
def test_a_row_that_is_masked_altogether_is_uniform(mask: str, half: Any) -> None:
    def fn(x: jax.Array, w: jax.Array, allowed: jax.Array) -> jax.Array:
        return jax.nn.softmax(MASKS[mask](x @ w, allowed))

    allowed = jnp.zeros((2, 3), bool).at[0, 1].set(True)
    out = autocast(promoting(fn), half)(jnp.ones((2, 3)), jnp.ones((3, 3)), allowed)
    np.testing.assert_allclose(out, [[0, 1, 0], [1 / 3] * 3], atol=1e-6)


LITERALS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "a root": lambda y: y / jnp.sqrt(1e10) * 1e5,
    "a power": lambda y: y * jnp.float32(10) ** 6 / 1e6,
    "tiny": lambda y: (y * 1e-7) * 1e7,
    "nearly zero": lambda y: 1e-9 * y / 1e-9,
    "a sum": lambda y: y + jnp.sum(jnp.full(100, 1e3)) - 1e5,
    "a product": lambda y: y + jnp.prod(jnp.full(6, 10.0)) - 1e6,
    "counted": lambda y: y * 0 + jnp.arange(80_000.0)[jnp.array([1, 4_093, 79_999])],
}


@pytest.mark.parametrize("literal", LITERALS)
def test_literals_that_half_cannot_hold_are_float32(literal: str) -> None:
    fn, x = LITERALS[literal], jnp.array([0.0, 0.5, 2.0])
    ours = autocast(lambda x: fn((x[None] @ jnp.eye(3))[0]))(x)
    assert ours.dtype == F32
    np.testing.assert_allclose(ours, promoting(fn)(x), rtol=1e-5, atol=0.07)


def test_literals_that_half_can_hold_are_half() -> None:
    for scale in (0.5, 1 / np.sqrt(64), 6e-4, -60_000.0, 0.0, np.inf):
        out = autocast(lambda x, scale=scale: jnp.maximum((x @ x) * scale, scale + 0.0))(X[:2, :2])
        assert out.dtype == F16
    gelu = autocast(lambda x: jnp.tanh(jnp.sqrt(2 / jnp.pi) * (x @ x) / jnp.log(10.0)))
    assert gelu(X[:2, :2]).dtype == F16


@jax.custom_vjp
def seven_vjp(x: jax.Array) -> jax.Array:
    """Twice its argument, with a planted gradient of 7."""
    return 2 * x


seven_vjp.defvjp(lambda x: (2 * x, None), lambda _, g: (7 * g,))


@jax.custom_jvp
def seven_jvp(x: jax.Array) -> jax.Array:
    """Twice its argument, with a planted tangent of 7."""
    return 2 * x


seven_jvp.defjvp(lambda primals, tangents: (2 * primals[0], 7 * tangents[0]))


def through_scan(seven: Any) -> Any:
    def fn(w: jax.Array) -> jax.Array:
        body = jax.checkpoint(lambda c, x: (c, seven(c)))
        return lax.scan(body, w, jnp.arange(3))[1][1]

    return fn


@pytest.mark.quick_cases(6)
@pytest.mark.parametrize("seven", [seven_vjp, seven_jvp])
@pytest.mark.parametrize(
    "wrap",
    [
        lambda seven: seven,
        lambda seven: jax.jit(seven),
        through_scan,
        lambda seven: autocast_as("lower")(seven),
        lambda seven: autocast_as("float32")(seven),
        lambda seven: lambda w: lax.cond(w.sum() > -1, seven, lambda x: x, w),
        lambda seven: lambda w: jax.vmap(seven)(w),
        lambda seven: lambda w: jax.checkpoint(seven)(w),
    ],
    ids=["plain", "jit", "scan of remat", "lower", "float32", "cond", "vmap", "remat"],
)
@pytest.mark.parametrize("jit", [False, True])
def test_a_planted_gradient_survives(seven: Any, wrap: Any, jit: bool) -> None:
    inner = wrap(seven)

    def loss(w: jax.Array) -> jax.Array:
        return jnp.sum(autocast(inner)(w).astype(jnp.float32))

    grad = jax.jit(jax.grad(loss)) if jit else jax.grad(loss)
    for dtype in (F32, F16):
        out = grad(jnp.ones((2, 2), dtype))
        assert (out.dtype, out.tolist()) == (dtype, [[7.0, 7.0], [7.0, 7.0]])


@pytest.mark.parametrize("wrap", [lambda fn: fn, autocast_as("lower")], ids=["entered", "lower"])
def test_a_custom_rule_with_products_is_run_in_half(wrap: Any) -> None:
    @jax.custom_vjp
    def product(x: jax.Array, w: jax.Array) -> jax.Array:
        return x @ w

    def backward(saved: Any, g: jax.Array) -> tuple[jax.Array, jax.Array]:
        x, w = saved
        return 3 * g @ w.T, 5 * x.T @ g

    product.defvjp(lambda x, w: (x @ w, (x, w)), backward)
    x, w = jnp.ones((2, 3)), jnp.ones((3, 4))
    function = autocast(wrap(product))
    assert function(x, w).dtype == F16

    def loss(x: jax.Array, w: jax.Array) -> jax.Array:
        return function(x, w).astype(jnp.float32).sum()

    gx, gw = jax.grad(loss, (0, 1))(x, w)
    assert (gx.dtype, gw.dtype) == (F32, F32)
    assert (float(gx[0, 0]), float(gw[0, 0])) == (12, 10)
    text = str(jax.make_jaxpr(jax.grad(loss, (0, 1)))(x, w))
    assert "f32[2,3] = dot_general" not in text


def test_a_custom_rule_of_half_inputs_becomes_float32_where_a_rule_says_so() -> None:
    @jax.custom_vjp
    def total(x: jax.Array) -> jax.Array:
        return jnp.sum(x * x)

    total.defvjp(lambda x: (jnp.sum(x * x), x), lambda x, g: (7 * g * x,))

    def fn(x: jax.Array) -> jax.Array:
        return autocast_as("float32")(total)(x.astype(jnp.float16))

    x = jnp.full((2, 3), 300.0)
    assert autocast(lambda x: total(x.astype(jnp.float16)))(x).dtype == F16
    out = autocast(fn)(x)
    assert (out.dtype, float(out)) == (F32, 6 * 300.0**2)
    assert jax.grad(autocast(fn))(x).tolist() == [[2100.0] * 3] * 2


def tanh_of_product() -> tuple[Any, jax.Array]:
    """Returns a function with a rule, which closes over an array, and that array."""
    w = jnp.asarray(np.random.default_rng(0).normal(size=(4, 4)), jnp.float32)
    function = jax.custom_jvp(lambda x: jnp.tanh(x @ w))
    function.defjvp(lambda p, t: (function(*p), (1 - function(*p) ** 2) * (t[0] @ w)))
    return function, w


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize(
    "grad",
    [
        lambda loss: jax.grad(jax.jit(loss)),
        lambda loss: jax.jit(jax.grad(jax.jit(loss))),
        lambda loss: jax.jacfwd(jax.jit(loss)),
        lambda loss: jax.grad(jax.checkpoint(jax.jit(loss))),
        lambda loss: jax.grad(lambda x: lax.scan(lambda c, _: (c, loss(x)), 0, None, 1)[1].sum()),
    ],
    ids=["grad of jit", "jit of both", "jacfwd", "remat", "scan"],
)
def test_a_rule_may_run_after_its_trace_has_ended(grad: Any) -> None:
    function, w = tanh_of_product()

    def loss(x: jax.Array, transform: Any = autocast) -> jax.Array:
        return transform(lambda x: function(x @ w))(x).astype(jnp.float32).mean()

    expected = grad(functools.partial(loss, transform=lambda f: f))(w)
    np.testing.assert_allclose(grad(loss)(w), expected, atol=1e-3)


def test_rules_with_integers() -> None:
    order, w = jnp.array([1, 0]), jnp.ones((2, 2))

    @jax.custom_jvp
    def largest(x: jax.Array, rows: jax.Array) -> tuple[jax.Array, jax.Array]:
        return (x @ w)[rows], jnp.argmax(x)

    @largest.defjvp
    def times_seven(primals: Any, tangents: Any) -> Any:
        out = largest(*primals)
        return out, (7 * (tangents[0] @ w)[primals[1]], np.zeros((), jax.dtypes.float0))

    out, index = autocast(largest)(jnp.eye(2), order)
    assert (out.dtype, index.dtype) == (F16, jnp.int32)
    grads = jax.grad(lambda x: autocast(largest)(x, order)[0].astype(jnp.float32).sum())(jnp.eye(2))
    assert grads.tolist() == [[14.0, 14.0], [14.0, 14.0]]


def test_a_lowered_rule_may_close_over_arrays_and_call_itself() -> None:
    w = jnp.full((2, 2), 0.5)

    @jax.custom_vjp
    def product(x: jax.Array) -> jax.Array:
        return x @ w

    product.defvjp(lambda x: (product(x), None), lambda _, g: (7 * g @ w.T,))
    loss = lambda x: autocast(autocast_as("lower")(product))(x).astype(jnp.float32).sum()
    text = str(jax.make_jaxpr(jax.grad(jax.jit(loss)))(w))
    assert "f32[2,2] = dot_general" not in text
    assert jax.grad(jax.jit(loss))(w).tolist() == [[7.0, 7.0], [7.0, 7.0]]


def test_symbolic_zeros_stay_symbolic() -> None:
    function = jax.custom_jvp(lambda x, y: x * y)

    def tangents(primals: Any, tangents: Any) -> Any:
        (x, y), (dx, dy) = primals, tangents
        assert isinstance(dy, jax.custom_derivatives.SymbolicZero)
        return x * y, 7 * dx * y

    function.defjvp(tangents, symbolic_zeros=True)
    assert float(jax.grad(lambda x: autocast(function)(x, jnp.float32(2)))(jnp.float32(3))) == 14


# Loops and branches


def test_a_scan_keeps_the_dtype_of_its_carry() -> None:
    def rnn(w: jax.Array, xs: jax.Array) -> Any:
        def cell(h: jax.Array, x: jax.Array) -> Any:
            h = jnp.tanh(h @ w + x)
            return h, h @ w

        return lax.scan(cell, jnp.zeros(3), xs)

    w, xs = jnp.ones((3, 3)) / 3, jnp.ones((5, 3))
    carry, ys = autocast(rnn)(w, xs)
    assert (carry.dtype, ys.dtype) == (F32, F16)
    expected, outputs = rnn(w, xs)
    np.testing.assert_allclose(carry, expected, rtol=2e-3)
    np.testing.assert_allclose(ys.astype(jnp.float32), outputs, rtol=2e-3)


def test_a_half_carry_stays_half_only_if_the_body_keeps_it_so() -> None:
    x, w = jnp.ones(3, jnp.float16), jnp.eye(3)

    def loop(body: Any) -> Any:
        return autocast(lambda x: lax.fori_loop(0, 3, lambda _, c: body(c), x))(x)

    assert loop(lambda c: c @ w).dtype == F16
    assert loop(lambda c: jnp.exp(c) * 0.1).dtype == F32
    assert autocast(lambda x: lax.while_loop(lambda c: c.sum() < 0, jnp.exp, x))(x).dtype == F32
    total = autocast(lambda x: lax.scan(lambda c, v: (c + v, None), jnp.zeros(()), x)[0])
    assert float(total(jnp.ones(5000, jnp.float16))) == 5000  # stops at 2048 in float16


def test_an_empty_scan() -> None:
    x, w = jnp.ones((0, 3), jnp.float16), jnp.ones((3, 3))
    carry, ys = autocast(lambda x: lax.scan(lambda c, v: (c @ w, v @ w), jnp.ones(3), x))(x)
    assert (carry.dtype, ys.dtype, ys.shape) == (F32, F16, (0, 3))


def test_each_element_of_a_batch_leaves_its_loop_by_itself() -> None:
    w = jnp.eye(2)

    def doubled(x: jax.Array) -> jax.Array:
        return lax.while_loop(lambda c: c[0] < 100, lambda c: (c[0] * 2, c[1] @ c[1]), (x, w))[0]

    x = jnp.array([1.0, 70.0, 200.0])
    assert autocast(jax.vmap(doubled))(x).tolist() == [128.0, 140.0, 200.0]
    assert jax.jit(jax.vmap(autocast(doubled)))(x).tolist() == [128.0, 140.0, 200.0]


def test_a_scatter_that_computes() -> None:
    out = autocast(lambda x: (x @ x).at[0].apply(jnp.tanh))(jnp.eye(2))
    np.testing.assert_allclose(out, [[np.tanh(1), 0], [0, 1]], rtol=1e-3)


def test_branches_agree() -> None:
    x, w = jnp.ones((2, 3)), jnp.ones((3, 3))

    def fn(index: Any, x: jax.Array) -> Any:
        branches = [lambda x: x @ w, lambda x: jnp.exp(x @ w), lambda x: x]
        return lax.switch(index, branches, x), lax.cond(index > 0, lambda x: x @ w, lambda x: 2 * (x @ w), x)

    for index in range(3):
        mixed, half = jax.jit(autocast(fn))(jnp.int32(index), x)
        assert (mixed.dtype, half.dtype) == (F32, F16)
        np.testing.assert_allclose(mixed, fn(jnp.int32(index), x)[0], rtol=2e-3)
    grad = jax.grad(lambda x: autocast(fn)(1, x)[0].sum())(x)
    np.testing.assert_allclose(grad, jax.grad(lambda x: fn(1, x)[0].sum())(x), rtol=5e-3)


def test_remat_keeps_its_policy() -> None:
    x, w = jnp.ones((2, 3)), jnp.ones((3, 3))

    def loss(w: jax.Array, policy: Any) -> jax.Array:
        body = jax.checkpoint(lambda w: jnp.sin(jnp.sin(x @ w) @ w), policy=policy)
        return autocast(body)(w).astype(jnp.float32).sum()

    def dots(policy: Any) -> int:
        return str(jax.make_jaxpr(jax.grad(loss), static_argnums=1)(w, policy)).count("dot_general")

    assert dots(jax.checkpoint_policies.everything_saveable) < dots(None)


def test_shard_map_and_pmap_inside_and_outside() -> None:
    mesh = Mesh(np.array(jax.devices()), ("data",))
    x, w = jnp.ones((8, 3)), jnp.ones((3, 4))

    def product(x: jax.Array, w: jax.Array) -> Any:
        y = x @ w
        return y, lax.psum(y.sum(), "data")

    specs = {"mesh": mesh, "in_specs": (P("data"), P()), "out_specs": (P("data"), P())}
    for fn in (
        autocast(jax.shard_map(product, **specs)),
        jax.shard_map(autocast(product), **specs),
    ):
        y, total = jax.jit(fn)(x, w)
        assert (y.dtype, total.dtype, float(total)) == (F16, F32, 96)
    assert jax.pmap(autocast(lambda x: x @ w))(x[:, None]).dtype == F16
    assert autocast(jax.pmap(lambda x: x @ w))(x[:, None]).dtype == F16


def test_collectives_run_in_float32() -> None:
    fn = jax.vmap(autocast(lambda x: lax.psum(x, "i")), axis_name="i")
    assert fn(jnp.full((4, 1), 30_000, jnp.float16)).tolist() == [[120_000.0]] * 4


# Nesting


def test_the_innermost_region_decides() -> None:
    x, w = jnp.ones((2, 3)), jnp.ones((3, 3))
    plain = autocast(lambda y: y @ w, enabled=False)
    half = autocast(lambda y: y @ w)
    brain = autocast(lambda y: y @ w, jnp.bfloat16)
    for wrap in (lambda f: f, jax.jit, jax.checkpoint, jax.vmap, through_identity_scan):
        assert autocast(lambda x, wrap=wrap: wrap(plain)(x @ w))(x).dtype == F32
        assert autocast(lambda x, wrap=wrap: wrap(half)(x @ w), enabled=False)(x).dtype == F16
        assert autocast(lambda x, wrap=wrap: wrap(brain)(x @ w))(x).dtype == jnp.bfloat16
    assert autocast(half, jnp.bfloat16)(x).dtype == F16
    assert autocast(autocast(half, enabled=False), enabled=False)(x).dtype == F16


def through_identity_scan(fn: Any) -> Any:
    return lambda x: lax.scan(lambda c, _: (c, fn(c)), x, None, length=1)[1][0]


def test_a_region_within_a_differentiated_region() -> None:
    x, w = jnp.ones((2, 3)), jnp.ones((3, 3))
    inner = autocast(lambda w: x @ w, enabled=False)
    text = str(jax.make_jaxpr(jax.grad(lambda w: autocast(lambda w: inner(w).sum())(w)))(w))
    assert "f16" not in text


def test_disabled_is_the_plain_function_to_the_bit() -> None:
    def fn(x: jax.Array) -> Any:
        return jax.nn.softmax(x @ x.T), jnp.sum(x)

    for dtype in (F32, F16):
        x = jnp.asarray(X, dtype)
        assert_bitwise_equal(autocast(fn, enabled=False)(x), fn(x))


def test_a_decorator_around_a_region_is_not_a_region() -> None:
    def squared(fn: Any) -> Any:
        @functools.wraps(fn)
        def wrapped(x: jax.Array) -> jax.Array:
            return jnp.square(fn(x))

        return wrapped

    half = autocast(lambda x: x @ x.T)
    x = jnp.full((2, 2), 300.0)
    assert squared(half)(x).dtype == F16
    around = autocast(squared(half))(x)
    assert (around.dtype, float(around[0, 0])) == (F32, float(np.inf))
    assert autocast(squared(autocast(lambda x: x, enabled=False)))(x).tolist() == [[9e4] * 2] * 2


def test_twice_is_once() -> None:
    once = autocast(lambda x: jax.nn.relu(x @ x.T))
    x = jnp.asarray(X, F16)
    assert_bitwise_equal(autocast(once)(x), once(x))


# What is left alone


def test_other_values_are_left_alone() -> None:
    def fn(key: Any, number: Any, flag: Any, z: Any) -> Any:
        return jax.random.split(key), number + 1, flag & True, z * z, jax.random.uniform(key)

    args = (jax.random.key(0), jnp.arange(3), jnp.array([True]), jnp.array([1 + 2j]))
    plain, ours = fn(*args), autocast(fn)(*args)
    assert [x.dtype for x in ours] == [x.dtype for x in plain]
    assert_bitwise_equal(ours[1:], plain[1:])


def test_float64_is_left_alone() -> None:
    with jax.enable_x64(True):
        x = jnp.asarray(X)
        assert x.dtype == jnp.float64
        out = autocast(lambda x: jnp.exp(x @ x.T))(x)
        assert_bitwise_equal(out, jnp.exp(x @ x.T))


def test_arguments_that_are_not_arrays_are_passed_on() -> None:
    def fn(x: jax.Array, power: int, *, name: str, options: Any = None) -> Any:
        return {"y": x @ x.T, "name": name, "none": options, "n": power}

    out = autocast(fn)(jnp.asarray(X), 2, name="n")
    assert out["y"].dtype == F16
    assert (out["name"], out["none"], out["n"]) == ("n", None, 2)


@pytest.mark.full
def test_nothing_leaks_out_of_the_trace() -> None:
    def fn(x: jax.Array) -> Any:
        y = lax.scan(lambda c, _: (jax.nn.relu(c @ x), None), x, None, length=2)[0]
        return {"loss": y.sum(), "name": "n"}

    with jax.checking_leaks():
        out = autocast(fn)(jnp.ones((2, 2)))
        grads = jax.jit(jax.grad(lambda x: autocast(fn)(x)["loss"]))(jnp.ones((2, 2)))
    assert (float(out["loss"]), out["name"]) == (16.0, "n")
    assert grads.tolist() == [[12.0, 12.0], [12.0, 12.0]]


def test_numpy_arrays_and_closures() -> None:
    w = W.astype(np.float32)
    assert autocast(lambda x: x @ w)(X.astype(np.float32)).dtype == F16
    grad = jax.grad(lambda w: autocast(lambda x: (x @ w).sum())(jnp.asarray(X, F32)))
    assert grad(jnp.asarray(W, F32)).dtype == F32


def test_opaque_calls_get_their_traced_dtypes() -> None:
    def host(a: Any) -> Any:
        assert a.dtype == np.float32
        return np.asarray(a) * 2

    def fn(x: jax.Array) -> jax.Array:
        y = x @ x.T
        return jax.pure_callback(host, jax.ShapeDtypeStruct(y.shape, jnp.float32), y)

    np.testing.assert_allclose(autocast(fn)(jnp.asarray(X, F32)), 2 * X @ X.T, rtol=1e-2, atol=1e-2)


# Rules


def test_rules_by_primitive_function_and_path() -> None:
    x, w = jnp.ones((2, 3)), jnp.ones((3, 3))

    @jax.jit
    def attend(x: jax.Array) -> jax.Array:
        return x @ w

    def fn(x: jax.Array) -> Any:
        with jax.named_scope("decoder"), jax.named_scope("attention"):
            inside = jax.checkpoint(lambda x: x @ w)(x)
        return inside, attend(x), jnp.exp(x @ w), x @ w

    def dtypes(rules: AutocastRules) -> list[str]:
        return [y.dtype.name for y in autocast(fn, rules=rules)(x)]

    assert dtypes(TORCH_CUDA) == [F16, F16, F32, F16]
    assert dtypes(TORCH_CUDA.replace(paths={"decoder/attention": "float32"})) == [
        F32,
        F16,
        F32,
        F16,
    ]
    assert dtypes(TORCH_CUDA.replace(functions={"attend": "float32"})) == [F16, F32, F32, F16]
    assert dtypes(TORCH_CUDA.replace(primitives={"exp": "promote"})) == [F16, F16, F16, F16]
    assert dtypes(TORCH_CUDA.replace(primitives={"dot_general": "float32"})) == [F32] * 4
    assert dtypes(AutocastRules()) == [F32] * 4


def test_a_later_path_rule_replaces_the_same_expression() -> None:
    first = TORCH_CUDA.replace(paths={"a": "float32"})
    assert first.replace(paths={"a": "lower"}).paths == (("a", "lower"),)
    assert first.replace(paths={"b": "lower"}).paths == (("b", "lower"), ("a", "float32"))


def test_autocast_as_fixes_a_function() -> None:
    x = jnp.ones((2, 3))
    exact = autocast_as("float32")(lambda x: x @ x.T)
    low = autocast_as("lower")(lambda x: jnp.exp(jnp.sum(x)))
    assert autocast(lambda x: (exact(x), x @ x.T))(x)[0].dtype == F32
    assert autocast(low)(x).dtype == F16
    assert autocast(jax.jit(low))(x).dtype == F16
    assert exact(x).dtype == F32
    assert autocast(lambda x: jax.vmap(exact)(x[None]))(x).dtype == F32


def test_presets() -> None:
    x = jnp.asarray(X, jnp.bfloat16)

    def fn(x: jax.Array) -> Any:
        return x @ x.T, jnp.exp(x), jnp.sum(x), jax.nn.gelu(x)

    def dtypes(rules: AutocastRules) -> list[str]:
        return [y.dtype.name for y in autocast(fn, jnp.bfloat16, rules=rules)(x)]

    assert dtypes(TORCH_CUDA) == ["bfloat16", F32, F32, F32]  # of a cube, which is a power
    assert dtypes(TORCH_CPU) == ["bfloat16", "bfloat16", F32, "bfloat16"]
    assert dtypes(APEX_O1) == ["bfloat16", F32, F32, F32]
    assert len({hash(rules) for rules in (TORCH_CUDA, TORCH_CPU, APEX_O1)}) == 3


def test_banned_operations_say_what_to_do() -> None:
    @jax.jit
    def binary_cross_entropy(p: jax.Array) -> jax.Array:
        return -jnp.log(p)

    advice = "autocast bans binary_cross_entropy: use optax.sigmoid_binary_cross_entropy on the"
    with pytest.raises(BannedOperationError, match=advice):
        autocast(binary_cross_entropy)(jnp.ones(2))
    rules = TORCH_CUDA.replace(banned={"erf": "use tanh"})
    with pytest.raises(BannedOperationError, match="bans erf: use tanh"):
        autocast(lax.erf, rules=rules)(jnp.ones(2))


def test_wrong_arguments_are_named() -> None:
    with pytest.raises(ValueError, match="dtype=float32 must be float16 or bfloat16"):
        autocast(jnp.sum, jnp.float32)
    with pytest.raises(TypeError, match="rules must be an AutocastRules, got 'O1'"):
        autocast(jnp.sum, rules="O1")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="primitives: the rule of 'exp' must be one of lower"):
        AutocastRules(primitives=(("exp", "half"),))  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"paths: '\(' is not a regular expression"):
        AutocastRules(paths=(("(", "lower"),))
    with pytest.raises(ValueError, match="rule='promote' must be 'float32', 'lower' or 'keep'"):
        autocast_as("promote")


# Cost


def test_a_parameter_is_cast_once() -> None:
    x, w = jnp.ones((2, 3)), jnp.ones((3, 3))

    def fn(x: jax.Array, w: jax.Array) -> jax.Array:
        for _ in range(4):
            x = jax.jit(lambda x: x @ w)(x)
        return x

    lowered = jax.jit(autocast(fn)).lower(x, w)
    assert lowered.as_text().count("(tensor<3x3xf32>) -> tensor<3x3xf16>") == 4  # one for each use
    compiled = lowered.compile().as_text() or ""
    assert len(re.findall(r"= f16\[3,3\]\S* convert\(", compiled)) == 1


def added_up(y: jax.Array) -> jax.Array:
    return lax.fori_loop(0, 5_000, lambda _, c: c + y[0, 0], jnp.float32(0))


READ_OFTEN: dict[str, tuple[Callable[[jax.Array, jax.Array], Any], tuple[int, int]]] = {
    "gather": (lambda x, w: (x @ w)[jnp.zeros(5_000, jnp.int32)], (1, 1)),
    "embedding": (lambda x, w: w[jnp.zeros(5_000, jnp.int32)] @ x, (1, 1)),
    "along axis": (
        lambda x, w: jnp.take_along_axis(x @ w, jnp.zeros((5_000, 1), jnp.int32), 0),
        (1, 1),
    ),
    "loop": (
        lambda x, w: lax.fori_loop(0, 5_000, lambda _, c: c + (x @ w)[0, 0], jnp.float32(0)),
        (1, 1),
    ),
    "loop over half": (lambda x, w: added_up(x @ w), (1, 1)),
    "inputs": (
        lambda x, w: lax.scan(lambda c, row: (c, row[None] @ w), None, x)[1],
        (5_000, 1),
    ),
    "bias": (lambda x, w: x @ jnp.ones((1, 1)) + w[0], (5_000, 1)),
    "bias of a batch": (lambda x, w: jax.vmap(lambda row: row @ jnp.eye(1) + w[0])(x), (5_000, 1)),
    "broadcast": (lambda x, w: jnp.broadcast_to(x @ w, (5_000, 1)) * 1, (1, 1)),
    "gate": (lambda x, w: (x @ jnp.ones((1, 1))) * (w @ jnp.ones((1, 1))), (5_000, 1)),
    "many times": (lambda x, w: functools.reduce(jnp.add, [x @ w for _ in range(500)]), (1, 1)),
}


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize("half", [F16, jnp.bfloat16], ids=["float16", "bfloat16"])
@pytest.mark.parametrize("name", READ_OFTEN)
def test_gradients_of_what_is_read_often_are_added_in_float32(name: str, half: Any) -> None:
    grad = gradient_of_what_is_read(name, lambda f: autocast(f, half))
    np.testing.assert_allclose(grad, plain_gradient_of_what_is_read(name), rtol=float(jnp.finfo(half).eps))


def gradient_of_what_is_read(name: str, transform: Callable[[Any], Any]) -> jax.Array:
    fn, shape = READ_OFTEN[name]

    def loss(w: jax.Array) -> jax.Array:
        return jnp.sum(transform(fn)(jnp.ones(shape), w), dtype=jnp.float32)

    return jax.jit(jax.grad(loss))(np.ones((1, 1), np.float32))


@functools.cache
def plain_gradient_of_what_is_read(name: str) -> jax.Array:
    return gradient_of_what_is_read(name, lambda f: f)


def saved(fn: Any, *args: Any) -> list[str]:
    """Returns dtype and shape of what is saved for the gradient, without the arguments' own shapes."""
    avals = jax.tree.leaves(jax.eval_shape(lambda *args: jax.vjp(fn, *args)[1], *args))
    shapes = {arg.shape for arg in args}
    return [f"{a.dtype.name}{list(a.shape)}" for a in avals if a.shape not in shapes]


def test_what_is_computed_in_float32_of_half_values_is_saved_in_half() -> None:
    x, w, v = jnp.ones((4, 3)), jnp.ones((3, 5)), jnp.ones((5, 2))
    scale = jnp.ones((4, 5))
    assert saved(autocast(lambda x, w: jnp.exp(x @ w).sum()), x, w) == ["float16[4, 5]"]

    def scaled(x: jax.Array, w: jax.Array, scale: jax.Array, v: jax.Array) -> jax.Array:
        return ((x @ w - scale) * scale * scale + scale) @ v

    residuals = jax.tree.leaves(jax.eval_shape(lambda *args: jax.vjp(autocast(scaled), *args)[1], x, w, scale, v))
    floats = [a.dtype for a in residuals if a.shape == (4, 5)]
    assert floats.count(F32) <= 2  # of scale, which is an argument
    assert floats.count(F16) >= 3
    out = autocast(scaled)(x, w, scale, v)
    assert out.tolist() == [[15.0] * 2] * 4


def test_a_float32_intermediate_is_not_rounded_on_the_way() -> None:
    x, scale = jnp.full((2, 2), 100.0), jnp.full((2, 2), 1000.0)

    def fn(x: jax.Array, scale: jax.Array) -> jax.Array:
        return ((x @ x) * scale - 2e4 * scale) @ x

    assert autocast(fn)(x, scale).tolist() == [[0.0, 0.0], [0.0, 0.0]]  # 2e7 is not a float16


def test_a_result_of_a_large_literal_is_not_rounded_for_storing() -> None:
    x = jnp.eye(2)
    out = autocast(lambda x: (jnp.tanh((x @ x) * 1e6 * 1e-7) * 1e6 * 1e-6) @ x)(x)
    np.testing.assert_allclose(out, np.tanh(0.1) * np.eye(2), rtol=2e-3)


def test_rules_for_one_path_change_nothing_elsewhere() -> None:
    def fn(x: jax.Array, w: jax.Array) -> jax.Array:
        with jax.named_scope("body"):
            y = jnp.exp(x @ w).sum()
        with jax.named_scope("head"):
            return y + (x @ w).sum()

    args = (jnp.ones((4, 3)), jnp.ones((3, 5)))
    head = autocast(fn, rules=TORCH_CUDA.replace(paths={"head": "float32"}))
    text = str(jax.make_jaxpr(head)(*args))
    assert text.count("f16[4,5] = dot_general") == text.count("f32[4,5] = dot_general") == 1
    assert saved(head, *args) == ["float16[4, 5]"]


def test_a_second_call_does_not_trace_again() -> None:
    traces = []

    @jax.jit
    @autocast
    def fn(x: jax.Array) -> jax.Array:
        traces.append(x)
        return x @ x.T

    fn(jnp.asarray(X, F32))
    fn(jnp.asarray(Y, F32))
    assert len(traces) == 1


@pytest.mark.full
def test_donation_goes_through() -> None:
    step = jax.jit(autocast(lambda w, x: w - 0.1 * (x.T @ x).astype(w.dtype)), donate_argnums=0)
    w = jnp.ones((6, 6))
    out = step(w, jnp.asarray(X, F32))
    assert w.is_deleted()
    assert out.shape == (6, 6)


def test_operations_keep_the_lines_that_they_are_from() -> None:
    def f(x: jax.Array) -> jax.Array:
        y = jnp.tanh(x @ x)
        y = jax.checkpoint(lambda y: jnp.tanh(y @ y))(y)
        y, _ = jax.lax.scan(lambda y, _: (jnp.tanh(y @ y), None), y, None, length=2)
        return jnp.sum(y)

    first = f.__code__.co_firstlineno
    lowered = jax.jit(jax.grad(autocast(f, jnp.float16))).lower(jnp.ones((4, 4)))
    lines = {int(line) for line in re.findall(r'test_transform\.py":(\d+)', lowered.as_text(debug_info=True))}
    assert {first + 1, first + 2, first + 3} <= lines, "without them, all operations are from where autocast ran them"
