"""A half policy that does not reach the products says so, once, and names lines and reasons."""

import inspect
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import equinox as eqx
import haiku as hk
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import linen as nn
from flax import nnx
from jax import lax

import jmp_train as jt
from jmp_train.policies.dtype_policies import half_products

pytestmark = [pytest.mark.quick, pytest.mark.newest]

HALF = jt.get_policy("mixed_float16")
X, W = jnp.ones((8, 4)), jnp.ones((4, 4))


@pytest.fixture(autouse=True)
def standard_promotion() -> Any:
    with jax.numpy_dtype_promotion("standard"):  # users' models promote by themselves
        yield


def messages(fn: Callable[..., Any], *args: Any) -> list[str]:
    """Returns the texts of the warnings of a call, all of which are of the documented class."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        fn(*args)
    assert {w.category for w in seen} <= {jt.policies.Float32ProductsWarning}
    assert {Path(w.filename) for w in seen} <= {Path(__file__)}  # the user's line
    return [str(w.message) for w in seen]


def traced(fn: Callable[..., Any], policy: Any = HALF) -> Callable[..., Any]:
    """Returns a function that traces another one under a policy, and computes nothing."""
    applied = jt.apply_policy(fn, policy)
    return lambda *args: jax.eval_shape(applied, *args)


class Mlp(nn.Module):
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.Dense(16, dtype=self.dtype)(x)
        return nn.Dense(4, dtype=self.dtype)(nn.relu(x))


def loss_of(model: nn.Module) -> Callable[[Any, Any], jax.Array]:
    def loss_fn(variables: Any, x: jax.Array) -> jax.Array:
        return model.apply(variables, x).astype(jnp.float32).mean()  # pyright: ignore[reportAttributeAccessIssue]

    return loss_fn


def test_a_dtype_of_linen_layers_is_named_with_its_lines_and_what_mends_it() -> None:
    variables = Mlp().init(jax.random.key(0), X)
    (text,) = messages(traced(Mlp().apply), variables, X)
    head, first, second, advice = text.splitlines()
    assert head.startswith("100% of the flops of products stay in float32 under the policy p=full")
    line = inspect.getsourcelines(Mlp.__call__)[1] + 2  # of the first nn.Dense, below the decorator
    assert f"{Path(__file__).name}:{line}: dot_general of float32[8,4] and float32[4,16]" in first
    assert "in Mlp/Dense_0: cast from float16 to float32 there" in first
    assert "Mlp/Dense_1" in second
    assert 'policy="autocast_float16"' in advice and "dtype=float16" in advice
    assert not messages(traced(Mlp(None).apply), variables, X)


def test_train_step_and_scaled_value_and_grad_say_it_once() -> None:
    variables = Mlp().init(jax.random.key(0), X)
    loss_fn, optimizer = loss_of(Mlp()), jt.with_loss_scale(optax.sgd(0.1), jt.torch_loss_scale())
    step = jt.train_step(jt.stateless(loss_fn), optimizer, policy="mixed_bfloat16")
    state = jt.TrainState.create(variables, optimizer)
    assert len(messages(lambda: jax.eval_shape(step, state, X))) == 1
    assert not messages(lambda: jax.eval_shape(step, state, X[:4]))  # a retrace
    assert not messages(lambda: jax.eval_shape(step.with_axes(), state, X))  # the same step
    value_and_grad = jt.scaled_value_and_grad(loss_fn, HALF)
    scale = jt.StaticLossScale(8.0)
    assert len(messages(lambda: jax.eval_shape(value_and_grad, scale, variables, X))) == 1
    assert not messages(lambda: jax.eval_shape(value_and_grad, scale, variables, X[:2]))
    autocast = jt.train_step(jt.stateless(loss_fn), optimizer, policy="autocast_float16")
    assert not messages(lambda: jax.eval_shape(autocast, state, X))


@pytest.mark.parametrize("accumulate_steps", [1, 2])
def test_a_step_names_the_model_state_that_no_policy_casts(accumulate_steps: int) -> None:
    def loss_fn(params: Any, frozen: Any, batch: Any, rng: Any) -> Any:
        del rng
        return (batch @ frozen["base"] @ params).mean(), (frozen, None)  # LoRA on frozen weights

    optimizer = jt.with_loss_scale(optax.sgd(0.1), jt.torch_loss_scale())
    step = jt.train_step(loss_fn, optimizer, policy=HALF, accumulate_steps=accumulate_steps)
    state = jt.TrainState.create(W, optimizer, model_state={"base": W})
    (text,) = messages(lambda: jax.eval_shape(step, state, X))
    assert "because of 'model_state/base', which the policy does not cast" in text


def made_inside(w: jax.Array, x: jax.Array) -> jax.Array:
    noise = jax.random.normal(jax.random.key(0), x.shape)
    return (x + noise) @ w


def in_a_scan(w: jax.Array, x: jax.Array) -> jax.Array:
    return lax.scan(lambda c, t: (c + t @ w, None), jnp.zeros(4), x + jnp.ones(4))[0]


def in_a_cond(w: jax.Array, x: jax.Array) -> jax.Array:
    x = x * jnp.ones(4)
    return lax.cond(w[0, 0] > 0, lambda x: x @ w, lambda x: x.astype(jnp.float32), x)


def in_remat(w: jax.Array, x: jax.Array) -> jax.Array:
    return jax.checkpoint(lambda x: (x + jnp.ones(4)) @ w)(x)


@jax.custom_vjp
def custom(w: jax.Array, x: jax.Array) -> jax.Array:
    return (x + jnp.ones(4)) @ w


custom.defvjp(lambda w, x: (custom(w, x), None), lambda residual, ct: (W, X))


def in_shard_map(w: jax.Array, x: jax.Array) -> jax.Array:
    mesh, spec = jax.sharding.Mesh(jax.devices()[:2], "data"), jax.sharding.PartitionSpec("data")
    own = jax.sharding.PartitionSpec()
    inner = jax.shard_map(lambda w, x: (x + jnp.ones(4)) @ w, mesh=mesh, in_specs=(own, spec), out_specs=spec)
    return inner(w, x)


CLOSED_OVER = jnp.ones((4, 4))


@pytest.mark.parametrize(
    ("fn", "reason"),
    [
        (made_inside, "because of float32 made by"),
        (in_a_scan, "because of float32 made by"),
        (in_a_cond, "because of float32 made by"),
        (in_remat, "because of float32 made by"),
        (custom, "because of float32 made by"),
        (in_shard_map, "because of float32 made by"),
        (lambda w, x: x @ CLOSED_OVER @ w, "because of a closed-over float32[4,4]"),
        (lambda w, x: jnp.cumsum(x, dtype=jnp.float32)[:4] @ w, "cast from float16 to float32"),
        (lambda w, x: lax.dot(x, w, preferred_element_type=jnp.float32) @ w, "the float32 result of"),
    ],
)
def test_why_a_product_is_float32(fn: Callable[..., Any], reason: str) -> None:
    (text,) = messages(traced(fn), W, X)
    assert reason in text
    assert Path(__file__).name in text.splitlines()[1]


def test_a_jitted_helper_of_jax_does_not_hide_the_line_of_its_caller() -> None:
    def first(w: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.einsum("ij,jk->ik", x.astype(jnp.float32), w.astype(jnp.float32))

    def second(w: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.einsum("ij,jk->ik", x.astype(jnp.float32), w.astype(jnp.float32))

    lines = [messages(traced(fn), W, X)[0].splitlines()[1] for fn in (first, second)]
    numbers = [int(line.split(".py:")[1].split(":")[0]) for line in lines]
    assert numbers[1] - numbers[0] == 3  # jax traces einsum's inside once for both


def test_at_most_a_tenth_is_tolerated_and_three_lines_are_shown() -> None:
    def fn(w: jax.Array, x: jax.Array) -> jax.Array:
        small = x[:2].astype(jnp.float32) @ w[:, :1].astype(jnp.float32)  # 16 of 272 flops
        return (x @ w).sum() + small.sum()

    assert not messages(traced(fn), W, X)

    def many(w: jax.Array, x: jax.Array) -> jax.Array:
        x, w = x.astype(jnp.float32), w.astype(jnp.float32)
        x = x @ w
        x = x @ w
        x = x @ w
        x = x @ w
        return x @ w

    (text,) = messages(traced(many), W, X)
    assert len(text.splitlines()) == 6 and "and 2 more" in text


def test_loops_count_as_often_as_they_iterate() -> None:
    def fn(w: jax.Array, x: jax.Array) -> jax.Array:
        in_float32 = w.astype(jnp.float32)
        half = lax.scan(lambda c, _: (c @ w, None), x, None, length=20)[0]
        return (half.sum() + x.astype(jnp.float32) @ in_float32).sum()

    assert not messages(traced(fn), W, X)  # one of 21


@pytest.mark.parametrize(
    "fn",
    [
        lambda w, x: jnp.dot(x.astype("float32"), w.astype("float32"), precision="highest"),
        jt.autocast_as("float32")(lambda w, x: x.astype("float32") @ w.astype("float32")),
        lambda w, x: lax.dot(x, w, preferred_element_type=jnp.float32),  # it multiplies half
        lambda w, x: jnp.ones((3, 3), jnp.int32) @ jnp.ones((3, 3), jnp.int32),
        lambda w, x: jnp.exp(x.astype(jnp.float32)),  # no product at all
        lambda w, x: x @ w + 1.0,
    ],
)
def test_what_is_not_accused(fn: Callable[..., Any]) -> None:
    assert not messages(traced(fn), W, X)


def test_a_head_that_the_path_policy_keeps_is_as_asked_but_not_what_follows_a_norm() -> None:
    params = {"body": W, "head": W, "norm": jnp.ones(4)}

    def model(params: Any, x: jax.Array) -> jax.Array:
        return (x @ params["body"]) @ (2.0 * params["head"]).T  # derived from the head alone

    def normed(params: Any, x: jax.Array) -> jax.Array:
        return (x * params["norm"]) @ params["body"]

    head = jt.policy_by_path({"head": "float32"}, default="mixed_float16")
    assert not messages(traced(model, head), params, X)
    norm = jt.policy_by_path({"norm": "float32"}, default="mixed_float16")
    (text,) = messages(traced(normed, norm), params, X)
    assert "because of 'params/norm', which the policy does not cast" in text
    rule = jt.policy_by_path({"body": "mixed_bfloat16"}, default="float32")  # float32 inputs
    (text,) = messages(traced(model, rule), params, X)
    assert text.startswith("50%") and "because of 'x', which" in text
    assert 'policy="autocast_bfloat16"' in text


def test_a_conv_is_a_product() -> None:
    def fn(w: jax.Array, x: jax.Array) -> jax.Array:
        return lax.conv(x.astype(jnp.float32), w.astype(jnp.float32), (1, 1), "SAME")

    (text,) = messages(traced(fn), jnp.ones((2, 2, 3, 3)), jnp.ones((1, 2, 4, 4)))
    assert "conv_general_dilated of float32[1,2,4,4] and float32[2,2,3,3]" in text


@pytest.mark.full
@pytest.mark.parametrize(
    "make",
    [
        lambda loss: jt.train_step(jt.stateless(loss), optax.sgd(0.1), policy="mixed_bfloat16"),
        lambda loss: (
            lambda state, x: jt.scaled_value_and_grad(loss, "mixed_bfloat16")(jt.NoOpLossScale(), state.params, x)
        ),
        lambda loss: lambda state, x: jax.grad(jt.apply_policy(loss, "mixed_bfloat16"))(state.params, x),
    ],
)
def test_the_program_that_runs_is_the_one_that_is_looked_at(make: Any) -> None:
    traces: list[int] = []

    def loss_fn(w: Any, x: jax.Array) -> jax.Array:
        traces.append(1)
        return jnp.dot(x.astype(jnp.float32), w.astype(jnp.float32)).mean()

    state = jt.TrainState.create(W, optax.sgd(0.1))
    (text,) = messages(lambda: jax.jit(make(loss_fn))(state, X))
    assert "cast from bfloat16 to float32 there" in text
    assert len(traces) == 1


@pytest.mark.full
def test_the_other_trace_leaves_no_mark_on_models_with_state() -> None:
    class Net(nnx.Module):
        def __init__(self) -> None:
            self.norm = nnx.BatchNorm(4, rngs=nnx.Rngs(0))
            self.dropout = nnx.Dropout(0.5, rngs=nnx.Rngs(1))

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.dropout(self.norm(x))

    net, other = Net(), Net()
    y = jt.apply_policy(lambda x: net(x), HALF)(X)
    expected = HALF.cast_to_output(other(HALF.cast_to_compute(X)))
    assert bool((y == expected).all())
    same = jax.tree.map(lambda a, b: bool((a == b).all()), nnx.state(net), nnx.state(other))
    assert all(jax.tree.leaves(same))

    class Linen(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            x = jt.apply_policy(lambda x: nn.Dense(4)(x), HALF)(x)
            return nn.Dense(3)(x)

    names = Linen().init(jax.random.key(0), X)["params"]
    shapes = jax.tree.map(jnp.shape, {name: layer["bias"] for name, layer in names.items()})
    assert shapes == {"Dense_0": (4,), "Dense_1": (3,)}

    def haiku(x: jax.Array) -> jax.Array:
        x = jt.apply_policy(lambda x: hk.Linear(4)(x), HALF)(x)
        return hk.Linear(3)(x)

    params = hk.transform(haiku).init(jax.random.key(0), X)
    assert sorted(params) == ["linear", "linear_1"] and params["linear"]["b"].shape == (4,)


def test_functions_of_values_run_as_they_did() -> None:
    def fn(w: jax.Array, x: jax.Array) -> jax.Array:
        return x @ w if x.sum() > 0 else x  # eager only

    assert not messages(jt.apply_policy(fn, HALF), W, X)


@pytest.mark.parametrize(
    ("fn", "error"),
    [
        (lambda w, x: lax.scan(lambda c, t: ((t @ w).astype(t.dtype), None), jnp.zeros(4), x), "carry"),
        (lambda w, x: lax.conv(x[None, None], jnp.ones((1, 1, 2, 2)), (1, 1), "SAME"), "dtypes"),
    ],
)
def test_errors_of_half_beside_float32_say_what_to_do(fn: Callable[..., Any], error: str) -> None:
    for run in (jt.apply_policy(fn, HALF), lambda w, x: jt.scaled_value_and_grad(fn, HALF)(jt.NoOpLossScale(), w, x)):
        with pytest.raises(TypeError, match=error) as info:
            run(W, X)
        (note,) = [note for note in info.value.__notes__ if "autocast_float16" in note]
        assert "carry.astype" in note or "c.astype(x.dtype)" in note


def test_other_errors_have_no_note() -> None:
    with pytest.raises(TypeError) as info:
        jt.apply_policy(lambda x: x @ jnp.ones(3), HALF)(X)
    assert not any("autocast" in note for note in getattr(info.value, "__notes__", []))


@pytest.mark.full
def test_equinox_models_are_seen_through() -> None:
    model = eqx.nn.MLP(4, 4, 8, 1, key=jax.random.key(0))

    def fn(model: Any, x: jax.Array) -> jax.Array:
        return jax.vmap(model)(x + jnp.ones(4))

    (text,) = messages(jt.apply_policy(fn, HALF), model, X)
    assert "eqx.nn.Linear" in text


@pytest.mark.parametrize("outer", ["mixed_bfloat16", None])
def test_the_programs_of_functions_within_are_not_taken_for_their_callers(outer: str | None) -> None:
    """The caller runs without a program of its own: outside of jit, or without a policy."""

    def product(w: jax.Array, x: jax.Array, y: jax.Array) -> jax.Array:
        return (w @ x @ y).astype(jnp.float32).sum()

    inner = jax.grad(jt.apply_policy(product, "mixed_bfloat16"))
    w = jnp.ones((2, 2))
    inner(w, w, w)  # whose first trace is past
    if outer is None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(half_products, "is_at_risk", lambda: True)  # as on a jaxlib whose convolutions are looked at
            loss, grads = jt.scaled_value_and_grad(lambda w: inner(w, w, w).sum())(jt.NoOpLossScale(), w)
        assert loss == 16 and grads.shape == w.shape
    else:
        assert jt.apply_policy(lambda w: inner(w, w, w), outer)(w).tolist() == [[4, 4], [4, 4]]
