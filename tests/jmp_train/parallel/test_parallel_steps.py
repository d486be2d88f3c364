"""The three routes to many devices: the results of one device, and one decision for all."""

import contextlib
import dataclasses
import functools
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from gpu_builders import compile_for_gpu
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from promotion import relaxed
from pytrees import assert_close
from sklearn.datasets import load_digits

import jmp_train as jt

pytestmark = [pytest.mark.quick, pytest.mark.newest]

DEVICES, ROWS = 8, 64
PROGRAMS = Path(__file__).resolve().parents[2] / "programs" / "gpu_programs.py"
MESH = Mesh(np.array(jax.devices()), ("data",))


ROUTES: dict[str, Callable[[jt.steps.TrainStep], Any]] = {
    "shard_map": lambda step: jax.jit(jt.data_parallel(step, MESH)),
    "pmap": jt.pmap_step,
    "jit": lambda step: jax.jit(jt.sharded_step(step, MESH)),
}


class Net(nn.Module):
    """Two dense layers with a BatchNorm, which is the whole batch's where it is given an axis."""

    axis_name: str | None = None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.Dense(32)(x)
        x = nn.BatchNorm(use_running_average=False, momentum=0.9, axis_name=self.axis_name)(x)
        return nn.Dense(10)(nn.relu(x))


MEAN_STEP = jt.train_step(jt.stateless(lambda w, x: (w * x).mean()), optax.sgd(1.0))


def zero_state() -> jt.TrainState:
    return jt.TrainState.create(jnp.zeros(()), optax.sgd(1.0))


@functools.cache
def digits() -> tuple[np.ndarray, np.ndarray]:
    images, labels = load_digits(return_X_y=True)
    return np.asarray(images), np.asarray(labels)


def batches(count: int) -> list[dict[str, np.ndarray]]:
    images, labels = digits()
    order = np.random.default_rng(0).permutation(len(labels))
    indices = [order[np.arange(i * ROWS, (i + 1) * ROWS) % len(labels)] for i in range(count)]
    return [{"x": (images[r] / 16).astype(np.float32), "y": labels[r].astype(np.int32)} for r in indices]


@functools.cache
def first_variables() -> Any:
    return jax.jit(Net().init)(jax.random.key(0), np.zeros((1, 64), np.float32))


def make(optimizer: Any, policy: str, axis_name: str | None) -> tuple[jt.steps.TrainStep, jt.TrainState]:
    variables = first_variables()

    def loss_fn(params: Any, stats: Any, batch: Any, rng: Any) -> Any:
        del rng
        with jax.numpy_dtype_promotion("standard"):  # flax promotes by itself
            logits, new = Net(axis_name).apply(
                {"params": params, "batch_stats": stats}, batch["x"], mutable=["batch_stats"]
            )
        losses = optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), batch["y"])
        return losses.mean(), (new["batch_stats"], None)

    optimizer = relaxed(optimizer)
    if "16" in policy:
        optimizer = jt.with_loss_scale(optimizer, jt.torch_loss_scale(2.0**10))
    step = jt.train_step(loss_fn, optimizer, policy=policy)
    state = jt.TrainState.create(variables["params"], optimizer, model_state=variables["batch_stats"])
    return step, state


def assert_replicas_are_equal(tree: Any) -> None:
    for array in jax.tree.leaves(tree):
        first, *others = [np.asarray(shard.data) for shard in array.addressable_shards]
        assert len(others) == DEVICES - 1
        assert first.shape == array.shape
        for other in others:
            np.testing.assert_array_equal(other, first)


@functools.cache
def fifty_steps_of_one_device() -> tuple[jt.TrainState, list[float]]:
    """Returns the state at their end, and the loss of each."""
    step, state = make(optax.sgd(0.05, momentum=0.9), "float32", None)
    run, losses = jax.jit(step), []
    for batch in batches(50):
        state, metrics = run(state, batch)
        losses.append(float(metrics["loss"]))
    return state, losses


@pytest.mark.full
@pytest.mark.parametrize("route", ROUTES)
def test_fifty_steps_are_those_of_one_device(route: str) -> None:
    step, state = make(optax.sgd(0.05, momentum=0.9), "float32", "data")
    many, losses = ROUTES[route](step), []
    single, wanted = fifty_steps_of_one_device()
    for batch, loss in zip(batches(50), wanted, strict=True):
        state, metrics = many(state, batch)
        losses.append(float(metrics["loss"]))
        np.testing.assert_allclose(losses[-1], loss, rtol=1e-5)
    assert losses[-1] < 0.5 * losses[0]
    assert_replicas_are_equal((state.params, state.model_state, state.opt_state))
    assert_close((state.params, state.model_state), (single.params, single.model_state), atol=5e-6)


def by_fsdp(step: jt.steps.TrainStep) -> Any:
    def run(state: jt.TrainState, batch: Any) -> Any:
        shardings = jt.fsdp_shardings(state, MESH, min_size=DEVICES)
        return jt.sharded_step(step, MESH, shardings=shardings)(state, batch)

    return jax.jit(run)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("reduce_dtype", ["float32", "float16"])
@pytest.mark.parametrize("route", [*ROUTES, "fsdp"])
def test_complex_parameters_state_and_aux_are_those_of_one_device(route: str, reduce_dtype: str) -> None:
    """Gradient descent on the mean of |x w + b - y|^2, beside NumPy's in complex128; b is not sharded."""
    random = np.random.default_rng(0)
    x, y = random.normal(size=(32, DEVICES)), random.normal(size=32) + 1j * random.normal(size=32)

    def loss_fn(params: Any, model_state: Any, batch: Any, rng: Any) -> Any:
        del model_state, rng
        x = batch["x"].astype(jnp.complex64)
        error = x @ params["w"] + params["b"] - batch["y"]
        mean = {"error": error.mean()}
        return (jnp.abs(error) ** 2).mean(), (mean, mean)

    # jax's gradient of a complex number is the conjugate of the way up.
    conjugate = optax.stateless(lambda grads, _: jax.tree.map(jnp.conj, grads))
    optimizer = jt.with_loss_scale(optax.chain(conjugate, optax.sgd(0.05)), jt.torch_loss_scale(2.0**10))
    policy = f"params=float32,compute=float32,output=float32,reduce={reduce_dtype}"
    step = jt.train_step(loss_fn, optimizer, policy=policy, accumulate_steps=2)
    params = {"w": jnp.zeros(DEVICES, jnp.complex64), "b": jnp.zeros((), jnp.complex64)}
    state = jt.TrainState.create(params, optimizer, model_state={"error": jnp.zeros((), jnp.complex64)})
    batch = {"x": jnp.asarray(x, jnp.float32), "y": jnp.asarray(y, jnp.complex64)}
    run, w, b = ROUTES.get(route, by_fsdp)(step), np.zeros(DEVICES), 0j
    for _ in range(3):
        state, metrics = run(state, batch)
        error = x @ w + b - y
        norm = np.sqrt((np.abs(2 * (x.T @ error) / 32) ** 2).sum() + np.abs(2 * error.mean()) ** 2)
        w, b = w - 0.05 * 2 * (x.T @ error) / 32, b - 0.05 * 2 * error.mean()
        np.testing.assert_allclose(np.mean(metrics["aux"]["error"]), error.mean(), rtol=1e-5)
        np.testing.assert_allclose(metrics["grad_norm"], norm, rtol=1e-5)
    np.testing.assert_allclose(state.params["w"], w, rtol=1e-5)
    np.testing.assert_allclose(state.params["b"], b, rtol=1e-5)
    if route != "fsdp":
        assert_replicas_are_equal((state.params, state.model_state))


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(
    ("size", "reduce_dtype", "expected"),
    [(60_000.0, "f32", 60_000.0), (60_000.0, "f16", 60_000.0), (6e-8, "f32", 6e-8)],
)
def test_gradients_neither_overflow_nor_vanish_when_they_are_reduced(
    route: str, size: float, reduce_dtype: str, expected: float
) -> None:
    policy = jt.get_policy(f"p=f32,c=f16,o=f32,r={reduce_dtype}")
    optimizer = jt.with_loss_scale(optax.sgd(1.0), jt.NoOpLossScale())
    step = jt.train_step(jt.stateless(lambda params, batch: (params * batch).sum()), optimizer, policy=policy)
    state = jt.TrainState.create(jnp.zeros(()), optimizer)
    after, _ = ROUTES[route](step)(state, jnp.full(DEVICES, size))
    np.testing.assert_allclose(after.params, -expected, rtol=1e-2 if size < 1 else 1e-3)


def test_a_mesh_may_be_explicit_and_have_other_axes() -> None:
    kinds = (AxisType.Explicit,) * 2
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"), axis_types=kinds)
    step = MEAN_STEP
    for transform in (jt.data_parallel, jt.sharded_step):
        state = zero_state()
        after, _ = jax.jit(transform(step, mesh))(state, np.arange(8, dtype=np.float32))
        assert float(after.params) == -3.5


@contextlib.contextmanager
def counted_compilations() -> Iterator[list[str]]:
    """Yields a list that grows by one with each program that XLA compiles."""
    compiled = []

    def listen(event: str, duration_secs: float, **kwargs: str | int) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield compiled
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


DATA_MODEL = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))
ONE = Mesh(np.array(jax.devices()[:1]), ("data",))
EAGER: dict[str, Callable[..., Any]] = {
    "shard_map": lambda step, **options: jt.data_parallel(step, MESH, **options),
    "pmap": jt.pmap_step,
    "jit": lambda step, **options: jt.sharded_step(step, MESH, **options),
    "two axes": lambda step, **options: jt.data_parallel(step, DATA_MODEL, **options),
    "one device": lambda step, **options: jt.data_parallel(step, ONE, **options),
}


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("form", [*EAGER, "fsdp"])
def test_without_jit_many_steps_are_one_compiled_program(form: str) -> None:
    """The first state comes from one device, batches from the host; states are donated."""

    def loss_fn(params: Any, model_state: Any, batch: Any, rng: Any) -> Any:
        noise = 1e-3 * jax.random.normal(rng, ())
        loss = ((batch["x"] @ params - batch["y"]) ** 2).mean() + noise * params.sum()
        return loss, (model_state + 1, None)

    optimizer = jt.with_loss_scale(optax.sgd(0.1, momentum=0.9), jt.torch_loss_scale())
    step = jt.train_step(loss_fn, optimizer)
    random = np.random.default_rng(0)
    batch = {"x": random.normal(size=(16, DEVICES)), "y": random.normal(size=(16, 3))}
    batch = jax.tree.map(np.float32, batch)
    state = jt.TrainState.create(jnp.zeros((DEVICES, 3)), optimizer, model_state=jnp.int32(0), rng=jax.random.key(0))
    state = jax.device_put(state, jax.devices()[0])
    jax.block_until_ready(state)
    if form == "fsdp":  # of this state, which has a model state
        shardings = jt.fsdp_shardings(state, MESH, min_size=1)
        run = jt.sharded_step(step, MESH, shardings=shardings, donate_argnums=0)
    else:
        run = EAGER[form](step, donate_argnums=0)
    losses, states = [], []
    with counted_compilations() as compiled:
        for _ in range(4):
            state, metrics = run(state, batch)
            losses.append(metrics["loss"])
            states.append(state)
    assert len(compiled) == (2 if form == "fsdp" else 1)  # the other shards what it puts on devices
    assert states[0].params.is_deleted() and not states[-1].params.is_deleted()
    assert int(state.model_state) == 4
    assert losses[-1] < losses[0]
    if form == "pmap":  # which takes batches that lie on one device, too
        after, _ = run(state, jax.device_put(batch, jax.devices()[0]))
        assert int(after.model_state) == 5


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize("form", EAGER)
def test_within_a_transformation_a_form_is_a_part_of_its_program(form: str) -> None:
    step = MEAN_STEP
    state, run = zero_state(), EAGER[form](step)
    batches = jnp.arange(16.0).reshape(2, 8)
    after, _ = jax.jit(lambda state, x: jax.lax.scan(run, state, x))(state, batches)
    assert float(after.params) == -(3.5 + 11.5)
    if form not in ("pmap", "jit"):
        (equation,) = jax.make_jaxpr(run)(state, batches[0]).eqns
        if equation.primitive.name == "jit":  # jax 0.12 inlines it when it compiles
            assert equation.params["inline"]
            (equation,) = equation.params["jaxpr"].eqns
        assert equation.primitive.name == "shard_map"


@pytest.mark.quick_cases(4)
@pytest.mark.parametrize("form", EAGER)
def test_an_axis_that_the_model_names_otherwise_is_named(form: str) -> None:
    loss = jt.stateless(lambda w, x: (w * x - jax.lax.pmean(x, "batch")).mean())
    step = jt.train_step(loss, optax.sgd(1.0))
    state = zero_state()
    text = r"reduces over the axis 'batch' .* the step's axes are 'data'. .*axis=\"batch\""
    with pytest.raises(NameError, match=text):
        EAGER[form](step)(state, jnp.ones(16))
    with pytest.raises(NameError, match="the step's axes are none, as on one device"):
        step(state, jnp.ones(16))
    after, _ = jt.pmap_step(step, "batch")(state, jnp.ones(16))
    assert float(after.params) == -1


@pytest.mark.parametrize("form", [*EAGER, "alone", "micro-batches"])
def test_a_batch_without_rows_is_refused(form: str) -> None:
    step = jt.train_step(
        jt.stateless(lambda w, batch: (w * batch["x"]).mean() * batch["rate"].mean()),
        optax.sgd(1.0),
        accumulate_steps=2 if form == "micro-batches" else 1,
    )
    state = zero_state()
    run = EAGER[form](step) if form in EAGER else jax.jit(step)
    rate = jnp.float32(1) if form == "alone" else jnp.ones(0)  # a scalar is not an example
    with pytest.raises(ValueError, match=r"the batch has no examples: '\w+' has shape \(0"):
        run(state, {"x": jnp.ones((0, 3)), "rate": rate})


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("form", EAGER)
def test_what_was_split_or_replicated_for_pmap_is_named(form: str) -> None:
    """The first loss broadcasts and would be another number, the second fails, and the third is a sequence's."""

    def broadcasting(w: Any, batch: Any) -> Any:
        return ((batch["x"] @ w)[:, 0] - batch["y"]).mean()

    def failing(w: Any, batch: Any) -> Any:
        return ((batch["x"] @ w).reshape(len(batch["x"]), 1) - batch["y"]).mean()

    def of_sequences(w: Any, batch: Any) -> Any:
        return ((batch["x"] @ w[:, 0])[..., None] - batch["y"]).mean()

    def run(loss: Any, state: Any, batch: Any) -> Any:
        return EAGER[form](jt.train_step(jt.stateless(loss), optax.sgd(1.0)))(state, batch)

    state = jt.TrainState.create(jnp.ones((3, 1)), optax.sgd(1.0))
    count = {"two axes": 4, "one device": 1}.get(form, DEVICES)
    split = {"x": jnp.asarray(np.ones((count, 5, 3), np.float32)), "y": jnp.asarray(np.ones((count, 5), np.float32))}
    copies = jax.tree.map(lambda x: jnp.asarray(np.stack([x] * count)), state)
    with pytest.raises(ValueError, match=rf"state\.step must be a scalar, got shape \({count},\): .*unreplicate"):
        run(broadcasting, copies, split)
    run(of_sequences, state, {**split, "y": split["y"][..., None]})
    if form == "one device":
        return
    text = rf"all arrays of the batch are \[{count}, 5, \.\.\.\], as if split over the {count} devices"
    with pytest.warns(UserWarning, match=text) as warned:
        run(broadcasting, state, split)
    assert warned[0].filename == __file__
    with pytest.raises(TypeError, match="reshape"), pytest.warns(UserWarning, match=text):
        run(failing, state, split)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("form", ["shard_map", "pmap", "jit", "two axes"])
def test_counts_that_devices_would_not_share_are_refused(form: str) -> None:
    """Sixteen examples, half of them positive; what is added up over the devices, or is not a count, may stay."""

    def run(count: Callable[[Any], Any], **options: Any) -> Any:
        def loss_fn(w: Any, model_state: Any, x: Any, rng: Any) -> Any:
            seen = model_state["seen"] + count((x > 0).sum(dtype=jnp.int32))
            hit = model_state["hit"] | (seen > 5)
            state = {"seen": seen, "hit": hit, "key": rng, "raw": jax.random.key_data(rng)}
            return (w * x).mean(), (state, None)

        key = jax.random.key(0)
        first = {"seen": jnp.int32(0), "hit": jnp.array(False), "key": key, "raw": jax.random.PRNGKey(0)}
        state = jt.TrainState.create(jnp.zeros(()), optax.sgd(1.0), model_state=first, rng=key)
        step = jt.train_step(loss_fn, optax.sgd(1.0), **options)
        return EAGER[form](step)(state, jnp.arange(16.0) % 2)[0].model_state

    text = r"model_state 'hit' \(bool\), 'seen' \(int32\) depends on a device's own examples"
    for options in ({}, {"accumulate_steps": 2}):
        with pytest.raises(ValueError, match=text):
            run(lambda count: count, **options)
    shared = run(lambda count: jax.lax.psum(count, "data"))
    assert (int(shared["seen"]), bool(shared["hit"])) == (8, True)


@pytest.mark.parametrize("check_vma", [True, False])
def test_in_a_shard_map_of_ones_own_a_loss_is_not_averaged_twice(check_vma: bool) -> None:
    def own(loss: Any) -> Any:
        step = jt.train_step(jt.stateless(loss), optax.sgd(1.0)).with_axes("data")
        specs = (PartitionSpec(), PartitionSpec("data"))
        run = jax.shard_map(step, mesh=MESH, in_specs=specs, out_specs=PartitionSpec(), check_vma=check_vma)
        return jax.jit(run)(state, jnp.arange(8.0))[0].params

    state = zero_state()
    assert float(own(lambda w, x: (w * x).mean())) == -3.5
    averaged = lambda w, x: jax.lax.pmean((w * x).mean(), "data")
    if not check_vma:  # here jax's gradient of a mean is that of the own part
        assert float(own(averaged)) == -3.5
        return
    with pytest.raises(ValueError, match="loss_fn averages its loss over the axis 'data', but the step does"):
        own(averaged)


def test_a_mesh_of_other_devices_that_is_set_is_refused() -> None:
    step = MEAN_STEP
    state = zero_state()
    with (
        jax.set_mesh(DATA_MODEL),
        pytest.raises(
            ValueError,
            match=r"jax\.set_mesh has set a mesh of 8 devices, but the step's mesh has 1; set the same mesh or none",
        ),
    ):
        jt.data_parallel(step, ONE)(state, jnp.ones(4))


@functools.cache
def squares_step() -> tuple[jt.steps.TrainStep, jt.TrainState, jax.Array, jax.Array]:
    """Returns a step, its state and batch, and the parameters after it on one device."""
    step = jt.train_step(jt.stateless(lambda w, x: ((x @ w) ** 2).mean()), optax.sgd(0.1))
    state = jt.TrainState.create(jnp.ones((4, 2)), optax.sgd(0.1))
    x = jnp.asarray(np.arange(64, dtype=np.float32).reshape(16, 4) / 64)
    return step, state, x, jax.jit(step)(state, x)[0].params


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("form", ["shard_map", "pmap", "jit", "two axes", "sharded"])
@pytest.mark.parametrize("within", ["no mesh", "explicit", "automatic"])
def test_any_mesh_may_be_set_and_arrays_lie_on_explicit_axes(within: str, form: str) -> None:
    explicit = Mesh(DATA_MODEL.devices, DATA_MODEL.axis_names, axis_types=(AxisType.Explicit,) * 2)
    step, state, x, wanted = squares_step()
    mesh = {"explicit": explicit, "automatic": DATA_MODEL}.get(within)
    with jax.set_mesh(mesh) if mesh else contextlib.nullcontext():
        if form == "sharded":
            shardings = jt.parallel.state_shardings(state, explicit, params=PartitionSpec(None, "model"))
            run = jt.sharded_step(step, explicit, shardings=shardings)
        elif form == "two axes":
            run = jt.data_parallel(step, explicit)
        else:
            run = EAGER[form](step)
        results = [run(state, x)]
        if form in ("two axes", "sharded"):
            on_explicit = [NamedSharding(explicit, PartitionSpec(*names)) for names in ((), ("data",))]
            placed = jax.device_put((state, x), tuple(on_explicit))
            results += [run(*placed), *([jax.jit(run)(*placed)] if within != "automatic" else [])]
    for after, _ in results:
        np.testing.assert_allclose(jax.device_get(after.params), wanted, rtol=1e-5)


def test_wrong_calls_are_refused() -> None:
    step = MEAN_STEP
    jitted: Any = jax.jit(step)
    for transform in ROUTES.values():
        with pytest.raises(TypeError, match="step must be a result of train_step, not jitted, got"):
            transform(jitted)
    no_mesh: Any = jax.devices()
    with pytest.raises(TypeError, match=r"mesh must be a jax\.sharding\.Mesh, got list"):
        jt.data_parallel(step, no_mesh)
    with pytest.raises(ValueError, match="axis='batch' is not one of the mesh's: 'data'"):
        jt.sharded_step(step, MESH, "batch")
    wrong: list[Any] = [jt.fsdp_shardings(zero_state(), MESH), {"x": PartitionSpec()}, ("data",), MESH, None]
    for shardings in wrong:
        by_pmap: Any = lambda step, _, axis: jt.pmap_step(step, axis)
        for transform in (jt.sharded_step, jt.data_parallel, by_pmap):
            with pytest.raises(TypeError, match=r"axis must be the name of a mesh axis, got a \w+; pass shardings by"):
                transform(step, MESH, shardings)
    donations: list[Any] = ["0", 0.5, 2, True, [0, "1"], [[0]], None]
    for donated in donations:
        for transform in (jt.sharded_step, jt.data_parallel, lambda step, _, **given: jt.pmap_step(step, **given)):
            with pytest.raises(ValueError, match=re.escape(f"donate_argnums={donated!r} must be 0 for the state, 1 ")):
                transform(step, MESH, donate_argnums=donated)
    state = zero_state()
    for transform in ROUTES.values():
        text = r"the 8 devices.* must divide the first axis of every leaf of the batch; 'x' has shape \(9,\)"
        with pytest.raises(ValueError, match=text):
            transform(dataclasses.replace(step))(state, {"x": jnp.ones(9)})


COLLECTIVE = re.compile(r" (all-reduce|reduce-scatter|all-gather|all-to-all|collective-\w+)(-start)?\(")
STARTED = re.compile(r"\s+%(\S+) = (.*?) all-reduce-start\((.*)")
REDUCED = re.compile(r"\s+%\S+ = (?:\(\(.*?\),)?(.*?) all-reduce(?:-start)?\(")  # operands, in jax 0.12
WIDTH, LAYERS = 2048, 4  # as in PROGRAMS


@functools.cache
def scheduled(python: str, route: str, accumulate_steps: str) -> tuple[str, list[str]]:
    """Returns all that is in front of a program's entry, and the entry's lines in running order."""
    target = f"{PROGRAMS}:parallel_step", route, accumulate_steps
    compiled = compile_for_gpu(*target, gpu="H100-80GB", devices=DEVICES, python=python)
    before, entry = compiled.hlo.split("\nENTRY ")
    return before, entry.splitlines()


@pytest.mark.full
@pytest.mark.timeout(200)
@pytest.mark.parametrize("accumulate_steps", ["1", "2"])
@pytest.mark.parametrize("route", ROUTES)
def test_eight_gpus_reduce_once_and_never_in_half(route: str, accumulate_steps: str, plan_python: str) -> None:
    before, entry = scheduled(plan_python, route, accumulate_steps)
    assert not COLLECTIVE.search(before)  # nothing is reduced for each micro-batch,
    assert any(" while(" in line for line in entry) == (accumulate_steps == "2")  # in this loop
    types = [match[1] for match in map(REDUCED.match, entry) if match]
    assert len(types) == sum(bool(COLLECTIVE.search(line)) for line in entry)
    sizes = [
        (dtype, int(np.prod([int(n) for n in shape.split(",") if n])))
        for text in types
        for dtype, shape in re.findall(r"(\w+)\[([\d,]*)\]", text)
    ]
    assert {dtype for dtype, _ in sizes} <= {"f32", "s32", "u32", "pred"}
    floating = 4 * sum(count for dtype, count in sizes if dtype == "f32")
    gradients_and_statistics = 4 * LAYERS * (WIDTH * WIDTH + 2 * WIDTH)
    assert 4 <= floating - gradients_and_statistics <= 1024  # the metrics


@pytest.mark.full
@pytest.mark.timeout(200)
@pytest.mark.parametrize("route", ROUTES)
def test_eight_gpus_reduce_gradients_while_they_compute_others(route: str, plan_python: str) -> None:
    """Without micro-batches: the loop over these has all gradients ready at the same time."""
    _, entry = scheduled(plan_python, route, "1")
    multiplies = []
    for start, match in enumerate(map(STARTED.match, entry)):
        if match and "f32[" in match[2]:
            assert '"is_sync":false' in match[3]
            done = next(i for i, x in enumerate(entry) if f" all-reduce-done(%{match[1]})" in x)
            multiplies.append(any("__cublas" in line for line in entry[start:done]))
    # After the last of the gradients there is no other to compute.
    assert multiplies == [True] * (LAYERS - 1) + [False]
