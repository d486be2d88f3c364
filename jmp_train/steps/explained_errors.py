"""Explains errors of loss functions about mesh axes and random keys."""

import contextlib
import re
from collections.abc import Iterator, Sequence

import jax

from jmp_train.policies import Params
from jmp_train.policies.autocasting import missing_key_explained
from jmp_train.policies.loss_scaling import LossScales
from jmp_train.steps.gradient_functions import GradientFunction, StepGradients
from jmp_train.types import Batch, ModelState

NO_KEY = (
    "The state has no random key, so that loss_fn got rng=None: TrainState.create(params, optimizer, "
    "rng=jax.random.key(0)) gives it one, and loss_fn a fresh key in each step"
)


def explained(gradients: GradientFunction, axis_names: Sequence[str]) -> GradientFunction:
    """Returns a gradient function whose errors about axes and random keys name those of the step.

    Args:
      gradients: gradient function that calls the loss function.
      axis_names: mesh axes of the step.
    """

    def run(
        loss_scale: LossScales, params: Params, model_state: ModelState, batch: Batch, rng: jax.Array | None
    ) -> StepGradients:
        with names_of_axes(axis_names), missing_key_explained(lambda: NO_KEY if rng is None else None):
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
