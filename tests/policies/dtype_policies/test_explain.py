"""explain_policy says of each operation in which precision it runs under a policy, and why."""

from typing import Any

import equinox as eqx
import haiku as hk
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import linen as nn
from flax import nnx

import jmp_train as jt

pytestmark = pytest.mark.quick

X = jax.ShapeDtypeStruct((8, 4), jnp.float32)
W = jax.ShapeDtypeStruct((4, 4), jnp.float32)


@pytest.fixture(autouse=True)
def standard_promotion() -> Any:
    with jax.numpy_dtype_promotion("standard"):
        yield


def test_plain_path_and_autocast_policies_of_one_function() -> None:
    def model(params: Any, x: jax.Array) -> jax.Array:
        hidden = jnp.tanh(x @ params["body"])
        return jnp.exp(hidden @ params["head"])

    params = {"body": W, "head": W}
    plain = jt.explain_policy(model, "mixed_bfloat16", params, X)
    assert [row.operation for row in plain.operations] == ["dot_general", "tanh", "dot_general", "exp"]
    assert {dtype for row in plain.operations for dtype in row.dtypes_in} == {"bfloat16"}
    assert plain.half_flops_share == plain.half_products_share == 1.0

    by_path = jt.policy_by_path({"head": "float32"}, default="mixed_float16")
    report = jt.explain_policy(model, by_path, params, X)
    assert report.half_products_share == 0.5
    assert report.operations[2].reason == "'params/head', which the policy does not cast"

    autocast = jt.explain_policy(model, "autocast_float16", params, X)
    assert [(row.operation, row.rule) for row in autocast.operations] == [
        (row.operation, row.rule) for row in jt.explain_autocast(model, params, X).operations
    ]
    assert autocast.operations[-1].reason == "primitive 'exp'"

    text = str(plain)
    assert text.split()[:4] == ["operation", "in", "out", "rule"]
    assert text.endswith("100.0% of the flops in half precision, 100.0% of those of products")
    assert plain.rows()[0]["flops"] == 2 * 8 * 4 * 4


def test_flops_of_loops_and_ragged_products() -> None:
    def fn(w: jax.Array, x: jax.Array) -> jax.Array:
        x = jax.lax.scan(lambda c, _: (c @ w, None), x, None, length=5)[0]
        return jax.lax.ragged_dot(x, w[None], jnp.array([8]))

    report = jt.explain_policy(fn, "mixed_bfloat16", W, X)
    products = [row for row in report.operations if row.operation != "broadcast_in_dim"]
    assert [row.flops for row in products if row.flops >= 256] == [5 * 256, 256]


def test_operations_without_results() -> None:
    """Such as `jax.debug.print`."""
    seen: list[float] = []

    def fn(w: jax.Array, x: jax.Array) -> jax.Array:
        jax.debug.callback(lambda x: seen.append(float(x)), w.sum())
        return x.astype(jnp.float32) @ w.astype(jnp.float32)

    w = jnp.ones((8, 8))
    report = jt.explain_policy(fn, "mixed_float16", w, w)
    assert "debug_callback" in {row.operation for row in report.operations}
    assert report.operations[-1].reason.startswith("cast from float16 to float32")
    step = jt.train_step(jt.stateless(lambda w, x: fn(w, x).sum()), optax.sgd(0.1), policy="mixed_bfloat16")
    with pytest.warns(jt.policies.Float32ProductsWarning):
        step(jt.TrainState.create(w, optax.sgd(0.1)), w)
    jax.effects_barrier()
    assert seen == [64]


def test_linen_nnx_equinox_and_haiku() -> None:
    linen = nn.Sequential([nn.Dense(4, dtype=jnp.float32), nn.Dense(4)])
    variables = jax.eval_shape(linen.init, jax.random.key(0), X)
    report = jt.explain_policy(linen.apply, "mixed_float16", variables, X)
    products = [row for row in report.operations if row.operation == "dot_general"]
    assert [row.in_half for row in products] == [False, False]
    assert [row.path for row in products] == ["Sequential/layers_0", "Sequential/layers_1"]

    net = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
    report = jt.explain_policy(lambda net, x: net(x), "mixed_float16", net, X)
    assert report.half_products_share == 1.0

    mlp = eqx.nn.MLP(4, 4, 8, 1, key=jax.random.key(0))
    report = jt.explain_policy(lambda mlp, x: jax.vmap(mlp)(x), "mixed_float16", mlp, X)
    assert report.half_products_share == 1.0
    assert report.operations[0].path == "eqx.nn.MLP/eqx.nn.Linear"

    haiku = hk.transform(lambda x: hk.Linear(4)(x))
    params = jax.eval_shape(haiku.init, jax.random.key(0), X)
    report = jt.explain_policy(haiku.apply, "mixed_float16", params, None, X)
    assert report.half_products_share == 1.0 and report.operations[0].path == "linear"


def test_wrong_policies_are_named() -> None:
    with pytest.raises(TypeError, match=r"policy must be a Policy, a PathPolicy or a name such as .*, got 3"):
        jt.explain_policy(jnp.dot, 3, W, W)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="enabled=False"):
        jt.explain_policy(jt.autocast(jnp.dot, enabled=False), "autocast_float16", W, W)


def test_a_whole_step_casts_by_itself() -> None:
    """Adam's bfloat16 moments stay bfloat16; a policy would cast them."""
    tx = jt.with_loss_scale(optax.adam(1e-3, mu_dtype=jnp.bfloat16), jt.torch_loss_scale())
    value_and_grad = jt.scaled_value_and_grad(lambda w, x: (x @ w).astype(jnp.float32).sum(), "mixed_float16")

    def step(w: Any, opt_state: Any, x: Any) -> Any:
        _, grads = value_and_grad(jt.get_loss_scale(opt_state), w, x)
        updates, opt_state = tx.update(grads, opt_state, w)
        return optax.apply_updates(w, updates), opt_state

    w = jnp.ones(W.shape)
    assert jt.explain_policy(step, None, w, tx.init(w), X).half_products_share == 1


def test_the_message_for_mixed_dtypes_names_the_model_state() -> None:
    def loss_fn(w: Any, state: Any, x: Any, rng: Any) -> Any:
        del rng
        return jax.lax.conv(x @ w, state, (1, 1), "SAME").sum(), (state, None)

    tx = jt.with_loss_scale(optax.sgd(0.1), jt.torch_loss_scale())
    state = jt.TrainState.create(jnp.ones((4, 4)), tx, model_state=jnp.ones((3, 3, 1, 1)))
    with pytest.raises(TypeError, match="same dtype") as error:
        jt.train_step(loss_fn, tx, policy="mixed_float16")(state, jnp.ones((2, 3, 4, 4)))
    assert "does not cast a model state" in error.value.__notes__[0]


def test_mixed_dtypes_are_explained_once_also_if_the_error_has_notes() -> None:
    def fn(x: Any) -> Any:
        error = TypeError("float16 and float32")
        error.add_note("The policy of this model is strict.")
        raise error

    with pytest.raises(TypeError, match="float16 and") as error:
        jt.apply_policy(jt.apply_policy(fn, "mixed_float16"), "mixed_float16")(X)
    assert len(error.value.__notes__) == 2
