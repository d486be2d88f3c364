"""Checks what a loss function takes and returns, where it is passed and where it is called."""

import inspect
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp

_EXPECTED = (
    "loss_fn(params, model_state, batch, rng) -> (loss, (model_state, aux)); "
    "stateless(loss_fn) adapts a loss_fn(params, batch) -> loss, and stateless(loss_fn, has_aux=True) "
    "a loss_fn(params, batch) -> (loss, aux)"
)

# An attribute of loss functions that an AMP mode has made, whether the mode casts parameters and batch.
CASTS_BY_AMP = "_jmp_train_casts_by_amp"
# Another: in which half type the mode autocasts; None where it does not.
AUTOCASTS_BY_AMP = "_jmp_train_autocasts_by_amp"


class Pair(NamedTuple):
    """What a loss function returned of which was not said whether it is two losses, or a loss and aux."""

    loss: Any
    other: Any


def check_takes_state(loss_fn: object) -> None:
    """Raises TypeError if a loss function cannot take (params, model_state, batch, rng)."""
    if signature := _refused_signature(loss_fn, 4):
        raise TypeError(f"loss_fn takes {signature}, it must be a {_EXPECTED}")


def check_is_stateless(loss_fn: object) -> None:
    """Raises TypeError if a loss function cannot take (params, batch)."""
    if signature := _refused_signature(loss_fn, 2):
        hint = "" if _refused_signature(loss_fn, 4) else "; train_step takes this one as it is, without stateless"
        if not _refused_signature(loss_fn, 3):
            hint = (
                "; a loss that draws is a loss_fn(params, model_state, batch, rng) -> (loss, (model_state, aux)), and "
                "train_step takes it without stateless"
            )
        raise TypeError(f"loss_fn takes {signature}, it must be a loss_fn(params, batch){hint}")


def _refused_signature(fn: object, count: int) -> str:
    """Returns the signature of a function that cannot take so many arguments; empty if it can, or none is known."""
    if not callable(fn):
        raise TypeError(f"loss_fn must be a function, got {fn!r}")
    try:
        signature = inspect.signature(fn, follow_wrapped=False)
    except (TypeError, ValueError):  # of what is not a Python function nothing is known
        return ""
    try:
        signature.bind(*[None] * count)
    except TypeError:
        return str(signature)
    return ""


def refuse_second_cast(loss_fn: object, policy: object) -> None:
    """Raises ValueError if a policy is to cast what an AMP mode casts already."""
    if policy is not None and getattr(loss_fn, CASTS_BY_AMP, False):
        raise ValueError(
            f"policy={str(policy)!r}: loss_fn was transformed by an AMP mode, which says the dtypes itself; "
            "take policy=None, or the untransformed loss_fn and optimizer"
        )


def unpack_loss(result: object) -> tuple[Any, tuple[Any, Any]]:
    """Returns loss and `(model_state, aux)` of what a loss function returned; TypeError if it is not that."""
    match result:
        case (loss, (model_state, aux)):
            return loss, (model_state, aux)
    raise TypeError(f"loss_fn returned {_described(result)}, it must be a {_EXPECTED}")


def only_losses(result: Any, has_aux: bool | None, to_say: str = "stateless(loss_fn, has_aux=True)") -> Any:
    """Returns what a loss function without aux returned; raises TypeError if that is not a loss or tuple of losses.

    Args:
      result: of the loss function.
      has_aux: False if the caller said that it returns losses alone; None if nothing was said: of two scalars
        the second may be aux, and a `Pair` is returned.
      to_say: how it is said that it returns aux, for the message.
    """
    if not isinstance(result, tuple | list) or all(map(_is_loss, result)):
        unsaid = has_aux is None and isinstance(result, tuple) and len(result) == 2
        return Pair(*result) if unsaid else result
    raise TypeError(
        f"loss_fn returned {_described(result)}, of which not all are losses; where it returns (loss, aux), "
        f"say {to_say}"
    )


def loss_and_aux(result: Any, has_aux: bool) -> tuple[Any, Any]:
    """Returns the loss, or losses, and aux of what a loss function returned.

    Args:
      result: of the loss function.
      has_aux: whether it returns `(loss, aux)`; else aux is None.

    Raises:
      TypeError: it returned something else than was said.
    """
    if not has_aux:
        return only_losses(result, False, "has_aux=True"), None
    if isinstance(result, tuple | list) and len(result) == 2:
        return result[0], result[1]
    raise TypeError(f"has_aux=True, but loss_fn returned {_described(result)}, which is no (loss, aux)")


def refuse_pair(loss: object) -> None:
    """Raises TypeError if it was not said whether the second of two scalars is a loss."""
    if isinstance(loss, Pair):
        raise TypeError(
            "loss_fn returned two scalars, and the step would follow their sum: say "
            "stateless(loss_fn, has_aux=True) if the second is aux, has_aux=False if it is a loss too"
        )


def _is_loss(x: Any) -> bool:
    if isinstance(x, Mapping | tuple | list | str | None):
        return False
    try:
        return jnp.shape(x) == () and bool(jnp.issubdtype(jnp.result_type(x), jnp.floating))
    except TypeError:  # no number
        return False


def _described(result: Any) -> str:
    """Returns "(float32[], dict)" for such a tuple, or what one thing is."""
    if isinstance(result, tuple | list):
        return f"({', '.join(map(_described, result))})"
    if hasattr(result, "dtype") and hasattr(result, "shape"):
        return f"{result.dtype}{list(result.shape)}"
    return type(result).__name__
