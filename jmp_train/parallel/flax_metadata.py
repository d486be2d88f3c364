"""Sharding metadata of flax parameters: linen's boxes and nnx's variables."""

import dataclasses
import functools
import sys
from collections.abc import Sequence
from typing import Any

import jax
from flax.core.meta import AxisMetadata, Partitioned
from flax.linen.spmd import logical_to_mesh_axes
from flax.typing import LogicalRules
from jax.sharding import PartitionSpec, get_abstract_mesh, use_abstract_mesh

from jmp_train.parallel.mesh_axes import without_axis
from jmp_train.policies import Params, PyTree
from jmp_train.steps import TrainStep


def is_box(x: object) -> bool:
    """Returns whether `x` is a linen array with metadata, as created by `nn.with_partitioning`."""
    return isinstance(x, AxisMetadata)


def specs_of_metadata(params: Params) -> Any:
    """Returns a tree prefix of `PartitionSpec`s from the metadata of the parameters.

    Logical names are translated by flax's rules: the box's own, or those of `nn.logical_axis_rules`.

    Args:
      params: pytree of arrays, or of their shapes.
    """
    nnx: Any = sys.modules.get("flax.nnx")  # users with variables have imported it

    def spec_of(x: Any) -> Any:
        if is_box(x) and hasattr(x, "get_partition_spec"):
            spec = x.get_partition_spec()
            return _of_logical(spec, x.rules) if hasattr(x, "rules") else spec
        if nnx is not None and isinstance(x, nnx.Variable):
            return nnx.get_partition_spec(x)
        return PartitionSpec()

    def is_end(x: object) -> bool:
        return is_box(x) or (nnx is not None and isinstance(x, nnx.Variable))

    return jax.tree.map(spec_of, params, is_leaf=is_end)


def _of_logical(names: Sequence[str | None] | None, rules: LogicalRules | None) -> PartitionSpec:
    spec = logical_to_mesh_axes(names, rules)
    return PartitionSpec() if spec is None else spec


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
