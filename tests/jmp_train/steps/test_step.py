import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from promotion import relaxed
from pytrees import assert_bitwise_equal, host_copy, poison_gradient

import jmp_train as jt

pytestmark = [pytest.mark.quick, pytest.mark.newest]


def net_loss(params: Any, model_state: Any, batch: Any, rng: Any) -> Any:
    """Two layers with dropout and a running mean; `batch["poison"]` multiplies the gradient of the second kernel."""
    kernel = poison_gradient(params["out"], batch["poison"][0].astype(jnp.float32))
    hidden = jax.nn.relu(batch["x"] @ params["in"])
    kept = jax.random.bernoulli(rng, 0.9, hidden.shape)
    y = jnp.where(kept, hidden, jnp.zeros_like(hidden)) @ kernel
    mean = 0.9 * model_state["mean"] + 0.1 * jax.lax.stop_gradient(hidden).astype(jnp.float32).mean(0)
    loss = ((y.astype(jnp.float32) - batch["y"].astype(jnp.float32)) ** 2).mean()
    return loss, ({"mean": mean}, {"mean": y.mean()})


def net_state(optimizer: Any) -> jt.TrainState:
    random = np.random.default_rng(0)
    params = {name: np.float32(random.normal(size=shape)) for name, shape in (("in", (4, 8)), ("out", (8, 1)))}
    return jt.TrainState.create(params, optimizer, model_state={"mean": jnp.zeros(8)}, rng=jax.random.key(1))


def net_batch(seed: int, poison: float = 1.0, examples: int = 16) -> dict[str, jax.Array]:
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(examples, 4)).astype(np.float32)
    return {"x": jnp.asarray(x), "y": jnp.asarray(x.sum(-1, keepdims=True)), "poison": jnp.full((examples,), poison)}


def scheduled_adam() -> optax.GradientTransformationExtraArgs:
    return relaxed(optax.adam(optax.cosine_decay_schedule(1e-2, 100)))


def line_loss(params: Any, batch: Any) -> jax.Array:
    return ((batch @ params["w"]).astype(jnp.float32) ** 2).mean()


def line_state(optimizer: Any, **kwargs: Any) -> jt.TrainState:
    return jt.TrainState.create({"w": jnp.array([1.0, 2.0])}, optimizer, **kwargs)


def line_batch(seed: int, examples: int = 8) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=(examples, 2)), jnp.float32)


@pytest.mark.parametrize("policy", ["autocast_float16", "mixed_float16"])
def test_float16_without_a_loss_scale_is_said_once(policy: str) -> None:
    step = jt.train_step(jt.stateless(line_loss), optax.sgd(0.1), policy=policy)
    state = line_state(step.optimizer)
    with pytest.warns(
        jt.policies.MissingLossScaleWarning, match=r"computes in float16 and the optimizer has no loss scale.*jt"
    ):
        jax.eval_shape(step, state, line_batch(0))
    jax.eval_shape(step, state, line_batch(0, 16))


@pytest.mark.parametrize(
    ("optimizer", "policy"),
    [
        (optax.sgd(0.1), "autocast_bfloat16"),
        (optax.chain(jt.with_loss_scale(optax.sgd(0.1), jt.NoOpLossScale())), "mixed_float16"),
    ],
)
def test_a_loss_scale_is_not_missed_in_bfloat16_nor_where_none_is_asked_for(optimizer: Any, policy: str) -> None:
    jax.eval_shape(
        jt.train_step(jt.stateless(line_loss), optimizer, policy=policy), line_state(optimizer), line_batch(0)
    )


# --- skipping ---------------------------------------------------------------------------------


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("policy", ["float32", "mixed_float16", "mixed_bfloat16"])
def test_a_planted_inf_changes_nothing_but_the_counters_and_the_key(policy: str) -> None:
    optimizer = jt.with_loss_scale(scheduled_adam(), jt.torch_loss_scale(2.0**10))
    step = jax.jit(jt.train_step(net_loss, optimizer, policy=policy), donate_argnums=0)
    state, metrics = step(net_state(optimizer), net_batch(0))
    assert bool(metrics["grads_finite"])
    for skips, poison in enumerate((np.inf, -np.inf, np.nan), start=1):
        before, key = host_copy(state), np.array(jax.random.key_data(state.rng))
        state, metrics = step(state, net_batch(1, poison))
        assert_bitwise_equal(state.params, before.params)
        assert_bitwise_equal(state.opt_state.inner_state, before.opt_state.inner_state)
        assert_bitwise_equal(state.model_state, before.model_state)
        assert not bool(metrics["grads_finite"])
        assert float(metrics["loss_scale"]) == 2.0 ** (10 - skips)
        assert int(metrics["skipped_steps"]) == int(state.opt_state.consecutive_skips) == skips
        assert int(state.step) == 1 + skips
        assert not np.array_equal(jax.random.key_data(state.rng), key)

    skipped = host_copy(state)
    state, metrics = step(state, net_batch(1))
    assert bool(metrics["grads_finite"])
    assert int(state.opt_state.consecutive_skips) == 0
    assert int(optax.tree.get(state.opt_state.inner_state[0], "count")) == 2
    assert not np.array_equal(state.params["in"], skipped.params["in"])


def test_a_skip_keeps_subnormal_and_negative_zero_parameters() -> None:
    optimizer = jt.with_loss_scale(optax.sgd(0.1), jt.torch_loss_scale())
    step = jax.jit(jt.train_step(jt.stateless(lambda p, x: (p * x).sum()), optimizer))
    params = jnp.asarray(np.array([-0.0, 1e-40, -1e-45], np.float32))
    state, _ = step(jt.TrainState.create(params, optimizer), jnp.full(3, jnp.inf))
    assert_bitwise_equal(state.params, params)


def test_overflow_of_the_scaled_gradient_alone_is_found() -> None:
    """The true gradient fits float16, the scaled one does not: the scale falls until it does."""
    optimizer = jt.with_loss_scale(optax.sgd(1e-3), jt.torch_loss_scale(2.0**16))
    step = jt.train_step(jt.stateless(line_loss), optimizer, policy="mixed_float16")
    _, metrics = jax.lax.scan(step, line_state(optimizer), jnp.full((20, 4, 2), 8.0))
    assert 0 < int(metrics["skipped_steps"][-1]) < 20
    assert bool(metrics["grads_finite"][-1])


# --- the same results as without jmp_train -----------------------------------------------------------


def test_float32_equals_the_plain_optax_loop_bitwise() -> None:
    """Op by op: under jit XLA may fuse the two loops differently."""
    plain = optax.sgd(0.1, momentum=0.9)
    optimizer = jt.with_loss_scale(plain, jt.torch_loss_scale())
    step = jt.train_step(jt.stateless(line_loss), optimizer, policy="float32")

    def by_hand(params: Any, opt_state: Any, batch: Any) -> Any:
        grads = jax.grad(line_loss)(params, batch)
        updates, opt_state = plain.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    state = line_state(optimizer)
    params, opt_state = state.params, plain.init(state.params)
    for seed in range(4):
        state, _ = step(state, line_batch(seed))
        params, opt_state = by_hand(params, opt_state, line_batch(seed))
    assert_bitwise_equal(state.params, params)
    assert_bitwise_equal(state.opt_state.inner_state, opt_state)


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16", "float16", "bfloat16"])
def test_half_precision_learns_what_float32_learns(policy: str) -> None:
    losses = {}
    for name in ("float32", policy):
        optimizer = jt.with_loss_scale(optax.sgd(0.05), jt.torch_loss_scale(2.0**8))
        step = jax.jit(jt.train_step(jt.stateless(line_loss), optimizer, policy=name))
        params = jt.get_policy(name).cast_to_param({"w": jnp.array([1.0, 2.0])})
        state = jt.TrainState.create(params, optimizer)
        for seed in range(40):
            state, metrics = step(state, line_batch(seed))
            assert metrics["loss"].dtype == jnp.float32
        losses[name] = float(line_loss(jt.cast_to_full(state.params), line_batch(99)))
    assert losses["float32"] < 0.2
    assert losses[policy] == pytest.approx(losses["float32"], abs=0.05)


def test_metrics_are_those_of_float64() -> None:
    optimizer = jt.with_loss_scale(optax.chain(optax.clip_by_global_norm(0.5), optax.sgd(1.0)),
                                   jt.torch_loss_scale())  # fmt: skip
    step = jax.jit(jt.train_step(jt.stateless(line_loss), optimizer))
    x, w = np.asarray(line_batch(0), np.float64), np.array([1.0, 2.0])
    state, metrics = step(line_state(optimizer), line_batch(0))
    gradient = 2 * x.T @ (x @ w) / len(x)
    norm = np.linalg.norm(gradient)
    assert set(metrics) == {
        "loss", "aux", "grad_norm", "grads_finite", "loss_scale", "skipped_steps",
    }  # fmt: skip
    np.testing.assert_allclose(metrics["loss"], np.mean((x @ w) ** 2), rtol=1e-6)
    np.testing.assert_allclose(metrics["grad_norm"], norm, rtol=1e-6)
    np.testing.assert_allclose(state.params["w"], w - 0.5 * gradient / norm, rtol=1e-5)


# --- micro-batches ----------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["float32", "mixed_float16"])
def test_accumulation_equals_the_whole_batch(policy: str) -> None:
    optimizer = jt.with_loss_scale(optax.sgd(0.1), jt.torch_loss_scale(2.0**8))
    whole = jax.jit(jt.train_step(jt.stateless(line_loss), optimizer, policy=policy))
    split = jax.jit(jt.train_step(jt.stateless(line_loss), optimizer, policy=policy, accumulate_steps=4))
    a, b = line_state(optimizer), line_state(optimizer)
    tolerance = 1e-6 if policy == "float32" else 2e-3
    for seed in range(5):
        (a, in_one), (b, in_four) = whole(a, line_batch(seed)), split(b, line_batch(seed))
        np.testing.assert_allclose(a.params["w"], b.params["w"], rtol=tolerance, atol=tolerance)
        np.testing.assert_allclose(in_one["loss"], in_four["loss"], rtol=tolerance * 10)


def test_one_bad_micro_batch_skips_the_global_batch_once() -> None:
    optimizer = jt.with_loss_scale(scheduled_adam(), jt.torch_loss_scale(2.0**10))
    step = jax.jit(jt.train_step(net_loss, optimizer, accumulate_steps=4))
    state = net_state(optimizer)
    batch = net_batch(0)
    batch["poison"] = batch["poison"].at[4:8].set(jnp.inf)  # the second of four
    after, metrics = step(state, batch)
    assert_bitwise_equal(after.params, state.params)
    assert_bitwise_equal(after.model_state, state.model_state)
    assert float(metrics["loss_scale"]) == 2.0**9
    assert int(metrics["skipped_steps"]) == 1


def test_model_state_threads_through_aux_stacks_and_keys_differ() -> None:
    def loss_fn(params: Any, seen: Any, batch: Any, rng: Any) -> Any:
        draw = jax.random.uniform(rng)
        return (params["w"] * batch).sum(), (seen + 1, {"seen": seen, "draw": draw})

    step = jax.jit(jt.train_step(loss_fn, optax.sgd(0.1), accumulate_steps=3))
    state = jt.TrainState.create({"w": jnp.ones(2)}, optax.sgd(0.1), model_state=jnp.int32(0), rng=jax.random.key(0))
    state, metrics = step(state, jnp.ones((6, 2)))
    assert int(state.model_state) == 3
    np.testing.assert_array_equal(metrics["aux"]["seen"], [0, 1, 2])
    assert len(set(metrics["aux"]["draw"].tolist())) == 3


# --- optimizers in any nesting ----------------------------------------------------------------

SCALE = jt.torch_loss_scale(2.0**4)


def inner() -> optax.GradientTransformationExtraArgs:
    return jt.with_loss_scale(optax.sgd(0.1), SCALE)


def test_an_overflow_of_frozen_parameters_alone_skips_and_lowers_the_scale() -> None:
    parts: dict[Any, Any] = {"trained": jt.with_loss_scale(optax.adam(0.1), SCALE), "frozen": optax.set_to_zero()}
    optimizer = relaxed(optax.multi_transform(parts, {"head": "trained", "body": "frozen"}))

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        return params["head"] * batch["head"] + params["body"] * batch["body"]

    step = jax.jit(jt.train_step(jt.stateless(loss_fn), optimizer))
    params = {"head": jnp.float32(1.0), "body": jnp.float32(1.0)}
    state, _ = step(jt.TrainState.create(params, optimizer), {"head": jnp.ones(()), "body": jnp.ones(())})
    skipped, metrics = step(state, {"head": jnp.ones(()), "body": jnp.float32(np.inf)})
    assert not metrics["grads_finite"]
    assert_bitwise_equal(skipped.params, state.params)
    for name in ("mu", "nu", "count"):
        assert_bitwise_equal(optax.tree.get(skipped.opt_state, name), optax.tree.get(state.opt_state, name))
    assert float(metrics["loss_scale"]) == 2.0**3
    assert int(metrics["skipped_steps"]) == 1


@pytest.mark.parametrize("outside", [True, False])
def test_multi_steps_recovers_from_an_overflow(outside: bool) -> None:
    optimizer = (
        optax.MultiSteps(inner(), 2) if outside else jt.with_loss_scale(optax.MultiSteps(optax.sgd(0.1), 2), SCALE)
    )
    with jax.numpy_dtype_promotion("standard"):  # MultiSteps multiplies booleans with floats
        step = jax.jit(jt.train_step(jt.stateless(line_loss), optimizer))
        state = line_state(optimizer)
        for batch in (jnp.full((8, 2), jnp.inf), line_batch(0), line_batch(1), line_batch(2)):
            state, metrics = step(state, batch)
    assert np.isfinite(state.params["w"]).all()
    assert not np.array_equal(state.params["w"], [1, 2])
    assert int(metrics["skipped_steps"]) == 1
    assert float(metrics["loss_scale"]) == 2.0**3


def test_an_optimizer_without_a_loss_scale_works() -> None:
    optimizer = relaxed(optax.adam(0.1))
    step = jax.jit(jt.train_step(jt.stateless(line_loss), optimizer, policy="bfloat16"))
    state = jt.TrainState.create({"w": jnp.ones(2, jnp.bfloat16)}, optimizer)
    shapes = jax.eval_shape(lambda s: s, state)
    state, metrics = step(state, line_batch(0))
    assert jax.eval_shape(lambda s: s, state) == shapes  # moments keep their dtype
    assert float(metrics["loss_scale"]) == 1
    assert int(metrics["skipped_steps"]) == 0


def test_the_optimizer_gets_the_loss_as_value() -> None:
    optimizer = jt.with_loss_scale(relaxed(optax.polyak_sgd()), jt.torch_loss_scale())
    step = jax.jit(jt.train_step(jt.stateless(line_loss), optimizer))
    state, first = step(line_state(optimizer), line_batch(0))
    assert float(step(state, line_batch(0))[1]["loss"]) < float(first["loss"])


# --- transformations --------------------------------------------------------------------------


def test_one_trace_for_all_steps() -> None:
    traces = []

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        traces.append(1)
        return line_loss(params, batch)

    optimizer = jt.with_loss_scale(relaxed(optax.adamw(1e-2)), jt.deepspeed_loss_scale())
    step = jax.jit(jt.train_step(jt.stateless(loss_fn), optimizer, policy="mixed_float16"), donate_argnums=0)
    state = jt.TrainState.create({"w": jnp.asarray([1.0, 2.0]) * 1.0, "weak": jnp.asarray(1.0)}, optimizer)
    for seed in range(5):
        batch = line_batch(seed) if seed != 2 else jnp.full((8, 2), jnp.inf, jnp.float32)
        state, _ = step(state, batch)
    assert len(traces) == 1  # the look at its products reads the same program


def test_vmap_over_seeds_equals_each_alone() -> None:
    optimizer = jt.with_loss_scale(relaxed(optax.adam(0.1)), jt.torch_loss_scale(2.0**8))
    step = jt.train_step(jt.stateless(line_loss), optimizer)
    batches = jnp.stack([line_batch(0), jnp.full((8, 2), jnp.nan), line_batch(2)])

    def run(key: jax.Array, batch: jax.Array) -> jt.TrainState:
        params = {"w": jax.random.normal(key, (2,))}
        return step(jt.TrainState.create(params, optimizer, rng=key), batch)[0]

    keys = jax.random.split(jax.random.key(0), 3)
    together = jax.jit(jax.vmap(run))(keys, batches)
    assert together.opt_state.skipped_steps.tolist() == [0, 1, 0]
    assert together.opt_state.loss_scale.loss_scale.tolist() == [256, 128, 256]
    for i in range(3):
        alone = jax.jit(run)(keys[i], batches[i])
        np.testing.assert_allclose(together.params["w"][i], alone.params["w"], rtol=1e-6)


# --- errors -----------------------------------------------------------------------------------


def step_with(loss: Any, state: jt.TrainState | None = None, batch: Any = None, **options: Any) -> Any:
    """Makes a step and runs it, with plain gradient descent unless `options` have an optimizer."""
    optimizer = options.pop("optimizer", optax.sgd(0.1))
    step = jt.train_step(loss, optimizer, **options)
    return step(line_state(optimizer) if state is None else state, line_batch(0) if batch is None else batch)


def test_what_does_not_fit_is_named() -> None:
    line = jt.stateless(line_loss)
    with pytest.raises(TypeError, match=r"optimizer must be an optax\.GradientTransformation, got 3"):
        step_with(line, optimizer=3)
    with pytest.raises(TypeError, match="policy must be a Policy, a PathPolicy or a name such as 'autocast_float16', "):
        step_with(line, policy=jnp.float16)
    with pytest.raises(ValueError, match="accumulate_steps=0 must be an integer of at least 1"):
        step_with(line, accumulate_steps=0)
    with pytest.raises(ValueError, match=r"accumulate_steps=3 must divide.*'x' has shape \(8, 2\)"):
        step_with(line, batch={"x": jnp.ones((8, 2))}, accumulate_steps=3)
    with pytest.raises(ValueError, match=r"'\(root\)' has shape \(\)"):
        step_with(line, batch=jnp.float32(1), accumulate_steps=3)
    low = jt.TrainState.create({"w": jnp.ones(2, jnp.float16)}, inner())
    with pytest.raises(ValueError, match="'w' is float16, not float32"):
        step_with(line, low, optimizer=inner(), policy="mixed_float16")
    with pytest.raises(TypeError, match=r"loss_fn returned float32.*it must be a loss_fn.*; stateless"):
        step_with(lambda p, s, b, r: p["w"].sum())
    two_scales = optax.multi_transform({"a": inner(), "b": inner()}, lambda p: {"w": "a", "v": "b"})
    state = jt.TrainState.create({"w": jnp.ones(2), "v": jnp.ones(2)}, two_scales)
    with pytest.raises(ValueError, match="has 2 loss scales"):
        step_with(jt.stateless(lambda p, b: (p["w"] * p["v"]).sum()), state, optimizer=two_scales)


def test_a_model_state_that_changes_is_named() -> None:
    def grows(params: Any, state: Any, batch: Any, rng: Any) -> Any:
        return params["w"].sum(), ({"mean": jnp.ones(3)}, None)

    with pytest.raises(TypeError, match="loss_fn must return a model_state of the state's structure, got"):
        step_with(grows)
    for old, text in ((jnp.ones(2), r"float32\[2\]"), (jnp.arange(3), r"int32\[3\]")):
        with pytest.raises(TypeError, match=rf"'mean' as float32\[3\], but the state has {text}"):
            step_with(grows, line_state(optax.sgd(0.1), model_state={"mean": old}))


@pytest.mark.parametrize("accumulate_steps", [1, 2])
def test_float64_stays_float64(accumulate_steps: int) -> None:
    with jax.enable_x64(True):
        step = jt.train_step(jt.stateless(lambda p, x: ((x @ p["w"]) ** 2).mean()), inner(),
                             accumulate_steps=accumulate_steps)  # fmt: skip
        state = jt.TrainState.create({"w": jnp.array([1.0, 2.0], jnp.float64)}, inner())
        x = np.random.default_rng(0).normal(size=(8, 2))
        state, metrics = jax.jit(step)(state, x)
        expected = np.array([1, 2]) - 0.1 * 2 * x.T @ (x @ [1, 2]) / 8
        np.testing.assert_allclose(state.params["w"], expected, rtol=1e-12)
        assert metrics["loss"].dtype == jnp.float64


def test_model_state_keeps_its_dtype() -> None:
    def halves(params: Any, state: Any, batch: Any, rng: Any) -> Any:
        return params["w"].sum(), (state.astype(jnp.float16), None)

    step = jax.jit(jt.train_step(halves, optax.sgd(0.1)))
    state, _ = step(line_state(optax.sgd(0.1), model_state=jnp.ones(2)), line_batch(0))
    assert state.model_state.dtype == jnp.float32


def test_it_is_a_frozen_value() -> None:
    step = jt.train_step(jt.stateless(line_loss), inner())
    assert step.with_axes("data", "model").axis_names == ("data", "model")
    assert step.axis_names == ()
    with pytest.raises(dataclasses.FrozenInstanceError):
        step.accumulate_steps = 2  # type: ignore[misc]


def test_stateless_hands_aux_on() -> None:
    fn = jt.stateless(lambda p, b: (p * b, "aux"), has_aux=True)
    assert fn(2.0, "state", 3.0, None) == (6.0, ("state", "aux"))


# --- parallel ---------------------------------------------------------------------------------

MESH = Mesh(np.array(jax.devices()), ("data",))


def parallel(step: jt.steps.TrainStep, way: str) -> Any:
    step = step.with_axes("data")
    if way == "pmap":
        return jax.pmap(step, axis_name="data", in_axes=(None, 0), out_axes=None)
    return jax.jit(
        jax.shard_map(step, mesh=MESH, in_specs=(P(), P("data")), out_specs=P(), check_vma=way == "shard_map with vma")
    )


def sharded(batch: Any, way: str) -> Any:
    if way != "pmap":
        return batch
    return jax.tree.map(lambda x: x.reshape(8, -1, *x.shape[1:]), batch)


WAYS = ("shard_map with vma", "shard_map without vma", "pmap")


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("way", "accumulate_steps"), [*((way, 1) for way in WAYS), ("shard_map with vma", 2), ("pmap", 2)]
)
def test_eight_devices_equal_one(way: str, accumulate_steps: int) -> None:
    """Statistics are averaged, devices draw apart, and an overflow on one device skips on all."""

    def loss_fn(params: Any, stats: Any, batch: Any, rng: Any) -> Any:
        draw = jax.random.uniform(rng)
        mean = jax.lax.stop_gradient(batch).mean()
        return line_loss(params, batch), (mean, {"draw": draw, "square": draw**2})

    optimizer = jt.with_loss_scale(optax.sgd(0.1, momentum=0.9), jt.torch_loss_scale(2.0**8))
    step = jt.train_step(loss_fn, optimizer, policy="float32", accumulate_steps=accumulate_steps)
    on_eight, on_one = parallel(step, way), jax.jit(step)
    a, b = (line_state(optimizer, model_state=jnp.float32(0), rng=jax.random.key(0)) for _ in range(2))
    batches = [line_batch(seed, examples=32) for seed in range(5)]
    for batch in batches:
        a, many = on_eight(a, sharded(batch, way))
        b, one = on_one(b, batch)
        np.testing.assert_allclose(many["loss"], one["loss"], rtol=1e-5)
        np.testing.assert_allclose(many["grad_norm"], one["grad_norm"], rtol=1e-5)
        # Equal draws everywhere would have no variance.
        assert (many["aux"]["square"] > many["aux"]["draw"] ** 2 + 1e-3).all()
    np.testing.assert_allclose(a.params["w"], b.params["w"], rtol=1e-5, atol=1e-6)
    if accumulate_steps == 1:  # else it is that of the last micro-batch
        np.testing.assert_allclose(a.model_state, np.mean(batches[-1]), rtol=1e-5)

    before = jax.device_get(a.params)
    a, metrics = on_eight(a, sharded(batches[-1].at[9].set(jnp.inf), way))  # an example of the third device
    assert_bitwise_equal(jax.device_get(a.params), before)
    assert (int(metrics["skipped_steps"]), float(metrics["loss_scale"])) == (1, 2.0**7)
