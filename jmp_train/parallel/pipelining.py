"""Pipeline parallelism: a model in stages, one per device along a mesh axis.

A batch is split into micro-batches that follow each other from stage to stage, as in GPipe. A pipeline is part of
the model, inside the loss function. Gradients, norm and overflow check are therefore those of the whole model.

`Stages` may have any shapes. One program runs on all devices, and an array has equal parts on them. So each device's
parameters are one row of a packed array, as long as the longest one, and a stage's output is padded to the width of
the largest activation.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jmp_train.parallel.mesh_axes import axis_size, surrounding
from jmp_train.policies import Params, PyTree
from jmp_train.policies.pytrees import check_count, is_float_array, named_leaves
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
    check_count("micro_batches", micro_batches)

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
        mesh=surrounding(mesh),
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


@dataclasses.dataclass(frozen=True)
class Stages:
    """A model's stages of any shapes, one per device along a mesh axis.

    The packed parameters are one leaf. So a policy casts them all alike, rules on paths do not see single parameters,
    and optimizers that look at whole layers (LAMB, Adafactor) treat a stage as one layer.

    Args:
      functions: `function(params, x, rng) -> y` for each stage. `x` and `y` are arrays [examples, ...] of one dtype,
        and each stage takes the output of the previous one.
      params: the parameters of each stage, trees of arrays of one floating dtype. The class keeps their shapes.

    Raises:
      ValueError: functions and parameters differ in number, or a parameter has another dtype than the first one.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import jmp_train as jt
      >>> params = [{"w": jnp.ones((2, 3))}, {"w": jnp.ones((3, 1)), "b": jnp.ones(1)}]
      >>> first = lambda p, x, rng: jax.nn.relu(x @ p["w"])
      >>> second = lambda p, x, rng: x @ p["w"] + p["b"]
      >>> stages = jt.parallel.Stages([first, second], params)
      >>> packed = stages.pack(params)
      >>> packed.shape, stages.unpack(packed)[1]["w"].shape
      ((2, 6), (3, 1))

    Reference: "Combining DDP with model parallelism" of PyTorch's tutorial on DistributedDataParallel.
    """

    functions: Sequence[Stage]
    params: dataclasses.InitVar[Sequence[Any]]
    _shapes: tuple[Any, ...] = dataclasses.field(init=False)

    def __post_init__(self, params: Sequence[Any]) -> None:
        if len(params) != len(self.functions):
            raise ValueError(f"{len(self.functions)} functions have params of {len(params)} stages")
        leaves = named_leaves(list(params))
        for path, x in leaves:
            if not is_float_array(x) or x.dtype != leaves[0][1].dtype:
                raise ValueError(
                    f"params {path!r} is {jnp.result_type(x)}, but {leaves[0][0]!r} is "
                    f"{jnp.result_type(leaves[0][1])}; all params of stages must have one floating dtype"
                )
        shapes = (jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree) for tree in params)
        object.__setattr__(self, "functions", tuple(self.functions))
        object.__setattr__(self, "_shapes", tuple(shapes))

    def pack(self, params: Sequence[Any]) -> jax.Array:
        """Returns the parameters as one array [stages, elements of the largest stage], padded with zeros.

        Args:
          params: the parameters of each stage, or trees of the same shapes, such as gradients.

        Raises:
          ValueError: a stage has another structure, or a leaf another shape.
        """
        for number, (tree, shapes) in enumerate(zip(params, self._shapes, strict=True)):
            came, wanted = ([(path, tuple(leaf.shape)) for path, leaf in named_leaves(each)] for each in (tree, shapes))
            if came != wanted:
                raise ValueError(f"params of stage {number} must be {wanted}, got {came}")
        longest = max(sum(leaf.size for leaf in jax.tree.leaves(shapes)) for shapes in self._shapes)
        return jnp.stack([_row(tree, longest) for tree in params])

    def unpack(self, packed: jax.Array) -> list[Any]:
        """Returns the parameters of each stage.

        Args:
          packed: the result of `pack`, in any dtype.
        """
        return [self._unpack_row(number, row) for number, row in enumerate(packed)]

    def _unpack_row(self, number: int, row: jax.Array) -> Any:
        leaves, structure = jax.tree.flatten(self._shapes[number])
        arrays, start = [], 0
        for leaf in leaves:
            arrays.append(row[start : start + leaf.size].reshape(leaf.shape))
            start += leaf.size
        return jax.tree.unflatten(structure, arrays)

    def pipeline(self, mesh: Mesh, axis: str = "pipe", *, micro_batches: int = 1) -> Callable[..., jax.Array]:
        """Returns a function that passes a batch through the stages; see `pipeline`.

        Args:
          mesh: the devices.
          axis: the mesh axis of the stages. They must not reduce over it, nor over another automatic axis.
          micro_batches: number of parts into which a batch is split along its first axis.

        Returns:
          `run(packed, x, rng=None) -> y`, where y is the output of the last stage.

        Raises:
          ValueError: the axis does not have one device per stage, or `micro_batches` is below 1. When called:
            `micro_batches` does not divide the batch, or a stage returns another dtype than it takes.
        """
        count = axis_size(mesh, axis)
        if count != len(self.functions):
            raise ValueError(f"mesh axis {axis!r} has {count} devices for {len(self.functions)} stages")

        def run(packed: jax.Array, x: jax.Array, rng: jax.Array | None = None) -> jax.Array:
            shapes = self._activations(packed, x, rng)
            largest = max(math.prod(shape) for shape in shapes)

            def on_flat(number: int, row: jax.Array, flat: jax.Array, rng: jax.Array | None) -> jax.Array:
                x = _unpadded(flat, shapes[number])
                return _padded(self.functions[number](self._unpack_row(number, row), x, rng), largest)

            def stage(index: jax.Array, *operands: Any) -> jax.Array:
                return lax.switch(index, [partial(on_flat, number) for number in range(count)], *operands)

            flat = pipeline_of_indexed(stage, mesh, axis, micro_batches)(packed, _padded(x, largest), rng)
            return _unpadded(flat, shapes[-1])

        return jax.jit(run)

    def _activations(self, packed: jax.Array, x: jax.Array, rng: jax.Array | None) -> list[tuple[int, ...]]:
        """Returns the shape of one example of each stage's input, and of the last output."""
        shapes = [x.shape[1:]]
        value: Any = x
        for number, (function, tree) in enumerate(zip(self.functions, self._shapes, strict=True)):
            params = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, packed.dtype), tree)
            value = jax.eval_shape(function, params, value, rng)
            if value.dtype != x.dtype or value.shape[:1] != x.shape[:1]:
                raise ValueError(
                    f"stage {number} returned {value.dtype}{list(value.shape)} for a batch of {x.shape[0]} "
                    f"examples in {x.dtype}; all stages must return arrays [examples, ...] of that dtype"
                )
            shapes.append(value.shape[1:])
        return shapes


def _row(tree: PyTree, length: int) -> jax.Array:
    flat = jnp.concatenate([jnp.ravel(x) for x in jax.tree.leaves(tree)])
    return jnp.pad(flat, (0, length - flat.size))


def _padded(x: jax.Array, width: int) -> jax.Array:
    flat = x.reshape(x.shape[0], -1)
    return jnp.pad(flat, ((0, 0), (0, width - flat.shape[1])))


def _unpadded(flat: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return flat[:, : math.prod(shape)].reshape(flat.shape[0], *shape)
