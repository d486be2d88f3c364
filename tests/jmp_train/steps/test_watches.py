"""The watches of a step: shares of lost updates and of vanishing gradients, beside counts by NumPy in float64."""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from promotion import relaxed

import jmp_train as jt
from jmp_train.steps import metrics as metrics_module
from jmp_train.steps.metrics import group_names

pytestmark = pytest.mark.quick

BOTH = ("lost_updates", "underflow")
MESH = Mesh(np.array(jax.devices()), ("data",))
TINY = 2.0**-14  # float16's smallest normal number


def product_loss(params: Any, batch: Any) -> jax.Array:
    """The mean over the examples of all products: the gradient of a parameter is the mean of its factors."""
    rows = [
        (w * x.astype(w.dtype)).astype(jnp.float32).reshape(len(x), -1).sum(-1)
        for w, x in zip(*map(jax.tree.leaves, (params, batch)), strict=True)
    ]
    return sum(rows).mean()  # pyright: ignore[reportAttributeAccessIssue, reportCallIssue, reportArgumentType]


def shares_of(
    params: Any,
    factors: Any,
    optimizer: Any,
    *,
    policy: Any = None,
    watch: tuple[str, ...] = BOTH,
    examples: int = 1,
    run: Callable[[jt.steps.TrainStep], Any] = jax.jit,
    loss: Any = None,
    **options: Any,
) -> Any:
    """Returns the shares of a step in which the gradients are `factors`, and all metrics."""
    step = jt.train_step(loss or jt.stateless(product_loss), optimizer, policy=policy, watch=watch, **options)
    batch = jax.tree.map(lambda x: jnp.broadcast_to(jnp.asarray(x), (examples, *np.shape(x))), factors)
    _, metrics = run(step)(jt.TrainState.create(params, optimizer), batch)
    shares = jax.tree.map(float, metrics["watch"])
    return shares, metrics


def unscaled(optimizer: Any) -> Any:
    return jt.with_loss_scale(optimizer, jt.NoOpLossScale())


# --- lost updates -----------------------------------------------------------------------------


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16, np.float32])
def test_lost_updates_are_those_that_numpy_counts(dtype: Any) -> None:
    rng = np.random.default_rng(0)
    old = {"a": rng.normal(size=(32, 8)), "b": rng.normal(size=100)}
    old = {name: x.astype(dtype) for name, x in old.items()}
    update = {name: (x.astype(float) * 2.0 ** rng.uniform(-30, 0, x.shape)).astype(dtype) for name, x in old.items()}
    update["a"][:7] = 0
    shares, _ = shares_of(jax.tree.map(jnp.asarray, old), update, unscaled(optax.sgd(1.0)), watch=("lost_updates",))

    def expected(x: np.ndarray, u: np.ndarray) -> float:
        lost = (x.astype(float) - u.astype(float)).astype(dtype) == x
        return (lost & (u != 0)).sum() / (u != 0).sum()

    wanted = {name: expected(old[name], update[name]) for name in old}
    assert all(0.1 < share < 0.9 for share in wanted.values())
    assert shares == {"lost_updates": pytest.approx(wanted, abs=1e-7)}


WRAPPED = {
    "plain": (lambda: optax.sgd(2.0**-13), 1.0),
    "loss scale": (lambda: unscaled(optax.sgd(2.0**-13)), 1.0),
    "accumulated": (
        lambda: unscaled(relaxed(optax.MultiSteps(optax.sgd(2.0**-13), 2).gradient_transformation())),
        0.0,
    ),  # its first step adds nothing
    "master weights": (lambda: jt.with_master_weights(unscaled(optax.sgd(2.0**-13))), 0.0),
    "too small for float32": (lambda: jt.with_master_weights(optax.sgd(2.0**-26)), 1.0),
    "stochastic rounding": (lambda: jt.with_stochastic_rounding(optax.sgd(2.0**-13), jax.random.key(0)), 0.0),
}


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("wrapped", WRAPPED)
def test_what_is_lost_is_lost_where_the_update_is_added(wrapped: str) -> None:
    make, wanted = WRAPPED[wrapped]
    ones = jnp.ones(16, jnp.bfloat16)
    shares, _ = shares_of(ones, np.ones(16, np.float32), make(), watch=("lost_updates",))
    assert shares == {"lost_updates": {"params": wanted}}


def test_a_zero_that_changes_its_sign_is_lost() -> None:
    params = jnp.array([-0.0, 0.0, 0.0], jnp.float16)
    factors = np.array([-(2.0**-24), 2.0**-24, 1.0], np.float32)
    shares, _ = shares_of(params, factors, unscaled(optax.sgd(2.0**-10)), watch=("lost_updates",))
    assert shares["lost_updates"]["params"] == pytest.approx(2 / 3)


def test_a_skipped_step_loses_nothing() -> None:
    optimizer = jt.with_loss_scale(optax.sgd(2.0**-13), jt.torch_loss_scale(1.0))
    ones = jnp.ones(4, jnp.bfloat16)
    shares, metrics = shares_of(ones, np.array([1, 1, 1, np.inf], np.float32), optimizer)
    assert not metrics["grads_finite"]
    assert shares == {"lost_updates": {"params": 0.0}, "underflow": {"params": 0.0}}
    shares, metrics = shares_of(ones, np.ones(4, np.float32), optimizer)
    assert shares["lost_updates"] == {"params": 1.0}


# --- underflow --------------------------------------------------------------------------------

# Zeros do not count; of the others the second and third are below float16's smallest normal number.
FACTORS = np.array([0.0, TINY / 2, -TINY * 3 / 4, TINY, 1.0, -2.0], np.float32)
SCALED = {1.0: 2 / 5, 2.0: 0.0, 0.5: 3 / 5}


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("scale", SCALED)
@pytest.mark.parametrize("policy", ["mixed_float16", "autocast_float16"])
def test_underflow_is_that_of_the_scaled_gradients(policy: str, scale: float) -> None:
    optimizer = jt.with_loss_scale(optax.sgd(0.1), jt.StaticLossScale(scale))
    shares, _ = shares_of(jnp.ones(6), FACTORS, optimizer, policy=policy, watch=("underflow",))
    assert shares == {"underflow": {"params": pytest.approx(SCALED[scale])}}


def test_underflow_of_bfloat16_and_of_float32() -> None:
    """Beside bfloat16's smallest normal number, which is float32's, nothing vanishes; and nothing does in float32."""
    optimizer = unscaled(optax.sgd(0.1))
    for policy in ("mixed_bfloat16", "float32", None):
        shares, _ = shares_of(jnp.ones(6), FACTORS, optimizer, policy=policy, watch=("underflow",))
        assert shares == {"underflow": {"params": 0.0}}


def test_underflow_follows_the_policy_of_each_parameter() -> None:
    policy: Any = jt.policy_by_path({"norm": "float32"}, default="mixed_float16")
    params = {"dense": jnp.ones(6), "norm": jnp.ones(6)}
    factors = {"dense": FACTORS, "norm": FACTORS}
    shares, _ = shares_of(params, factors, unscaled(optax.sgd(0.1)), policy=policy, watch=("underflow",))
    assert shares == {"underflow": {"dense": pytest.approx(2 / 5), "norm": 0.0}}


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("mode", ["torch", "naive"])
def test_underflow_in_an_amp_mode(mode: str) -> None:
    options: dict[str, Any] = {"init_scale" if mode == "torch" else "initial_scale": 1.0}
    amp = jt.amp_mode(mode, **options)
    loss_fn, optimizer = amp.transform(jt.stateless(lambda w, x: (x @ w).astype(jnp.float32).sum()), optax.sgd(0.1))
    step = jax.jit(jt.train_step(loss_fn, optimizer, watch=("underflow",)))
    state = jt.TrainState.create(jnp.ones((6, 1)), optimizer, cast_params=amp.cast_params)
    _, metrics = step(state, jnp.asarray(FACTORS)[None])
    assert float(metrics["watch"]["underflow"]["params"]) == pytest.approx(2 / 5)


def test_underflow_of_micro_batches_is_that_of_their_mean() -> None:
    """Of eight micro-batches each has an eighth of the loss, and that is what float16 has to hold."""
    optimizer = unscaled(optax.sgd(0.1))
    options: dict[str, Any] = {"policy": "mixed_float16", "watch": ("underflow",)}
    shares, _ = shares_of(jnp.ones(6), FACTORS * 8, optimizer, accumulate_steps=8, examples=8, **options)
    assert shares == {"underflow": {"params": pytest.approx(2 / 5)}}


def test_underflow_of_several_losses_counts_all_of_them() -> None:
    scales = jt.policies.PerLossScale((jt.StaticLossScale(1.0), jt.StaticLossScale(4.0)))
    optimizer = jt.with_loss_scale(optax.sgd(0.1), scales)
    loss = jt.stateless(lambda w, x: (product_loss(w, x),) * 2, has_aux=False)
    options: dict[str, Any] = {"policy": "mixed_float16", "watch": ("underflow",)}
    shares, _ = shares_of(jnp.ones(6), FACTORS, optimizer, loss=loss, **options)
    assert shares == {"underflow": {"params": pytest.approx(2 / 10)}}


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("shape", [(), (0, 3), (65_535,), (70_000,), (3, 40_000), (70_000, 2), (2, 300, 300)])
def test_more_elements_than_16_bits_count_are_counted(shape: tuple[int, ...]) -> None:
    rng = np.random.default_rng(2)
    factors = rng.choice(np.array([0.0, TINY / 2, 1.0], np.float32), shape, p=[0.01, 0.5, 0.49])
    factors = np.asarray(factors, np.float32)
    shares, _ = shares_of(
        jnp.ones(shape), factors, unscaled(optax.sgd(0.1)), policy="mixed_float16", watch=("underflow",)
    )
    wanted = (factors == TINY / 2).sum() / max((factors != 0).sum(), 1)
    assert shares["underflow"]["params"] == pytest.approx(wanted, rel=1e-7)


# --- groups, devices, programs -----------------------------------------------------------------


class Net(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return nn.Dense(2)(nn.Dense(3)(x))


def test_groups_are_the_modules_under_the_root() -> None:
    linen = jax.eval_shape(Net().init, jax.random.key(0), jnp.ones((1, 4)))
    assert group_names(linen) == group_names(linen["params"]) == ["Dense_0"] * 2 + ["Dense_1"] * 2
    model = nnx.eval_shape(
        lambda: nnx.Sequential(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), nnx.Linear(2, 2, rngs=nnx.Rngs(0)))
    )
    assert set(group_names(nnx.state(model))) == {"0", "1"}
    haiku = {"mlp/~/linear_0": {"w": 0, "b": 0}, "mlp/~/linear_1": {"w": 0}}
    assert group_names(haiku) == ["mlp/~/linear_0"] * 2 + ["mlp/~/linear_1"]
    assert group_names({"w": 0, "b": 0}) == ["b", "w"]
    assert group_names({"dense": {"w": 0, "b": 0}}) == ["b", "w"]
    assert group_names(0) == group_names(nnx.Param(jnp.zeros(2))) == ["params"]
    assert group_names([0, {"w": 0}]) == ["0", "1"]


def test_there_are_at_most_eight_groups() -> None:
    many = {f"block_{i}": {"w": 0} for i in range(30)} | {"embed": 0, "head": 0}
    assert set(group_names(many)) == {"block", "embed", "head"}
    others = dict.fromkeys("abcdefghijkl", 0)
    assert group_names(others) == [*"abcdefg", *["others"] * 5]
    assert group_names([0] * 9) == ["params"] * 9


ROUTES: dict[str, Callable[[jt.steps.TrainStep], Any]] = {
    "data_parallel": lambda step: jt.data_parallel(step, MESH),
    "pmap_step": jt.pmap_step,
    "sharded_step": lambda step: jt.sharded_step(step, MESH),
    "fsdp": lambda step: jt.sharded_step(
        step,
        MESH,
        shardings=jt.fsdp_shardings(
            jt.TrainState.create({"a": jnp.zeros(64, jnp.bfloat16), "b": jnp.zeros(64)}, unscaled(optax.sgd(1.0))),
            MESH,
            min_size=8,
        ),
    ),
}


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("route", ROUTES)
def test_eight_devices_find_what_one_finds(route: str) -> None:
    rng = np.random.default_rng(1)
    params = {"a": jnp.ones(64, jnp.bfloat16), "b": jnp.ones(64)}
    factors = {"a": 2.0 ** rng.uniform(-24, 0, 64), "b": 2.0 ** rng.uniform(-24, 0, 64)}
    factors = jax.tree.map(lambda x: x.astype(np.float16).astype(np.float32), factors)
    policy = jt.policy_by_path({"a": "p=bf16,c=f16,o=f32"}, default="mixed_float16")
    options: dict[str, Any] = {"policy": policy, "examples": 8}
    alone, _ = shares_of(params, factors, unscaled(optax.sgd(1.0)), policy=policy)
    shares, metrics = shares_of(params, factors, unscaled(optax.sgd(1.0)), run=ROUTES[route], **options)
    assert 0.1 < alone["lost_updates"]["a"] < 0.9
    assert 0.1 < alone["underflow"]["b"] < 0.9
    assert shares == alone
    for share in jax.tree.leaves(metrics["watch"]):
        assert {float(shard.data) for shard in share.addressable_shards} == {float(share)}


def test_devices_with_parameters_of_their_own_agree_on_the_shares_of_all() -> None:
    optimizer = unscaled(optax.sgd(1.0))
    step = jt.train_step(jt.stateless(product_loss), optimizer, policy="p=bf16,c=f16,o=f32", watch=BOTH)
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("data", "model"))
    state = jt.TrainState.create({"a": jnp.ones(24, jnp.bfloat16)}, optimizer)
    factors = np.full((8, 24), 2.0**-20, np.float32)
    factors[:, :9] = 0.5  # of the first two devices along "model" only
    specs = jax.tree.map(lambda x: P("model") if np.ndim(x) else P(), state)

    def on_each(state: Any, batch: Any) -> Any:
        _, metrics = step.with_axes("data", model=("model",))(state, batch)
        return jax.tree.map(lambda x: x[None, None], metrics["watch"])

    run = jax.shard_map(
        on_each, mesh=mesh, in_specs=(specs, {"a": P("data", "model")}), out_specs=P("data", "model"), check_vma=False
    )
    watched = jax.jit(run)(state, {"a": jnp.asarray(factors)})
    for name in BOTH:
        np.testing.assert_array_equal(watched[name]["a"], np.full((2, 4), 15 / 24, np.float32))


def test_without_watches_the_program_is_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer = jt.with_loss_scale(relaxed(optax.adam(0.1)), jt.torch_loss_scale())
    state = jt.TrainState.create({"a": jnp.ones(4), "b": jnp.ones((2, 2))}, optimizer)
    batch = {"a": jnp.ones((8, 4)), "b": jnp.ones((8, 2, 2))}

    def program(**options: Any) -> str:
        step = jt.train_step(jt.stateless(product_loss), optimizer, policy="mixed_float16", **options)
        return jax.jit(step).lower(state, batch).as_text()

    step = jt.train_step(jt.stateless(product_loss), optimizer)
    assert step.watch == ()
    assert "watch" not in jax.eval_shape(step, state, batch)[1]
    off, on = program(), program(watch=BOTH)
    assert off == program(watch=())
    assert "ui32" in on
    assert "ui32" not in off
    monkeypatch.setattr(metrics_module, "watch_metrics", lambda *args: {})
    assert program() == program(watch=()) == off


def test_a_step_that_watches_is_traced_once() -> None:
    optimizer = jt.with_loss_scale(relaxed(optax.adam(0.1)), jt.torch_loss_scale(2.0))
    traces = []

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        traces.append(batch.shape)
        return product_loss(params, batch)

    step = jax.jit(jt.train_step(jt.stateless(loss_fn), optimizer, policy="mixed_float16", watch=BOTH))
    state, batch = jt.TrainState.create(jnp.ones(4), optimizer), jnp.ones((8, 4))
    state, first = step(state, batch)
    count = len(traces)
    state, second = step(state, batch)
    assert len(traces) == count > 0
    for metrics in (first, second):
        assert all(x.dtype == jnp.float32 and x.shape == () for x in jax.tree.leaves(metrics["watch"]))


def test_a_wrong_watch_is_refused() -> None:
    def make(watch: Any) -> jt.steps.TrainStep:
        return jt.train_step(jt.stateless(product_loss), optax.sgd(0.1), watch=watch)

    with pytest.raises(ValueError, match=r"watch: 'overflow' is unknown; choose from 'lost_updates', 'underflow'"):
        make(("overflow",))
    with pytest.raises(TypeError, match=r"watch='underflow' must be a tuple of names: watch=\('underflow',\)"):
        make("underflow")
    assert make(["underflow", "underflow"]).watch == ("underflow",)
