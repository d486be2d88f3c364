"""The parts of a state that a skipped step changes, their copies, and fingerprints of the unchanged parts.

A skip changes the random key, the step, the loss scales, their counters, and the state of a skip rule. Parameters and
model state stay, and are too large to copy; a fingerprint shows whether a state has the same ones.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType
from jax.tree_util import keystr
from jax.typing import ArrayLike

from jmp_train.distributed import local_data
from jmp_train.policies import LossScaledState, PyTree
from jmp_train.policies.optimizers import SkipRuleState, scaled_states
from jmp_train.policies.pytrees import is_key
from jmp_train.steps import TrainState

_CHANGED, _KEPT, _OTHER = "changed", "kept", "other"


class StateParts(NamedTuple):
    """Positions of a state's leaves, and the paths of all leaves.

    Attributes:
      changed: leaves that a skip may change: key, step, loss scales, counters, a skip rule's state.
      kept: leaves of parameters and model state.
      paths: paths of all leaves, as `keystr` writes them.
    """

    changed: list[int]
    kept: list[int]
    paths: list[str]


class Snapshot(NamedTuple):
    """A record of a state before a step, on its devices; nothing waits for it.

    Attributes:
      changed: copies of the leaves that a skip changes.
      fingerprints: fingerprints of the other leaves, uint32 [leaves].
    """

    changed: list[jax.Array]
    fingerprints: jax.Array


def parts_of(state: TrainState) -> StateParts:
    """Returns the parts of a state that a skipped step changes and keeps.

    Raises:
      ValueError: the optimizer has no loss scale, so no step is skipped.
    """
    if not scaled_states(state.opt_state):
        raise ValueError(
            "the optimizer has no loss scale, so no step is skipped; with_loss_scale(optimizer, NoOpLossScale()) skips "
            "non-finite steps"
        )

    def changed_but_inner(node: Any) -> Any:
        labels = _all(_CHANGED, node._replace(inner_state=None))
        return labels._replace(inner_state=_all(_OTHER, node.inner_state))

    def of_node(node: Any) -> Any:
        if not isinstance(node, LossScaledState):
            return _CHANGED if jnp.ndim(node) == 0 or is_key(node) else _OTHER
        inner = node.inner_state
        labels = changed_but_inner(inner) if isinstance(inner, SkipRuleState) else _all(_OTHER, inner)
        return changed_but_inner(node)._replace(inner_state=labels)

    labels = TrainState(
        params=_all(_KEPT, state.params),
        opt_state=jax.tree.map(of_node, state.opt_state, is_leaf=lambda x: isinstance(x, LossScaledState)),
        model_state=_all(_KEPT, state.model_state),
        rng=_all(_CHANGED, state.rng),
        step=_CHANGED,
    )
    found = jax.tree.leaves(labels)
    changed, kept = ([i for i, label in enumerate(found) if label == wanted] for wanted in (_CHANGED, _KEPT))
    return StateParts(changed, kept, [keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(state)])


def snapshot(leaves: Sequence[Any], changed: Sequence[int] = (), kept: Sequence[int] = ()) -> Snapshot:
    """Returns copies and fingerprints of a state's leaves, computed before the state is donated to a step.

    Args:
      leaves: the leaves of the state.
      changed: positions of the leaves to copy.
      kept: positions of the leaves to take fingerprints of.
    """
    copied, printed = [leaves[i] for i in changed], [leaves[i] for i in kept]
    try:
        return _snapshot(copied, printed)
    except ValueError:  # a state that is not on its mesh yet may be on several devices, which jit refuses
        copies = [_snapshot([x], []).changed[0] for x in copied]
        prints = [local_data(_snapshot([], [x]).fingerprints) for x in printed]
        return Snapshot(copies, jnp.concatenate([np.zeros(0, np.uint32), *prints]))


@jax.jit
def _snapshot(changed: list[jax.Array], kept: list[jax.Array]) -> Snapshot:
    prints = [_fingerprint(x) for x in kept]
    return Snapshot([jnp.copy(x) for x in changed], jnp.stack(prints) if prints else jnp.zeros(0, jnp.uint32))


def _all(label: str, tree: PyTree) -> Any:
    return jax.tree.map(lambda x: label, tree)


def _fingerprint(x: ArrayLike) -> jax.Array:
    """Returns the sum of an array's bits mixed with their positions, uint32: the same on any devices, in any order."""
    total = jnp.zeros((), jnp.uint32)
    for number, word in enumerate(_words(x)):
        place = (_positions(word) + jnp.uint32(number + 1)) * jnp.uint32(0x9E3779B9)
        total = total + jnp.sum(_mix(word ^ place), dtype=jnp.uint32)
    return total


def _words(x: ArrayLike) -> list[jax.Array]:
    """Returns the bits of an array as arrays of uint32 of its shape, or of one more axis."""
    x = jax.random.key_data(x) if is_key(x) else jnp.asarray(x)
    if jnp.iscomplexobj(x):
        return [*_words(x.real), *_words(x.imag)]
    if x.dtype == jnp.bool_:
        return [x.astype(jnp.uint32)]
    is_float = jnp.issubdtype(x.dtype, jnp.floating)
    bits = (jnp.finfo(x.dtype) if is_float else jnp.iinfo(x.dtype)).bits
    if bits < 8:  # exact, and NaN stays NaN
        x, bits = x.astype(jnp.float32 if is_float else jnp.int32), 32
    if bits == 64:
        return [lax.bitcast_convert_type(x, jnp.uint32)]
    return [lax.bitcast_convert_type(x, jnp.dtype(f"uint{bits}")).astype(jnp.uint32)]


def _positions(x: jax.Array) -> jax.Array:
    """Returns the number of each element, uint32 like `x`, without a reshape, which would gather a sharded array."""
    where = jax.typeof(x).sharding
    explicit = where if AxisType.Explicit in where.mesh.axis_types else None
    position, stride = jnp.zeros_like(x), 1
    for axis in reversed(range(x.ndim)):
        along = lax.broadcasted_iota(jnp.uint32, x.shape, axis, out_sharding=explicit)
        position = position + along * jnp.uint32(stride % 2**32)
        stride *= x.shape[axis]
    return position


def _mix(x: jax.Array) -> jax.Array:
    """Returns uint32 numbers with every bit dependent on every bit of `x`: the end of MurmurHash3, a bijection."""
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        x = (x ^ (x >> jnp.uint32(shift))) * jnp.uint32(factor)
    return x ^ (x >> jnp.uint32(16))
