"""Autocast leaves linear algebra, log-probabilities and what asks for exactness in float32."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import jax.scipy.linalg as sl
import numpy as np
import pytest
from jax.scipy import stats
from promotion import promoting

from jmp_train.policies.autocasting.rules import TORCH_CPU, TORCH_CUDA
from jmp_train.policies.autocasting.transform import autocast

pytestmark = pytest.mark.quick

RANDOM = np.random.default_rng(0)
A = RANDOM.normal(size=(6, 6)).astype(np.float32)
S = A @ A.T + 6 * np.eye(6, dtype=np.float32)
X = RANDOM.normal(size=(3, 6)).astype(np.float32)
V = X[0]

FUNCTIONS: dict[str, tuple[Callable[..., Any], tuple[np.ndarray, ...]]] = {
    "expm": (sl.expm, (A,)),
    "expm_frechet": (lambda a: sl.expm_frechet(a, a)[1], (A,)),
    "inv": (jnp.linalg.inv, (A,)),
    "pinv": (jnp.linalg.pinv, (A[:, :4],)),
    "det": (jnp.linalg.det, (A,)),
    "slogdet": (lambda a: jnp.linalg.slogdet(a)[1], (A,)),
    "solve": (jnp.linalg.solve, (A, V)),
    "lstsq": (lambda a, v: jnp.linalg.lstsq(a, v)[0], (A, V)),
    "cho_solve": (lambda a, v: sl.cho_solve((a, True), v), (S, V)),
    "matrix_power": (lambda a: jnp.linalg.matrix_power(a, 5), (A,)),
    "solve_sylvester": (sl.solve_sylvester, (S, S, A)),
    "polar": (lambda a: sl.polar(a)[0], (A,)),
    "vdot": (jnp.vdot, (X, X)),
    "squared norms": (lambda x: jnp.einsum("bi,bi->b", x, x), (X,)),
    "multivariate_normal": (lambda x, s: stats.multivariate_normal.logpdf(x, V, s), (V, S)),
    "multivariate_normal of a batch": (
        lambda x, s: stats.multivariate_normal.logpdf(x, V, s), (X, S),
    ),
    "multivariate_normal by vmap": (
        lambda x, s: jax.vmap(lambda x: stats.multivariate_normal.logpdf(x, V, s))(x), (X, S),
    ),
    "gaussian_kde": (lambda x: stats.gaussian_kde(x).logpdf(x), (X[:2],)),
    "owens_t": (jax.scipy.special.owens_t, (V, V)),
    "cov": (jnp.cov, (X,)),
    "polyfit": (lambda v: jnp.polyfit(v, v, 2), (V,)),
    "samples": (lambda v, s: jax.random.multivariate_normal(jax.random.key(0), v, s), (V, S)),
    "default precision": (
        jax.default_matmul_precision("highest")(lambda a, x: x @ a), (A, X),
    ),
}  # fmt: skip


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_no_half_in_what_is_exact(name: str) -> None:
    fn, args = FUNCTIONS[name]
    for half, rules in ((jnp.float16, TORCH_CUDA), (jnp.bfloat16, TORCH_CPU)):
        ours = autocast(promoting(fn), half, rules=rules)
        text = str(jax.make_jaxpr(ours)(*args))
        if name not in ("solve_sylvester", "polar", "gaussian_kde"):  # the gradient is jax's own
            text += str(jax.make_jaxpr(jax.grad(lambda *a, f=ours: jnp.sum(f(*a))))(*args))
        assert "f16[" not in text
        assert "f32[" in text


LARGE: dict[str, tuple[Callable[..., Any], tuple[np.ndarray, ...]]] = {
    "expm": (sl.expm, (A,)),
    "log-probability": (FUNCTIONS["multivariate_normal of a batch"][0], (300 * X, S)),
    "vdot": (jnp.vdot, (300 * X, -300 * X)),
    "of half values": (lambda x: jnp.vdot(300 * jnp.dot(x, jnp.eye(6)), jnp.dot(x, 300 * jnp.eye(6))), (X,)),
}  # fmt: skip


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("name", LARGE)
def test_large_values_are_finite_in_float16(name: str) -> None:
    fn, args = LARGE[name]
    ours = jax.jit(autocast(promoting(fn)))(*args)
    assert ours.dtype == jnp.float32
    with jax.enable_x64(True):
        expected = jax.jit(promoting(fn))(*(np.asarray(x, np.float64) for x in args))
    np.testing.assert_allclose(ours, expected, rtol=2e-3)


def test_inverses_of_half_values_save_half() -> None:
    def fn(x: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.linalg.norm(x @ w, axis=-1).sum() + jnp.vdot(x @ w, x @ w)

    x, w = jnp.ones((4, 3)), jnp.ones((3, 5))
    residuals = jax.tree.leaves(jax.eval_shape(lambda *args: jax.vjp(autocast(fn), *args)[1], x, w))
    assert {r.dtype.name for r in residuals if r.size == 20} == {"float16"}


def test_functions_of_the_user_are_their_own() -> None:
    @jax.jit
    def inv(x: jax.Array) -> jax.Array:
        return x @ x

    assert autocast(inv)(jnp.eye(3)).dtype == jnp.float16
    assert autocast(jnp.linalg.multi_dot)([A, A, A]).dtype == jnp.float16
    assert autocast(jnp.linalg.vecdot)(A, S).dtype == jnp.float16
    lower = TORCH_CUDA.replace(functions={"jax.scipy.linalg": "keep", "polyfit": "lower"})
    assert dict(lower.functions)["jax.scipy.linalg"] == "keep"
    assert autocast(jnp.cov, rules=TORCH_CUDA.replace(functions={"cov": "keep"}))(X).dtype == "float32"
    assert autocast(jnp.cov, rules=TORCH_CUDA.replace(functions={"cov": "lower"}))(X).dtype == "float16"
