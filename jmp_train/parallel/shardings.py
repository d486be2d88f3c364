"""Where the arrays of a train state lie on a mesh: whole, as their paths say, or cut by their shapes.

What the optimizer keeps of a parameter, moments and float32 masters, lies where the parameter does, unless a
form says otherwise: ZeRO-1 cuts these alone, FSDP the parameters too.
"""

import dataclasses
import math
import re
from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.tree_util import KeyPath

from jmp_train.flax_metadata import specs_of_metadata
from jmp_train.mesh_axes import automatic, axis_size, dimension_over
from jmp_train.policies.paths import check_regexes, check_rules, named_leaves, path_name
from jmp_train.train_state import TrainState

P = PartitionSpec
MIN_SIZE = 2**12  # elements; less is not worth a message


def specs_by_path(params: Any, rules: Mapping[str, PartitionSpec | tuple[Any, ...]]) -> Any:
    """Returns a `PartitionSpec` for each parameter, that of the first rule whose regular expression its path finds.

    Args:
      params: pytree of arrays, or of their shapes.
      rules: from a regular expression, searched for in a path such as "layers/0/kernel", to a spec, or a tuple of a
        spec's entries. Parameters that no rule finds lie whole on every device.

    Returns:
      A tree like `params`.

    Raises:
      TypeError: `rules` is no mapping, a key no string, or a value no spec.
      ValueError: a rule is no regular expression, finds no parameter, or has more entries than the parameter has
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

    def spec_of(path: KeyPath, x: Any) -> PartitionSpec:
        name = path_name(path)
        spec = next((spec for regex, spec in specs.items() if re.search(regex, name)), P())
        _check_rank(f"params {name!r}", x, spec)
        return spec

    return jax.tree_util.tree_map_with_path(spec_of, params)


def _as_spec(regex: str, spec: Any) -> PartitionSpec:
    entries = tuple(spec) if isinstance(spec, tuple | PartitionSpec) else (spec, 0)
    flat = [x for entry in entries for x in (entry if isinstance(entry, tuple) else (entry,))]
    if not all(x is None or x is P.UNCONSTRAINED or isinstance(x, str) for x in flat):
        raise TypeError(
            f"rule {regex!r} must have a PartitionSpec, or a tuple of mesh axes and None, got {spec!r}"
        )
    return P(*entries)


def state_shardings(state: TrainState, mesh: Mesh, *, params: Any = None) -> TrainState:
    """Returns where the arrays of a state lie whose parameters are cut as one says, as for tensor parallelism.

    Args:
      state: a train state, or the shapes of one, as `jax.eval_shape` makes them.
      mesh: the devices.
      params: tree or prefix tree like `state.params` of `PartitionSpec`s, such as `specs_by_path` or flax's
        `nn.get_partition_spec` makes; None for what the parameters' own metadata say (`nn.with_partitioning`,
        `nnx.with_partitioning`), and those without lie whole on every device.

    Returns:
      A tree like `state` of `NamedSharding`s, for `jax.device_put(state, shardings)` and
      `sharded_step(step, mesh, shardings=shardings)`. What the optimizer keeps for a parameter, in its shape, lies
      where the parameter does; all else is whole everywhere.

    Raises:
      TypeError: `state` is no `TrainState`.
      ValueError: a spec names an axis that the mesh lacks, or does not divide its parameter; the message names it.

    Example:
      >>> import jax, jax.numpy as jnp, optax
      >>> from jax.sharding import Mesh, PartitionSpec as P
      >>> import jmp_train as jt
      >>> mesh = Mesh(jax.devices()[:1], ("model",))
      >>> state = jt.TrainState.create({"w": jnp.ones((2, 4))}, optax.adam(1e-3))
      >>> shardings = jt.state_shardings(state, mesh, params={"w": P(None, "model")})
      >>> tuple(shardings.opt_state[0].mu["w"].spec)
      (None, 'model')
    """
    return _placed(state, mesh, params, cut_optimizer=None, cut_params=None)


def zero1_shardings(
    state: TrainState,
    mesh: Mesh,
    axis: str = "data",
    *,
    params: Any = None,
    min_size: int = MIN_SIZE,
) -> TrainState:
    """Returns where the arrays of a state lie whose optimizer state is cut over the devices that share a batch.

    Each device keeps and updates its part of moments and masters; parameters lie whole on all of them.

    Args:
      state: see `state_shardings`, as are `mesh` and `params`.
      mesh: the devices.
      axis: the mesh axis to cut over. An array is cut along the longest of its dimensions that the axis divides and
        that `params` has not cut.
      params: how parameters are cut already.
      min_size: arrays with fewer elements are left alone.

    Returns:
      See `state_shardings`.

    Raises:
      TypeError: see `state_shardings`.
      ValueError: the mesh has no such axis, or see `state_shardings`.

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
    cut = _Cut(axis, axis_size(mesh, axis), min_size)
    return _placed(state, mesh, params, cut_optimizer=cut, cut_params=None)


def fsdp_shardings(
    state: TrainState,
    mesh: Mesh,
    axis: str = "data",
    *,
    params: Any = None,
    min_size: int = MIN_SIZE,
) -> TrainState:
    """Returns where the arrays of a state lie whose parameters are cut, too, over the devices that share a batch.

    `sharded_step` gathers them for the step, in the compute dtype, and adds gradients up in float32, each device
    its own part of them.

    Args:
      state: see `zero1_shardings`, as are the others.
      mesh: the devices.
      axis: the mesh axis to cut over.
      params: how parameters are cut already.
      min_size: arrays with fewer elements are left alone.

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
    cut = _Cut(axis, axis_size(mesh, axis), min_size)
    return _placed(state, mesh, params, cut_optimizer=cut, cut_params=cut)


def full_shardings(state: TrainState, shardings: Any, mesh: Mesh) -> TrainState:
    """Returns a sharding for each array of a state.

    Args:
      state: a train state, or the shapes of one.
      shardings: a tree or a prefix tree of `NamedSharding`s or `PartitionSpec`s.
      mesh: the devices.

    Raises:
      ValueError: a part of the tree is another state's, or a sharding does not fit its array; the message names it.
    """
    specs = _broadcast(
        shardings, state, "shardings must have a sharding for each array of the state"
    )

    def named(path: KeyPath, spec: Any, x: Any) -> NamedSharding:
        spec = _checked_spec(f"shardings {path_name(path)!r}", x, spec, mesh)
        return NamedSharding(automatic(mesh), spec)

    return jax.tree_util.tree_map_with_path(named, specs, state, is_leaf=_is_spec)


def gradient_dimensions(state: TrainState, shardings: TrainState, axis: str) -> Any:
    """Returns along which dimension the gradient of each parameter is best cut over an axis; -1 for none.

    Where the optimizer has its part of a parameter alone, it needs that part of the gradient.

    Args:
      state: a train state, or the shapes of one.
      shardings: where its arrays lie.
      axis: the mesh axis.
    """
    found = {
        path: dimension_over(axis, sharding)
        for path, sharding in jax.tree_util.tree_leaves_with_path(shardings.params)
    }
    owners = _owners(state)
    for leaf, sharding in jax.tree_util.tree_leaves_with_path(shardings.opt_state):
        owner = owners.get(leaf)
        if owner is not None and found[owner] < 0:
            found[owner] = dimension_over(axis, sharding)
    return jax.tree.unflatten(jax.tree.structure(shardings.params), list(found.values()))


@dataclasses.dataclass(frozen=True)
class _Cut:
    """The rule on shapes: along the longest dimension that can be divided and is whole."""

    axis: str
    count: int
    min_size: int

    def __call__(self, x: Any, spec: PartitionSpec) -> PartitionSpec:
        if math.prod(x.shape) < self.min_size:
            return spec
        entries = [*spec, *(None,) * (len(x.shape) - len(spec))]
        whole = [
            dimension
            for dimension, size in enumerate(x.shape)
            if entries[dimension] is None and size % self.count == 0
        ]
        if not whole:
            return spec
        longest = max(whole, key=lambda dimension: x.shape[dimension])
        entries[longest] = self.axis
        while entries[-1] is None:
            entries.pop()
        return P(*entries)


def _placed(
    state: TrainState, mesh: Mesh, params: Any, cut_optimizer: _Cut | None, cut_params: _Cut | None
) -> TrainState:
    if not isinstance(state, TrainState):
        raise TypeError(f"state must be a TrainState, got {type(state).__name__}")
    specs = _checked_specs(state.params, params, mesh)
    by_owner = dict(jax.tree_util.tree_leaves_with_path(specs, is_leaf=_is_spec))
    owners = _owners(state)
    mesh = automatic(mesh)

    def named(cut: _Cut | None, x: Any, spec: PartitionSpec) -> NamedSharding:
        return NamedSharding(mesh, spec if cut is None else cut(x, spec))

    def of_optimizer(path: KeyPath, x: Any) -> NamedSharding:
        owner = owners.get(path)
        return named(cut_optimizer, x, P() if owner is None else by_owner[owner])

    whole = jax.tree.map(lambda x: NamedSharding(mesh, P()), state)
    return dataclasses.replace(
        whole,
        params=jax.tree.map(lambda x, spec: named(cut_params, x, spec), state.params, specs),
        opt_state=jax.tree_util.tree_map_with_path(of_optimizer, state.opt_state),
    )


def _owners(state: TrainState) -> dict[KeyPath, KeyPath]:
    """Returns, by their paths, to which parameter the arrays of the optimizer's state belong.

    optax keeps such arrays in trees like the parameters, so their paths end in the parameter's; the longest such
    end counts, and the shape has to be the same.
    """
    shapes = {path: x.shape for path, x in jax.tree_util.tree_leaves_with_path(state.params)}
    owners = {}
    for path, x in jax.tree_util.tree_leaves_with_path(state.opt_state):
        ends = (path[start:] for start in range(len(path) + 1))
        owner = next((end for end in ends if shapes.get(end) == x.shape), None)
        if owner is not None:
            owners[path] = owner
    return owners


def _checked_specs(params: Any, specs: Any, mesh: Mesh) -> Any:
    if specs is None:
        specs = specs_of_metadata(params)
    specs = _broadcast(
        specs, params, "params must have a PartitionSpec for each parameter of the state"
    )
    return jax.tree_util.tree_map_with_path(
        lambda path, spec, x: _checked_spec(f"params {path_name(path)!r}", x, spec, mesh),
        specs,
        params,
        is_leaf=_is_spec,
    )


def _broadcast(prefix: Any, tree: Any, message: str) -> Any:
    """Returns a tree like another of what a prefix tree has for its parts."""
    try:
        return jax.tree.broadcast(prefix, tree, is_leaf=_is_spec)
    except ValueError as error:
        came, wanted = jax.tree.structure(prefix, is_leaf=_is_spec), jax.tree.structure(tree)
        raise ValueError(f"{message}:\n  {wanted}\ngot:\n  {came}") from error


def _checked_spec(what: str, x: Any, spec: Any, mesh: Mesh) -> PartitionSpec:
    """Returns a spec, or that of a sharding, if it fits an array; else raises ValueError."""
    if isinstance(spec, NamedSharding):
        spec = spec.spec
    if not _is_spec(spec):
        raise ValueError(f"{what} must be a PartitionSpec, got {spec!r}")
    _check_rank(what, x, spec)
    for size, entry in zip(x.shape, spec, strict=False):
        axes = entry if isinstance(entry, tuple) else () if entry is None else (entry,)
        count = math.prod(axis_size(mesh, axis) for axis in axes)
        if size % count:
            raise ValueError(
                f"{what} of shape {x.shape} cannot be cut by {spec}: "
                f"{size} is no multiple of {count} devices"
            )
    return spec


def _check_rank(what: str, x: Any, spec: PartitionSpec) -> None:
    if len(spec) > len(x.shape):
        raise ValueError(f"{what} of shape {x.shape} has fewer dimensions than {spec}")


def _is_spec(x: Any) -> bool:
    return isinstance(x, PartitionSpec)
