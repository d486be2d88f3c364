"""A run's options for few bits: the optimizer's state, half-precision parameters, products in 8 bits."""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import optax

from jmp_train.policies import (
    Amp,
    DelayedScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    Policy,
    with_kahan,
    with_stochastic_rounding,
)
from jmp_train.policies.dtype_policies import AutocastPolicy
from jmp_train.policies.pytrees import is_half

RECIPES = {recipe.__name__: recipe for recipe in (Float8CurrentScaling, DelayedScaling, MXFP8BlockScaling)}
PARAMETERS: dict[str, Callable[[Any], Any]] = {
    "kahan": with_kahan,
    "kahan-int8": partial(with_kahan, compensation_dtype="int8"),
    "stochastic-rounding": lambda optimizer: with_stochastic_rounding(optimizer, jax.random.key(0)),
}


@dataclasses.dataclass(frozen=True)
class FewBits:
    """The options of a run that store or compute in few bits, in addition to its policy or mode.

    Attributes:
      state_dtypes: dtypes of the optimizer's arrays, such as "nu=bfloat16"; see `with_state_dtypes`.
      parameters: method for updates below the precision of half parameters, one of `PARAMETERS`; None for none.
      fp8: the one of `RECIPES` by which an autocast policy multiplies dense layers in 8 bits; None for none.

    Example:
      >>> FewBits(("nu=bfloat16",), fp8="Float8CurrentScaling").metadata()
      {'state_dtypes': ['nu=bfloat16'], 'fp8': 'Float8CurrentScaling'}
    """

    state_dtypes: tuple[str, ...] = ()
    parameters: str | None = None
    fp8: str | None = None

    @property
    def has_fp8_state(self) -> bool:
        """Whether the fp8 recipe has a state."""
        return self.fp8 == DelayedScaling.__name__

    def metadata(self) -> dict[str, Any]:
        """Returns the options that are set, as JSON data."""
        said = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {name: list(x) if isinstance(x, tuple) else x for name, x in said.items() if x}

    def for_precision(self, precision: Policy | Amp) -> "FewBits":
        """Returns the options that apply to a policy or mode.

        Args:
          precision: see `precision_of`.
        """
        parameters = self.parameters if stores_in_half(precision) else None
        return dataclasses.replace(
            self, parameters=parameters, fp8=self.fp8 if isinstance(precision, AutocastPolicy) else None
        )

    def outer_optimizer(self, optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
        """Returns an optimizer with the method for half parameters around it.

        Args:
          optimizer: the optimizer with its loss scale.
        """
        return optimizer if self.parameters is None else PARAMETERS[self.parameters](optimizer)

    def policy(self, policy: Policy, *, has_rules: bool) -> Policy:
        """Returns a policy with products in 8 bits, if a recipe is set.

        Args:
          policy: the policy; only one that autocasts is changed.
          has_rules: True if it got rules, which choose the fp8 products; otherwise all dense layers are fp8 products.
        """
        if self.fp8 is None or not isinstance(policy, AutocastPolicy):
            return policy
        rules = policy.rules if has_rules else policy.rules.replace(primitives={"dot_general": "fp8"})
        return dataclasses.replace(policy, rules=rules, fp8=RECIPES[self.fp8]())


DEFAULT_FEW_BITS = FewBits()


def stores_in_half(precision: Policy | Amp) -> bool:
    """Returns whether a precision is a policy that stores parameters in half precision; modes handle theirs themselves.

    Args:
      precision: see `precision_of`.
    """
    return isinstance(precision, Policy) and is_half(precision.param_dtype)
