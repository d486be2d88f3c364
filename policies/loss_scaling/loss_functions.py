"""Checks the arguments and results of loss functions."""

import inspect
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp

_EXPECTED = (
    "loss_fn(params, model_state, batch, rng) -> (loss, (model_state, aux)); "
    "stateless(loss_fn) adapts a loss_fn(params, batch) -> loss, and stateless(loss_fn, has_aux=True) "
    "a loss_fn(params, batch) -> (loss, aux)"
)

_ASKS_FOR_A_KEY = re.compile(r"\*, .*\b(rngs?|key|seed)\b")  # by keyword only, as equinox's models do

# An attribute of loss functions from an AMP mode: whether the mode casts parameters and batch.
CASTS_BY_AMP = "_jmp_train_casts_by_amp"
# Another: the half type to which the mode autocasts; None if it does not.
AUTOCASTS_BY_AMP = "_jmp_train_autocasts_by_amp"


class LossPair(NamedTuple):
    """The result of a loss function that may be two losses, or a loss and aux."""

    loss: Any
    other: Any


def check_takes_state(loss_fn: object) -> None:
    """Raises TypeError if a loss function cannot take (params, model_state, batch, rng)."""
    if signature := _refused_signature(loss_fn, 4):
        raise TypeError(f"loss_fn takes {signature}; it must be a {_EXPECTED}")


def check_is_stateless(loss_fn: object) -> None:
    """Raises TypeError if a loss function cannot take (params, batch)."""
    if signature := _refused_signature(loss_fn, 2):
        hint = "" if _refused_signature(loss_fn, 4) else "; pass this one to train_step directly, without stateless"
        if not _refused_signature(loss_fn, 3) or _ASKS_FOR_A_KEY.search(signature):
            hint = (
                "; a loss that needs random keys is a loss_fn(params, model_state, batch, rng) -> (loss, "
                "(model_state, aux)): pass it to train_step without stateless"
            )
        raise TypeError(f"loss_fn takes {signature}; it must be a loss_fn(params, batch){hint}")


def is_stateless(loss_fn: object) -> bool:
    """Returns whether a loss function can take (params, batch)."""
    return not _refused_signature(loss_fn, 2)


def _refused_signature(fn: object, count: int) -> str:
    """Returns the signature of a function that cannot take `count` arguments; empty if it can, or is unknown."""
    if not callable(fn):
        raise TypeError(f"loss_fn must be a function, got {fn!r}")
    try:
        signature = inspect.signature(fn, follow_wrapped=False)
    except (TypeError, ValueError):  # the signature is only known for Python functions
        return ""
    try:
        signature.bind(*[None] * count)
    except TypeError:
        return str(signature)
    return ""


def refuse_second_cast(loss_fn: object, policy: object) -> None:
    """Raises ValueError if a policy would cast values that an AMP mode casts already."""
    if policy is not None and getattr(loss_fn, CASTS_BY_AMP, False):
        raise ValueError(
            f"policy={str(policy)!r}: loss_fn was transformed by an AMP mode, which sets the dtypes; pass "
            "policy=None, or the original loss_fn and optimizer"
        )


def unpack_loss(result: object) -> tuple[Any, tuple[Any, Any]]:
    """Returns loss and `(model_state, aux)` from a loss function's result; raises TypeError for another result."""
    match result:
        case (loss, (model_state, aux)):
            return loss, (model_state, aux)
    raise TypeError(f"loss_fn returned {_described(result)}; it must be a {_EXPECTED}")


def only_losses(result: Any, has_aux: bool | None, to_say: str = "stateless(loss_fn, has_aux=True)") -> Any:
    """Returns the result of a loss function without aux; raises TypeError if it is not a loss or tuple of losses.

    Args:
      result: the result of the loss function.
      has_aux: False if the caller declared that it returns only losses; None if undeclared: then the second of two
        scalars may be aux, and a `LossPair` is returned.
      to_say: how to declare that it returns aux, for the message.
    """
    if not isinstance(result, tuple | list) or all(map(_is_loss, result)):
        unsaid = has_aux is None and isinstance(result, tuple) and len(result) == 2
        return LossPair(*result) if unsaid else result
    raise TypeError(
        f"loss_fn returned {_described(result)} with values that are not losses; if it returns (loss, aux), pass "
        f"{to_say}"
    )


def loss_and_aux(result: Any, has_aux: bool) -> tuple[Any, Any]:
    """Returns the loss, or losses, and aux from a loss function's result.

    Args:
      result: the result of the loss function.
      has_aux: whether it returns `(loss, aux)`; otherwise aux is None.

    Raises:
      TypeError: the result does not match `has_aux`.
    """
    if not has_aux:
        return only_losses(result, False, "has_aux=True"), None
    if isinstance(result, tuple | list) and len(result) == 2:
        return result[0], result[1]
    raise TypeError(f"has_aux=True, but loss_fn returned {_described(result)}, not (loss, aux)")


def refuse_pair(loss: object) -> None:
    """Raises TypeError if it is undeclared whether the second of two scalars is a loss."""
    if isinstance(loss, LossPair):
        raise TypeError(
            "loss_fn returned two scalars. Pass stateless(loss_fn, has_aux=True) if the second is aux, or "
            "has_aux=False to train on their sum"
        )


def _is_loss(x: Any) -> bool:
    if isinstance(x, Mapping | tuple | list | str | None):
        return False
    try:
        return jnp.shape(x) == () and bool(jnp.issubdtype(jnp.result_type(x), jnp.floating))
    except TypeError:  # not a number
        return False


def _described(result: Any) -> str:
    """Returns a description such as "(float32[], dict)" of a tuple, or of one object."""
    if isinstance(result, tuple | list):
        return f"({', '.join(map(_described, result))})"
    if hasattr(result, "dtype") and hasattr(result, "shape"):
        return f"{result.dtype}{list(result.shape)}"
    return type(result).__name__
