"""Explains errors of loss functions about mesh axes and random keys."""

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
    """Returns a gradient function whose errors about axes and random keys name those of the step.

    Args:
      gradients: gradient function that calls the loss function.
      axis_names: mesh axes of the step.
    """

    def run(
        loss_scale: LossScales, params: Params, model_state: ModelState, batch: Batch, rng: jax.Array | None
    ) -> StepGradients:
        with names_of_axes(axis_names), missing_key_explained(NO_KEY if rng is None else None):
            return gradients(loss_scale, params, model_state, batch, rng)

    return run


@contextlib.contextmanager
def names_of_axes(axis_names: Sequence[str]) -> Iterator[None]:
    """Names the mesh axes of the step if a loss function reduces over another one.

    Args:
      axis_names: mesh axes of the step.

    Raises:
      NameError: in place of jax's error.
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
            f"loss_fn reduces over the axis {name!r} (a layer's axis_name?), but the step's axes are {there}. "
            f'Use pmap_step(step, axis="{name}"), or data_parallel(step, mesh, axis="{name}") or '
            f'sharded_step with a Mesh(devices, ("{name}",)); or pass the step\'s axis to the layer'
        ) from error


@contextlib.contextmanager
def missing_key_explained(why: str | None) -> Iterator[None]:
    """Adds a reason to the error of a flax, haiku, equinox or jax model that asks for a random key.

    Args:
      why: a sentence; None if there is a key.
    """
    try:
        yield
    except Exception as error:
        if why is not None and _ASKS_FOR_A_KEY.search(f"{type(error).__name__} {error}"):
            error.add_note(why)
        raise


def why_no_key(fn: Callable[..., Any], args: Sequence[Any]) -> str | None:
    """Returns the reason why a function has no random key, for `missing_key_explained`; None if it has all its keys.

    Args:
      fn: a step, or a function with arguments named after keys.
      args: its arguments.
    """
    for name, x in zip(argument_names(fn, len(args)), args, strict=True):
        if x is None and _IS_KEY.search(name):
            return f"the argument {name} is None: pass a key, such as jax.random.key(0)"
        if getattr(x, "rng", x) is None and hasattr(x, "opt_state"):
            return NO_KEY
    return None
