"""Models that are sharded over a mesh: the results of one device, one decision for all, in every form and mode."""

import dataclasses
import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from gpu_builders import compile_for_gpu
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from pytrees import assert_bitwise_equal, assert_close, poison_gradient
from refusals import assert_refused

import jmp_train as jt
from jmp_train.tools.aot import CompiledProgram

pytestmark = pytest.mark.quick

DEVICES, ROWS, WIDTH, HIDDEN, CLASSES = 8, 32, 16, 32, 5
WEIGHT = 2.0**-8  # of a loss whose gradients shall not overflow at the loss scale 2**16
PROGRAMS = Path(__file__).resolve().parents[2] / "programs" / "gpu_programs.py"


def mesh_of(**axes: int) -> Mesh:
    return Mesh(np.array(jax.devices()).reshape(*axes.values()), tuple(axes))


DATA = mesh_of(data=8)
DATA_MODEL = mesh_of(data=4, model=2)
DATA_PIPE = mesh_of(data=4, pipe=2)
ALL_AXES = mesh_of(data=2, model=2, pipe=2)

BLOCKS = ("up", "down", "bias")


def make_params() -> dict[str, jax.Array]:
    """Returns two residual blocks and a head."""
    random = np.random.default_rng(0)
    shapes = {"up": (2, WIDTH, HIDDEN), "down": (2, HIDDEN, WIDTH), "bias": (2, WIDTH), "head": (WIDTH, CLASSES)}
    return {
        name: jnp.asarray(random.normal(size=shape) / shape[-2] ** 0.5, jnp.float32) for name, shape in shapes.items()
    }


def dense(x: jax.Array, kernel: jax.Array) -> jax.Array:
    return jt.policies.float32_dot_general(x, kernel, (((1,), (0,)), ((), ())))


def block(params: Any, x: jax.Array, rng: Any) -> jax.Array:
    del rng
    hidden = jax.nn.gelu(dense(x, params["up"]))
    return x + dense(hidden, params["down"]) + params["bias"]


def blocks_of(params: Any) -> dict[str, Any]:
    return {name: params[name] for name in BLOCKS}


def in_order(params: Any, x: jax.Array) -> jax.Array:
    for layer in range(2):
        x = block(jax.tree.map(lambda leaf, i=layer: leaf[i], blocks_of(params)), x, None)
    return x


def through(run: Callable[..., jax.Array], params: Any, x: jax.Array) -> jax.Array:
    return run(blocks_of(params), x)


def loss_of(model: Callable[..., jax.Array], weight: float = 1.0) -> Callable[..., jax.Array]:
    def loss_fn(params: Any, batch: Any) -> jax.Array:
        # Of one column of one block: a part that is on one shard of each axis alone.
        last = params["up"][1, :, -1]
        last = poison_gradient(last, batch["poison"].max().astype(last.dtype))
        params = {**params, "up": params["up"].at[1, :, -1].set(last)}
        logits = dense(model(params, batch["x"].astype(params["up"].dtype)), params["head"])
        return optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), batch["y"]).mean() * weight

    return loss_fn


class Form(NamedTuple):
    """How a model is sharded: the mesh, the model's blocks on it, and the state's shardings."""

    mesh: Mesh
    model: Callable[..., jax.Array]
    shardings: Callable[[jt.TrainState, Mesh], jt.TrainState]


def tensor_specs(params: Any, *first: str | None) -> Any:
    rules = {"up": P(*first, None, "model"), "down": P(*first, "model"), "bias": P(*first)}
    return jt.parallel.specs_by_path(params, rules)


def tensor(state: jt.TrainState, mesh: Mesh) -> jt.TrainState:
    return jt.parallel.state_shardings(state, mesh, params=tensor_specs(state.params, None))


def tensor_and_zero1(state: jt.TrainState, mesh: Mesh) -> jt.TrainState:
    specs = tensor_specs(state.params, None)
    return jt.zero1_shardings(state, mesh, params=specs, min_size=64)


def piped(state: jt.TrainState, mesh: Mesh) -> jt.TrainState:
    specs = jt.parallel.specs_by_path(state.params, {"up|down|bias": P("pipe")})
    return jt.parallel.state_shardings(state, mesh, params=specs)


def all_of_them(state: jt.TrainState, mesh: Mesh) -> jt.TrainState:
    specs = tensor_specs(state.params, "pipe")
    return jt.fsdp_shardings(state, mesh, params=specs, min_size=64)


FORMS = {
    "tensor": Form(DATA_MODEL, in_order, tensor),
    "zero1": Form(DATA, in_order, functools.partial(jt.zero1_shardings, min_size=64)),
    "fsdp": Form(DATA, in_order, functools.partial(jt.fsdp_shardings, min_size=64)),
    "tensor-zero1": Form(DATA_MODEL, in_order, tensor_and_zero1),
    "pipeline": Form(DATA_PIPE, functools.partial(through, jt.pipeline(block, DATA_PIPE, micro_batches=4)), piped),
    "all": Form(ALL_AXES, functools.partial(through, jt.pipeline(block, ALL_AXES, micro_batches=2)), all_of_them),
}

MODES: dict[str, dict[str, Any]] = {
    "torch": {"mode": "torch"},
    "O1": {"mode": "apex", "opt_level": "O1"},
    "O2": {"mode": "apex", "opt_level": "O2"},
    "O3": {"mode": "apex", "opt_level": "O3"},
    "naive": {"mode": "naive", "initial_scale": 2.0**16},
}
# Every form and every mode: modes differ in casts and loss scales, not in what is sharded and agreed on.
MODES_OF_FORMS = [
    ("torch", "tensor"), ("torch", "fsdp"), ("O1", "pipeline"), ("O1", "zero1"), ("O2", "all"), ("O2", "fsdp"),
    ("O3", "zero1"), ("O3", "tensor-zero1"), ("naive", "tensor-zero1"), ("naive", "all"),
]  # fmt: skip


def batches(count: int) -> list[dict[str, np.ndarray]]:
    random = np.random.default_rng(1)
    return [
        {
            "x": random.normal(size=(ROWS, WIDTH)).astype(np.float32),
            "y": random.integers(0, CLASSES, ROWS),
            "poison": np.ones(ROWS, np.float32),
        }
        for _ in range(count)
    ]


def assert_replicas_are_equal(tree: Any) -> None:
    """Asserts that shards of the same part of an array have the same bits."""
    for array in jax.tree.leaves(tree):
        parts: dict[str, bytes] = {}
        for shard in array.addressable_shards:
            data = np.asarray(shard.data).tobytes()
            assert parts.setdefault(str(shard.index), data) == data


@pytest.mark.full
@pytest.mark.parametrize("form", FORMS)
def test_steps_are_those_of_one_device(form: str) -> None:
    """With clipping, whose norm has to be that of all parts."""
    mesh, model, shardings = FORMS[form]
    tx = optax.chain(optax.clip_by_global_norm(0.5), optax.sgd(0.1, momentum=0.9))
    single = jt.TrainState.create(make_params(), tx)
    one = jax.jit(jt.train_step(jt.stateless(loss_of(in_order)), tx))
    where = shardings(single, mesh)
    step = jt.train_step(jt.stateless(loss_of(model)), tx)
    many = jax.jit(jt.sharded_step(step, mesh, shardings=where))
    state = jax.device_put(single, where)
    for batch in batches(5):
        single, wanted = one(single, batch)
        state, metrics = many(state, batch)
        assert float(wanted["grad_norm"]) > 0.5
        for name in ("loss", "grad_norm"):
            np.testing.assert_allclose(metrics[name], wanted[name], rtol=1e-6)
    assert_close((state.params, state.opt_state), (single.params, single.opt_state), atol=1e-6)
    assert_replicas_are_equal(state)
    for x, sharding in zip(jax.tree.leaves(state), jax.tree.leaves(where), strict=True):
        assert x.sharding.is_equivalent_to(sharding, x.ndim)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(("mode", "form"), MODES_OF_FORMS)
def test_an_overflow_on_one_shard_is_skipped_by_all(mode: str, form: str) -> None:
    mesh, model, shardings = FORMS[form]
    amp = dataclasses.replace(jt.amp_mode(**MODES[mode]), batch_norms=())
    sgd = optax.sgd(0.1 / WEIGHT, momentum=0.9)
    loss_fn, tx = amp.transform(jt.stateless(loss_of(model, WEIGHT)), sgd)
    state = jt.TrainState.create(make_params(), tx, cast_params=amp.cast_params)
    where = shardings(state, mesh)
    many = jax.jit(jt.sharded_step(jt.train_step(loss_fn, tx), mesh, shardings=where))
    loss_fn, _ = amp.transform(jt.stateless(loss_of(in_order, WEIGHT)), sgd)
    one, single = jax.jit(jt.train_step(loss_fn, tx)), state
    state = jax.device_put(state, where)
    for number, batch in enumerate(batches(4)):
        if number in (1, 2):
            batch["poison"][ROWS - 1] = np.inf  # an example of the last device along "data" alone
        before = jax.device_get((state.params, state.opt_state))
        state, metrics = many(state, batch)
        single, wanted = one(single, batch)
        after = jax.device_get((state.params, state.opt_state))
        assert bool(metrics["grads_finite"]) == (number not in (1, 2)) == wanted["grads_finite"]
        for name in ("loss_scale", "skipped_steps"):
            assert metrics[name] == wanted[name]
        np.testing.assert_allclose(metrics["loss"], wanted["loss"], rtol=1e-2)
        if number in (1, 2):
            assert_bitwise_equal(after[0], before[0])
            for old, new in zip(*map(moments, (before[1], after[1])), strict=True):
                assert_bitwise_equal(new, old)
        else:
            changed = jax.tree.map(lambda a, b: (a != b).any(), *map(moments, (before[1], after[1])))
            assert all(jax.tree.leaves(changed))
        assert_replicas_are_equal(state)


@pytest.mark.full
@pytest.mark.parametrize("reduce", ["float32", "float16"])
def test_fsdp_with_micro_batches_several_losses_and_statistics(reduce: str) -> None:
    """Beside `data_parallel` with whole parameters, in float16; the same keys are drawn."""
    policy = f"params=float32,compute=float16,output=float32,reduce={reduce}"
    scales = jt.policies.PerLossScale((jt.torch_loss_scale(2.0**6), jt.torch_loss_scale(2.0**8)))
    tx = jt.with_loss_scale(optax.sgd(0.1, momentum=0.9), scales)

    def loss_fn(params: Any, statistics: jax.Array, batch: Any, rng: Any) -> Any:
        x = batch["x"] + 0.1 * jax.random.uniform(rng, batch["x"].shape).astype(batch["x"].dtype)
        logits = dense(in_order(params, x), params["head"]).astype(jnp.float32)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
        statistics = 0.9 * statistics + 0.1 * logits.mean(0)
        aux = {"mean": logits.mean(), "count": jnp.int32(len(logits))}
        return (losses.mean(), 0.1 * (logits**2).mean()), (statistics, aux)

    step = jt.train_step(loss_fn, tx, policy=policy, accumulate_steps=2)
    whole = jt.TrainState.create(make_params(), tx, model_state=jnp.zeros(CLASSES), rng=jax.random.key(0))
    where = jt.fsdp_shardings(whole, DATA, min_size=64)
    sharded = jax.device_put(whole, where)
    on_whole = jax.jit(jt.data_parallel(step, DATA))
    on_sharded = jax.jit(jt.sharded_step(step, DATA, shardings=where))
    for batch in batches(3):
        batch["x"] = np.concatenate([batch["x"], -batch["x"]])
        batch["y"] = np.concatenate([batch["y"], batch["y"]])
        del batch["poison"]
        whole, wanted = on_whole(whole, batch)
        sharded, metrics = on_sharded(sharded, batch)
        assert bool(metrics["grads_finite"])
        np.testing.assert_allclose(metrics["loss"], wanted["loss"], rtol=1e-5)
        np.testing.assert_allclose(metrics["aux"]["mean"], wanted["aux"]["mean"], rtol=1e-4)
        assert metrics["aux"]["count"].shape == (DEVICES, 2)  # of each device and micro-batch
    for name in ("params", "model_state", "opt_state"):
        assert_close(getattr(sharded, name), getattr(whole, name), atol=1e-4)


def moments(opt_state: Any) -> list[Any]:
    return [x for x in jax.tree.leaves(opt_state) if np.ndim(x)]


def bytes_by_device(tree: Any) -> set[int]:
    per_device = np.zeros(DEVICES, np.int64)
    for array in jax.tree.leaves(tree):
        for shard in array.addressable_shards:
            per_device[shard.device.id] += shard.data.nbytes
    return set(per_device.tolist())


@pytest.mark.parametrize("form", ["zero1", "fsdp"])
def test_a_device_stores_an_eighth(form: str) -> None:
    """Of Adam's moments and O2's master weights, by FSDP of the parameters too; and small leaves whole."""
    amp = dataclasses.replace(jt.amp_mode("apex", opt_level="O2"), batch_norms=())
    _, tx = amp.transform(jt.stateless(lambda params, batch: 0.0), optax.adam(1e-3))
    large, small, odd = 64 * 96, 96, 67 * 67
    params = {"kernel": jnp.zeros((64, 96)), "bias": jnp.zeros(96), "odd": jnp.zeros((67, 67))}
    state = jt.TrainState.create(params, tx, cast_params=amp.cast_params)
    make = {"zero1": jt.zero1_shardings, "fsdp": jt.fsdp_shardings}[form]
    state = jax.device_put(state, make(state, DATA))
    copies = jax.device_get(state.opt_state)
    scalars = sum(x.nbytes for x in jax.tree.leaves(copies) if not x.ndim)
    assert bytes_by_device(state.opt_state) == {3 * 4 * (large // 8 + small + odd) + scalars}
    whole = large if form == "zero1" else large // 8
    assert bytes_by_device(state.params) == {2 * (whole + small + odd)}


def test_fsdp_casts_parameters_before_they_are_gathered() -> None:
    def loss_fn(kernel: jax.Array, batch: jax.Array) -> jax.Array:
        return (batch @ kernel).astype(jnp.float32).mean()

    optimizer = jt.with_loss_scale(optax.sgd(0.1), jt.NoOpLossScale())
    step = jt.train_step(jt.stateless(loss_fn), optimizer, policy="mixed_float16")
    state = jt.TrainState.create(jnp.ones((64, 64)), optimizer)
    run = jt.sharded_step(step, DATA, shardings=jt.fsdp_shardings(state, DATA, min_size=64))
    program = str(jax.make_jaxpr(run)(state, jnp.ones((8, 64))))
    # Cast while it is sharded, gathered, and sharded again after the update.
    assert re.findall(r"(\w+)\[64,64\] = sharding_constraint", program) == ["f16", "f16", "f32"]


@functools.cache
def compiled(python: str, form: str, mode: str) -> CompiledProgram:
    target = f"{PROGRAMS}:model_parallel_step", form, mode
    return compile_for_gpu(*target, gpu="H100-80GB", devices=DEVICES, python=python)


COLLECTIVE = re.compile(r" = (.*?) (all-reduce|all-gather|reduce-scatter|collective-permute|all-to-all)(?:-start)?\(")
LARGE = 2**16  # elements; metrics have fewer


@pytest.mark.full
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("form", "mode"),
    [
        ("fsdp", "torch"),
        ("zero1", "apex-O2"),
        ("fsdp", "apex-O2"),
        ("fsdp", "apex-O1"),
        ("fsdp", "apex-O3"),
        ("fsdp", "naive"),
        ("tensor", "torch"),
        ("tensor", "apex-O2"),
    ],
)
def test_eight_gpus_gather_in_half_and_reduce_in_float32(form: str, mode: str, plan_python: str) -> None:
    program = compiled(plan_python, form, mode)
    gathered, reduced = set(), set()
    for types, name in COLLECTIVE.findall(program.hlo):
        large = {
            dtype
            for dtype, shape in re.findall(r"(\w+)\[([\d,]+)\]", types)
            if np.prod([int(n) for n in shape.split(",")]) >= LARGE
        }
        (gathered if name == "all-gather" else reduced).update(large)
    assert reduced == {"f32"}
    assert gathered == (set() if form == "tensor" else {"f16"})
    assert ("reduce-scatter" in program.hlo) == (form != "tensor")
    if form == "fsdp":
        layers = 8 * 2048 * 2048 // DEVICES  # of tests/programs/gpu_programs.py
        stored = {"torch": 4, "apex-O1": 4, "apex-O3": 2}.get(mode, 2 + 4)
        moments_and_batch = 8 * layers + 4 * 128 * 2048  # the optimizer's are float32 in all modes
        assert 0 <= program.argument_bytes - stored * layers - moments_and_batch < 10_000


@pytest.mark.full
def test_layers_of_other_shapes_on_different_devices_are_those_of_one() -> None:
    """The tutorial's two-device model; its loss scale and its dropout, too."""
    params = [
        {"kernel": make_params()["up"][0], "bias": jnp.ones(HIDDEN)},
        {"kernel": make_params()["down"][0][:, :CLASSES]},
    ]

    def first(params: Any, x: jax.Array, rng: Any) -> jax.Array:
        hidden = jax.nn.relu(dense(x, params["kernel"]) + params["bias"])
        return hidden if rng is None else hidden * jax.random.uniform(rng, hidden.shape)

    def second(params: Any, x: jax.Array, rng: Any) -> jax.Array:
        del rng
        return dense(x, params["kernel"])

    stages = jt.parallel.Stages([first, second], params)
    run = stages.pipeline(DATA_PIPE, micro_batches=2)

    def cross_entropy(logits: jax.Array, batch: Any) -> jax.Array:
        logits = logits.astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()

    def apart(packed: Any, batch: Any) -> jax.Array:
        return cross_entropy(run(packed, batch["x"]), batch)

    def together(params: Any, batch: Any) -> jax.Array:
        return cross_entropy(second(params[1], first(params[0], batch["x"], None), None), batch)

    tx = optax.sgd(0.1, momentum=0.9)
    single = jt.TrainState.create(params, tx)
    state = jt.TrainState.create(stages.pack(params), tx)
    where = jt.parallel.state_shardings(state, DATA_PIPE, params=P("pipe"))
    state = jax.device_put(state, where)
    one = jax.jit(jt.train_step(jt.stateless(together), tx))
    step = jt.train_step(jt.stateless(apart), tx)
    many = jax.jit(jt.sharded_step(step, DATA_PIPE, shardings=where))
    for batch in batches(5):
        single, wanted = one(single, batch)
        state, metrics = many(state, batch)
        np.testing.assert_allclose(metrics["loss"], wanted["loss"], rtol=1e-6)
    assert_close(stages.unpack(jax.device_get(state.params)), single.params, atol=1e-6)
    assert state.params.addressable_shards[0].data.shape == (1, WIDTH * HIDDEN + HIDDEN)

    # Micro-batches draw apart, and an example draws the same whatever the others are.
    x = jnp.ones((4, WIDTH))
    drawn = np.asarray(jax.jit(run)(stages.pack(params), x, jax.random.key(0)))
    assert (drawn[:2] != drawn[2:]).any()


def test_a_pipeline_draws_for_each_stage_and_micro_batch() -> None:
    mesh = mesh_of(data=4, pipe=2)

    def stage(params: jax.Array, x: jax.Array, rng: Any) -> jax.Array:
        return x + params * jax.random.uniform(rng, x.shape)

    run = jax.jit(jt.pipeline(stage, mesh, micro_batches=4))
    weights = jnp.array([1.0, 10.0])
    y = np.asarray(run(weights, jnp.zeros((4, 3)), jax.random.key(7)))
    key = jax.random.key(7)
    for example in range(4):
        keys = [jax.random.fold_in(jax.random.fold_in(key, stage), example) for stage in range(2)]
        first, second = (np.asarray(jax.random.uniform(key, (1, 3))) for key in keys)
        np.testing.assert_allclose(y[example], (first + 10 * second)[0], rtol=1e-6)


def test_a_pipeline_of_one_stage_or_of_trees() -> None:
    x = {"a": jnp.arange(8.0).reshape(4, 2), "b": jnp.ones((4, 1))}

    def stage(params: jax.Array, x: Any, rng: Any) -> Any:
        del rng
        return {"a": x["a"] * params, "b": x["b"] + params}

    for count in (1, 8):
        mesh = mesh_of(data=8 // count, pipe=count)
        run = jt.pipeline(stage, mesh, micro_batches=2)
        y = jax.jit(run)(jnp.full(count, 2.0), x)
        np.testing.assert_array_equal(y["a"], x["a"] * 2.0**count)
        np.testing.assert_array_equal(y["b"], x["b"] + 2.0 * count)


def test_wrong_pipelines_are_refused() -> None:
    mesh, x = DATA_PIPE, jnp.ones((4, 3))

    def identity(params: Any, x: Any, rng: Any) -> Any:
        del params, rng
        return x

    with pytest.raises(ValueError, match=r"params 'w' of shape \(3,\) must have one row for each"):
        jt.pipeline(identity, mesh)({"w": jnp.ones(3)}, x)
    with pytest.raises(ValueError, match="micro_batches=3 must divide the first axis"):
        jt.pipeline(identity, mesh, micro_batches=3)(jnp.ones(2), x)
    doubling = jt.pipeline(lambda params, x, rng: jnp.tile(x, (1, 2)), mesh)
    with pytest.raises(ValueError, match="params '1' is float16, but '0' is float32"):
        jt.parallel.Stages([identity] * 2, [jnp.ones(2), jnp.ones(2, jnp.float16)])
    stages = jt.parallel.Stages([identity] * 2, [jnp.ones(2), jnp.ones(3)])
    refusals = {
        "axis='stages' is not one of the mesh's: 'data', 'pipe'": lambda: jt.pipeline(identity, mesh, "stages"),
        "micro_batches=0 must be an integer of at least 1": lambda: jt.pipeline(identity, mesh, micro_batches=0),
        "its inputs, (root) float32[4, 3]; it returned .*4, 6]": lambda: doubling(jnp.ones(2), x),
        "2 functions have params of 1 stages": lambda: jt.parallel.Stages([identity, identity], [jnp.ones(2)]),
        "params of stage 1 must be .*3.*, got .*2": lambda: stages.pack([jnp.ones(2), jnp.ones(2)]),
        "mesh axis 'data' has 4 devices for 2 stages": lambda: stages.pipeline(mesh, "data"),
    }
    assert_refused(refusals)
    to_half = jt.parallel.Stages([identity, lambda p, x, rng: x.astype("float16")], [jnp.ones(2), jnp.ones(3)])
    run = to_half.pipeline(mesh)
    with pytest.raises(ValueError, match=r"stage 1 returned float16\[4, 3\] for a batch of 4 examples in"):
        run(to_half.pack([jnp.ones(2), jnp.ones(3)]), x)
