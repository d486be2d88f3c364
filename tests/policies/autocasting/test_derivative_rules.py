"""Gradients are right wherever half precision holds operands, value and gradient: no derivative rule loses them.

jax's rule for `x / d`, for example, multiplies by `d ** -2`, which float16 cannot hold for |d| above 256.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import export, lax
from jax.scipy import special
from primitive_lists import HOW
from promotion import promoting

import jmp_train as jt
from jmp_train.policies.autocasting.rules import MOSTLY_HALF, TORCH_CPU, TORCH_CUDA, AutocastRules
from jmp_train.policies.autocasting.transform import autocast
from jmp_train.policies.programs import walk

pytestmark = pytest.mark.quick

Fn = Callable[..., Any]
TABLES = {
    "float16, torch": (jnp.float16, TORCH_CUDA),
    "bfloat16, torch": (jnp.bfloat16, TORCH_CPU),
    "float16, mostly half": (jnp.float16, MOSTLY_HALF),
}
POINTS = 256
UNITS = 3  # of rounding
SCALES = np.array([1.0, 2.0**-8, 2.0**8])  # of the gradient that arrives, as loss scales are


class Case(NamedTuple):
    """A function, the sets of its arguments, and how many units of the arriving gradient it may be off."""

    fn: Fn
    sets: str = "R"
    absolute: float = 0.0


def named(module: Any, sets: str, names: str, absolute: float = 0.0) -> dict[str, Case]:
    return {name: Case(getattr(module, name), sets, absolute) for name in names.split()}


# R: all magnitudes, both signs; P: positive; U: from -1 to 1; G: above 1. The derivatives of the logistic function and
# of tanh are those of their rounded results, as in torch: where these round to 1, the derivative is 0.
PRIMITIVES: dict[str, Case] = {
    **named(
        lax, "R", "abs asinh atan bessel_i0e bessel_i1e cbrt cos cosh erf erfc exp exp2 expm1 neg sin sinh square tan"
    ),
    **named(lax, "P", "digamma lgamma log log1p rsqrt sqrt"),
    **named(lax, "U", "acos asin atanh erf_inv"),
    **named(lax, "R", "logistic tanh", absolute=1),
    **named(lax, "G", "acosh"),
    **named(lax, "RR", "add atan2 div max min mul rem sub"),
    "integer_pow": Case(lambda x: x**-2),
    "pow": Case(lax.pow, "PR"),
    "clamp": Case(lambda x: lax.clamp(-2.0, x, 3.0)),
    "select_n": Case(lambda x, y: jnp.where(x > y, x, y), "RR"),
    "copy": Case(jnp.copy),
    "stop_gradient": Case(lambda x: x * lax.stop_gradient(x)),
    "real": Case(lambda x: lax.real(lax.complex(x, x))),
    "imag": Case(lambda x: lax.imag(lax.complex(x, x))),
    "convert_element_type": Case(lambda x: x.astype(jnp.float32)),
}
VARIANTS: dict[str, Case] = {
    "log2": Case(jnp.log2, "P"),
    "1 / x": Case(lambda x: 1 / x),
    "reciprocal": Case(jnp.reciprocal),
    "x ** 3": Case(lambda x: x**3),
    "x ** -1": Case(lambda x: x**-1),
    "x ** -3": Case(lambda x: x**-3),
    "x ** 0.5": Case(lambda x: x**0.5, "P"),
    "x ** -1.5": Case(lambda x: x**-1.5, "P"),
    "2.5 ** x": Case(lambda x: jnp.float32(2.5) ** x),
    "x / 3": Case(lambda x: x / 3),
    "x / (x + 1)": Case(lambda x: x / (x + 1), "P", absolute=2),
    "mod": Case(jnp.mod, "RR"),
    "hypot": Case(jnp.hypot, "RR", absolute=16),
    "logaddexp": Case(jnp.logaddexp, "RR", absolute=2),
    "logaddexp2": Case(jnp.logaddexp2, "RR", absolute=2),
    "sinc": Case(jnp.sinc),
    "i0": Case(jnp.i0),
    **named(jax.nn, "R", "relu relu6 softplus leaky_relu hard_sigmoid hard_tanh elu celu selu log_sigmoid"),
    **named(jax.nn, "R", "sigmoid silu hard_silu gelu soft_sign mish squareplus sparse_plus", absolute=4),
    **named(special, "P", "gammaln entr"),
    **named(special, "U", "erfinv"),
    **named(special, "R", "log_ndtr i0e i1e"),
    **named(special, "R", "ndtr", absolute=2),
    **named(special, "PP", "xlogy xlog1py"),
    "log_cosh": Case(optax.log_cosh, "R", absolute=2),
    "huber_loss": Case(optax.huber_loss, absolute=2),
}


def square_matrices(fn: Fn) -> Fn:
    return lambda *xs: fn(*(x.reshape(8, 8) for x in xs))


# Functions of vectors, whose error is relative to the largest gradient of a vector.
REDUCTIONS: dict[str, Case] = {
    **named(
        jnp, "R", "sum mean prod var std max min ptp cumsum cumprod median sort nanmax nanmean nanvar diff gradient"
    ),
    **named(lax, "R", "cummax cummin cumlogsumexp"),
    **named(jax.nn, "R", "logsumexp softmax log_softmax standardize"),
    "norm": Case(jnp.linalg.norm),
    "norm of order 1": Case(lambda x: jnp.linalg.norm(x, 1)),
    "norm of order 3": Case(lambda x: jnp.linalg.norm(x, 3)),
    "largest norm": Case(lambda x: jnp.linalg.norm(x, jnp.inf)),
    "quantile": Case(lambda x: jnp.quantile(x, 0.3)),
    "top_k": Case(lambda x: lax.top_k(x, 8)[0]),
    "pool": Case(lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (8,), (1,), "SAME")),
    "mean pool": Case(lambda x: lax.reduce_window(x, 0.0, lax.add, (8,), (1,), "SAME") / 8),
    "rms norm": Case(lambda x: x * lax.rsqrt(jnp.mean(x * x) + 1e-6)),
    "unit length": Case(lambda x: x / jnp.linalg.norm(x)),
    "unit sum": Case(lambda x: x / jnp.sum(jnp.abs(x))),
    "largest is 1": Case(lambda x: x / jnp.max(jnp.abs(x))),
    "safe norm": Case(lambda x: optax.safe_norm(x, 1e-3)),
    "geometric mean": Case(lambda x: jnp.exp(jnp.mean(jnp.log(jnp.abs(x))))),
    "harmonic mean": Case(lambda x: 1 / jnp.mean(1 / x)),
    "clipped": Case(lambda x: x * jnp.minimum(1.0, 1 / jnp.linalg.norm(x))),
    "cosine": Case(optax.cosine_similarity, "RR"),
    "distance": Case(lambda x, y: jnp.linalg.norm(x - y), "RR"),
    "dot_general": Case(square_matrices(jnp.matmul), "RR"),
    "ratio of sums": Case(lambda x, y: x.sum() / y.sum(), "RR"),
    "ratio": Case(square_matrices(lambda x, y: (x @ y) / (y @ x)), "SS", absolute=3),
    "linear attention": Case(square_matrices(lambda q, k: (q @ k.T @ q) / (q @ k.sum(0))[:, None]), "SS", absolute=3),
    "cross entropy": Case(lambda x, y: optax.softmax_cross_entropy(x, jax.nn.softmax(y)), "RR"),
}


# The primitives that no case above runs, and why.
WITHOUT_A_RULE = {
    "they move values": """
        concatenate device_put dynamic_update_slice gather layout_constraint name optimization_barrier pad pvary
        relayout reshard scatter sharding_constraint split stack tile unstack with_memory_space_constraint rev slice
        dynamic_slice""",
    "their results are steps": "argmax argmin ceil eq floor ge gt is_finite le lt ne round sign",
    "products": "conv_general_dilated ragged_dot_general",
    "solvers and special functions, which run in float32": """
        cholesky eig eigh fft geqrf hessenberg householder_product lu lu_pivots_to_permutation qr schur svd
        triangular_solve tridiagonal tridiagonal_solve igamma igammac polygamma regularized_incomplete_beta""",
    "sums, which run in float32": "reduce reduce_window scatter-add scatter-mul select_and_scatter_add",
    "like another": "add_any log2 reduce_window_min",
}


def arguments(case: Case, half: Any) -> list[np.ndarray]:
    """Returns arguments of all magnitudes that a half type has, as float64 that it holds exactly."""
    info = jnp.finfo(half)
    least, most = np.log2(float(info.tiny)), np.log2(float(info.max)) - 1e-3
    arrays = []
    for number, name in enumerate(case.sets):
        rng = np.random.default_rng(number)
        size, signs = POINTS // 2, rng.choice([-1.0, 1.0], POINTS)
        wide, middle = 2.0 ** rng.uniform(least, most, size), 2.0 ** rng.uniform(-8, 4, size)
        below_1 = np.concatenate([2.0 ** rng.uniform(least, 0, size), 1 - 2.0 ** rng.uniform(-10, -1, size)])
        x = {
            "R": signs * np.concatenate([wide, middle]),
            "P": np.concatenate([wide, middle]),
            "U": signs * below_1,
            "G": np.concatenate([1 + middle, np.maximum(wide, 1 / wide)]),
        }[name]
        arrays.append(rng.permutation(np.asarray(jnp.asarray(x, jnp.float32).astype(half)).astype(np.float64)))
    return arrays


def gradients(cases: dict[str, Case], inputs: dict[str, list[Any]], transform: Fn) -> tuple[Any, Any]:
    """Returns the values of all cases, and their gradients for each scale, computed in one program."""

    def values(inputs: dict[str, list[Any]]) -> dict[str, Any]:
        return {name: case.fn(*inputs[name]) for name, case in cases.items()}

    def arriving(result: Any) -> Any:
        last = np.resize([1.0, 0.5, 0.75], result.shape[-1:]) if result.ndim > 1 else 1.0
        return jnp.stack([jnp.full(result.shape, scale * last, result.dtype) for scale in SCALES])

    def run(inputs: dict[str, list[Any]]) -> tuple[Any, Any]:
        found, pull = jax.vjp(transform(promoting(values)), inputs)
        return found, jax.vmap(lambda cotangents: pull(cotangents)[0])(jax.tree.map(arriving, found))

    return jax.tree.map(lambda x: np.asarray(x).astype(np.float64), jax.jit(run)(inputs))


def computed(cases: dict[str, Case], inputs: dict[str, list[np.ndarray]], half: Any, rules: AutocastRules) -> Any:
    """Returns values and gradients in float64, then the gradients in float32 and under autocast."""

    def typed(dtype: Any) -> dict[str, list[Any]]:
        return {name: [jnp.asarray(x, dtype) for x in arrays] for name, arrays in inputs.items()}

    with jax.enable_x64(True):
        values, right = gradients(cases, typed(jnp.float64), lambda fn: fn)
    _, plain = gradients(cases, typed(jnp.float32), lambda fn: fn)
    _, found = gradients(cases, typed(half), lambda fn: autocast(fn, half, rules=rules))
    return values, right, plain, found


def wrong(cases: dict[str, Case], half: Any, rules: AutocastRules) -> dict[str, str]:
    """Returns the cases whose gradients are off, with the worst argument of each."""
    info = jnp.finfo(half)
    unit, tiny, most = float(info.eps), float(info.tiny), float(info.max) * 0.99
    inputs = {name: arguments(case, half) for name, case in cases.items()}

    values, right, plain, found = computed(cases, inputs, half, rules)
    messages = {}
    with np.errstate(invalid="ignore", over="ignore"):
        for name, case in cases.items():
            fits = (np.abs(values[name]) < most) & ((np.abs(values[name]) > tiny) | (values[name] == 0))
            for position, (true, in_float32, ours) in enumerate(
                zip(right[name], plain[name], found[name], strict=True)
            ):
                size = np.maximum(np.abs(true), tiny) * unit
                held = fits & (np.abs(true) < most) & ((np.abs(true) > tiny) | (true == 0))
                if case.absolute:  # of a composed function, whose terms have to fit too
                    held &= np.all([np.abs(x) * SCALES[:, None] < most for x in inputs[name]], axis=0)
                held &= np.abs(in_float32 - true) < size / 2  # not worse than without autocast
                error = np.abs(ours - true) / (UNITS * size + case.absolute * unit * SCALES[:, None])
                bad = held & ~(error <= 1)
                if bad.any():
                    scale, point = np.argwhere(bad)[np.argmax(np.nan_to_num(error[bad], nan=np.inf))]
                    at = [float(x[point]) for x in inputs[name]]
                    messages[f"{name}, argument {position}"] = (
                        f"at {at} times {SCALES[scale]}: {ours[scale, point]:.5g}, right {true[scale, point]:.5g}; "
                        f"{bad.mean():.1%} of the points"
                    )
    return messages


FULL = [
    pytest.param(f"{half}, torch", cases, marks=pytest.mark.full)
    for half in ("float16", "bfloat16")
    for cases in ("primitives", "composed")
]


@pytest.mark.parametrize(
    ("table", "cases"), [("float16, mostly half", "primitives"), *FULL], ids=lambda name: name.replace(" ", "_")
)
def test_derivatives_of_elementwise_operations_are_right_at_all_magnitudes(table: str, cases: str) -> None:
    messages = wrong(PRIMITIVES if cases == "primitives" else VARIANTS, *TABLES[table])
    assert not messages, "\n".join(f"{name}: {message}" for name, message in messages.items())


def rows(case: Case, half: Any) -> list[np.ndarray]:
    """Returns rows of 64 numbers of similar size, each of another magnitude."""
    most = 15 if half == jnp.float16 else 30
    arrays = []
    for number, name in enumerate(case.sets):
        rng = np.random.default_rng(number)
        exponents = np.linspace(-0.8, 0.9, 12)[:, None] * (2 if name == "S" else most)
        x = 2.0 ** (exponents + rng.uniform(-2, 1, (12, 64))) * (1 if name == "S" else rng.choice([-1, 1], (12, 64)))
        arrays.append(np.asarray(jnp.asarray(x, jnp.float32).astype(half)).astype(np.float64))
    return arrays


@pytest.mark.full
@pytest.mark.parametrize("table", ["float16, torch", "bfloat16, torch"])
def test_derivatives_of_reductions_are_right_at_all_magnitudes(table: str) -> None:
    half, rules = TABLES[table]
    unit, tiny, most = (float(getattr(jnp.finfo(half), name)) for name in ("eps", "tiny", "max"))
    inputs = {name: rows(case, half) for name, case in REDUCTIONS.items()}
    cases = {name: case._replace(fn=jax.vmap(case.fn)) for name, case in REDUCTIONS.items()}
    values, right, plain, found = computed(cases, inputs, half, rules)
    wrong = []
    with np.errstate(invalid="ignore", over="ignore"):
        for name, case in cases.items():
            fits = np.abs(values[name]).reshape(12, -1).max(axis=1) < most
            for true, in_float32, ours in zip(right[name], plain[name], found[name], strict=True):
                size = np.abs(true).max(axis=-1)
                held = fits & (size < 0.99 * most) & (size > 64 * tiny)
                held &= np.abs(in_float32 - true).max(axis=-1) < size * unit / 2
                error = np.abs(ours - true).max(axis=-1) / (size * unit)
                if np.any(held & ~(error <= UNITS + case.absolute)):
                    wrong.append((name, np.where(held, error, 0).max(axis=0)))
    assert not wrong


TIES: dict[str, Fn] = {
    "max": jnp.max,
    "min": jnp.min,
    "nanmax": jnp.nanmax,
    "norm": lambda x: jnp.linalg.norm(x, jnp.inf),
    "rows": lambda x: jnp.max(x.reshape(2, -1), axis=1).sum() / 2,
    "in a loop": lambda x: lax.map(jnp.max, x.reshape(2, -1)).sum() / 2,
}


@pytest.mark.parametrize("half", [jnp.float16, jnp.bfloat16], ids=["float16", "bfloat16"])
def test_equal_maxima_share_the_gradient(half: Any) -> None:
    x = np.ones(70_000, np.float32)

    def gradients(x: Any) -> dict[str, Any]:
        # A product makes the values half.
        return {
            name: jax.grad(
                lambda x, f=fn: 4096 * autocast(lambda x: f(jnp.dot(x[:, None], jnp.ones((1, 1)))[:, 0]), half)(x)
            )(x)
            for name, fn in TIES.items()
        }

    for name, found in jax.jit(gradients)(x).items():
        np.testing.assert_allclose(found, np.full(x.shape, 4096 / 70_000), rtol=0.01, err_msg=name)


def test_maxima_of_symbolic_shapes_are_exported() -> None:
    shape = jax.ShapeDtypeStruct(export.symbolic_shape("b,4"), jnp.float32)
    exported = export.export(jax.jit(autocast(lambda x: jnp.max(x @ jnp.full((4, 4), 0.25)))))(shape)
    assert exported.call(jnp.ones((3, 4))) == 1


@pytest.mark.parametrize("transform", [autocast, lambda fn: jt.apply_policy(fn, "mixed_bfloat16")])
def test_warnings_count_axes_of_symbolic_length_once(transform: Callable[[Fn], Fn]) -> None:
    """Of a symbolic number of rows, a product in float32 is 8 of 9 flops."""

    def fn(x: jax.Array) -> jax.Array:
        in_float32 = lax.platform_dependent(x, default=lambda x: x @ jnp.ones((4, 8), jnp.float32))
        return in_float32.sum() + (x @ jnp.ones((4, 1), x.dtype)).sum().astype(jnp.float32)

    shape = jax.ShapeDtypeStruct(export.symbolic_shape("b,4"), jnp.float32)
    with jax.numpy_dtype_promotion("standard"), pytest.warns(jt.policies.Float32ProductsWarning, match="^89% of"):
        exported = export.export(jax.jit(transform(fn)))(shape)
    assert exported.call(jnp.ones((3, 4))) == 108


CROSS_ENTROPIES: dict[str, Fn] = {
    "optax": lambda logits, labels: optax.softmax_cross_entropy_with_integer_labels(logits, labels),
    "one-hot": lambda logits, labels: optax.softmax_cross_entropy(logits, jax.nn.one_hot(labels, 4)),
    "log_softmax": lambda logits, labels: -jax.nn.log_softmax(logits)[jnp.arange(8), labels],
    "picked": lambda logits, labels: -jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], 1),
    "logsumexp": lambda logits, labels: jax.nn.logsumexp(logits, 1) - logits[jnp.arange(8), labels],
    "masked": lambda logits, labels: jax.nn.logsumexp(logits, 1) - (logits * jax.nn.one_hot(labels, 4)).sum(1),
    "by hand": lambda logits, labels: jnp.log(jnp.exp(logits).sum(1)) - logits[jnp.arange(8), labels],
    "stable": lambda logits, labels: (
        jnp.log(jnp.exp(shifted := logits - lax.stop_gradient(logits.max(1, keepdims=True))).sum(1))
        - jnp.take_along_axis(shifted, labels[:, None], 1)[:, 0]
    ),
    "in a scan": lambda logits, labels: lax.map(
        lambda row: optax.softmax_cross_entropy_with_integer_labels(*row), (logits, labels)
    ),
    "remat": lambda logits, labels: jax.checkpoint(optax.softmax_cross_entropy_with_integer_labels)(logits, labels),
    "vmap": lambda logits, labels: jax.vmap(optax.softmax_cross_entropy_with_integer_labels)(logits, labels),
}


@pytest.mark.parametrize("half", [jnp.float16, jnp.bfloat16], ids=["float16", "bfloat16"])
def test_gradients_of_confident_predictions_keep_their_digits(half: Any) -> None:
    """The gradient of a label's logit is p - 1: the difference of two gradients, which half would round to 0."""
    labels, confidence = np.arange(8) % 4, np.linspace(1, 12, 8)
    logits = np.asarray(jnp.asarray(confidence[:, None] * np.eye(4)[labels], half), np.float64)
    rows = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    right = rows - np.eye(4)[labels]

    def gradients(weights: Any) -> dict[str, Any]:
        def loss(fn: Fn) -> Fn:
            return promoting(lambda w: fn(jnp.float32(logits) @ w, jnp.int32(labels)).sum())

        # With the identity as weights, their gradient is the product of the logits and the gradients of the logits.
        return {name: jax.grad(autocast(loss(fn), half))(weights) for name, fn in CROSS_ENTROPIES.items()}

    expected = logits.T @ right
    for name, found in jax.jit(gradients)(np.eye(4, dtype=np.float32)).items():
        np.testing.assert_allclose(found, expected, rtol=0.01, atol=0.01 * np.abs(expected).min(), err_msg=name)


BINARY_CROSS_ENTROPIES: dict[str, Fn] = {
    "optax": lambda x, y: optax.sigmoid_binary_cross_entropy(x, y),
    "softplus": lambda x, y: jax.nn.softplus(x) - x * y,
    "logaddexp": lambda x, y: jnp.logaddexp(0.0, x) - x * y,
    "signed": lambda x, y: jnp.logaddexp(0.0, jnp.where(y > 0, -1.0, 1.0) * x),
    "maximum": lambda x, y: jnp.maximum(x, 0) - x * y + jnp.log1p(jnp.exp(-jnp.abs(x))),
    "clip": lambda x, y: jnp.clip(x, 0) + jnp.log1p(jnp.exp(-jnp.abs(x))) - x * y,  # numpyro's
    "relu": lambda x, y: jax.nn.relu(x) - x * y + jnp.log1p(jnp.exp(-jnp.abs(x))),
}


@pytest.mark.parametrize("half", [jnp.float16, jnp.bfloat16], ids=["float16", "bfloat16"])
def test_gradients_of_confident_decisions_keep_their_digits(half: Any) -> None:
    """The gradient of a logit is sigmoid(x) - y, the difference of the gradients of two or three readers of x."""
    logits = np.array([1.0, 2.0, 4.0, 6.0, 8.0, -1.0, -4.0, -8.0])
    labels = (logits > 0).astype(np.float64)
    right = 1 / (1 + np.exp(-logits)) - labels

    def gradients(logits: Any, labels: Any) -> dict[str, Any]:
        def loss(fn: Fn) -> Fn:
            return promoting(lambda w: jnp.diagonal(fn(jnp.eye(8) @ w, labels[:, None] * jnp.ones(8))).sum())

        weights = jnp.diag(logits)
        found = {name: jax.grad(autocast(loss(fn), half))(weights) for name, fn in BINARY_CROSS_ENTROPIES.items()}
        return {name: jnp.diagonal(gradient) for name, gradient in found.items()}

    for name, found in jax.jit(gradients)(jnp.float32(logits), jnp.float32(labels)).items():
        np.testing.assert_allclose(found, right, rtol=0.01, err_msg=name)


def test_every_primitive_with_a_derivative_has_a_case() -> None:
    cases = {**PRIMITIVES, **VARIANTS, **REDUCTIONS}
    arrays = [jax.ShapeDtypeStruct((64,), jnp.float32)] * 2
    programs = [jax.make_jaxpr(promoting(case.fn))(*arrays[: len(case.sets)]) for case in cases.values()]
    found = {place.equation.primitive.name for program in programs for place in walk(program)}
    groups = [words for words in HOW if not words.startswith(("as traced", "without", "entered", "exchanged"))]
    left = {name for words in groups for name in HOW[words].split()} - found
    assert left == set(" ".join(WITHOUT_A_RULE.values()).split()) - found
