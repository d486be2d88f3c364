"""Skipped steps leave capsules, from which their gradients come out again bit for bit."""

import dataclasses
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from promotion import relaxed
from pytrees import assert_bitwise_equal, poison_gradient

import jmp_train as jt
from jmp_train.steps import GradientFunction, StepGradients, TrainStep
from jmp_train.tools.capsules import recorder as recorder_module

pytestmark = pytest.mark.quick

FEATURES, EXAMPLES = 6, 16
Run = Callable[[Any, Any], tuple[Any, dict[str, Any]]]


def with_gradients(gradients: GradientFunction) -> GradientFunction:
    """Returns a gradient function whose aux is its scaled gradients."""

    def run(*args: Any) -> StepGradients:
        result = gradients(*args)
        return result._replace(aux=result.grads)

    return run


def telling(step: TrainStep) -> TrainStep:
    """Returns a step whose metrics have the scaled gradients as aux."""
    return step.with_transforms(with_gradients)


def loss_fn(params: Any, model_state: Any, batch: Any, rng: Any) -> Any:
    """Returns the loss of two layers with dropout, whose gradients the batch poisons, and a mean that it keeps."""
    x = poison_gradient(batch["x"] @ params["in"], batch["poison"][:, None])
    kept = jax.random.bernoulli(rng, 0.8, x.shape)
    hidden = jnp.where(kept, jax.nn.relu(x), jnp.zeros_like(x))
    loss = ((hidden @ params["out"]).astype(jnp.float32)[:, 0] - batch["y"].astype(jnp.float32)) ** 2
    mean = jnp.mean(jax.lax.stop_gradient(hidden).astype(jnp.float32))
    return loss.mean(), ({"mean": model_state["mean"].astype(jnp.float32) * 0.9 + mean * 0.1}, None)


def two_losses(params: Any, model_state: Any, batch: Any, rng: Any) -> Any:
    loss, (model_state, aux) = loss_fn(params, model_state, batch, rng)
    penalty = sum(jnp.sum(jnp.square(x.astype(jnp.float32))) for x in params.values())
    return (loss, penalty), (model_state, aux)


def make_params() -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    shapes = {"in": (FEATURES, 8), "out": (8, 1)}
    return {name: random.normal(0, 0.5, shape).astype(np.float32) for name, shape in shapes.items()}


def batches(skips: set[int], count: int) -> Iterator[dict[str, np.ndarray]]:
    """Yields batches, those of the given numbers with an infinite gradient in one example."""
    random = np.random.default_rng(1)
    for number in range(count):
        poison = np.ones(EXAMPLES, np.float32)
        if number in skips:
            poison[number % EXAMPLES] = np.inf
        x = random.normal(0, 1, (EXAMPLES, FEATURES)).astype(np.float32)
        yield {"x": x, "y": x[:, 0], "poison": poison}


def make_step(mode: str = "torch", accumulate_steps: int = 1, **options: Any) -> tuple[TrainStep, jt.TrainState]:
    optimizer = relaxed(optax.adam(1e-2))
    losses = two_losses if options.get("num_losses") else loss_fn
    amp = jt.amp_mode(mode, **options)
    if amp.precision.keep_batchnorm_fp32:
        amp = dataclasses.replace(amp, batch_norms=())
    fn, optimizer = amp.transform(losses, optimizer)
    step = jt.train_step(fn, optimizer, accumulate_steps=accumulate_steps)
    state = jt.TrainState.create(
        make_params(),
        optimizer,
        model_state=amp.cast_model_state({"mean": jnp.zeros(())}),
        rng=jax.random.key(7),
        cast_params=amp.cast_params,
    )
    return telling(step), state


def mesh_of(count: int) -> Mesh:
    return Mesh(np.array(jax.devices()[:count]), ("data",))


ROUTES: dict[str, Callable[[TrainStep], Run]] = {
    "one device": lambda step: jax.jit(step, donate_argnums=0),
    "shard_map": lambda step: jax.jit(jt.data_parallel(step, mesh_of(8)), donate_argnums=0),
    "pmap": lambda step: jt.pmap_step(step, donate_argnums=0),
    "jit": lambda step: jt.sharded_step(step, mesh_of(8), donate_argnums=0),
}


def check_replays(run: Run, state: Any, directory: Path, count: int, skips: set[int], **options: Any) -> int:
    """Trains with skips, replays each from its capsule and the state after it, and returns how many there were.

    The recorder waits, so that the state after a skip is there before the next step takes it.
    """
    found = 0
    with jt.SkipRecorder(directory, wait=True, **options) as recorder:
        watched = recorder.watch(run)
        for batch in batches(skips, count):
            last = recorder.last_capsule()
            state, metrics = watched(state, batch)
            newest = recorder.last_capsule()
            if newest is None or newest == last:
                assert bool(metrics["grads_finite"])
                continue
            before, again = jt.load_capsule(newest, copied(state))
            assert_bitwise_equal(again, batch)
            replayed, replayed_metrics = run(before, again)
            assert_bitwise_equal(replayed_metrics, metrics)
            assert_bitwise_equal(replayed, state)
            assert not all(np.isfinite(x).all() for x in jax.tree.leaves(replayed_metrics["aux"]))
            found += 1
    return found


def copied(tree: Any) -> Any:
    return jax.tree.map(jnp.copy, tree)


MODES: list[tuple[str, dict[str, Any]]] = [
    ("torch", {"init_scale": 256.0}),
    ("torch", {"dtype": jnp.bfloat16}),
    ("apex", {"opt_level": "O0"}),
    ("apex", {"opt_level": "O1"}),
    ("apex", {"opt_level": "O2"}),
    ("apex", {"opt_level": "O3"}),
    ("naive", {"initial_scale": 256.0}),
    ("apex", {"opt_level": "O2", "num_losses": 2}),
    ("torch", {"init_scale": 256.0, "accumulate_steps": 2}),
    ("naive", {"initial_scale": 2.0**8, "hysteresis": 3, "accumulate_steps": 2}),
]
# Each mode on one device and by one other route, and each route with several modes.
PAIRS = [(*mode, route) for i, mode in enumerate(MODES) for route in ("one device", [*ROUTES][1 + i % 3])]


def test_a_skip_is_replayed_bit_by_bit(tmp_path: Path) -> None:
    step, state = make_step(init_scale=256.0, growth_interval=2)
    assert check_replays(ROUTES["one device"](step), state, tmp_path, 6, {1, 4, 5}) == 3
    assert [path.name for path in sorted(tmp_path.iterdir())] == [f"step_{number:08d}.capsule" for number in (1, 4, 5)]


@pytest.mark.full
@pytest.mark.parametrize(("mode", "options", "route"), PAIRS)
def test_fifty_of_fifty_are_replayed(mode: str, options: dict[str, Any], route: str, tmp_path: Path) -> None:
    step, state = make_step(mode, **options)
    assert check_replays(ROUTES[route](step), state, tmp_path, 60, set(range(60)) - set(range(3, 60, 6))) == 50


def small_step() -> tuple[jt.steps.TrainStep, jt.TrainState]:
    """Returns a step of little to compile, whose batches are skipped if they have an inf."""
    optimizer = jt.with_loss_scale(optax.sgd(0.1, momentum=0.9), jt.torch_loss_scale(256.0))
    step = jt.train_step(jt.stateless(lambda w, x: (w.sum() * x).mean()), optimizer)
    return step, jt.TrainState.create(jnp.ones(4), optimizer, rng=jax.random.key(0))


GOOD, BAD = np.ones(4, np.float32), np.full(4, np.inf, np.float32)


def test_a_state_that_is_not_on_its_mesh_yet_is_taken(tmp_path: Path) -> None:
    step, state = small_step()
    devices = jax.devices()
    state = dataclasses.replace(
        state,
        params=np.ones(4, np.float32),
        rng=jax.device_put(state.rng, devices[1]),
        step=jax.device_put(state.step, devices[2]),
    )
    run = jt.data_parallel(step, mesh_of(2))
    with jt.SkipRecorder(tmp_path, wait=True) as recorder:
        after, metrics = recorder.watch(run)(state, BAD)
    for given in (state, after):
        before, batch = jt.load_capsule(tmp_path / "step_00000000.capsule", given)
        assert_bitwise_equal(run(before, batch), (after, metrics))


@pytest.mark.full
def test_sharded_states_are_replayed(tmp_path: Path) -> None:
    mesh = mesh_of(8)
    step, state = make_step("naive", initial_scale=256.0)
    shardings = jt.fsdp_shardings(state, mesh, min_size=8)
    run = jt.sharded_step(step, mesh, shardings=shardings, donate_argnums=0)
    assert check_replays(run, jax.device_put(state, shardings), tmp_path / "fsdp", 8, {0, 2, 3, 7}) == 4

    pipe = Mesh(np.array(jax.devices()[:4]), ("pipe",))
    stages = jt.pipeline(lambda w, x, rng: x * w, pipe, micro_batches=2)
    optimizer = jt.with_loss_scale(relaxed(optax.adam(0.1)), jt.torch_loss_scale(256.0))
    fn = jt.stateless(lambda params, batch: (stages(params, batch["x"]) * batch["poison"][:, None]).mean())
    step = telling(jt.train_step(fn, optimizer, policy="mixed_float16"))
    state = jt.TrainState.create(jax.device_put(jnp.ones(4), NamedSharding(pipe, P("pipe"))), optimizer)
    run = jax.jit(step, donate_argnums=0)
    assert check_replays(run, state, tmp_path / "pipe", 8, {0, 2, 3, 7}, save_state=True) == 4


@pytest.mark.full
def test_keys_outside_of_the_loss_scale_are_put_back(tmp_path: Path) -> None:
    optimizer = jt.with_loss_scale(relaxed(optax.adam(0.1)), jt.megatron_loss_scale(256.0, hysteresis=2))
    optimizer = jt.with_stochastic_rounding(optimizer, jax.random.key(3))
    fn = jt.stateless(lambda w, x: (w * x["x"][:, :4].astype(w.dtype)).astype(jnp.float32).mean() * x["poison"].max())
    step = telling(jt.train_step(fn, optimizer))
    state = jt.TrainState.create(jnp.ones(4, jnp.bfloat16), optimizer)
    assert check_replays(jax.jit(step), state, tmp_path, 8, {0, 2, 3, 7}) == 4


def test_the_program_is_the_same_and_compiled_once(tmp_path: Path) -> None:
    step, state = small_step()
    run = jax.jit(step, donate_argnums=0)
    program = run.lower(state, GOOD).as_text()
    with jt.SkipRecorder(tmp_path) as recorder:
        watched = recorder.watch(run)
        for x in (GOOD, BAD, GOOD, BAD):
            state, _ = watched(state, x)
        assert run.lower(state, GOOD).as_text() == program
    assert run._cache_size() == 1  # pyright: ignore
    assert len(list(tmp_path.iterdir())) == 2


class LateFlags:
    """Makes flags look as if the device had not computed them yet, and counts those that are waited for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ready, self.reads = False, 0
        monkeypatch.setattr(type(jnp.array(True)), "is_ready", lambda x: self.ready)
        monkeypatch.setattr(recorder_module.jax, "device_get", self._read)

    def _read(self, x: jax.Array) -> np.ndarray:
        self.reads += 1
        return np.asarray(x)


def test_a_good_step_is_not_waited_for_and_its_batch_is_let_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step, state = small_step()
    recorder = jt.SkipRecorder(tmp_path)
    watched = recorder.watch(jax.jit(step, donate_argnums=0))
    state, _ = watched(state, GOOD)
    recorder.flush()
    flags, alive = LateFlags(monkeypatch), weakref.WeakSet[Any]()
    for number in range(10):
        batch = GOOD.copy().view(Weak)
        alive.add(batch)
        state, _ = watched(state, batch)
        del batch
        assert flags.reads == max(0, number - 3)  # the oldest of more than four
        assert len(alive) == min(4, number + 1)
    flags.ready = True
    state, _ = watched(state, GOOD)
    assert not alive
    assert not list(tmp_path.iterdir())


class Weak(np.ndarray):
    """An array that can be referred to weakly and is hashed by its identity."""

    __hash__ = object.__hash__  # pyright: ignore
    __eq__ = object.__eq__  # pyright: ignore


def test_the_newest_capsules_stay(tmp_path: Path) -> None:
    step, state = small_step()
    run = jax.jit(step)
    for directory, keep in ((tmp_path / "of three", 3), (tmp_path / "of one", 1)):
        with jt.SkipRecorder(directory, keep=keep) as recorder:
            after = state
            for _ in range(6):
                after, _ = recorder.watch(run)(after, BAD)
        steps = [path.name for path in sorted(directory.iterdir())]
        assert steps == [f"step_{number:08d}.capsule" for number in range(6 - keep, 6)]
    (tmp_path / "of three" / "step_notes.txt").write_text("mine")
    with jt.SkipRecorder(tmp_path / "of three") as recorder:  # of an earlier step, but the newest file
        recorder.watch(run)(state, BAD)
    names = [path.name for path in sorted((tmp_path / "of three").iterdir())]
    assert names == [*(f"step_{number:08d}.capsule" for number in (0, 4, 5)), "step_notes.txt"]


def late_capsule(directory: Path, monkeypatch: pytest.MonkeyPatch, **options: Any) -> tuple[Run, list[Any]]:
    """Trains good, skipped, good, good, with flags that come late; returns the step and the state before each step."""
    step, state = small_step()
    run, states = jax.jit(step), []
    with jt.SkipRecorder(directory, **options) as recorder:
        flags = LateFlags(monkeypatch)
        for x in (GOOD, BAD, GOOD, GOOD):
            states.append(state)
            state, _ = recorder.watch(run)(state, x)
        flags.ready = True
    return run, [*states, state]


def test_a_state_that_went_on_is_refused_and_one_of_the_step_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, states = late_capsule(tmp_path, monkeypatch)
    (path,) = tmp_path.iterdir()
    for number in (0, 3, 4):
        with pytest.raises(
            ValueError, match=rf"{path} is of step 1 .*; the given state is of step {number}, .*params"
        ) as refusal:
            jt.load_capsule(path, states[number])
        assert "2 steps further when the skip was seen" in str(refusal.value)
    wanted = run(states[1], BAD)
    for number in (1, 2):  # before and after the skip
        assert_bitwise_equal(run(*jt.load_capsule(path, states[number])), wanted)
    with jt.CheckpointStore(tmp_path / "checkpoints") as store:
        store.save(2, states[2])
        store.wait()
        _, found = store.restore(states[4])
    assert_bitwise_equal(run(*jt.load_capsule(path, found)), wanted)


def test_a_capsule_with_the_state_fits_any_state_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, states = late_capsule(tmp_path, monkeypatch, save_state=True)
    (path,) = tmp_path.iterdir()
    before, batch = jt.load_capsule(path, states[4])
    assert_bitwise_equal(before.params, states[1].params)
    assert_bitwise_equal(run(before, batch)[1], run(states[1], BAD)[1])


def test_other_leaves_are_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, states = late_capsule(tmp_path, monkeypatch)
    (path,) = tmp_path.iterdir()
    with pytest.raises(ValueError, match=r"\.rng: the capsule has key<fry> uint32\[2\], the state has nothing"):
        jt.load_capsule(path, dataclasses.replace(states[1], rng=None))
    with pytest.raises(ValueError, match=r"the given state is of step 1, and differs in 1 of 1 leaves: \.params"):
        jt.load_capsule(path, dataclasses.replace(states[1], params=states[1].params.at[2].set(-1.0)))
    with pytest.raises(TypeError, match="TrainState"):
        jt.load_capsule(path, states[1].params)
    optimizer = optax.sgd(0.1)
    with pytest.raises(ValueError, match="no loss scale"):
        jt.load_capsule(path, jt.TrainState.create(jnp.ones(4), optimizer))


def test_what_cannot_be_recorded_is_refused(tmp_path: Path) -> None:
    step, state = small_step()
    with pytest.raises(ValueError, match="keep=0 must be"):
        jt.SkipRecorder(tmp_path, keep=0)
    recorder = jt.SkipRecorder(tmp_path)
    with pytest.raises(TypeError, match="outside of jit"):
        jax.jit(recorder.watch(step))(state, GOOD)
    bare = jt.TrainState.create(jnp.ones(4), optax.sgd(0.1))
    with pytest.raises(ValueError, match="no loss scale"):
        recorder.watch(jax.jit(step))(bare, GOOD)
    with pytest.raises(TypeError, match="TrainState"):
        recorder.watch(jax.jit(step))(state.params, GOOD)  # pyright: ignore

    def several(state: Any, batches: Any) -> Any:
        return jax.lax.scan(step, state, batches)

    with pytest.raises(TypeError, match="grads_finite"):
        recorder.watch(jax.jit(several))(state, np.stack([GOOD, BAD]))
    assert recorder.last_capsule() is None


def test_a_capsule_that_cannot_be_written_stops_nothing(tmp_path: Path) -> None:
    step, state = small_step()
    recorder = jt.SkipRecorder(tmp_path / "gone", wait=True)
    (tmp_path / "gone").rmdir()
    with pytest.warns(RuntimeWarning, match="no capsule of a skipped step was written to .*gone"):
        recorder.watch(jax.jit(step))(state, BAD)
    recorder, batch = jt.SkipRecorder(tmp_path / "new"), jnp.asarray(BAD)
    with pytest.MonkeyPatch.context() as monkeypatch:
        LateFlags(monkeypatch)
        recorder.watch(jax.jit(step))(state, batch)
        batch.delete()
    with pytest.warns(RuntimeWarning, match=r"no capsule .*/new: : an array was deleted"):
        recorder.close()


@pytest.mark.parametrize("sizes", [(3, 3), (3, 2)])
def test_a_batch_that_no_capsule_can_hold_apart_is_not_written(sizes: tuple[int, int], tmp_path: Path) -> None:
    class Twins:
        """Two children under one name."""

    key = jax.tree_util.GetAttrKey("same")
    children = [(key, np.full(size, np.nan, np.float32)) for size in sizes]
    jax.tree_util.register_pytree_with_keys(Twins, lambda _: (children, None), lambda *_: Twins())
    flag = {"grads_finite": jnp.array(False)}
    with jt.SkipRecorder(tmp_path, wait=True) as recorder:
        with pytest.warns(RuntimeWarning, match=r"no capsule .* two leaves of the same path \.same"):
            recorder.watch(lambda state, batch: (state, flag))(small_step()[1], Twins())
        assert recorder.last_capsule() is None
    assert list(tmp_path.iterdir()) == []
