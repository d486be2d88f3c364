"""Skip rules in `with_loss_scale`: one decision over all devices, a state that stays as it was to the last bit."""

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx, serialization
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from promotion import relaxed
from pytrees import assert_bitwise_equal, host_copy

import jmp_train as jt
from jmp_train.policies.optimizers import SkipRuleState

pytestmark = pytest.mark.quick

DEVICES, ROWS, WIDTH, WARMUP = 8, 16, 16, 4
MESH = Mesh(np.array(jax.devices()), ("data",))
RULE = jt.spikes(window=8, warmup=WARMUP)
NEVER = jt.policies.SkipRule(init=tuple, update=lambda norm, state: (norm < 0, state))
ALWAYS = jt.policies.SkipRule(init=tuple, update=lambda norm, state: (norm >= 0, state))
PARAMS = {"w": jnp.linspace(-1, 1, WIDTH), "b": jnp.array([-0.0, 0.5])}
SCALE = 2.0**4


def loss_fn(params: Any, model_state: Any, batch: jax.Array, rng: Any) -> Any:
    """Returns a loss whose gradients are in proportion to the batch, and the batch's mean as model state."""
    del rng
    half = params["w"].astype(batch.dtype)
    loss = (batch @ half).astype(jnp.float32).mean() + params["b"].astype(jnp.float32).sum()
    return loss, ({"mean": 0.5 * model_state["mean"] + 0.5 * batch.astype(jnp.float32).mean()}, None)


def optimizer(skip: jt.policies.SkipRule[Any] | None = RULE, inner: Any = None) -> Any:
    inner = optax.sgd(0.01, momentum=0.9) if inner is None else inner
    return jt.with_loss_scale(inner, jt.torch_loss_scale(SCALE, growth_interval=1000), skip=skip)


def first_state(tx: Any, params: Any = None) -> jt.TrainState:
    return jt.TrainState.create(PARAMS if params is None else params, tx, model_state={"mean": jnp.zeros(())})


def good(number: int) -> np.ndarray:
    rng = np.random.default_rng(number)
    return rng.uniform(0.9, 1.1, (ROWS, WIDTH)).astype(np.float32)


def with_spike(number: int, row: int = 11) -> np.ndarray:
    """Returns a batch whose gradient is a spike, by one row alone, which one device of eight has."""
    batch = good(number)
    batch[row] *= 1000
    return batch


@functools.cache
def one_device(tx: Any, **options: Any) -> Any:
    return jax.jit(jt.train_step(loss_fn, tx, **options))


TX, PLAIN, SKIPPING = optimizer(), optimizer(None), optimizer(ALWAYS)
ONES = jax.tree.map(jnp.ones_like, PARAMS)


def warm(run: Any, state: jt.TrainState, steps: int = WARMUP + 2) -> jt.TrainState:
    for number in range(steps):
        state, metrics = run(state, good(number))
        assert int(metrics["skip_reason"]) == 0
    return state


def skip_a_spike(run: Any, state: jt.TrainState, steps: int = WARMUP + 2) -> tuple[jt.TrainState, jt.TrainState, Any]:
    """Returns the states before and after a spike that is skipped, and its metrics."""
    before = warm(run, state, steps)
    after, metrics = run(before, with_spike(10))
    assert_skipped(before, after)
    assert int(metrics["skip_reason"]) == 2
    return before, after, metrics


def assert_skipped(before: jt.TrainState, after: jt.TrainState) -> None:
    """Asserts that all that a skipped step keeps is as it was, and that the loss scale counts it as a finite one."""
    assert_bitwise_equal(host_copy(after.params), host_copy(before.params))
    assert_bitwise_equal(host_copy(after.model_state), host_copy(before.model_state))
    old, new = (scaled(state) for state in (before, after))
    assert_bitwise_equal(host_copy(new.inner_state.inner_state), host_copy(old.inner_state.inner_state))
    assert float(new.loss_scale.loss_scale) == float(old.loss_scale.loss_scale)
    assert int(new.loss_scale.counter) == int(old.loss_scale.counter) + 1
    assert (bool(new.last_finite), bool(new.last_taken), int(new.skip_reason)) == (True, False, 2)
    assert int(new.skipped_steps) == int(old.skipped_steps) + 1
    assert int(new.consecutive_skips) == int(old.consecutive_skips) + 1
    assert int(new.inner_state.rule_state.samples) == int(old.inner_state.rule_state.samples) + 1


def scaled(state: jt.TrainState) -> Any:
    opt_state = state.opt_state
    return opt_state if isinstance(opt_state, jt.policies.LossScaledState) else opt_state.inner_state


def sharded(by: Callable[..., Any] | None) -> Callable[[jt.steps.TrainStep], Any]:
    def route(step: jt.steps.TrainStep) -> Any:
        shardings = None if by is None else by(first_state(step.optimizer), MESH, min_size=8)
        return jt.sharded_step(step, MESH, shardings=shardings)

    return route


ROUTES: dict[str, Callable[[jt.steps.TrainStep], Any]] = {
    "data_parallel": lambda step: jt.data_parallel(step, MESH),
    "pmap_step": jt.pmap_step,
    "sharded_step": sharded(None),
    "zero1": sharded(jt.zero1_shardings),
    "fsdp": sharded(jt.fsdp_shardings),
}


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("route", ROUTES)
def test_a_spike_on_one_device_is_skipped_by_all(route: str) -> None:
    run = ROUTES[route](jt.train_step(loss_fn, TX))
    _, after, metrics = skip_a_spike(run, first_state(TX))
    assert (int(metrics["skipped_steps"]), bool(metrics["grads_finite"])) == (1, True)
    for leaf in jax.tree.leaves(after):
        if leaf.sharding.is_fully_replicated:
            for shard in leaf.addressable_shards:
                assert_bitwise_equal(np.asarray(shard.data), np.asarray(leaf))
    later, metrics = run(after, good(11))
    assert (int(metrics["skip_reason"]), int(scaled(later).consecutive_skips)) == (0, 0)
    assert not np.array_equal(later.params["w"], after.params["w"])


def test_gradients_that_are_split_over_devices_have_one_decision() -> None:
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))
    specs = {"w": P("model"), "b": P()}
    state_specs = jax.tree.map(lambda x: P("model") if x.ndim and x.size == WIDTH else P(), TX.init(PARAMS))

    def update(grads: Any, state: Any, params: Any) -> Any:
        return TX.update(grads, state, params, axis_names=("data", "model"))

    run = jax.jit(
        jax.shard_map(update, mesh=mesh, in_specs=(specs, state_specs, specs), out_specs=(specs, state_specs))
    )
    state, reasons = TX.init(PARAMS), []
    for number in range(7):
        grads = {"w": jnp.asarray(good(number)[0]), "b": jnp.zeros(2)}
        if number == 5:
            grads["w"] = grads["w"].at[-1].mul(1e4)  # on the devices of the second half alone
        _, state = run(grads, state, PARAMS)
        reasons.append(int(state.skip_reason))
    assert reasons == [0, 0, 0, 0, 0, 2, 0]


def test_micro_batches_are_one_step() -> None:
    skip_a_spike(one_device(TX, accumulate_steps=4), first_state(TX))


def test_multi_steps_go_on_as_without_the_spike() -> None:
    tx = optimizer(inner=relaxed(optax.MultiSteps(optax.sgd(0.01, momentum=0.9), 2).gradient_transformation()))
    run = one_device(tx)
    before, skipped, _ = skip_a_spike(run, first_state(tx), steps=WARMUP + 1)  # in the middle of two
    after, _ = run(skipped, good(11))
    expected, _ = run(before, good(11))
    assert_bitwise_equal(after.params, expected.params)
    assert_bitwise_equal(scaled(after).inner_state.inner_state, scaled(expected).inner_state.inner_state)
    assert not np.array_equal(after.params["w"], before.params["w"])


@pytest.mark.parametrize("around", [optax.MultiSteps, optax.apply_if_finite])
def test_what_hides_steps_from_a_rule_is_refused(around: Any) -> None:
    tx = around(TX, 2)
    step = jt.train_step(loss_fn, tx)
    tx = tx.gradient_transformation() if isinstance(tx, optax.MultiSteps) else tx
    with pytest.raises(ValueError, match=r"of its state, wraps a with_loss_scale whose skip rule"):
        jax.eval_shape(step, first_state(tx), good(0))


def test_master_weights_stay_too() -> None:
    tx = jt.with_master_weights(optimizer())
    params = jax.tree.map(lambda x: x.astype(jnp.float16), PARAMS)
    before, after, _ = skip_a_spike(one_device(tx), first_state(tx, params))
    assert_bitwise_equal(jt.get_master_weights(after.opt_state), jt.get_master_weights(before.opt_state))


@pytest.mark.parametrize("around", [lambda tx: tx, jt.with_master_weights], ids=["alone", "master weights"])
def test_updates_of_a_skipped_step_change_no_bit(around: Any) -> None:
    tx = around(SKIPPING)
    updates, _ = tx.update(ONES, tx.init(PARAMS), PARAMS)
    assert_bitwise_equal(optax.apply_updates(PARAMS, updates), PARAMS)


def test_a_rule_in_a_chain_or_for_some_parameters_keeps_all() -> None:
    labels = {"w": "trained", "b": "frozen"}
    transforms: Any = {"trained": SKIPPING, "frozen": optax.set_to_zero()}
    for tx in (optax.chain(SKIPPING, optax.scale(0.5)), optax.multi_transform(transforms, labels)):
        before = first_state(tx)
        after, metrics = jax.jit(jt.train_step(loss_fn, tx))(before, good(0))
        assert int(metrics["skip_reason"]) == 2
        assert_bitwise_equal((after.params, after.model_state), (before.params, before.model_state))


def test_steps_that_are_not_finite_leave_the_statistics_as_they_were() -> None:
    run = one_device(TX)
    before = warm(run, first_state(TX))
    for bad in (np.inf, np.nan):
        batch = good(10)
        batch[3, 3] = bad
        after, metrics = run(before, batch)
        old, new = scaled(before), scaled(after)
        assert_bitwise_equal(new.inner_state, old.inner_state)
        assert (int(metrics["skip_reason"]), int(new.skip_reason), bool(new.last_taken)) == (1, 1, False)
        assert float(new.loss_scale.loss_scale) == SCALE / 2
        assert_bitwise_equal((after.params, after.model_state), (before.params, before.model_state))


def test_a_rule_that_never_skips_changes_nothing() -> None:
    never_skipping = optimizer(NEVER)
    plain, never = first_state(PLAIN), first_state(never_skipping)
    batches = [good(0), with_spike(1), np.full((ROWS, WIDTH), np.inf, np.float32), good(2)]
    for batch in batches:
        plain, metrics = one_device(PLAIN)(plain, batch)
        never, with_reason = one_device(never_skipping)(never, batch)
        assert_bitwise_equal({**metrics, "skip_reason": with_reason["skip_reason"]}, with_reason)
    unwrapped = never.opt_state._replace(inner_state=never.opt_state.inner_state.inner_state)
    assert_bitwise_equal(dataclasses.replace(never, opt_state=unwrapped), plain)


def test_several_losses_are_skipped_by_the_norm_of_their_sum() -> None:
    def two_losses(params: Any, model_state: Any, batch: Any, rng: Any) -> Any:
        loss, rest = loss_fn(params, model_state, batch, rng)
        return (loss, (0.01 * params["b"] ** 2).sum()), rest

    scales = jt.policies.PerLossScale((jt.torch_loss_scale(8.0), jt.torch_loss_scale(32.0)))
    tx = jt.with_loss_scale(optax.sgd(0.01), scales, skip=RULE)
    run = jax.jit(jt.train_step(two_losses, tx))
    before = warm(run, first_state(tx))
    after, metrics = run(before, with_spike(10))
    assert int(metrics["skip_reason"]) == 2
    assert metrics["loss_scale"].tolist() == [8.0, 32.0]
    assert_bitwise_equal(after.params, before.params)


def test_a_checkpoint_goes_on_as_if_nothing_had_happened(tmp_path: Path) -> None:
    run = one_device(TX)
    state = warm(run, first_state(TX), steps=3)  # the warm-up ends after it
    store = jt.CheckpointStore(tmp_path)
    store.save(3, state)
    _, restored = store.restore(first_state(TX))
    assert_bitwise_equal(restored, state)
    again = serialization.from_bytes(first_state(TX).opt_state, serialization.to_bytes(state.opt_state))
    assert_bitwise_equal(jax.tree.map(jnp.asarray, again), state.opt_state)
    reasons = []
    for batch in (good(3), good(4), with_spike(5), good(6)):
        state, metrics = run(state, batch)
        restored, _ = run(restored, batch)
        reasons.append(int(metrics["skip_reason"]))
    assert reasons == [0, 0, 2, 0]
    assert_bitwise_equal(restored, state)


def test_a_state_without_a_rule_is_adopted_and_statistics_are_kept() -> None:
    _, old = PLAIN.update(ONES, PLAIN.init(PARAMS), PARAMS)
    adopted = jt.adopt_opt_state(TX.init(PARAMS), old)
    assert_bitwise_equal(adopted.inner_state.inner_state, old.inner_state)
    assert int(adopted.inner_state.rule_state.samples) == 0
    _, new = TX.update(ONES, adopted, PARAMS)
    assert int(new.loss_scale.counter) == 2
    assert_bitwise_equal(jt.adopt_opt_state(TX.init(PARAMS), new), new)
    back = jt.adopt_opt_state(PLAIN.init(PARAMS), new)
    assert_bitwise_equal(back.inner_state, new.inner_state.inner_state)


def test_a_flax_state_keeps_what_a_spike_made() -> None:
    class FlaxState(jt.FlaxTrainState):
        batch_stats: Any

    state = FlaxState.create(apply_fn=None, params=PARAMS, tx=SKIPPING, batch_stats=jnp.zeros(2))
    new = state.apply_gradients(grads=ONES, batch_stats=jnp.ones(2))
    assert_bitwise_equal((new.params, new.batch_stats), (state.params, state.batch_stats))
    assert int(new.step) == 1


def test_a_spike_leaves_a_capsule(tmp_path: Path) -> None:
    run = one_device(TX)
    with jt.SkipRecorder(tmp_path, wait=True) as recorder:
        watched = recorder.watch(run)
        before = warm(watched, first_state(TX))
        after, metrics = watched(before, jnp.asarray(with_spike(10)))
    path = recorder.last_capsule()
    assert path is not None
    assert [file.name for file in tmp_path.iterdir()] == [path.name]
    again, batch = jt.load_capsule(path, after)
    assert_bitwise_equal(scaled(again).inner_state.rule_state, scaled(before).inner_state.rule_state)
    assert_bitwise_equal(run(again, batch)[1], metrics)


def test_check_progress_names_the_rule() -> None:
    _, state = SKIPPING.update(ONES, SKIPPING.init(PARAMS), PARAMS)
    with pytest.raises(jt.policies.StalledTrainingError, match="skipped for non-finite gradients or by the skip rule"):
        jt.check_progress(state, stop_after=1)


def test_an_amp_mode_takes_a_rule(caplog: pytest.LogCaptureFixture) -> None:
    amp = jt.amp_mode("apex", opt_level="O1", loss_scale=8.0, verbosity=1)
    loss, tx = amp.transform(loss_fn, optax.sgd(0.01), skip=ALWAYS)
    state = first_state(tx)
    after, metrics = jax.jit(jt.train_step(loss, tx))(state, good(0))
    assert int(metrics["skip_reason"]) == 2
    assert_bitwise_equal(after.params, state.params)
    with caplog.at_level("INFO", "jmp_train.amp"):
        amp.log(metrics)
    assert "gradient spike: step skipped, 1 so far" in caplog.text
    assert "overflow" not in caplog.text


def test_what_is_no_rule_or_another_rules_is_refused() -> None:
    with pytest.raises(TypeError, match=r"skip must be a SkipRule, such as spikes\(\)"):
        optimizer(jt.spikes)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="state has no skip rule's state"):
        TX.update(ONES, PLAIN.init(PARAMS), PARAMS)
    with pytest.raises(ValueError, match="state has a skip rule's state"):
        PLAIN.update(ONES, TX.init(PARAMS), PARAMS)
    with pytest.raises(ValueError, match="has a skip rule, but the step's optimizer has none"):
        jax.eval_shape(jt.train_step(loss_fn, PLAIN), first_state(TX), good(0))
    growing = jt.policies.SkipRule(init=lambda: jnp.zeros(1), update=lambda norm, state: (norm < 0, jnp.zeros(2)))
    tx = optimizer(growing)
    with pytest.raises(TypeError, match=r"float32\[2\] in one tree and float32\[1\]"):
        tx.update(PARAMS, tx.init(PARAMS), PARAMS)


def test_without_a_rule_there_is_no_trace_of_one() -> None:
    state = first_state(PLAIN)
    _, metrics = jax.eval_shape(jt.train_step(loss_fn, PLAIN), state, good(0))
    assert "skip_reason" not in metrics
    nodes = jax.tree.leaves(state.opt_state, is_leaf=lambda x: isinstance(x, SkipRuleState))
    assert not any(isinstance(x, SkipRuleState) for x in nodes)
    assert (int(state.opt_state.skip_reason), bool(state.opt_state.last_taken)) == (0, True)


def test_select_step_keeps_what_an_nnx_model_changed() -> None:
    model = nnx.BatchNorm(2, momentum=0.5, rngs=nnx.Rngs(0))
    tracker = nnx.Optimizer(model, SKIPPING, wrt=nnx.Param)
    before = jax.tree.map(jnp.copy, nnx.state(model))

    @nnx.jit
    def step(model: nnx.BatchNorm, tracker: nnx.Optimizer, x: jax.Array) -> jax.Array:
        old = jax.tree.map(jnp.copy, nnx.state(model, nnx.BatchStat))
        scale = jt.get_loss_scale(tracker)
        _, grads = jt.nnx_value_and_grad(lambda model, x: (model(x) ** 2).sum())(scale, model, x)
        tracker.update(model, grads)
        changed = nnx.state(model, nnx.BatchStat)
        nnx.update(model, jt.select_step(tracker, changed, old))
        return tracker.opt_state.skip_reason

    assert int(step(model, tracker, jnp.arange(6.0).reshape(3, 2))) == 2
    assert_bitwise_equal(nnx.state(model), before)


def test_a_skipped_step_loses_no_updates() -> None:
    for rule, share in ((NEVER, 1.0), (ALWAYS, 0.0)):
        tx = optimizer(rule, optax.sgd(1e-12))
        params = {"w": jnp.ones(WIDTH), "b": jnp.ones(2)}
        run = jax.jit(jt.train_step(loss_fn, tx, watch=["lost_updates"]))
        _, metrics = run(first_state(tx, params), good(0))
        assert float(metrics["watch"]["lost_updates"]["w"]) == share
