"""What tuning chooses: half precision or float32 of operations, or few bits or half precision of matrix products.

Both kinds have the same methods. A unit that is kept runs in the higher precision of the two.
"""

import dataclasses
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jmp_train.policies import MOSTLY_HALF, AutocastPolicy, DelayedScaling, Int8RowwiseScaling, NVFP4BlockScaling
from jmp_train.policies.autocasting import (
    DEFAULT_RECIPE,
    FEW_BITS_PRODUCTS,
    HALVES,
    TORCH_CUDA,
    AutocastRules,
    Cause,
    Recipe,
    address_of,
    autocast,
    dequantized,
    is_batched,
    mark_of,
    quantized,
    run_region,
)
from jmp_train.policies.autocasting.emulating import emulated_autocast
from jmp_train.policies.pytrees import check_half
from jmp_train.steps import TrainStep
from jmp_train.tools.tuning.tolerance import Errors, Tolerance
from jmp_train.tools.tuning.tuned_functions import Example, Subject
from jmp_train.tools.tuning.units import Unit, entries_of, find_units, fp8_entries, unit_of

_DEFAULTS = {"float8_e4m3fn": DEFAULT_RECIPE, "float4_e2m1fn": NVFP4BlockScaling(), "int8": Int8RowwiseScaling()}


@dataclasses.dataclass(frozen=True)
class HalfPrecision:
    """Operations in half precision, or kept in float32.

    Attributes:
      half: the half type.
    """

    half: Any

    name = property(lambda self: self.half.name)
    base = MOSTLY_HALF
    kept = "float32"
    refusal = "even if all operations run in float32 the tolerance is exceeded"

    def units(self, subject: Subject, example: Example) -> list[Unit]:
        """Returns the operations to choose from, in the order in which they run."""
        return find_units(subject, example, self.half)

    def trial(self, fn: Callable[..., Any], flags: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a function by run-time flags."""
        return emulated_autocast(fn, self.half, flags=flags)

    def run(self, fn: Callable[..., Any], rules: AutocastRules) -> Callable[..., Any]:
        """Returns a function by rules."""
        return autocast(fn, self.half, rules=rules)

    def rules(self, kept: Collection[int], units: Sequence[Unit]) -> AutocastRules:
        """Returns the rules that keep these units."""
        expressions = [x for entry in entries_of(kept, units) for x in entry.expressions]
        return self.base.replace(operations=dict.fromkeys(expressions, "float32"))

    def rounded(self, x: jax.Array) -> jax.Array:
        """Returns float32 parameters rounded once."""
        return x.astype(self.half).astype(jnp.float32)


@dataclasses.dataclass(frozen=True)
class ProductsInFewBits:
    """Matrix products in 8 or 4 bits, or kept as the rules of the step have them.

    Attributes:
      half: the half type of the step.
      own: the rules of the step.
      recipe: how operands and gradients are quantized.
    """

    half: Any
    own: AutocastRules
    recipe: Recipe

    name = property(lambda self: self.recipe.forward_dtype.name)
    kept = "half precision"
    refusal = "even if no product runs in few bits the tolerance is exceeded; find rules for half precision first"

    @property
    def base(self) -> AutocastRules:
        """The rules of the step without products in few bits."""
        fields = dataclasses.fields(self.own)
        tables = {x.name: [entry for entry in getattr(self.own, x.name) if entry[1] != "fp8"] for x in fields}
        none = AutocastRules(**{name: tuple(entries) for name, entries in tables.items()})
        missing = [name for name, _ in self.own.primitives if name not in dict(none.primitives)]
        return none.replace(primitives=dict.fromkeys(missing, "lower"))

    def units(self, subject: Subject, example: Example) -> list[Unit]:
        """Returns the products to choose from, and others that a path has in common with them."""
        log: list[Any] = []
        jax.eval_shape(lambda: subject.objective(lambda fn: self._run_all(fn, log=log), *example))
        found: dict[str, list[Any]] = {}
        for x in log:
            if x.equation.primitive.name in FEW_BITS_PRODUCTS:
                found.setdefault(address_of((*x.callers, x.equation), x.path), []).append(x)
        return [_unit(address, decisions) for address, decisions in found.items()]

    def trial(self, fn: Callable[..., Any], flags: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a function by run-time flags."""
        return self._run_all(fn, flags=lambda address, equations: flags((address,), equations))

    def _run_all(self, fn: Callable[..., Any], **settings: Any) -> Callable[..., Any]:
        """Returns a function with all products in few bits that may be, in a region with further settings."""
        mark = mark_of(self.run(fn, self.own.replace(primitives=dict.fromkeys(FEW_BITS_PRODUCTS, "fp8"))))
        assert mark is not None and mark.region is not None
        region = dataclasses.replace(mark.region, **settings)
        return lambda *args, **kwargs: run_region(region, fn, args, kwargs)

    def run(self, fn: Callable[..., Any], rules: AutocastRules) -> Callable[..., Any]:
        """Returns a function by rules."""
        return autocast(fn, self.half, rules=rules, fp8=self.recipe)

    def rules(self, kept: Collection[int], units: Sequence[Unit]) -> AutocastRules:
        """Returns the rules that keep these units."""
        chosen = {i for i, unit in enumerate(units) if unit.is_free} - set(kept)
        paths, operations = fp8_entries(chosen, units)
        return self.base.replace(paths=dict.fromkeys(paths, "fp8"), operations=dict.fromkeys(operations, "fp8"))

    def rounded(self, x: jax.Array) -> jax.Array:
        """Returns float32 parameters rounded once: matrices only, since no others are quantized."""
        if x.ndim < 2 or not x.size:
            return x
        found = quantized(x.swapaxes(-1, -2), 1, self.recipe.weights, self.recipe.forward_dtype)
        array = found.array if found.blocks is None else dequantized(found)
        return (array.astype(jnp.float32) * found.inverse)[..., : x.shape[-2]].swapaxes(-1, -2)


def _has_own_derivative(decision: Any) -> bool:
    within = {equation.primitive.name for equation in decision.callers}
    return not within.isdisjoint(("custom_vjp_call", "custom_jvp_call"))


def _unit(address: str, decisions: Sequence[Any]) -> Unit:
    """Returns the products at an address, which an entry for it sets together."""
    may_be = [x for x in decisions if x.rule == "fp8"]
    why = "shares path and line with products that the rule leaves alone" if 0 < len(may_be) < len(decisions) else ""
    why = "in a function with a custom derivative" if any(map(_has_own_derivative, may_be)) else why
    is_free = bool(may_be) and not why
    by_path = not (any if is_free else all)(map(_is_left_by_paths, decisions))
    return unit_of(address, decisions, is_free=is_free, by_path=by_path, not_tried=why)


def _is_left_by_paths(decision: Any) -> bool:
    """Returns whether no entry of a path puts a product in few bits, as attention's, or whether that may be so."""
    is_named = decision.reason.cause == Cause.OPERATION and is_batched(decision.equation)
    return is_named or decision.reason.cause == Cause.ACTIVATIONS


def precision_of(fn: Any, dtype: DTypeLike, recipe: Recipe | None) -> HalfPrecision | ProductsInFewBits:
    """Returns what is chosen from; takes the arguments of `tune`."""
    name = next((name for name in _DEFAULTS if dtype == name or dtype == jnp.dtype(name)), None)
    if recipe is not None and not isinstance(recipe, Recipe):
        raise TypeError(f"recipe must be a recipe, such as Float8CurrentScaling(), got {recipe!r}")
    if name is None:
        half = check_half(dtype, "dtype", *_DEFAULTS)
        if recipe is not None:
            raise ValueError(f"recipe={recipe!r} needs dtype={recipe.forward_dtype.name!r}, got dtype={half.name!r}")
        return HalfPrecision(half)
    policy = fn.policy.default if isinstance(fn, TrainStep) and fn.policy is not None else None
    own = policy.fp8 if isinstance(policy, AutocastPolicy) and not isinstance(policy.fp8, DelayedScaling) else None
    recipe = recipe or (own if own is not None and own.forward_dtype == name else _DEFAULTS[name])
    if isinstance(recipe, DelayedScaling):
        raise ValueError(
            f"recipe={recipe!r} has a state, and trials have none: tune by Float8CurrentScaling(), whose scales are "
            "those that delayed ones approximate"
        )
    if recipe.forward_dtype != name:
        raise ValueError(f"recipe={recipe!r} needs dtype={recipe.forward_dtype.name!r}, got dtype={name!r}")
    if isinstance(policy, AutocastPolicy):
        return ProductsInFewBits(policy.autocast_dtype, policy.rules, recipe)
    dtype = policy.compute_dtype if policy is not None and policy.compute_dtype in HALVES else jnp.dtype(jnp.bfloat16)
    return ProductsInFewBits(dtype, TORCH_CUDA, recipe)


def costs_first(alone: dict[int, Errors], units: Sequence[Unit], tolerance: Tolerance) -> list[int]:
    """Returns the numbers of units, those first that use up most of the tolerance for their flops.

    Args:
      alone: errors with each unit alone in few bits, or as many as there are.
      units: all units.
      tolerance: tolerance of the errors.
    """

    def cost(number: int) -> float:
        return tolerance.used(alone[number]) ** 2 / max(1, units[number].flops) if number in alone else 0.0

    free = [i for i, unit in enumerate(units) if unit.is_free]
    return sorted(free, key=lambda i: (-cost(i), i))
