"""What every training script in this folder is asked: what runs in half, how it learns, what a skip leaves."""

import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np

import jmp_train as jt

STEPS = 20
FIRST_SCALE, PERIOD, HUGE_SCALE = 2.0**12, 8, 2.0**100


class Script(NamedTuple):
    """A training script up to its loop.

    Attributes:
      state: a pytree of all that the step carries.
      step: `step(state, batch) -> (state, loss)`, compiled as the script compiles it.
      batch: what it is trained on, again and again.
    """

    state: Any
    step: Callable[[Any, Any], tuple[Any, Any]]
    batch: Any


def growing_scale() -> jt.LossScale:
    """Returns a loss scale that doubles twice within the steps."""
    return jt.torch_loss_scale(FIRST_SCALE, growth_interval=PERIOD)


def half_optimizer(optimizer: Any, half: bool) -> Any:
    """Returns a script's optimizer, for training in half precision with a loss scale."""
    return jt.with_loss_scale(optimizer, growing_scale()) if half else optimizer


def gradients_of(
    loss_fn: Callable[..., Any],
    half: bool,
    value_and_grad: Callable[..., Any] | None = None,
    *,
    has_aux: bool = False,
    policy: str | None = "autocast_float16",
) -> Callable[..., Any]:
    """Returns a function of the optimizer's state and of the loss's arguments to the loss and its gradients.

    Args:
      loss_fn: the script's.
      half: whether to scale the loss and to run it under the policy.
      value_and_grad: what the script itself uses; jax's by default.
      has_aux: as for `jax.value_and_grad`.
      policy: a policy's name; None if the loss is in half precision by itself.
    """
    if half:
        half_policy = None if policy is None else jt.get_policy(policy)
        half_fn = jt.scaled_value_and_grad(loss_fn, half_policy, has_aux=has_aux)
        return lambda opt_state, *args: half_fn(jt.get_loss_scale(opt_state), *args)
    full_fn = (value_and_grad or jax.value_and_grad)(loss_fn, has_aux=has_aux)
    return lambda opt_state, *args: full_fn(*args)


# Products in half precision


def share_by_policy(loss_fn: Callable[..., Any], *args: Any) -> float:
    """Returns the share of products in half under `mixed_float16`.

    Asserts that `explain_policy` says the same, and that there is a warning where a tenth of the work is left.
    """
    report = jt.explain_policy(loss_fn, "mixed_float16", *args)
    half_loss = jt.apply_policy(loss_fn, jt.get_policy("mixed_float16"))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        share = products_in_half(half_loss, *args)
    warned = any(issubclass(warning.category, jt.policies.Float32ProductsWarning) for warning in caught)
    assert warned == (report.half_products_share < 0.9)
    return _same_as_told(share, report.operations)


def share_by_autocast(loss_fn: Callable[..., Any], *args: Any) -> float:
    """Returns that under autocast, and asserts that `explain_autocast` says the same."""
    share = products_in_half(jt.autocast(loss_fn), *args)
    return _same_as_told(share, jt.explain_autocast(loss_fn, *args).operations)


def _same_as_told(share: float, operations: Any) -> float:
    assert np.mean([row.in_half for row in operations if row.operation in PRODUCTS]) == share
    return share


PRODUCTS = ("dot_general", "conv_general_dilated")


def products_in_half(fn: Callable[..., Any], *args: Any) -> float:
    """Returns the share of products whose operands are half."""
    leaves, tree = jax.tree.flatten(args)
    are_arrays = [isinstance(leaf, jax.Array | np.ndarray) for leaf in leaves]
    static = [None if is_array else x for x, is_array in zip(leaves, are_arrays, strict=True)]

    def of_arrays(arrays: list[Any]) -> Any:
        given = iter(arrays)
        full = [next(given) if a else x for x, a in zip(static, are_arrays, strict=True)]
        results = jax.tree.leaves(fn(*jax.tree.unflatten(tree, full)))
        return [x for x in results if isinstance(x, jax.Array)]

    arrays = [x for x, is_array in zip(leaves, are_arrays, strict=True) if is_array]
    halves = [
        all(x.aval.dtype in (jnp.float16, jnp.bfloat16) for x in equation.invars)
        for equation in _equations(jax.make_jaxpr(of_arrays)(arrays))
        if equation.primitive.name in PRODUCTS
    ]
    return float(np.mean(halves))


def _equations(jaxpr: Any) -> Iterator[Any]:
    for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        yield equation
        for value in jax.tree.leaves(list(equation.params.values())):
            if isinstance(value, jex.Jaxpr | jex.ClosedJaxpr):
                yield from _equations(value)


# Twenty steps


def train(script: Script) -> tuple[Any, list[float]]:
    """Returns the last state and the losses."""
    state, losses = script.state, []
    for _ in range(STEPS):
        state, loss = script.step(state, script.batch)
        losses.append(float(np.mean(loss)))
    return state, losses


def assert_learns_alike(
    half: Script, full: Script, tolerance: float, *, fall: float = 0.8, updates_a_step: int = 1
) -> None:
    """Asserts that a script in half has the losses of the same one in float32, and that they fall.

    Args:
      half: with a `growing_scale`.
      full: the script as it was.
      tolerance: of each loss, relative to the first one.
      fall: the last loss is at most this part of the first one.
      updates_a_step: how often a step calls the optimizer.
    """
    state, losses = train(half)
    _, expected = train(full)
    assert expected[-1] <= fall * expected[0], expected
    np.testing.assert_allclose(losses, expected, rtol=0, atol=tolerance * abs(expected[0]))
    assert losses != expected  # nothing would have run in half
    for scaled in scaled_states(state):
        assert np.all(scaled.skipped_steps == 0)
        doublings = STEPS * updates_a_step // PERIOD
        assert np.all(scaled.loss_scale.loss_scale == FIRST_SCALE * 2.0**doublings)


# One overflow


def scaled_states(state: Any) -> list[jt.policies.LossScaledState]:
    return [node for node in jax.tree.leaves(state, is_leaf=is_scaled) if is_scaled(node)]


def assert_skips(
    script: Script,
    state: Any = None,
    batch: Any = None,
    goes_on: str = "a^",
    skips: int = 1,
) -> None:
    """Asserts that one overflow leaves all of the state as it was, to the bit, apart from the scale.

    Args:
      script: the script in half.
      state: that overflows; the script's own by default.
      batch: likewise.
      goes_on: a regular expression of the paths of leaves which a skipped step changes: counts, keys.
      skips: how often a step calls the optimizer, which skips each time.
    """
    state = script.state if state is None else state
    scales = [np.array(scaled.loss_scale.loss_scale) for scaled in scaled_states(state)]
    assert scales
    before = _leaves(state)
    state, _ = script.step(state, script.batch if batch is None else batch)
    after = _leaves(state)
    assert before.keys() == after.keys()
    changed = [path for path in before if before[path] != after[path]]
    assert not [path for path in changed if not re.search(goes_on, path)], changed
    assert goes_on == "a^" or changed
    for scaled, scale in zip(scaled_states(state), scales, strict=True):
        assert np.all(scaled.skipped_steps == skips)
        assert np.all(scaled.loss_scale.loss_scale == scale / 2**skips)


def is_scaled(x: Any) -> bool:
    return isinstance(x, jt.policies.LossScaledState)


def overflowing(tree: Any) -> Any:
    """Returns a state with a loss scale that no gradient in float16 survives."""
    return jt.set_loss_scale(tree, jt.torch_loss_scale(HUGE_SCALE, growth_interval=PERIOD))


def _leaves(state: Any) -> dict[str, tuple[str, bytes]]:
    """Returns dtype and bytes of all arrays by their paths, but for those of loss scales."""
    inner = jax.tree.map(lambda x: x.inner_state if is_scaled(x) else x, state, is_leaf=is_scaled)
    return {
        jax.tree_util.keystr(path): _bits(x)
        for path, x in jax.tree_util.tree_leaves_with_path(inner)
        if isinstance(x, jax.Array | np.ndarray | int | float)
    }


def _bits(x: Any) -> tuple[str, bytes]:
    x = jnp.asarray(x)
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    return str(x.dtype), np.asarray(x).tobytes()
