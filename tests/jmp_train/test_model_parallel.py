"""Models that are cut over a mesh: the numbers of one device, one decision for all, in every form and every mode."""

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_bitwise_equal, poison_gradient
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jmp_train as jt

DEVICES, ROWS, WIDTH, HIDDEN, CLASSES = 8, 32, 16, 32, 5
WEIGHT = 2.0**-8  # of a loss whose gradients shall not overflow at the loss scale 2**16
PROGRAMS = Path(__file__).resolve().parents[1] / "gpu_programs.py"


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
    shapes = {
        "up": (2, WIDTH, HIDDEN),
        "down": (2, HIDDEN, WIDTH),
        "bias": (2, WIDTH),
        "head": (WIDTH, CLASSES),
    }
    return {
        name: jnp.asarray(random.normal(size=shape) / shape[-2] ** 0.5, jnp.float32)
        for name, shape in shapes.items()
    }


def dense(x: jax.Array, kernel: jax.Array) -> jax.Array:
    return jt.wide_dot_general(x, kernel, (((1,), (0,)), ((), ())))


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
        # Of one column of one block: a part that lies on one shard of each axis alone.
        last = params["up"][1, :, -1]
        last = poison_gradient(last, batch["poison"].max().astype(last.dtype))
        params = {**params, "up": params["up"].at[1, :, -1].set(last)}
        logits = dense(model(params, batch["x"].astype(params["up"].dtype)), params["head"])
        return (
            optax.softmax_cross_entropy_with_integer_labels(
                logits.astype(jnp.float32), batch["y"]
            ).mean()
            * weight
        )

    return loss_fn


class Form(NamedTuple):
    """How a model is cut: the mesh, the model's blocks on it, and where the state lies."""

    mesh: Mesh
    model: Callable[..., jax.Array]
    shardings: Callable[[jt.TrainState, Mesh], jt.TrainState]


def tensor_specs(params: Any, *first: str | None) -> Any:
    rules = {"up": P(*first, None, "model"), "down": P(*first, "model"), "bias": P(*first)}
    return jt.specs_by_path(params, rules)


def tensor(state: jt.TrainState, mesh: Mesh) -> jt.TrainState:
    return jt.state_shardings(state, mesh, params=tensor_specs(state.params, None))


def tensor_and_zero1(state: jt.TrainState, mesh: Mesh) -> jt.TrainState:
    specs = tensor_specs(state.params, None)
    return jt.zero1_shardings(state, mesh, params=specs, min_size=64)


def piped(state: jt.TrainState, mesh: Mesh) -> jt.TrainState:
    specs = jt.specs_by_path(state.params, {"up|down|bias": P("pipe")})
    return jt.state_shardings(state, mesh, params=specs)


def all_of_them(state: jt.TrainState, mesh: Mesh) -> jt.TrainState:
    specs = tensor_specs(state.params, "pipe")
    return jt.fsdp_shardings(state, mesh, params=specs, min_size=64)


FORMS = {
    "tensor": Form(DATA_MODEL, in_order, tensor),
    "zero1": Form(DATA, in_order, functools.partial(jt.zero1_shardings, min_size=64)),
    "fsdp": Form(DATA, in_order, functools.partial(jt.fsdp_shardings, min_size=64)),
    "tensor-zero1": Form(DATA_MODEL, in_order, tensor_and_zero1),
    "pipeline": Form(
        DATA_PIPE,
        functools.partial(through, jt.pipeline(block, DATA_PIPE, micro_batches=4)),
        piped,
    ),
    "all": Form(
        ALL_AXES,
        functools.partial(through, jt.pipeline(block, ALL_AXES, micro_batches=2)),
        all_of_them,
    ),
}

MODES: dict[str, dict[str, Any]] = {
    "torch": {"mode": "torch"},
    "O1": {"mode": "apex", "opt_level": "O1"},
    "O2": {"mode": "apex", "opt_level": "O2"},
    "O3": {"mode": "apex", "opt_level": "O3"},
    "naive": {"mode": "naive", "initial_scale": 2.0**16},
}
# The others are slow: they differ from these in casts and loss scales, not in what is cut and agreed on.
FAST = {"torch": ("tensor", "fsdp", "pipeline"), "O2": ("zero1", "tensor-zero1", "all")}
MODES_OF_FORMS = [
    pytest.param(mode, form, marks=() if form in FAST.get(mode, ()) else pytest.mark.slow)
    for mode in MODES
    for form in FORMS
]


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
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-6),
        jax.device_get((state.params, state.opt_state)),
        jax.device_get((single.params, single.opt_state)),
    )
    assert_replicas_are_equal(state)
    for x, sharding in zip(jax.tree.leaves(state), jax.tree.leaves(where), strict=True):
        assert x.sharding.is_equivalent_to(sharding, x.ndim)


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
            batch["poison"][ROWS - 1] = np.inf  # a row of the last device along "data" alone
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
            changed = jax.tree.map(
                lambda a, b: (a != b).any(), *map(moments, (before[1], after[1]))
            )
            assert all(jax.tree.leaves(changed))
        assert_replicas_are_equal(state)


def moments(opt_state: Any) -> list[Any]:
    return [x for x in jax.tree.leaves(opt_state) if np.ndim(x)]
