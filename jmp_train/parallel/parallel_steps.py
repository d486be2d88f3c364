"""Data-parallel train steps by `shard_map`, `pmap` or `jit`, each with the signature of the step.

The batch is split along its first axis (a `jmp_train.graphs.stack` between its graphs), and the state is replicated.
Gradients stay local until they are averaged in the policy's `reduce_dtype`. Loss, model state, and floating and complex
aux are averaged too. All devices take or skip the step together, and each draws from its own random key.
"""

import contextlib
import dataclasses
import functools
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.core.meta import Partitioned
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, Sharding, get_abstract_mesh, use_abstract_mesh
from jax.sharding import PartitionSpec as P

from jmp_train.parallel.mesh_axes import (
    automatic,
    axis_size,
    check_axis,
    check_same_state,
    has_integers,
    on_automatic_axes,
    without_axis,
)
from jmp_train.parallel.sharded_gradients import dimensions_of_gradients, gradients_over_devices, with_whole_params
from jmp_train.parallel.shardings import full_shardings, is_box
from jmp_train.policies import Params, PyTree
from jmp_train.policies.pytrees import has_tracers, is_integer
from jmp_train.steps import (
    StepFunction,
    TrainState,
    TrainStep,
    check_call,
    check_divides,
    check_is_train_state,
    check_not_replicated,
    delayed_scaling,
    in_parts,
    warn_of_split,
    with_next_scales,
)
from jmp_train.types import Batch, Metrics


def data_parallel(
    step: TrainStep,
    mesh: Mesh,
    axis: str = "data",
    *,
    donate_argnums: int | Sequence[int] = (),
) -> StepFunction:
    """Returns a compiled step that runs on all devices along a mesh axis, by `shard_map`.

    Within `jax.jit`, `jax.lax.scan` and other transformations it becomes part of their program. Other axes of the
    mesh are left to jax. Several processes run it with a mesh of all their devices and a batch that is one array
    over these.

    Args:
      step: from `train_step`.
      mesh: the devices, for example `jax.make_mesh((8,), ("data",))`.
      axis: the mesh axis along which the batch is split.
      donate_argnums: as for jit; 0 lets the next state reuse the memory of the last one. An outer jit has its own.

    Returns:
      A pure function `(state, batch) -> (state, metrics)`. Metrics are those of the whole batch; aux that is neither
      floating nor complex is the first device's. Arrays that are not on the mesh's devices yet, such as NumPy
      arrays, are moved there first.

    Raises:
      TypeError: `step` is not a `TrainStep`; when called, the batch has a graph outside a stack.
      ValueError: the mesh has no such axis, or `donate_argnums` is no number of an argument; when called, the number of
        the mesh's devices does not divide the batch, or integers or flags of the model state depend on a device's own
        examples.

    Example:
      >>> import jax, jax.numpy as jnp, optax
      >>> import jmp_train as jt
      >>> step = jt.train_step(jt.stateless(lambda w, x: (w * x).mean()), optax.sgd(1.0))
      >>> mesh = jax.sharding.Mesh(jax.devices(), ("data",))
      >>> state = jt.TrainState.create(jnp.zeros(()), optax.sgd(1.0))
      >>> state, metrics = jt.data_parallel(step, mesh)(state, jnp.full(8 * mesh.size, 2.0))
      >>> float(state.params)
      -2.0

    Reference: torch's DistributedDataParallel; https://docs.jax.dev/en/latest/notebooks/shard_map.html.
    """
    parallel = _checked_step(step).with_axes(axis)
    donated = _checked_donation(donate_argnums)
    everywhere, apart = _replicated_and_split(mesh, axis)

    def on_traced(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        check_same_state(parallel, mesh, state, batch)
        # The step names its reductions, so jax need not find out which values vary.
        mapped = jax.shard_map(
            with_inert_boxes(parallel, state.params, axis),
            mesh=automatic(mesh),
            in_specs=(P(), P(axis)),
            out_specs=P(),
            axis_names={axis},
            check_vma=False,
        )
        return mapped(state, batch)

    def put(state: TrainState, batch: Batch) -> tuple[TrainState, Batch]:
        return placed((state, batch), (everywhere, apart), on_same_devices)

    return _on_mesh(step, mesh, axis, put, jax.jit(on_traced, inline=True, donate_argnums=donated))


def pmap_step(
    step: TrainStep,
    axis: str = "data",
    *,
    devices: Sequence[Any] | None = None,
    donate_argnums: int | Sequence[int] = (),
) -> StepFunction:
    """Returns a compiled step that runs on several devices of this process, by `pmap`.

    Args:
      step: from `train_step`.
      axis: a name for the devices.
      devices: the devices; None for all local ones.
      donate_argnums: as for jit; 0 lets the next state reuse the memory of the last one.

    Returns:
      A function `(state, batch) -> (state, metrics)` that needs no jit. It takes and returns the state as
      on one device, and takes the whole batch. Each of several processes passes the batch of its own devices.

    Raises:
      TypeError: see `data_parallel`.
      ValueError: as in `data_parallel`.

    Example:
      >>> import jax, jax.numpy as jnp, optax
      >>> import jmp_train as jt
      >>> step = jt.train_step(jt.stateless(lambda w, x: (w * x).mean()), optax.sgd(1.0))
      >>> state = jt.TrainState.create(jnp.zeros(()), optax.sgd(1.0))
      >>> state, metrics = jt.pmap_step(step)(state, jnp.full(4 * jax.device_count(), 2.0))
      >>> float(state.params)
      -2.0
    """
    check_axis(axis)
    parallel = _checked_step(step).with_axes(axis)
    donated = _checked_donation(donate_argnums)
    mesh = Mesh(np.array(jax.local_devices() if devices is None else devices), (axis,))
    everywhere, apart = NamedSharding(mesh, P()), NamedSharding(mesh, P(axis))

    @functools.lru_cache(maxsize=4)
    def check(structure: Any, shapes: tuple[tuple[int, ...], ...]) -> None:
        check_same_state(parallel, mesh, *jax.tree.unflatten(structure, shapes))

    run = jax.pmap(
        parallel,
        axis,
        in_axes=(None, 0),
        out_axes=None,
        devices=devices,
        donate_argnums=donated,
    )

    def on_all(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        check_not_replicated(state)
        check_divides(batch, mesh.size, f"the {mesh.size} devices")
        warn_of_split(batch, mesh.size)
        step.first_trace.look_at_values({"batch": batch}, step.policy)
        if has_integers(state.model_state):
            leaves, structure = jax.tree.flatten((state, batch))
            check(structure, tuple(jax.ShapeDtypeStruct(jnp.shape(x), x.dtype) for x in leaves))
        parts = in_parts(batch, mesh.size)
        if not has_tracers((state, parts)):
            state, parts = placed((state, parts), (everywhere, apart))
        with over(mesh):
            return run(state, parts)

    return on_all


def sharded_step(
    step: TrainStep,
    mesh: Mesh,
    axis: str = "data",
    *,
    shardings: PyTree = None,
    donate_argnums: int | Sequence[int] = (),
) -> StepFunction:
    """Returns a compiled step by plain `jit`, with arrays that are sharded over a mesh.

    Plain jit sums the gradients of a batch over the devices in the compute dtype. Here, each device's gradients stay
    apart until they are averaged, as in `data_parallel`; jit does everything else. With `shardings`, the state may be
    sharded over the mesh in any way: parameters over other axes (tensor parallelism), optimizer state over `axis`
    (ZeRO-1), or parameters too (FSDP). Norm, overflow check and clipping see the whole state.

    Args:
      step: see `data_parallel`.
      mesh: see `data_parallel`.
      axis: see `data_parallel`.
      shardings: the shardings of the state's arrays, from `state_shardings`, `zero1_shardings` or `fsdp_shardings`, or
        any tree or prefix tree of shardings or `PartitionSpec`s, such as flax's `nn.get_sharding(state, mesh)`; the
        next state has the same. None replicates the state. Parameters that are sharded over `axis` are gathered in the
        dtype to which all of their uses cast them. Gradients are summed in the policy's `reduce_dtype`. If the
        parameter or its optimizer state is sharded over `axis`, each device gets only its own part of the sum.
      donate_argnums: see `data_parallel`.

    Returns:
      See `data_parallel`; aux that is neither floating nor complex has one row per device.

    Raises:
      TypeError: see `data_parallel`.
      ValueError: see `data_parallel`; when called, `shardings` belong to another state
        or do not fit its arrays.

    Example:
      >>> import jax, jax.numpy as jnp, optax
      >>> import jmp_train as jt
      >>> step = jt.train_step(jt.stateless(lambda w, x: (w * x).mean()), optax.sgd(1.0))
      >>> mesh = jax.sharding.Mesh(jax.devices(), ("data",))
      >>> state = jt.TrainState.create(jnp.zeros(8), optax.sgd(1.0))
      >>> shardings = jt.fsdp_shardings(state, mesh, min_size=8)
      >>> run = jt.sharded_step(step, mesh, shardings=shardings, donate_argnums=0)
      >>> state, metrics = run(state, jnp.full((8 * mesh.size, 8), 16.0))
      >>> float(state.params[0])
      -2.0
    """
    parallel = _checked_step(step).with_axes(axis)
    donated = _checked_donation(donate_argnums)
    everywhere, apart = _replicated_and_split(mesh, axis)

    @functools.lru_cache(maxsize=4)
    def where(structure: Any, shapes: tuple[tuple[int, ...], ...]) -> TrainState:
        arrays = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)
        return full_shardings(jax.tree.unflatten(structure, arrays), shardings, mesh)

    def shardings_of(state: TrainState) -> TrainState | None:
        if shardings is None:
            return None
        leaves, structure = jax.tree.flatten(state)
        return where(structure, tuple(map(jnp.shape, leaves)))

    def on_traced(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        check_is_train_state(state)
        shardings = shardings_of(state)
        check_call(step, state, batch)
        state, batch = on_automatic_axes((state, batch), mesh)
        check_same_state(parallel, mesh, state, batch)
        gradients = gradients_over_devices(
            with_inert_boxes(parallel, state.params, axis),
            automatic(mesh),
            axis,
            dimensions_of_gradients(state, shardings, axis),
        )
        if shardings is not None:
            gradients = with_whole_params(gradients, shardings.params, axis)
        gradients = with_next_scales(gradients, delayed_scaling(step.policy))
        new, metrics = step.updated(state, batch, gradients, evaluates=False)
        return (new if shardings is None else lax.with_sharding_constraint(new, shardings)), metrics

    def put(state: TrainState, batch: Batch) -> tuple[TrainState, Batch]:
        batch = placed(batch, apart, on_same_devices)
        if shardings is None:
            return placed(state, everywhere, on_same_devices), batch
        return placed(state, shardings_of(state)), batch

    return _on_mesh(step, mesh, axis, put, jax.jit(on_traced, inline=True, donate_argnums=donated))


def _replicated_and_split(mesh: Mesh, axis: str) -> tuple[NamedSharding, NamedSharding]:
    """Returns the shardings of a replicated array and of a batch along a mesh axis; raises if there is no such axis."""
    axis_size(mesh, axis)
    return NamedSharding(automatic(mesh), P()), NamedSharding(automatic(mesh), P(axis))


def _on_mesh(
    step: TrainStep,
    mesh: Mesh,
    axis: str,
    put: Callable[[TrainState, Batch], tuple[TrainState, Batch]],
    run: StepFunction,
) -> StepFunction:
    """Returns a step that first checks its arguments and, unless they are traced, moves them to the mesh."""
    count = axis_size(mesh, axis)

    def on_all(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        check_not_replicated(state)
        check_divides(batch, count, f"the {count} devices along mesh axis {axis!r}")
        warn_of_split(batch, count)
        if not has_tracers((state, batch)):
            step.first_trace.look_at_values({"batch": batch}, step.policy)
            state, batch = put(state, batch)
        with over(mesh):
            return run(state, batch)

    return on_all


def _checked_step(step: object) -> TrainStep:
    if not isinstance(step, TrainStep):
        kind = type(step).__name__
        raise TypeError(f"step must be a result of train_step, not jitted, got {kind}")
    return step


def _checked_donation(numbers: Any) -> tuple[int, ...]:
    """Returns the numbers of the arguments, state and batch, whose memory the results may reuse."""
    several = (numbers,) if is_integer(numbers) else numbers
    if isinstance(several, Sequence) and all(is_integer(number) and -2 <= number < 2 for number in several):
        return tuple(several)
    raise ValueError(f"donate_argnums={numbers!r} must be 0 for the state, 1 for the batch, or a sequence of these")


def on_same_devices(sharding: Sharding, wanted: NamedSharding) -> bool:
    """Returns whether a sharding is over the same devices as another, whatever its spec; explicit axes do not count."""
    return (
        isinstance(sharding, NamedSharding)
        and sharding.device_set == wanted.device_set
        and AxisType.Explicit not in sharding.mesh.axis_types
    )


def placed(
    tree: PyTree,
    shardings: PyTree,
    suffices: Callable[[Sharding, NamedSharding], bool] = operator.eq,
) -> Any:
    """Returns a tree with its arrays moved to a mesh, so that one compiled program also takes arrays from elsewhere.

    On a mesh over several processes nothing is moved, because jit takes an array of one process as equal in all of
    them.

    Args:
      tree: jax arrays that are not traced, or NumPy arrays; other leaves stay.
      shardings: a `NamedSharding` for all leaves, or a tree or prefix tree of them.
      suffices: `suffices(sharding, wanted)` returns whether a jax array may stay where it is.
    """
    leaves, structure = jax.tree.flatten(tree)
    where = jax.tree.leaves(jax.tree.broadcast(shardings, tree))
    if any(sharding.mesh.is_multi_process for sharding in where[:1]):
        return tree

    def is_there(x: object, wanted: NamedSharding) -> bool:
        if isinstance(x, jax.Array):
            return suffices(x.sharding, wanted)
        return not isinstance(x, np.ndarray)

    away = [i for i, x in enumerate(leaves) if not is_there(x, where[i])]
    moved = jax.device_put([leaves[i] for i in away], [where[i] for i in away])
    for i, x in zip(away, moved, strict=True):
        leaves[i] = x
    return jax.tree.unflatten(structure, leaves)


@contextlib.contextmanager
def over(mesh: Mesh) -> Iterator[None]:
    """A context in which jax shards over this mesh with automatic axes, whatever mesh `jax.set_mesh` has set.

    It has no effect if no mesh is set, nor within a `shard_map`.

    Raises:
      ValueError: `jax.set_mesh` has set a mesh with another number of devices, which jax cannot replace.
    """
    context, wanted = get_abstract_mesh(), automatic(mesh).abstract_mesh
    if context.empty or context.manual_axes or context == wanted:
        yield
        return
    if context.size != wanted.size:
        raise ValueError(
            f"jax.set_mesh has set a mesh of {context.size} devices, but the step's mesh has {wanted.size}; set "
            "the same mesh or none"
        )
    with use_abstract_mesh(wanted):
        yield


def with_inert_boxes(step: TrainStep, params: Params, axis: str) -> TrainStep:
    """Returns a step whose boxed parameters can be unboxed within a `shard_map` over an axis.

    Inside a `shard_map`, flax constrains the arrays that it unboxes by names that may be invalid there: unknown to this
    mesh, the manual axis, or, in DenseGeneral's initializers, those of other dimensions. Under plain jit without a mesh
    the names have no effect, and this step restores that. If the caller has set a mesh, only the manual axis is removed
    from the names.
    """
    if not any(is_box(x) for x in jax.tree.leaves(params, is_leaf=is_box)):
        return step
    outside = get_abstract_mesh()

    def with_whole(x: object) -> Any:
        if not isinstance(x, Partitioned):
            return x
        return dataclasses.replace(x, names=tuple(without_axis(axis, name) for name in x.names))

    @functools.wraps(step.loss_fn)  # keeps the attributes of an AMP mode
    def loss_fn(params: Params, *rest: PyTree) -> Any:
        if not outside.empty:
            return step.loss_fn(jax.tree.map(with_whole, params, is_leaf=is_box), *rest)
        with use_abstract_mesh(outside):
            return step.loss_fn(params, *rest)

    return dataclasses.replace(step, loss_fn=loss_fn)
