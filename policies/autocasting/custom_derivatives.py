"""Autocast of functions with custom derivatives (`custom_jvp`, `custom_vjp`), which stay in effect."""

import dataclasses
import functools
from collections.abc import Sequence
from itertools import compress
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import JaxprEqn

from jmp_train.policies.autocasting.bound_operations import as_traced
from jmp_train.policies.autocasting.literal_bounds import fits
from jmp_train.policies.autocasting.primitives import PRODUCTS, cast, multiplies
from jmp_train.policies.autocasting.region import Cause, Decision
from jmp_train.policies.autocasting.rules import FLOAT32_RULES, AutocastRules, kind_of
from jmp_train.policies.autocasting.values import (
    FLOAT32,
    HALVES,
    Value,
    eligible,
    replaced,
    traced_arrays,
    traced_dtype,
    values_of,
)
from jmp_train.policies.programs import as_jax_array, on_arrays, opened


def custom_jvp(reading: Any, equation: JaxprEqn, inputs: list[Value]) -> list[Value] | None:
    """Returns the results of a new `custom_jvp`: the rules of the region apply to body and tangents.

    If products of it run in 8 bits, which have no forward-mode derivatives, it is a new `custom_vjp`.
    """
    into = [eligible(traced_dtype(atom)) for atom in equation.invars]
    out = [eligible(traced_dtype(variable)) for variable in equation.outvars]
    if reading.region.differentiates:
        return reading.evaluate(equation.params["call_jaxpr"], inputs)
    if equation.params.get("symbolic_zeros") or _has_other_floats(equation):
        return None
    # The rule runs when their casts and keys are gone, and must not close over scales that have gradients.
    reading = reading.changed(constants={}, delayed=None, key=None)

    def of_floats(primals: Sequence[Any], tangents: Sequence[Any]) -> list[Any]:
        def bound(*floats: object) -> list[Any]:
            return list(compress(as_traced(equation, *replaced(primals, into, floats)), out))

        return jax.jvp(bound, tuple(compress(primals, into)), tuple(tangents))[1]

    def has_8_bits() -> bool:
        decisions: list[Decision] = []
        avals = _avals(equation)
        program = jax.make_jaxpr(of_floats)(avals, list(compress(avals, into)))
        if multiplies(program):
            inner = reading.changed(log=decisions, differentiates=True, memory={}).body()
            jax.eval_shape(
                lambda *arrays: [x.array for x in inner.evaluate(program, values_of(arrays))], *program.in_avals
            )
        return any(x.rule == "fp8" for x in decisions)

    if reading.region.takes_8_bits and has_8_bits():
        return custom_vjp(reading, equation, inputs)
    # The derivative rule outlives this trace: it must not hold the operands' arrays.
    facts = [Value(None, integers=x.integers, given=x.given) for x in inputs]
    run = on_arrays(reading, equation.params["call_jaxpr"], facts)
    arrays = _followed(reading.region.half, inputs)
    halves = _read_through_float32(reading, equation, inputs, arrays)

    def as_given(arrays: Sequence[Any]) -> list[Any]:
        return [x if half is None else cast(x, half) for x, half in zip(arrays, halves, strict=True)]

    @jax.custom_jvp
    def function(*arrays: Any) -> list[Any]:
        return run(*as_given(arrays))

    @function.defjvp
    def tangents_by_the_rules(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        outputs, primals = function(*primals), as_given(primals)
        avals = _avals(equation)
        jaxpr = jax.make_jaxpr(of_floats)(avals, list(compress(avals, into)))
        values = values_of([*primals, *compress(tangents, into)])
        results = reading.body().evaluate(jaxpr, values)
        floats = [v.to(x.dtype) for v, x in zip(results, compress(outputs, out), strict=True)]
        zeros = [np.zeros(x.shape, jax.dtypes.float0) for x in outputs]
        return outputs, replaced(zeros, out, floats)

    pairs = zip(arrays, inputs, halves, strict=True)
    return values_of(function(*(array if half is None else x.to(FLOAT32) for array, x, half in pairs)))


def _read_through_float32(
    reading: Any, equation: JaxprEqn, inputs: Sequence[Value], arrays: Sequence[Any]
) -> Sequence[Any]:
    """Returns the dtype of each operand that is read through float32, so that gradients are added there, or None.

    These are half operands that other operations read too, of functions with float32 results. The gradient of
    `softplus(x) - x * y` for a confident prediction, for example, is a small difference of two.
    """
    shared = [x.dtype if x.shared and x.dtype in HALVES and not x.weak else None for x in inputs]
    if not any(shared):
        return shared
    jaxpr, key = equation.params["call_jaxpr"], ("custom_jvp", reading.region.settings, *(x.kind for x in inputs))
    find = functools.partial(jax.eval_shape, on_arrays(reading.trial(), jaxpr, inputs), *arrays)
    results = reading.region.remembered(key, jaxpr, find)
    in_float32 = all(x.dtype == FLOAT32 for x in results if eligible(x.dtype))
    return shared if in_float32 else [None] * len(inputs)


def _followed(half: Any, inputs: list[Value]) -> list[Any]:
    """Returns the arrays; literals next to half values become half, if half can hold them."""
    strong = {value.dtype for value in inputs if not value.weak}
    return [
        value.to(half)
        if strong == {half} and value.weak and eligible(value.dtype) and fits(value.bounds, half, scales=True)
        else value.array
        for value in inputs
    ]


def _has_other_floats(equation: JaxprEqn) -> bool:
    """Returns whether operands or results have other differentiable dtypes, which autocast does not change."""
    dtypes = [traced_dtype(atom) for atom in (*equation.invars, *equation.outvars)]
    return any(jnp.issubdtype(dtype, jnp.inexact) and not eligible(dtype) for dtype in dtypes)


def custom_vjp(reading: Any, equation: JaxprEqn, inputs: list[Value]) -> list[Value] | None:
    """Returns the results of a new `custom_vjp`: the rules of the region apply to both halves of the old one.

    The backward half gets residuals and cotangents in their traced dtypes. If no dtype is forced, a function stays
    unchanged in three cases: it has no matrix product; the rules run none of its products in half precision; or a rule
    for single operations matches it, because the source lines of the forward half are unknown.
    """
    jaxpr, n_consts, region = equation.params["call_jaxpr"], equation.params.get("num_consts", 0), reading.region
    if region.differentiates:
        return reading.evaluate(jaxpr, inputs)
    forced = kind_of(region.forced) in ("lower", "float32")
    if _has_other_floats(equation) or not (forced or multiplies(jaxpr)):
        return None
    # The rule runs when their casts and keys are gone, and must not close over scales that have gradients.
    reading = reading.changed(constants={}, delayed=None, key=None)
    consts = [value.array for value in inputs[:n_consts]]
    given = inputs[n_consts:]
    dtype = region.half if region.forced == "lower" else jnp.dtype(jnp.float32)
    floats = [eligible(traced_dtype(atom)) for atom in equation.invars[n_consts:]]
    arrays = [x.to(dtype) if forced and is_float else x.array for x, is_float in zip(given, floats, strict=True)]
    arrays = list(map(as_jax_array, arrays))
    plain = values_of([*consts, *arrays])

    def tried() -> tuple[list[Any], Decision | None]:
        decisions: list[Decision] = []
        run = on_arrays(reading.changed(log=decisions), jaxpr, plain)
        return jax.eval_shape(run, *consts, *arrays), _for_float32(decisions, str(region.half))

    kinds = tuple(np.dtype(x.dtype) if eligible(x.dtype) else None for x in (*consts, *arrays))
    shapes, decision = region.remembered(("custom_vjp", region.settings, kinds), jaxpr, tried)
    if not forced and decision is not None:
        return _in_float32(reading, equation, inputs, decision)
    function = jax.custom_vjp(functools.partial(on_arrays(reading, jaxpr, plain), *consts))
    within = reading.changed(differentiates=True, memory={}, log=None)

    def forward(*primals: Any) -> tuple[list[Any], jax.tree_util.Partial]:
        perturbed = [primal.perturbed and is_float for primal, is_float in zip(primals, floats, strict=True)]
        primals = tuple(primal.value for primal in primals)
        forward_jaxpr, backward_jaxpr = _halves(equation, perturbed)
        results = on_arrays(within, forward_jaxpr, plain)(*consts, *primals)
        outputs = [x.astype(out.dtype) if eligible(out.dtype) else x for x, out in zip(results, shapes, strict=False)]
        dtypes = tuple(x.dtype if one else None for x, one in zip(primals, perturbed, strict=True))
        pullback = functools.partial(_pulled_back, within.body(), backward_jaxpr, dtypes)
        return outputs, jax.tree_util.Partial(pullback, *results[len(outputs) :])

    def backward(pullback: jax.tree_util.Partial, cotangents: list[Any]) -> tuple[Any, ...]:
        return pullback(cotangents=cotangents)

    function.defvjp(forward, backward, symbolic_zeros=True)
    return values_of(function(*arrays))


def _for_float32(decisions: Sequence[Decision], half: str) -> Decision | None:
    """Returns a decision that requires running a function as it was traced; None if there is none."""
    by_operation = [decision for decision in decisions if decision.reason.cause is Cause.OPERATION]
    products = [decision for decision in decisions if decision.equation.primitive.name in PRODUCTS]
    if by_operation or any(x.rule == "fp8" or half in x.dtypes_in for x in products):
        return next(iter(by_operation), None)
    return next(iter(products), None)


def _in_float32(reading: Any, equation: JaxprEqn, inputs: list[Value], decision: Decision) -> list[Value]:
    """Runs a whole function in float32, with products by the rule of the decision, and records the reason."""
    outputs = None
    if decision.rule in FLOAT32_RULES and decision.equation.params.get("precision") is None:
        by_rule = reading.changed(log=None, rules=AutocastRules(), forced=decision.rule, memory={})
        outputs = custom_vjp(by_rule, equation, inputs)
    results = (
        [x.array for x in outputs] if outputs is not None else as_traced(equation, *traced_arrays(equation, inputs))
    )
    if reading.region.log is not None:
        dtypes_in = tuple(str(traced_dtype(atom)) for atom in equation.invars)
        dtypes_out = tuple(str(traced_dtype(variable)) for variable in equation.outvars)
        callers = decision.callers[: decision.callers.index(equation)]
        whole = {"equation": equation, "callers": callers}
        reading.region.log.append(dataclasses.replace(decision, **whole, dtypes_in=dtypes_in, dtypes_out=dtypes_out))
    return values_of(results)


def _halves(equation: JaxprEqn, perturbed: Sequence[bool]) -> tuple[Any, Any]:
    """Returns both halves of a function with a custom derivative, traced in float32.

    Args:
      equation: the call of the function.
      perturbed: one boolean per operand, constants excluded: True if its gradient is needed.

    Returns:
      Two programs. The first maps all operands to results and residuals. The second maps the residuals and the
      cotangents of the floating results, in their order, to the gradients.
    """
    n_consts = equation.params.get("num_consts", 0)
    out = [eligible(traced_dtype(variable)) for variable in equation.outvars]
    tree: list[Any] = []

    def split(*operands: Any) -> tuple[list[Any], list[Any]]:
        consts, primals = operands[:n_consts], operands[n_consts:]

        def of_perturbed(*some: Any) -> tuple[list[Any], list[Any]]:
            results = as_traced(equation, *consts, *replaced(primals, perturbed, some))
            return list(compress(results, out)), results

        _, pullback, results = jax.vjp(of_perturbed, *compress(primals, perturbed), has_aux=True)
        leaves, structure = jax.tree.flatten(pullback)
        tree.append(structure)
        return results, leaves

    def joined(residuals: list[Any], cotangents: list[Any]) -> Any:
        return jax.tree.unflatten(tree[-1], residuals)(cotangents)

    forward, (results, residuals) = jax.make_jaxpr(split, return_shape=True)(*_avals(equation))
    return forward, jax.make_jaxpr(joined)(residuals, list(compress(results, out)))


def _pulled_back(
    reading: Any, jaxpr: Any, dtypes: Sequence[Any], *residuals: Any, cotangents: Sequence[Any]
) -> tuple[Any, ...]:
    """Returns the gradients of operands in the operands' dtypes, None for operands without gradient."""
    avals: list[Any] = [x.aval if isinstance(x, SymbolicZero) else None for x in cotangents]
    full = [x if a is None else np.zeros(a.shape, a.dtype) for x, a in zip(cotangents, avals, strict=True)]
    pairs = zip((*residuals, *(x for x in full if eligible(x.dtype))), opened(jaxpr).invars, strict=True)
    arrays = [x.astype(traced_dtype(variable)) if eligible(x.dtype) else x for x, variable in pairs]
    results = iter(reading.evaluate(jaxpr, values_of(arrays)))
    return tuple(None if dtype is None else next(results).to(dtype) for dtype in dtypes)


def _avals(equation: JaxprEqn) -> tuple[Any, ...]:
    return tuple(atom.aval for atom in equation.invars)
