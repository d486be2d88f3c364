"""Scaled gradients of flax nnx modules by nnx's own `value_and_grad`; a skipped step keeps their state."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax

from jmp_train.policies import PathPolicy, PyTree
from jmp_train.policies.dtype_policies import FirstTrace, Policy, cast_arguments, mixed_dtypes_explained, named_policy
from jmp_train.policies.loss_scaling import (
    LossScales,
    PerLossScale,
    loss_and_aux,
    unscale_and_check,
)
from jmp_train.policies.pytrees import (
    Search,
    cast_results,
    check_flag,
    contents,
    is_array,
    is_at_home,
    is_boxed,
    is_nnx_variable,
    is_random_state,
    stays_finite,
)
from jmp_train.steps.gradients import at_least, check_loss_scale, float32_loss


def nnx_value_and_grad(
    loss_fn: Callable[..., Any],
    policy: Policy | PathPolicy | str | None = None,
    *,
    argnums: Any = 0,
    has_aux: bool = False,
    axis_names: Sequence[str] = (),
    **options: Any,
) -> Callable[..., Any]:
    """Returns a function like `nnx.value_and_grad(loss_fn)` that runs in mixed precision.

    The new function takes the loss scale first: `fn(loss_scale, model, *args, **kwargs)`. Its gradients are
    float32 and still scaled: pass them to an `nnx.Optimizer` of a `with_loss_scale`. If they are not finite,
    that optimizer skips the step, and everything else that `loss_fn` changed, such as batch statistics, is
    restored, except random counts. It is restored too if one of these numbers was finite and is not any more; with
    finite gradients, the optimizer takes such a step.

    Args:
      loss_fn: `loss_fn(model, *args, **kwargs) -> loss`, a floating scalar, or `(loss, aux)`. Its changes to
        modules are made to the caller's modules.
      policy: the dtypes, or the name of a policy; None casts nothing. The differentiated variables, all
        `nnx.Param`s and the other arguments are cast to the compute dtype; other state is not.
      argnums: as in `nnx.value_and_grad`: positions of the arguments to differentiate, or `nnx.DiffState`s.
      has_aux: True if `loss_fn` returns `(loss, aux)`. `aux` is returned in the policy's output dtype or a higher
        precision.
      axis_names: the mesh axes passed to the optimizer, whose devices take or skip the step together.
      **options: `graph` and `graph_updates`, as in `nnx.value_and_grad`.

    Returns:
      A function that returns `(loss, grads)` or `((loss, aux), grads)`; the loss is unscaled, in float32 or
      higher precision. Under a `PerLossScale`, loss and gradients are tuples.

    Raises:
      TypeError: when called, the first argument is not a loss scale, or the loss not a floating scalar.

    Warns:
      Float32ProductsWarning: on the first call or trace, which traces `loss_fn` once more.
      InnerGradientWarning: `loss_fn` takes a gradient, which runs in float16; `scaled_grad` scales it.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> import jmp_train as jt
      >>> model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
      >>> loss_fn = lambda model, x: model(x).astype(jnp.float32).sum()
      >>> fn = jt.nnx_value_and_grad(loss_fn, "autocast_float16")
      >>> loss, grads = fn(jt.StaticLossScale(8.0), model, jnp.ones((2, 2)))
      >>> grads["bias"][...]
      Array([16.], dtype=float32)
    """
    from flax import nnx  # imported here, so that users without nnx modules do not wait for it

    if not callable(loss_fn):
        raise TypeError(f"loss_fn must be a function, got {loss_fn!r}")
    check_flag("has_aux", has_aux)
    policy = None if policy is None else named_policy(policy)
    run = loss_fn if policy is None else policy.default.transform(loss_fn)
    differentiated = argnums if isinstance(argnums, Sequence) else (argnums,)
    states = [x for x in differentiated if isinstance(x, nnx.DiffState)]
    first_trace = FirstTrace()

    def scaled(loss_scale: LossScales, number: int) -> Callable[..., Any]:
        @functools.wraps(loss_fn)
        def scaled_loss(*args: object, **kwargs: object) -> tuple[Any, tuple[Any, Any]]:
            result = in_policy(args, kwargs)
            loss, aux = loss_and_aux(result, has_aux)
            if policy is not None:
                aux = cast_results(aux, functools.partial(at_least, policy.default.output_dtype))
            loss = float32_loss(loss_scale, loss)
            scaled_losses = loss_scale.scale(loss)
            several = isinstance(loss_scale, PerLossScale)
            return (scaled_losses[number] if several else scaled_losses), (loss, aux)

        return scaled_loss

    def in_policy(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if policy is None:
            return loss_fn(*args, **kwargs)
        selected = _selected(args, states)
        with (
            mixed_dtypes_explained(policy),
            cast_arguments(policy, args, kwargs, also=selected) as (call_args, call_kwargs),
        ):
            return run(*call_args, **call_kwargs)

    def value_and_grad(loss_scale: LossScales, *args: object, **kwargs: object) -> Any:
        check_loss_scale(loss_scale)
        with first_trace.look(loss_fn, policy, args, kwargs):
            pass
        before = _State((args, kwargs), loss_fn)
        several = isinstance(loss_scale, PerLossScale)
        pairs = []
        for number in range(len(loss_scale.loss_scales) if several else 1):
            before.restore()  # each loss has its own forward pass, and all start alike
            differentiate = nnx.value_and_grad(scaled(loss_scale, number), argnums=argnums, has_aux=True, **options)
            ((_, result), grads) = differentiate(*args, **kwargs)
            pairs.append((result, at_least("float32", grads)))
        (loss, aux), grads = pairs[0]
        if several:
            grads = tuple(grads for _, grads in pairs)
        before.restore_unless(unscale_and_check(loss_scale, grads, axis_names).finite, axis_names)
        return ((loss, aux) if has_aux else loss), grads

    return value_and_grad


def _selected(args: tuple[Any, ...], states: Sequence[Any]) -> frozenset[int]:
    """Returns the ids of the variables selected by `nnx.DiffState`s."""
    from flax import nnx

    found = set()
    for state in states:
        is_selected = nnx.filterlib.to_predicate(state.filter)
        for path, x in nnx.iter_graph(args[state.argnum]):
            if is_nnx_variable(x) and is_selected(path, x):
                found.add(id(x))
    return frozenset(found)


class _State:
    """A record of the values in all nnx objects that a function can reach, made before it is called.

    Args:
      tree: the function's arguments.
      fn: the function.
    """

    def __init__(self, tree: PyTree, fn: Callable[..., Any]) -> None:
        search = Search()
        search.in_tree(tree)
        search.in_function(fn)
        self._before = [
            (x, name, value, value[...] if _is_ref(value) else value)
            for _, x in search.found
            if not is_boxed(x) and is_at_home(x)
            for name, value in contents(x).items()
            if (not name if is_nnx_variable(x) else is_array(value))
        ]

    def restore(self) -> None:
        """Restores all values."""
        for x, name, held, value in self._before:
            if _is_ref(held):
                held[...] = value
            elif _held(x, name) is not held:
                _hold(x, name, held)

    def restore_unless(self, finite: jax.Array, axis_names: Sequence[str]) -> None:
        """Restores all values except random state if the gradients were not finite, or values no longer are."""
        pairs = [
            (held[...] if _is_ref(held) else _held(x, name), old)
            for x, name, held, old in self._before
            if not is_random_state(x)
        ]
        alike = [pair for pair in pairs if jax.tree.structure(pair[0]) == jax.tree.structure(pair[1])]
        values_finite = stays_finite([new for new, _ in alike], [old for _, old in alike], axis_names)
        finite = finite if values_finite is None else finite & values_finite
        for x, name, held, old in self._before:
            new = _held(x, name)
            if _is_ref(held):
                held[...] = lax.select(finite, held[...], old)
            elif new is not held and not is_random_state(x):
                _hold(x, name, _chosen(finite, new, old))


def _is_ref(value: object) -> bool:
    return isinstance(value, jax.Ref)


def _held(x: Any, name: str) -> Any:
    return x.get_raw_value() if is_nnx_variable(x) else vars(x).get(name)


def _hold(x: Any, name: str, value: Any) -> None:
    if is_nnx_variable(x):
        x.set_raw_value(value)
    else:
        setattr(x, name, value)


def _chosen(finite: jax.Array, new: PyTree, old: PyTree) -> Any:
    """Returns the new value if `finite`, otherwise the old one; always the new one if their structures differ."""
    if jax.tree.structure(new) != jax.tree.structure(old):
        return new

    def choose(x: Any, y: object) -> Any:
        alike = is_array(x) and is_array(y) and (x.shape, x.dtype) == (y.shape, y.dtype)
        return lax.select(finite, x, jax.numpy.asarray(y)) if alike else x

    return jax.tree.map(choose, new, old)
