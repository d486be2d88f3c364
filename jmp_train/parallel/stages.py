"""Pipeline stages of any shapes, with parameters packed into one array with a row per device.

One program runs on all devices, and an array has equal parts on them. So each device's parameters are one row, as
long as the longest one, and a stage's output is padded to the width of the largest activation.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh

from jmp_train.parallel.mesh_axes import axis_size
from jmp_train.parallel.pipelining import Stage, pipeline_of_indexed
from jmp_train.policies import PyTree
from jmp_train.policies.pytrees import is_float_array, named_leaves


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
      ValueError: functions and parameters differ in number, or a parameter has another dtype than the first one;
        the message names it.

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
          params: the parameters of each stage, with the shapes passed to the class; or trees like them, such as
            gradients.

        Raises:
          ValueError: a stage has another structure, or a leaf another shape.
        """
        for number, (tree, shapes) in enumerate(zip(params, self._shapes, strict=True)):
            came, wanted = ([(path, tuple(leaf.shape)) for path, leaf in named_leaves(each)] for each in (tree, shapes))
            if came != wanted:
                raise ValueError(f"params of stage {number} must be {wanted}, got {came}")
        longest = max(map(_size, self._shapes))
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
          axis: the mesh axis along which the stages are placed. They must not reduce over it, nor over another
            automatic axis.
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

            def stage(index: jax.Array, row: jax.Array, flat: jax.Array, rng: jax.Array | None) -> jax.Array:
                def branch(number: int) -> Callable[..., jax.Array]:
                    def on_flat(row: jax.Array, flat: jax.Array, rng: jax.Array | None) -> jax.Array:
                        x = _unpadded(flat, shapes[number])
                        y = self.functions[number](self._unpack_row(number, row), x, rng)
                        return _padded(y, largest)

                    return on_flat

                return lax.switch(index, [branch(i) for i in range(count)], row, flat, rng)

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


def _size(shapes: PyTree) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(shapes))


def _row(tree: PyTree, length: int) -> jax.Array:
    flat = jnp.concatenate([jnp.ravel(x) for x in jax.tree.leaves(tree)])
    return jnp.pad(flat, (0, length - flat.size))


def _padded(x: jax.Array, width: int) -> jax.Array:
    flat = x.reshape(x.shape[0], -1)
    return jnp.pad(flat, ((0, 0), (0, width - flat.shape[1])))


def _unpadded(flat: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return flat[:, : math.prod(shape)].reshape(flat.shape[0], *shape)
