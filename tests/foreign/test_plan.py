"""Plans of steps that others wrote, with their own states: what is exported, what its arguments are, what it needs."""

import importlib
from collections import Counter
from collections.abc import Callable
from typing import Any

import equinox as eqx
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from training_scripts import equinox_diffusion as diffusion
from training_scripts import haiku_transformer, ogbg
from training_scripts import nnx_mnist as mnist

import jmp_train as jt
from jmp_train.tools.aot import ExportedProgram
from jmp_train.tools.planning import Placement, PlanRow, PlanSearch, Workload
from jmp_train.tools.planning.planner import arguments_of

pytestmark = [pytest.mark.full, pytest.mark.timeout(500)]

Step = tuple[Callable[..., Any], Any, Any]


def nnx_mnist() -> Step:
    """The script's own `nnx.jit`ted step, which changes the objects and returns nothing."""
    model = mnist.CNN(rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adamw(5e-3, 0.9), wrt=nnx.Param)
    metrics = nnx.MultiMetric(accuracy=nnx.metrics.Accuracy(), loss=nnx.metrics.Average("loss"))
    train_step: Any = mnist.train_step
    return lambda state, batch: train_step(*state, batch), (model, optimizer, metrics), mnist.digits()


def nnx_mnist_split() -> Step:
    """The same by the functional API."""
    step, objects, batch = nnx_mnist()
    graph, state = nnx.split(objects)

    def run(state: Any, batch: Any) -> Any:
        objects = nnx.merge(graph, state)
        step(objects, batch)
        return nnx.state(objects)

    return run, state, batch


def equinox_diffusion() -> Step:
    """A model with activation functions and numbers among its leaves, in a tuple with optax's state and a key."""
    model, data = diffusion.model_and_data()
    optimizer = optax.adabelief(3e-3)

    @eqx.filter_jit
    def make_step(state: Any, data: Any) -> Any:
        model, opt_state, key = state
        loss, grads = eqx.filter_value_and_grad(diffusion.loss_fn)(model, data, 10.0, key)
        updates, opt_state = optimizer.update(grads, opt_state, model)
        return (eqx.apply_updates(model, updates), opt_state, jax.random.split(key, 1)[0]), loss

    return make_step, (model, optimizer.init(eqx.filter(model, eqx.is_inexact_array)), jax.random.key(0)), data


def of_script(name: str, half: bool = False) -> Callable[[], Step]:
    """Returns a maker of a script's step as it is."""

    def make() -> Step:
        script = importlib.import_module(f"training_scripts.{name}").script(half)
        return script.step, script.state, script.batch

    make.__name__ = f"{name}_half" if half else name
    return make


# How many arguments each step has, by group.
STEPS: dict[Callable[[], Step], dict[str, int]] = {
    nnx_mnist: {"parameters": 12, "optimizer state": 26, "model state": 4, "other arguments": 8, "batch": 2},
    nnx_mnist_split: {"parameters": 12, "optimizer state": 26, "model state": 4, "other arguments": 8, "batch": 2},
    equinox_diffusion: {"parameters": 30, "optimizer state": 61, "other arguments": 1, "batch": 1},
    of_script("equinox_gan"): {
        "parameters": 14, "optimizer state": 30, "model state": 9, "other arguments": 1, "batch": 1,
    },
    of_script("equinox_gan", True): {
        "parameters": 14, "optimizer state": 40, "model state": 9, "other arguments": 1, "batch": 1,
    },
    of_script("haiku_transformer"): {"parameters": 22, "optimizer state": 45, "other arguments": 2, "batch": 2},
    of_script("ppo"): {"parameters": 10, "optimizer state": 21, "other arguments": 1, "batch": 5},
    of_script("seq2seq", True): {"parameters": 26, "optimizer state": 58, "other arguments": 1, "batch": 2},
    of_script("vae"): {"parameters": 10, "optimizer state": 21, "other arguments": 1, "batch": 1},
}  # fmt: skip


def exported(step: Any, state: Any, batch: Any, **options: Any) -> tuple[ExportedProgram, Any]:
    """Returns the program of a step, and the shapes of its state."""
    (variant,) = Workload(step, state, batch, **options).variants()
    return variant.exported(Placement(), variant.batch_size), variant.state


@pytest.mark.parametrize("make", STEPS, ids=lambda make: make.__name__)
def test_all_arguments_are_there_in_their_groups(make: Callable[[], Step]) -> None:
    program, state = exported(*make())
    arguments = arguments_of(program.paths, state)
    assert dict(Counter(argument.group for argument in arguments.values())) == STEPS[make]
    found = jax.export.deserialize(bytearray(program.serialized))
    assert len(found.in_avals) == len(program.paths) == sum(STEPS[make].values())
    # Nothing of the step is lost: the next state comes out, and it depends on the batch.
    given = Counter((aval.shape, str(aval.dtype)) for aval in found.in_avals[: len(program.donated)])
    assert not given - Counter((aval.shape, str(aval.dtype)) for aval in found.out_avals)
    assert {i for i, path in enumerate(program.paths) if path.startswith("batch")} <= {*found.module_kept_var_idx}


def test_haikus_policies_are_those_of_the_thread_that_plans(compiler: None) -> None:
    step = haiku_transformer.script(False)

    def update(state: Any, batch: Any) -> Any:
        loss, grads = jax.value_and_grad(haiku_transformer.loss_fn)(state["params"], state["rng"], batch)
        return {**state, "params": jax.tree.map(lambda p, g: p - 0.1 * g, state["params"], grads)}, loss

    state = {name: step.state[name] for name in ("params", "rng")}
    in_float32 = row_of(update, state, step.batch)
    with haiku_transformer.mixed_precision():
        in_half = row_of(lambda state, batch: update(state, batch), state, step.batch)
    assert set(in_float32.costs.operations) == {"f32"} != set(in_half.costs.operations)
    assert hk.mixed_precision.get_policy(haiku_transformer.LanguageModel) is None


def test_steps_that_cannot_be_planned_say_what_to_do() -> None:
    imagenet = of_script("imagenet")()
    with pytest.raises(ValueError, match=r"runs on 2 devices by itself \(pmap, .*; pass the step of one device"):
        exported(*imagenet)
    graphs = of_script("ogbg")()
    with pytest.raises(ValueError, match=r"batch 'nodes' has a first axis of 32, others of 64: .* give a function"):
        exported(*graphs)


def padded_graphs(size: int) -> Any:
    """Returns the shapes of a batch of so many molecules, as `jraph.pad_with_graphs` pads them."""
    graphs: Any = ogbg.molecules()
    nodes, edges = ((graphs.nodes, graphs.senders, graphs.receivers)[i].shape[0] for i in (0, 1))
    counts = {nodes: 4 * size, edges: 8 * size, graphs.n_node.shape[0]: size}
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct((counts[x.shape[0]], *x.shape[1:]), x.dtype), graphs)


def row_of(step: Any, state: Any, batch: Any, **options: Any) -> PlanRow:
    (row,) = jt.plan(Workload(step, state, batch, **options), "A100-40GB", PlanSearch(largest_batch=False)).rows
    assert sum(buffer.n_bytes for buffer in row.buffers) == row.peak_bytes
    return row


def n_bytes(tree: Any) -> int:
    return sum(np.prod(x.shape, dtype=int) * x.dtype.itemsize for x in jax.tree.leaves(tree) if hasattr(x, "dtype"))


def test_graphs_grow_by_a_function_of_their_number(compiler: None) -> None:
    step, state, _ = of_script("ogbg")()
    small, large = (row_of(step, state, padded_graphs, batch_size=size) for size in (8, 64))
    assert small.bytes_by_kind["batch"] == n_bytes(padded_graphs(8))
    assert large.bytes_by_kind["batch"] == n_bytes(padded_graphs(64))
    assert small.bytes_by_kind["parameters"] == large.bytes_by_kind["parameters"] == n_bytes(state.params)
    assert small.peak_bytes < large.peak_bytes


@pytest.mark.parametrize("make", [nnx_mnist, equinox_diffusion, of_script("seq2seq", True)])
def test_they_compile_and_more_examples_need_more(make: Callable[[], Step], compiler: None) -> None:
    step, state, batch = make()
    size = jax.tree.leaves(batch)[0].shape[0]
    small = row_of(step, state, batch)
    large = row_of(step, state, batch, batch_size=16 * size)
    assert (small.batch_size, large.batch_size) == (size, 16 * size)
    assert small.peak_bytes < large.peak_bytes
    for row in (small, large):
        assert row.bytes_by_kind["parameters"] == small.bytes_by_kind["parameters"] > 0
        assert row.bytes_by_kind["optimizer state"] >= row.bytes_by_kind["parameters"]
        assert row.bytes_by_kind["batch"] == n_bytes(batch) * row.batch_size // size
    assert jnp.isfinite(large.step_seconds_bound)
