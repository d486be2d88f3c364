"""Errors of loss functions about mesh axes and random keys, with what the step has of them."""

import contextlib
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from jmp_train.policies import Params
from jmp_train.policies.dtype_policies import argument_names
from jmp_train.policies.loss_scaling import LossScales
from jmp_train.steps.gradient_functions import GradientFunction, StepGradients
from jmp_train.types import Batch, ModelState

NO_KEY = (
    "The state has no random key, so that loss_fn got rng=None: TrainState.create(params, optimizer, "
    "rng=jax.random.key(0)) gives it one, and loss_fn a fresh key in each step"
)
_IS_KEY = re.compile(r"rng|key|seed")
_ASKS_FOR_A_KEY = re.compile(r"rng|requires a key", re.IGNORECASE)


def explained(gradients: GradientFunction, axis_names: Sequence[str]) -> GradientFunction:
    """Returns a gradient function whose errors about axes and random keys say what the step has.

    Args:
      gradients: calls the loss function.
      axis_names: the step's.
    """

    def run(
        loss_scale: LossScales, params: Params, model_state: ModelState, batch: Batch, rng: jax.Array | None
    ) -> StepGradients:
        with names_of_axes(axis_names), missing_key_explained(NO_KEY if rng is None else None):
            return gradients(loss_scale, params, model_state, batch, rng)

    return run


@contextlib.contextmanager
def names_of_axes(axis_names: Sequence[str]) -> Iterator[None]:
    """Says which axes there are where a loss function reduces over one that is not among them.

    Args:
      axis_names: the step's.

    Raises:
      NameError: instead of jax's.
    """
    try:
        yield
    except NameError as error:
        found = re.search(r"unbound axis name: ([^\s.]+)", str(error))
        if found is None:
            raise
        name = found[1]
        there = ", ".join(map(repr, axis_names)) or "none, as on one device"
        raise NameError(
            f"loss_fn reduces over the axis {name!r} (a layer's axis_name?), and the step's axes are {there}: "
            f'pmap_step(step, axis="{name}"), or data_parallel(step, mesh, axis="{name}") and sharded_step with a '
            f'mesh that has it, Mesh(devices, ("{name}",)); or give the layer the step\'s axis'
        ) from error


@contextlib.contextmanager
def missing_key_explained(why: str | None) -> Iterator[None]:
    """Adds why there is no random key to an error of a model that asks for one, of flax, haiku, equinox or jax.

    Args:
      why: a sentence; None where there is a key.
    """
    try:
        yield
    except Exception as error:
        if why is not None and _ASKS_FOR_A_KEY.search(f"{type(error).__name__} {error}"):
            error.add_note(why)
        raise


def why_no_key(fn: Callable[..., Any], args: Sequence[Any]) -> str | None:
    """Returns why a function has no random key, for `missing_key_explained`; None if all its keys are there.

    Args:
      fn: a function, whose arguments named after keys are looked at, or a step.
      args: its arguments.
    """
    for name, x in zip(argument_names(fn, len(args)), args, strict=True):
        if x is None and _IS_KEY.search(name):
            return f"the argument {name} is None: pass a key, such as jax.random.key(0)"
        if getattr(x, "rng", x) is None and hasattr(x, "opt_state"):
            return NO_KEY
    return None
