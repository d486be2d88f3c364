"""One step on many devices: `shard_map`, `pmap` or `jit`, each with the signature that it has on one.

The batch is cut along its first axis, a `jmp_train.graphs.stack` between its graphs; the state is the same
everywhere. Gradients stay local until they are averaged in the policy's `reduce_dtype`; loss, floating and
complex aux and model state are averaged; the
step is taken or skipped by all devices together, and each draws from a key of its own.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import jaxpr_as_fun
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jmp_train.batch_parts import check_divides, hint_of_split, in_parts, warn_of_split
from jmp_train.device_state import check_same_state, has_whole_numbers
from jmp_train.flax_metadata import with_inert_boxes
from jmp_train.mesh_axes import (
    automatic,
    axis_size,
    dimension_over,
    is_traced,
    on_automatic_axes,
    on_same_devices,
    over,
    placed,
    without_axis,
)
from jmp_train.narrow_uses import narrow_uses
from jmp_train.placement import full_shardings, gradient_dimensions
from jmp_train.policies.collectives import mean_over_axes, scatter_gradients
from jmp_train.policies.finite import is_inexact
from jmp_train.policies.per_loss_scale import PerLossScale
from jmp_train.step_checks import check_is_train_state, check_not_replicated
from jmp_train.train_state import TrainState
from jmp_train.train_step import Metrics, TrainStep, check_param_dtypes, loss_scale_of

Step = Callable[[TrainState, Any], tuple[TrainState, Metrics]]


def data_parallel(
    step: TrainStep,
    mesh: Mesh,
    axis: str = "data",
    *,
    donate_argnums: int | Sequence[int] = (),
) -> Step:
    """Returns a step that runs on all devices along an axis of a mesh, by `shard_map`; it is compiled already.

    Within `jax.jit`, `jax.lax.scan` and other transformations it is a part of their program. Other axes of the
    mesh are left to jax. Several processes run it with a mesh of all their devices and a batch that is one array
    over these.

    Args:
      step: what `train_step` returned.
      mesh: the devices, for example `jax.make_mesh((8,), ("data",))`.
      axis: the mesh axis along which the batch is cut.
      donate_argnums: as for jit; 0 lets the next state take the memory of the last. An outer jit has its own.

    Returns:
      A pure function `(state, batch) -> (state, metrics)`. Metrics are those of the whole batch; aux that is neither
      floating nor complex is the first device's. What does not lie on the mesh's devices yet, such as NumPy's
      arrays, is put there first.

    Raises:
      TypeError: `step` is no `TrainStep`; when called, the batch has a graph that is in no stack.
      ValueError: the mesh has no such axis; when called, the number of its devices does not divide the batch, or
        whole numbers or flags of the model state depend on a device's own rows.

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
    count = axis_size(mesh, axis)
    everywhere, apart = (NamedSharding(automatic(mesh), spec) for spec in (P(), P(axis)))

    def on_traced(state: TrainState, batch: Any) -> tuple[TrainState, Metrics]:
        check_same_state(parallel, mesh, state, batch)
        # The step names its reductions, and so does not need jax to find out what varies.
        mapped = jax.shard_map(
            with_inert_boxes(parallel, state.params, axis),
            mesh=automatic(mesh),
            in_specs=(P(), P(axis)),
            out_specs=P(),
            axis_names={axis},
            check_vma=False,
        )
        return mapped(state, batch)

    run = jax.jit(on_traced, inline=True, donate_argnums=donate_argnums)

    def on_all(state: TrainState, batch: Any) -> tuple[TrainState, Metrics]:
        check_not_replicated(state)
        check_divides(batch, count, f"the {count} devices along mesh axis {axis!r}")
        warn_of_split(batch, count)
        if not is_traced((state, batch)):
            parallel.first_trace.look_at_values({"batch": batch}, parallel.policy)
            state, batch = placed((state, batch), (everywhere, apart), on_same_devices)
        with over(mesh), hint_of_split(batch, count):
            return run(state, batch)

    return on_all


def pmap_step(
    step: TrainStep,
    axis: str = "data",
    *,
    devices: Sequence[Any] | None = None,
    donate_argnums: int | Sequence[int] = (),
) -> Step:
    """Returns a step that runs on several devices of this process, by `pmap`; it is compiled already.

    Args:
      step: what `train_step` returned.
      axis: a name for the devices.
      devices: which; None for all local ones.
      donate_argnums: as for jit; 0 lets the next state take the memory of the last.

    Returns:
      A function `(state, batch) -> (state, metrics)` that wants no jit. The state goes in and comes out as on
      one device, and the batch whole. Of several processes each brings the batch of its own devices.

    Raises:
      TypeError: see `data_parallel`.
      ValueError: when called, as in `data_parallel`.

    Example:
      >>> import jax, jax.numpy as jnp, optax
      >>> import jmp_train as jt
      >>> step = jt.train_step(jt.stateless(lambda w, x: (w * x).mean()), optax.sgd(1.0))
      >>> state = jt.TrainState.create(jnp.zeros(()), optax.sgd(1.0))
      >>> state, metrics = jt.pmap_step(step)(state, jnp.full(4 * jax.device_count(), 2.0))
      >>> float(state.params)
      -2.0
    """
    parallel = _checked_step(step).with_axes(axis)
    mesh = Mesh(np.array(jax.local_devices() if devices is None else devices), (axis,))
    everywhere, apart = NamedSharding(mesh, P()), NamedSharding(mesh, P(axis))

    @functools.lru_cache(maxsize=4)
    def check(structure: Any, shapes: Any) -> None:
        check_same_state(parallel, mesh, *jax.tree.unflatten(structure, shapes))

    run = jax.pmap(
        parallel,
        axis,
        in_axes=(None, 0),
        out_axes=None,
        devices=devices,
        donate_argnums=donate_argnums,
    )

    def on_all(state: TrainState, batch: Any) -> tuple[TrainState, Metrics]:
        check_not_replicated(state)
        check_divides(batch, mesh.size, f"the {mesh.size} devices")
        warn_of_split(batch, mesh.size)
        if has_whole_numbers(state.model_state):
            leaves, structure = jax.tree.flatten((state, batch))
            check(structure, tuple(jax.ShapeDtypeStruct(jnp.shape(x), x.dtype) for x in leaves))
        parts = in_parts(batch, mesh.size)
        if not is_traced((state, parts)):
            state, parts = placed((state, parts), (everywhere, apart))
        with over(mesh), hint_of_split(batch, mesh.size):
            return run(state, parts)

    return on_all


def sharded_step(
    step: TrainStep,
    mesh: Mesh,
    axis: str = "data",
    *,
    shardings: Any = None,
    donate_argnums: int | Sequence[int] = (),
) -> Step:
    """Returns a step by plain `jit`, with arrays that are sharded over a mesh; it is compiled already.

    What jit makes of a whole batch by itself adds gradients over the devices in the compute dtype. Here each
    device's gradients are apart until they are averaged, as in `data_parallel`; all else is jit's. With `shardings`
    the state may be cut over the mesh in any way: parameters over other axes (tensor parallelism), the optimizer's
    state over `axis` (ZeRO-1), parameters too (FSDP). Norm, finite test and clipping see all of it.

    Args:
      step: see `data_parallel`.
      mesh: see `data_parallel`.
      axis: see `data_parallel`.
      shardings: where the state's arrays lie, as `state_shardings`, `zero1_shardings` or `fsdp_shardings` says, or
        any tree or prefix tree of shardings or `PartitionSpec`s, such as flax's `nn.get_sharding(state, mesh)`; the
        next state's lie there too. None for whole ones. Parameters that are cut over `axis` are gathered in the
        dtype that all of their uses cast them to; gradients are added up in the policy's `reduce_dtype`, and where the
        parameter or its optimizer state is cut over `axis`, each device gets its part of the sum alone.
      donate_argnums: see `data_parallel`.

    Returns:
      See `data_parallel`; aux that is neither floating nor complex has one row for each device.

    Raises:
      TypeError: see `data_parallel`.
      ValueError: see `data_parallel`; when called, `shardings` are those of another state
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
    count = axis_size(mesh, axis)
    everywhere, apart = (NamedSharding(automatic(mesh), spec) for spec in (P(), P(axis)))

    @functools.lru_cache(maxsize=4)
    def where(structure: Any, shapes: Any) -> TrainState:
        arrays = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)
        return full_shardings(jax.tree.unflatten(structure, arrays), shardings, mesh)

    def shardings_of(state: TrainState) -> TrainState | None:
        if shardings is None:
            return None
        leaves, structure = jax.tree.flatten(state)
        return where(structure, tuple(map(jnp.shape, leaves)))

    def on_traced(state: TrainState, batch: Any) -> tuple[TrainState, Metrics]:
        check_is_train_state(state)
        shardings = shardings_of(state)
        check_param_dtypes(state.params, step.policy)
        state, batch = on_automatic_axes((state, batch), mesh)
        check_same_state(parallel, mesh, state, batch)
        next_rng, step_rng = (None, None) if state.rng is None else jax.random.split(state.rng)
        run = _sharded_gradients(
            with_inert_boxes(parallel, state.params, axis),
            automatic(mesh),
            axis,
            _grad_cuts(state, shardings, axis),
        )
        if shardings is not None:
            run = _with_whole_params(run, shardings.params, axis)
        (loss, model_state, averaged, grads), rows = run(
            loss_scale_of(state.opt_state), state.params, state.model_state, batch, step_rng
        )
        aux = jax.tree.map(
            lambda mean, row: row if mean is None else mean,
            averaged,
            rows,
            is_leaf=lambda x: x is None,
        )
        new, metrics = step.apply_gradients(state, loss, model_state, aux, grads, next_rng)
        return (new if shardings is None else lax.with_sharding_constraint(new, shardings)), metrics

    run = jax.jit(on_traced, inline=True, donate_argnums=donate_argnums)

    def on_all(state: TrainState, batch: Any) -> tuple[TrainState, Metrics]:
        check_not_replicated(state)
        check_divides(batch, count, f"the {count} devices along mesh axis {axis!r}")
        warn_of_split(batch, count)
        if not is_traced((state, batch)):
            step.first_trace.look_at_values({"batch": batch}, step.policy)
            batch = placed(batch, apart, on_same_devices)
            if shardings is None:
                state = placed(state, everywhere, on_same_devices)
            else:
                state = placed(state, shardings_of(state))
        with over(mesh), hint_of_split(batch, count):
            return run(state, batch)

    return on_all


def _grad_cuts(state: TrainState, shardings: TrainState | None, axis: str) -> Any:
    """Returns along which dimension each parameter's gradient is cut over the batch's axis; -1 for whole ones."""
    if shardings is None:
        cuts = jax.tree.map(lambda x: -1, state.params)
    else:
        cuts = gradient_dimensions(state, shardings, axis)
    losses = loss_scale_of(state.opt_state)
    return (cuts,) * len(losses.loss_scales) if isinstance(losses, PerLossScale) else cuts


def _sharded_gradients(parallel: TrainStep, mesh: Mesh, axis: str, cuts: Any) -> Any:
    """Returns `TrainStep.gradients` over the devices along an axis, each of which gets its part of the gradients."""

    def gradients(
        loss_scale: Any, params: Any, model_state: Any, batch: Any, rng: Any
    ) -> tuple[Any, Any]:
        results = parallel.local_gradients(loss_scale, params, model_state, batch, rng)
        grads = scatter_gradients(results[-1], cuts, axis, parallel.reduce_dtype)
        loss, model_state, aux = mean_over_axes(results[:-1], (axis,))
        averaged = jax.tree.map(lambda x: x if is_inexact(x) else None, aux)
        rows = jax.tree.map(lambda x: None if is_inexact(x) else jnp.asarray(x)[None], aux)
        return (loss, model_state, averaged, grads), rows

    specs = jax.tree.map(lambda dim: P(*(None,) * dim, axis) if dim >= 0 else P(), cuts)
    return jax.shard_map(
        gradients,
        mesh=mesh,
        in_specs=(P(), P(), P(), P(axis), P()),
        out_specs=((P(), P(), P(), specs), P(axis)),
        axis_names={axis},
        check_vma=False,
    )


def _with_whole_params(run: Any, shardings: Any, axis: str) -> Any:
    """Returns a function of parameters that may be cut over an axis, which are gathered for `run`.

    Those that all of its uses cast to a narrower dtype are gathered in that. XLA does not do so by itself. Nor does
    an `all_gather` within the `shard_map` do: what scatters into its result is wrong there in jaxlib 0.10, where
    another dimension is cut too.
    """
    cut = jax.tree.map(lambda sharding: dimension_over(axis, sharding) >= 0, shardings)
    if not any(jax.tree.leaves(cut)):
        return run

    def gather(x: Any, dtype: Any, sharding: NamedSharding) -> Any:
        entries = (without_axis(axis, entry) for entry in sharding.spec)
        whole = NamedSharding(sharding.mesh, P(*entries))
        # Where it lies, or it would be gathered before it is cast.
        narrow = lax.with_sharding_constraint(x.astype(dtype), sharding)
        return lax.with_sharding_constraint(narrow, whole).astype(x.dtype)

    def with_whole(loss_scale: Any, params: Any, *rest: Any) -> Any:
        program, shapes = jax.make_jaxpr(run, return_shape=True)(loss_scale, params, *rest)
        first, (leaves, structure) = len(jax.tree.leaves(loss_scale)), jax.tree.flatten(params)
        inputs = program.jaxpr.invars[first : first + len(leaves)]
        dtypes = jax.tree.unflatten(structure, narrow_uses(program.jaxpr, inputs))
        params = jax.tree.map(
            lambda x, dtype, sharding, is_cut: gather(x, dtype, sharding) if is_cut else x,
            params,
            dtypes,
            shardings,
            cut,
        )
        results = jaxpr_as_fun(program)(*jax.tree.leaves((loss_scale, params, *rest)))
        return jax.tree.unflatten(jax.tree.structure(shapes), results)

    return with_whole


def _checked_step(step: Any) -> TrainStep:
    if not isinstance(step, TrainStep):
        kind = type(step).__name__
        raise TypeError(f"step must be what train_step returned, not jitted, got {kind}")
    return step
