"""`PartitionSpec`s of parameters, by rules on paths or by flax's metadata: linen's boxes and nnx's variables."""

import dataclasses
import functools
import math
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

import jax
from flax.core.meta import AxisMetadata, Partitioned
from flax.linen.spmd import logical_to_mesh_axes
from flax.typing import LogicalRules
from jax.sharding import Mesh, NamedSharding, PartitionSpec, get_abstract_mesh, use_abstract_mesh
from jax.tree_util import KeyPath

from jmp_train.parallel.mesh_axes import axis_size, without_axis
from jmp_train.policies import Params, PyTree
from jmp_train.policies.pytrees import check_regexes, check_rules, named_leaves, path_name
from jmp_train.steps import TrainStep

P = PartitionSpec


def specs_by_path(params: Params, rules: Mapping[str, PartitionSpec | tuple[Any, ...]]) -> Any:
    """Returns a `PartitionSpec` for each parameter, from the first rule whose regular expression matches its path.

    Args:
      params: pytree of arrays, or of their shapes.
      rules: maps regular expressions, searched for in paths such as "layers/0/kernel", to specs, or tuples of
        spec entries. Parameters that match no rule are replicated on every device.

    Returns:
      A tree like `params`.

    Raises:
      TypeError: `rules` is not a mapping, a key not a string, or a value not a spec.
      ValueError: a rule is not a regular expression, matches no parameter, or has more entries than the parameter has
        dimensions.

    Example:
      >>> import jax.numpy as jnp
      >>> from jax.sharding import PartitionSpec as P
      >>> params = {"up": {"kernel": jnp.ones((4, 8)), "bias": jnp.ones(8)}, "norm": jnp.ones(4)}
      >>> specs = specs_by_path(params, {"up/kernel": P(None, "model"), "up/bias": P("model")})
      >>> tuple(specs["up"]["kernel"])
      (None, 'model')

    Reference: the partitioning rules of t5x.
    """
    check_regexes(rules)
    specs = {regex: _as_spec(regex, spec) for regex, spec in rules.items()}
    paths = [path for path, _ in named_leaves(params)]
    check_rules(rules, paths, "specs_by_path: {} found no parameter")

    def spec_of(path: KeyPath, x: jax.Array) -> PartitionSpec:
        name = path_name(path)
        spec = next((spec for regex, spec in specs.items() if re.search(regex, name)), P())
        _check_rank(f"params {name!r}", x, spec)
        return spec

    return jax.tree_util.tree_map_with_path(spec_of, params)


def _as_spec(regex: str, spec: object) -> PartitionSpec:
    entries = tuple(spec) if isinstance(spec, tuple | PartitionSpec) else (spec, 0)
    flat = [x for entry in entries for x in (entry if isinstance(entry, tuple) else (entry,))]
    if not all(x is None or x is P.UNCONSTRAINED or isinstance(x, str) for x in flat):
        raise TypeError(f"rule {regex!r} must have a PartitionSpec, or a tuple of mesh axes and None, got {spec!r}")
    return P(*entries)


def checked_specs(params: Params, specs: object, mesh: Mesh) -> Any:
    """Returns a spec per parameter; raises ValueError with the name of a parameter that its spec does not fit.

    Args:
      params: pytree of arrays, or of their shapes.
      specs: a tree or prefix tree of specs; None takes those of the parameters' metadata.
      mesh: the devices.
    """
    if specs is None:
        specs = specs_of_metadata(params)
    specs = broadcast_specs(specs, params, "params must have a PartitionSpec for each parameter of the state")
    return jax.tree_util.tree_map_with_path(
        lambda path, spec, x: checked_spec(f"params {path_name(path)!r}", x, spec, mesh),
        specs,
        params,
        is_leaf=is_spec,
    )


def broadcast_specs(prefix: object, tree: PyTree, message: str) -> Any:
    """Returns a prefix tree broadcast to the structure of another tree."""
    try:
        return jax.tree.broadcast(prefix, tree, is_leaf=is_spec)
    except ValueError as error:
        came, wanted = jax.tree.structure(prefix, is_leaf=is_spec), jax.tree.structure(tree)
        raise ValueError(f"{message}:\n  {wanted}\ngot:\n  {came}") from error


def checked_spec(what: str, x: jax.Array, spec: object, mesh: Mesh) -> PartitionSpec:
    """Returns a spec, or the spec of a sharding, if it fits an array; otherwise raises ValueError."""
    if isinstance(spec, NamedSharding):
        spec = spec.spec
    if not is_spec(spec):
        raise ValueError(f"{what} must be a PartitionSpec, got {spec!r}")
    _check_rank(what, x, spec)
    for size, entry in zip(x.shape, spec, strict=False):
        axes = entry if isinstance(entry, tuple) else () if entry is None else (entry,)
        count = math.prod(axis_size(mesh, axis) for axis in axes)
        if size % count:
            raise ValueError(
                f"{what} of shape {x.shape} cannot be sharded by {spec}: {size} must be a multiple of {count} devices"
            )
    return spec


def _check_rank(what: str, x: jax.Array, spec: PartitionSpec) -> None:
    if len(spec) > len(x.shape):
        raise ValueError(f"{what} of shape {x.shape} has fewer dimensions than {spec}")


def is_spec(x: object) -> TypeGuard[PartitionSpec]:
    """Returns whether `x` is a `PartitionSpec`."""
    return isinstance(x, PartitionSpec)


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
