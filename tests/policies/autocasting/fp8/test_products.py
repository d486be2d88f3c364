"""Products in 8 bits beside float64, and where autocast's rule "fp8" puts them."""

import dataclasses
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import jmp_train as jt
from jmp_train.policies.autocasting.fp8 import product_in_few_bits

pytestmark = pytest.mark.quick

RANDOM = np.random.default_rng(0)
RECIPES = [
    jt.policies.Float8CurrentScaling(),
    jt.policies.Float8CurrentScaling("E4M3"),
    jt.policies.MXFP8BlockScaling(),
]
FP8 = jt.TORCH_CUDA.replace(primitives={"dot_general": "fp8"})


def dot(x: Any, w: Any, contract: Any, recipe: Any) -> jax.Array:
    return product_in_few_bits(x, w, (contract, ((), ())), recipe)


def normal(*shape: int) -> jax.Array:
    return jnp.asarray(RANDOM.normal(size=shape), jnp.float32)


def in_8_bits(x: Any, dtype: Any) -> Any:
    """Returns what a tensor with one scale becomes, by NumPy in float64; its cast is ml_dtypes'."""
    x = np.asarray(x, np.float64)
    scale = np.float32(float(jnp.finfo(dtype).max)) / np.float32(np.abs(x).max())
    return (x * scale).astype(np.float32).astype(dtype).astype(np.float64) / scale


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("backward", ["HYBRID", "E4M3"])
@pytest.mark.parametrize(("left", "right"), [("ab", "bc"), ("abc", "dcb"), ("bad", "cb")])
def test_all_three_products_are_those_of_quantized_operands(left: str, right: str, backward: Any) -> None:
    both = [i for i in left if i in right]
    contract = tuple(map(left.index, both)), tuple(map(right.index, both))
    sizes = dict(zip("abcd", (5, 6, 7, 3), strict=True))
    lhs, rhs = normal(*(sizes[i] for i in left)), normal(*(sizes[i] for i in right)).astype(jnp.bfloat16)
    product = jax.jit(lambda x, w: dot(x, w, contract, jt.policies.Float8CurrentScaling(backward)))
    out, pullback = jax.vjp(product, lhs, rhs)
    cotangent = normal(*out.shape)
    grads = pullback(cotangent)
    x, w = (in_8_bits(a, jnp.float8_e4m3fn) for a in (lhs, rhs.astype(jnp.float32)))
    g = in_8_bits(cotangent, jnp.float8_e5m2 if backward == "HYBRID" else jnp.float8_e4m3fn)
    free = "".join(i for i in left + right if i not in both)
    np.testing.assert_allclose(out, np.einsum(f"{left},{right}->{free}", x, w), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(grads[0], np.einsum(f"{free},{right}->{left}", g, w), rtol=1e-5, atol=1e-5)
    wanted = np.einsum(f"{free},{left}->{right}", g, x)
    np.testing.assert_allclose(grads[1].astype(jnp.float32), wanted, rtol=1e-2, atol=1e-5)
    assert [x.dtype for x in grads] == [jnp.float32, jnp.bfloat16]


@pytest.mark.full
@pytest.mark.parametrize("recipe", RECIPES[1:])
def test_products_and_gradients_are_near_those_of_float32(recipe: Any) -> None:
    x, w = normal(64, 96) * 100, normal(96, 32) / 1000
    fp8 = jax.jit(jax.value_and_grad(lambda x, w: (dot(x, w, ((1,), (0,)), recipe) ** 3).sum(), (0, 1)))
    exact = jax.value_and_grad(lambda x, w: ((x @ w) ** 3).sum(), (0, 1))
    for got, wanted in zip(fp8(x, w)[1], exact(x, w)[1], strict=True):
        assert float(jnp.linalg.norm(got - wanted) / jnp.linalg.norm(wanted)) < 0.1


def test_zeros_stay_zeros_and_an_overflow_is_seen() -> None:
    x, w = jnp.zeros((4, 8)), normal(8, 4)
    run = jax.jit(lambda x, w: dot(x, w, ((1,), (0,)), jt.policies.Float8CurrentScaling()))
    np.testing.assert_array_equal(run(x, w), 0)
    assert not np.isfinite(run(x.at[0, 0].set(jnp.inf), w)[0]).any()


def rows(fn: Any, *args: Any, rules: Any = FP8) -> list[tuple[str, str, str]]:
    report = jt.explain_autocast(jt.autocast(fn, jnp.bfloat16, rules=rules), *args)
    return [(r.operation, r.rule, " ".join(r.dtypes_in)) for r in report.operations]


FLOAT8 = "float8_e4m3fn float8_e4m3fn"


def test_a_rule_by_primitive_leaves_what_is_no_layer() -> None:
    x, w = normal(8, 16), normal(16, 4)
    found = rows(lambda x, w: jax.nn.softmax(x @ w), x, w)
    assert found[0] == ("dot_general", "fp8", FLOAT8)
    assert ("exp", "float32", "float32") in found
    batches = normal(3, 8, 16)
    attend = lambda x, y: jnp.matmul(jnp.sin(x), jnp.sin(y))
    assert rows(attend, batches, normal(3, 16, 4))[-1] == ("dot_general", "lower", "bfloat16 bfloat16")
    assert rows(jnp.matmul, jnp.sin(batches), normal(3, 16, 4))[0] == ("dot_general", "fp8", FLOAT8)
    named = FP8.replace(operations={"dot_general": "fp8"})
    assert rows(attend, batches, normal(3, 16, 4), rules=named)[-1] == ("dot_general", "fp8", FLOAT8)
    assert rows(jnp.vdot, x, x)[-1][:2] == ("dot_general", "float32")
    highest = rows(lambda x, w: jnp.matmul(x, w, precision="highest"), x, w)
    assert highest == [("dot_general", "float32", "float32 float32")]


def test_rules_by_path_function_and_operation() -> None:
    @jax.jit
    def layer(x: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.exp(x @ w)

    def model(x: jax.Array, w: jax.Array) -> jax.Array:
        with jax.named_scope("head"):
            x = layer(x, w)
        return layer(x.sum(0, keepdims=True), w)

    x, w = normal(8, 8), normal(8, 8)
    tables: list[Any] = [{"paths": {"^head": "fp8"}}, {"operations": {"^head.*dot_general": "fp8"}}]
    for table in tables:
        found = rows(model, x, w, rules=jt.TORCH_CUDA.replace(**table))
        assert [rule for name, rule, _ in found if name == "dot_general"] == ["fp8", "lower"]
        assert {rule for name, rule, _ in found if name == "exp"} == {"float32"}
    found = rows(model, x, w, rules=jt.TORCH_CUDA.replace(functions={"layer": "fp8"}))
    assert Counter(rule for name, rule, _ in found if name in ("dot_general", "exp")) == {"fp8": 2, "float32": 2}


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("recipe", RECIPES[::2])
def test_through_loops_branches_and_checkpoints(recipe: Any) -> None:
    ws, x = normal(2, 32, 32), normal(8, 32)

    def unrolled(ws: Any, x: Any) -> Any:
        for w in ws:
            x = jnp.tanh(x @ w)
        return x.sum()

    def looped(ws: Any, x: Any) -> Any:
        def body(x: Any, w: Any) -> Any:
            run = jax.checkpoint(lambda x, w: jnp.tanh(x @ w))
            return lax.cond(x.shape[0] == 8, run, lambda x, w: x, x, w), None

        return lax.scan(body, x, ws)[0].sum()

    policy = dataclasses.replace(
        jt.get_policy("autocast_bfloat16"), rules=FP8.replace(primitives={"tanh": "float32"}), fp8=recipe
    )
    results = [jax.jit(jax.value_and_grad(policy.transform(fn)))(ws, x) for fn in (unrolled, looped)]
    np.testing.assert_allclose(results[0][0], results[1][0], rtol=1e-6)
    # The cotangent of the unrolled form is rounded to bfloat16 between layers, by another path.
    np.testing.assert_allclose(results[0][1], results[1][1], rtol=0.2, atol=0.05)
    assert bool(jnp.isfinite(results[1][1]).all())


def test_integers_that_8_bits_cannot_hold_are_not_quantized() -> None:
    found = rows(lambda w: jnp.arange(128).reshape(64, 2).astype(jnp.float32) @ w, normal(2, 8))
    assert found[-1][:2] == ("dot_general", "lower")


@pytest.mark.full
def test_diagnose_and_step_costs_know_8_bits() -> None:
    x, w = normal(64, 64), normal(64, 64)
    policy = dataclasses.replace(jt.get_policy("autocast_bfloat16"), rules=FP8)

    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        return ((x @ w).astype(jnp.float32) ** 2).mean()

    report = jt.diagnose(jax.grad(policy.transform(loss)), w, x)
    found = [(row.direction, *row.dtypes_in) for row in report.rows if row.primitive == "dot_general"]
    assert found == [("forward", *FLOAT8.split()), *2 * [("backward", "float8_e5m2", "float8_e4m3fn")]]
    casts = [row for row in report.rows if row.dtype.startswith("float8")]
    assert len(casts) == 3
    assert all(0.01 < row.local_error < 0.06 for row in casts)
    assert str(report).startswith("no problems in ")

    sgd = optax.sgd(0.1)
    step = jax.jit(jt.train_step(jt.stateless(loss), sgd, policy=policy))
    state = jt.TrainState.create(w, sgd)
    assert jt.steps.step_costs(step.trace(state, x), state).half_flops_share > 0.8


def test_a_recipe_that_is_none() -> None:
    with pytest.raises(TypeError, match=r"fp8 must be a recipe, such as .*, got 'hybrid'"):
        jt.autocast(jnp.dot, fp8="hybrid")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="fp8_format='E5M2' must be one of 'HYBRID', 'E4M3'"):
        jt.policies.Float8CurrentScaling("E5M2")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("lhs", "rhs"),
    [(1e-34, 1.0), (1e-37, 1.0), (1e-37, 1e37), (1e38, 1e-37), (1e38, 1e-3), (1e-20, 1e-15), (3e-3, 3e-33)],
)
def test_the_whole_range_of_float32_is_restored(lhs: float, rhs: float) -> None:
    """Also where a scale's inverse, or the product of two, is below the normal numbers, which XLA flushes to zero."""

    @jax.jit
    def run(x: jax.Array, y: jax.Array) -> Any:
        return jax.value_and_grad(lambda x, y: dot(x, y, ((1,), (0,)), RECIPES[0]).sum(), (0, 1))(x, y)

    value, grads = run(jnp.full((1, 4), lhs, jnp.float32), jnp.full((4, 1), rhs, jnp.float32))
    np.testing.assert_allclose(value, 4 * lhs * rhs, rtol=2.0**-3)
    np.testing.assert_allclose(grads[0], np.full((1, 4), rhs), rtol=2.0**-3)
    np.testing.assert_allclose(grads[1], np.full((4, 1), lhs), rtol=2.0**-3)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("recipe", [jt.policies.Float8CurrentScaling(), jt.policies.Int8RowwiseScaling()])
def test_second_derivatives_are_refused_unless_the_region_takes_the_first(recipe: Any) -> None:
    x, w = normal(8, 32), normal(32, 16) / 6
    loss = lambda x: (jnp.tanh(x @ w) ** 2).sum()
    penalty = lambda loss: lambda x: (jax.grad(loss)(x) ** 2).sum()
    cast = lambda fn: jt.autocast(fn, jnp.bfloat16, rules=FP8, fp8=recipe)
    for run in (jax.grad(penalty(cast(loss))), jax.grad(penalty(jax.jit(cast(loss)))), jax.hessian(cast(loss))):
        with pytest.raises(TypeError, match=r"no second derivatives|in forward mode|forward-mode"):
            jax.eval_shape(run, x)
    stopped = lambda x: cast(loss)(x - jax.lax.stop_gradient(jax.grad(cast(loss))(x)))
    wanted, found, of_stopped = jax.jit(
        lambda x: tuple(jax.grad(fn)(x) for fn in (penalty(loss), cast(penalty(loss)), stopped))
    )(x)
    assert np.linalg.norm(found - wanted) < 0.4 * np.linalg.norm(wanted)
    assert np.isfinite(of_stopped).all()


@pytest.mark.parametrize("rules", [FP8, jt.TORCH_CUDA.replace(functions={"layer": "fp8"})])
def test_products_of_a_custom_derivative_follow_the_rule(rules: Any) -> None:
    @jax.custom_vjp
    def dense(x: Any, w: Any) -> Any:
        return jnp.tanh(x @ w)

    dense.defvjp(
        lambda x, w: (dense(x, w), (x, w, dense(x, w))),
        lambda saved, g: (g * (1 - saved[2] ** 2) @ saved[1].T, saved[0].T @ (g * (1 - saved[2] ** 2))),
    )

    @jax.jit
    def layer(x: Any, w: Any) -> Any:
        return dense(x, w)

    x, w = normal(8, 32), normal(32, 16) / 6
    loss = lambda run: lambda w: (run(x, w) ** 2).sum()
    cast = jax.grad(loss(jt.autocast(layer, jnp.bfloat16, rules=rules)))
    assert str(jax.make_jaxpr(cast)(w)).count("f8_e4m3fn") > 2
    found, wanted = jax.jit(lambda w: (cast(w), jax.grad(loss(layer))(w)))(w)
    assert 1e-3 < np.linalg.norm(found - wanted) / np.linalg.norm(wanted) < 0.2
