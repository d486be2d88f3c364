"""Shardings of a train state over a mesh: replicated, by the paths of parameters, or by shapes (ZeRO-1, FSDP).

The optimizer's arrays for a parameter (moments and float32 master weights, also as codes and scales) are sharded as
the parameter is. ZeRO-1 shards these arrays over more axes, and FSDP the parameters too.

The `PartitionSpec`s of parameters come from rules on paths or from flax's metadata: linen's boxes and nnx's variables.
"""

import dataclasses
import math
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

import jax
from flax.core.meta import AxisMetadata
from flax.linen.spmd import logical_to_mesh_axes
from flax.typing import LogicalRules
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.tree_util import KeyPath

from jmp_train.parallel.mesh_axes import automatic, axis_size, dimension_over
from jmp_train.policies import Params, PyTree
from jmp_train.policies.pytrees import check_count, check_regexes, check_rules, named_leaves, path_name
from jmp_train.policies.quantizing import BlockQuantized
from jmp_train.steps import TrainState

P = PartitionSpec
MIN_SIZE = 2**12  # elements; fewer are not worth a message


def state_shardings(state: TrainState, mesh: Mesh, *, params: PyTree = None) -> TrainState:
    """Returns the shardings of a state from the specs of its parameters, as for tensor parallelism.

    Args:
      state: a train state, or its shapes from `jax.eval_shape`.
      mesh: the devices.
      params: tree or prefix tree of `PartitionSpec`s for `state.params`, for example from `specs_by_path` or flax's
        `nn.get_partition_spec`. None takes the specs from the parameters' own metadata (`nn.with_partitioning`,
        `nnx.with_partitioning`), and replicates parameters without.

    Returns:
      A tree like `state` of `NamedSharding`s, for `jax.device_put(state, shardings)` and
      `sharded_step(step, mesh, shardings=shardings)`. Optimizer arrays with the shape of their parameter are sharded
      as the parameter is; everything else is replicated.

    Raises:
      TypeError: `state` is not a `TrainState`.
      ValueError: a spec names an unknown axis, or does not divide its parameter; the message names the parameter.

    Example:
      >>> import jax, jax.numpy as jnp, optax
      >>> from jax.sharding import Mesh, PartitionSpec as P
      >>> import jmp_train as jt
      >>> mesh = Mesh(jax.devices()[:1], ("model",))
      >>> state = jt.TrainState.create({"w": jnp.ones((2, 4))}, optax.adam(1e-3))
      >>> shardings = jt.parallel.state_shardings(state, mesh, params={"w": P(None, "model")})
      >>> tuple(shardings.opt_state[0].mu["w"].spec)
      (None, 'model')
    """
    return _placed(state, mesh, params, optimizer_rule=None, params_rule=None)


def zero1_shardings(
    state: TrainState,
    mesh: Mesh,
    axis: str = "data",
    *,
    params: PyTree = None,
    min_size: int = MIN_SIZE,
) -> TrainState:
    """Returns the shardings of a state whose optimizer state is sharded over the devices that share a batch.

    Each device stores and updates its part of the moments and master weights; parameters are replicated on all devices.

    Args:
      state: see `state_shardings`.
      mesh: the devices.
      axis: the mesh axis to shard over. An array is sharded along the longest of the dimensions that the axis divides
        and that `params` does not shard.
      params: specs of the parameters; see `state_shardings`.
      min_size: arrays with fewer elements are not sharded over `axis`.

    Returns:
      See `state_shardings`.

    Raises:
      TypeError: see `state_shardings`.
      ValueError: the mesh has no such axis; also see `state_shardings`.

    Example:
      >>> import jax, jax.numpy as jnp, optax
      >>> import jmp_train as jt
      >>> mesh = jax.sharding.Mesh(jax.devices(), ("data",))
      >>> state = jt.TrainState.create({"w": jnp.ones((64, 128)), "b": jnp.ones(128)}, optax.adam(1e-3))
      >>> shardings = jt.zero1_shardings(state, mesh)
      >>> moments = shardings.opt_state[0].mu
      >>> tuple(moments["w"].spec), tuple(moments["b"].spec), tuple(shardings.params["w"].spec)
      ((None, 'data'), (), ())

    Reference: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models",
    https://arxiv.org/abs/1910.02054.
    """
    check_count("min_size", min_size, 0)
    rule = _ShapeRule(axis, axis_size(mesh, axis), min_size)
    return _placed(state, mesh, params, optimizer_rule=rule, params_rule=None)


def fsdp_shardings(
    state: TrainState,
    mesh: Mesh,
    axis: str = "data",
    *,
    params: PyTree = None,
    min_size: int = MIN_SIZE,
) -> TrainState:
    """Returns the shardings of a state whose parameters are also sharded over the devices that share a batch.

    `sharded_step` gathers the parameters in the compute dtype, and sums the gradients in float32, each device
    its own part of them.

    Args:
      state: see `state_shardings`.
      mesh: the devices.
      axis: the mesh axis to shard over; see `zero1_shardings`.
      params: specs of the parameters; see `state_shardings`.
      min_size: arrays with fewer elements are not sharded over `axis`.

    Returns:
      See `state_shardings`.

    Raises:
      TypeError: see `state_shardings`.
      ValueError: see `zero1_shardings`.

    Example:
      >>> import jax, jax.numpy as jnp, optax
      >>> import jmp_train as jt
      >>> mesh = jax.sharding.Mesh(jax.devices(), ("data",))
      >>> state = jt.TrainState.create({"w": jnp.ones((64, 128)), "b": jnp.ones(128)}, optax.adam(1e-3))
      >>> tuple(jt.fsdp_shardings(state, mesh).params["w"].spec)
      (None, 'data')

    Reference: torch's FullyShardedDataParallel; ZeRO's third stage, https://arxiv.org/abs/1910.02054.
    """
    check_count("min_size", min_size, 0)
    rule = _ShapeRule(axis, axis_size(mesh, axis), min_size)
    return _placed(state, mesh, params, optimizer_rule=rule, params_rule=rule)


def full_shardings(state: TrainState, shardings: object, mesh: Mesh) -> TrainState:
    """Returns a sharding for each array of a state.

    Args:
      state: a train state, or its shapes.
      shardings: a tree or a prefix tree of `NamedSharding`s or `PartitionSpec`s.
      mesh: the devices.

    Raises:
      ValueError: a part of the tree belongs to another state, or a sharding does not fit its array; the message names
        it.
    """
    specs = broadcast_specs(shardings, state, "shardings must have a sharding for each array of the state")

    def named(path: KeyPath, spec: PartitionSpec, x: jax.Array) -> NamedSharding:
        spec = checked_spec(f"shardings {path_name(path)!r}", x, spec, mesh)
        return NamedSharding(automatic(mesh), spec)

    return jax.tree_util.tree_map_with_path(named, specs, state, is_leaf=is_spec)


def gradient_dimensions(state: TrainState, shardings: TrainState, axis: str) -> Any:
    """Returns the dimension along which the gradient of each parameter is best sharded over an axis; -1 for none.

    A device with only a part of a parameter in its optimizer state needs only that part of the gradient.

    Args:
      state: a train state, or its shapes.
      shardings: the shardings of its arrays.
      axis: the mesh axis.
    """
    found = {
        path: dimension_over(axis, sharding) for path, sharding in jax.tree_util.tree_leaves_with_path(shardings.params)
    }
    owners = _owners(state)
    for leaf, sharding in jax.tree_util.tree_leaves_with_path(shardings.opt_state, is_leaf=_is_quantized):
        owner = owners.get(leaf)
        if owner is not None and found[owner] < 0:
            found[owner] = dimension_over(axis, sharding.codes if isinstance(sharding, BlockQuantized) else sharding)
    return jax.tree.unflatten(jax.tree.structure(shardings.params), list(found.values()))


@dataclasses.dataclass(frozen=True)
class _ShapeRule:
    """The rule on shapes: shards the longest dimension that the axis divides and that is not sharded yet."""

    axis: str
    count: int
    min_size: int

    def __call__(self, x: jax.Array, spec: PartitionSpec) -> PartitionSpec:
        if math.prod(x.shape) < self.min_size:
            return spec
        entries = [*spec, *(None,) * (len(x.shape) - len(spec))]
        whole = [
            dimension for dimension, size in enumerate(x.shape) if entries[dimension] is None and size % self.count == 0
        ]
        if not whole:
            return spec
        longest = max(whole, key=lambda dimension: x.shape[dimension])
        entries[longest] = self.axis
        while entries[-1] is None:
            entries.pop()
        return P(*entries)


def _placed(
    state: TrainState,
    mesh: Mesh,
    params: PyTree,
    optimizer_rule: _ShapeRule | None,
    params_rule: _ShapeRule | None,
) -> TrainState:
    if not isinstance(state, TrainState):
        raise TypeError(f"state must be a TrainState, got {type(state).__name__}")
    specs = checked_specs(state.params, params, mesh)
    by_owner = dict(jax.tree_util.tree_leaves_with_path(specs, is_leaf=is_spec))
    owners = _owners(state)
    mesh = automatic(mesh)

    def named(rule: _ShapeRule | None, x: jax.Array, spec: PartitionSpec) -> NamedSharding:
        return NamedSharding(mesh, spec if rule is None else rule(x, spec))

    def of_optimizer(path: KeyPath, x: jax.Array | BlockQuantized) -> NamedSharding | BlockQuantized:
        owner = owners.get(path)
        spec = P() if owner is None else by_owner[owner]
        if not isinstance(x, BlockQuantized):
            return named(optimizer_rule, x, spec)
        codes = named(optimizer_rule, x.codes, spec)
        return BlockQuantized(codes, NamedSharding(mesh, _spec_of_scales(x, codes.spec, mesh)))

    whole = jax.tree.map(lambda x: NamedSharding(mesh, P()), state)
    return dataclasses.replace(
        whole,
        params=jax.tree.map(lambda x, spec: named(params_rule, x, spec), state.params, specs),
        opt_state=jax.tree_util.tree_map_with_path(of_optimizer, state.opt_state, is_leaf=_is_quantized),
    )


def _owners(state: TrainState) -> dict[KeyPath, KeyPath]:
    """Returns the path of the parameter to which each array of the optimizer state belongs, by the array's path.

    optax keeps such arrays in trees like the parameters, so their paths end in the parameter's path. The longest such
    end counts, and the shapes must be equal.
    """
    shapes = {path: x.shape for path, x in jax.tree_util.tree_leaves_with_path(state.params)}
    owners = {}
    for path, x in jax.tree_util.tree_leaves_with_path(state.opt_state, is_leaf=_is_quantized):
        shape = x.codes.shape if isinstance(x, BlockQuantized) else x.shape
        ends = (path[start:] for start in range(len(path) + 1))
        owner = next((end for end in ends if shapes.get(end) == shape), None)
        if owner is not None:
            owners[path] = owner
    return owners


def _spec_of_scales(x: BlockQuantized, spec: PartitionSpec, mesh: Mesh) -> PartitionSpec:
    """Returns the spec of scales: that of their codes, except along an axis where it would cut blocks."""
    entries = [*spec, *(None,) * (x.codes.ndim - len(spec))]
    first = x.scales.ndim - 1  # the first axis along which blocks lie
    along = entries[first] if first < len(entries) and not any(entries[first + 1 :]) else None
    axes = along if isinstance(along, tuple) else () if along is None else (along,)
    count = math.prod(axis_size(mesh, axis) for axis in axes)
    return P(*entries[:first], along if x.scales.shape[-1] % count == 0 else None)


def _is_quantized(x: object) -> TypeGuard[BlockQuantized]:
    return isinstance(x, BlockQuantized)


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
