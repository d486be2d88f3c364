"""Pipeline parallelism: a model in stages, one per device along a mesh axis.

A batch is split into micro-batches that follow each other from stage to stage, as in GPipe. A pipeline is part of
the model, inside the loss function. Gradients, norm and overflow check are therefore those of the whole model.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jmp_train.parallel.mesh_axes import automatic, axis_size
from jmp_train.policies import Params
from jmp_train.policies.pytrees import named_leaves
from jmp_train.steps import check_divides, in_parts
from jmp_train.types import Batch

Stage = Callable[[Any, Any, Any], Any]


def pipeline(stage: Stage, mesh: Mesh, axis: str = "pipe", *, micro_batches: int = 1) -> Callable[..., Any]:
    """Returns a function that passes a batch through one stage per device of a mesh axis.

    With S stages and M micro-batches, each device waits for S - 1 of M + S - 1 ticks. The activations of all
    micro-batches are stored for the backward pass; with `jax.checkpoint(stage)`, only the inputs of the stages.

    Args:
      stage: `stage(params, x, rng) -> y`, one stage; y has the shapes and dtypes of x. It must not reduce over `axis`.
      mesh: the devices.
      axis: the mesh axis along which the stages are placed.
      micro_batches: number of parts into which a batch is split along its first axis.

    Returns:
      `run(params, x, rng=None) -> y`, compiled by jit. Leaves of `params` are [stages, ...]; shard them by
      `PartitionSpec("pipe")` so that each device stores only its own stage. `x` is an array or a tree of arrays
      [examples, ...], and y has the same structure. `rng` is None or a random key, from which every stage gets
      its own key per micro-batch.

    Raises:
      TypeError: `mesh` is not a Mesh.
      ValueError: the mesh has no such axis, or `micro_batches` is below 1. When called: a parameter does not have one
        row per stage, `micro_batches` does not divide the batch, or a stage changes shapes or dtypes.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> mesh = jax.sharding.Mesh(jax.devices(), ("pipe",))
      >>> run = pipeline(lambda w, x, rng: x * w, mesh, micro_batches=2)
      >>> y = run(jnp.full(mesh.size, 2.0), jnp.ones((4, 3)))
      >>> bool((y == 2.0**mesh.size).all())
      True

    Reference: Huang et al., "GPipe", https://arxiv.org/abs/1811.06965.
    """
    return pipeline_of_indexed(
        lambda index, *rest: stage(*rest), mesh, axis, micro_batches, partial(_check_stage, stage)
    )


def pipeline_of_indexed(
    stage: Callable[..., Any],
    mesh: Mesh,
    axis: str,
    micro_batches: int,
    check: Callable[[Any, Any, Any], None] = lambda params, parts, rng: None,
) -> Callable[..., Any]:
    """Returns a pipeline whose stages get their own index.

    Args:
      stage: `stage(index, params, x, rng)`; otherwise as in `pipeline`.
      mesh: the devices.
      axis: the mesh axis along which the stages are placed.
      micro_batches: number of parts into which a batch is split.
      check: `check(params, parts, rng)` is called before anything runs; `parts` are [micro_batches, examples, ...].
    """
    count = axis_size(mesh, axis)
    if not isinstance(micro_batches, int) or micro_batches < 1:
        raise ValueError(f"micro_batches={micro_batches!r} must be an integer of at least 1")

    def run(params: Params, x: Batch, rng: jax.Array | None = None) -> Any:
        for path, leaf in named_leaves(params):
            if jnp.ndim(leaf) == 0 or jnp.shape(leaf)[0] != count:
                raise ValueError(
                    f"params {path or '(root)'!r} of shape {jnp.shape(leaf)} must have one row for each of "
                    f"{count} stages"
                )
        check_divides(x, micro_batches, f"micro_batches={micro_batches}")
        parts = in_parts(x, micro_batches)
        check(params, parts, rng)
        in_ticks = partial(_in_ticks, stage, axis, count)
        outputs = _over_devices(in_ticks, mesh, axis)(params, parts, rng)
        # Rows are [stages * micro_batches, ...], and those of the last stage are the model's output.
        return jax.tree.map(lambda y: y[-micro_batches:].reshape(-1, *y.shape[2:]), outputs)

    return jax.jit(run)


def _over_devices(in_ticks: Callable[..., Any], mesh: Mesh, axis: str) -> Any:
    if mesh.shape[axis] == 1:  # nothing to shard, and XLA does not reduce over one device
        return in_ticks
    return jax.shard_map(
        in_ticks,
        mesh=_surrounding(mesh),
        in_specs=(P(axis), P(), P()),
        out_specs=P(axis),
        axis_names={axis},
        check_vma=False,
    )


def _in_ticks(
    stage: Callable[..., Any], axis: str, count: int, params: Params, parts: Batch, rng: jax.Array | None
) -> Any:
    """Returns the outputs of one device's stage for each micro-batch, computed one tick after another."""
    params = jax.tree.map(lambda x: x[0], params)
    index = lax.axis_index(axis) if count > 1 else jnp.int32(0)
    micro_batches = len(jax.tree.leaves(parts)[0])
    to_next = [(i, i + 1) for i in range(count - 1)]

    def tick(received: Batch, number: jax.Array) -> tuple[Any, Any]:
        own = jnp.clip(number - index, 0, micro_batches - 1)  # the micro-batch of this tick
        first = jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, own, keepdims=False), parts)
        x = jax.tree.map(lambda a, b: jnp.where(index == 0, a, b), first, received)
        key = None if rng is None else jax.random.fold_in(jax.random.fold_in(rng, index), own)
        y = stage(index, params, x, key)
        return (jax.tree.map(lambda x: lax.ppermute(x, axis, to_next), y) if to_next else y), y

    # Before their first tick, stages run on a micro-batch that is not theirs, and the result is dropped. Zeros would
    # not do: a norm could have infinite derivatives there, and zero times these is NaN.
    start = jax.tree.map(lambda x: x[0], parts)
    _, outputs = lax.scan(tick, start, jnp.arange(micro_batches + count - 1))
    return jax.tree.map(lambda y: y[count - 1 :], outputs)


def _check_stage(stage: Stage, params: Params, parts: Batch, rng: jax.Array | None) -> None:
    one, x = (jax.tree.map(lambda leaf: leaf[0], tree) for tree in (params, parts))
    y = jax.eval_shape(stage, one, x, rng)
    wanted, came = (
        [f"{path or '(root)'} {leaf.dtype}{list(leaf.shape)}" for path, leaf in named_leaves(tree)] for tree in (x, y)
    )
    if wanted != came:
        raise ValueError(
            f"stage must return arrays like its inputs, {', '.join(wanted)}; it returned {', '.join(came)}. For "
            "layers of different shapes, use Stages"
        )


def _surrounding(mesh: Mesh) -> Any:
    """Returns the mesh of the surrounding `shard_map`, if any, because jax accepts no other mesh there."""
    context = jax.sharding.get_abstract_mesh()
    return context if context.manual_axes else automatic(mesh)
