"""Autocast of functions with custom derivatives (`custom_jvp`, `custom_vjp`), which keep these."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn

from jmp_train.policies.autocasting.interpreter import (
    as_traced,
    inlined,
    interpret,
    on_arrays,
    values_of,
)
from jmp_train.policies.autocasting.literal_bounds import fits
from jmp_train.policies.autocasting.region import (
    Region,
    Value,
    chosen,
    eligible,
    replaced,
    traced_dtype,
)


def custom_jvp(region: Region, equation: JaxprEqn, inputs: list[Value]) -> list[Value] | None:
    """Makes a new custom rule of the body and the old tangents, both by the rules of the region."""
    into = [eligible(traced_dtype(atom)) for atom in equation.invars]
    out = [eligible(traced_dtype(variable)) for variable in equation.outvars]
    if equation.params.get("symbolic_zeros") or _has_other_floats(equation):
        return None
    # The rule runs when their casts are gone, and must not close over scales that have gradients.
    region = dataclasses.replace(region, constants={}, delayed=None)
    function = jax.custom_jvp(on_arrays(region, equation.params["call_jaxpr"], inputs))

    def of_floats(primals: Sequence[Any], tangents: Sequence[Any]) -> list[Any]:
        def bound(*floats: object) -> list[Any]:
            return chosen(as_traced(equation, *replaced(primals, into, floats)), out)

        return jax.jvp(bound, tuple(chosen(primals, into)), tuple(tangents))[1]

    @function.defjvp
    def tangents_by_the_rules(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        outputs = function(*primals)
        avals = _avals(equation)
        jaxpr = jax.make_jaxpr(of_floats)(avals, chosen(avals, into))
        values = values_of([*primals, *chosen(tangents, into)])
        results = interpret(region.body(), jaxpr, values)
        floats = [v.to(x.dtype) for v, x in zip(results, chosen(outputs, out), strict=True)]
        zeros = [np.zeros(x.shape, jax.dtypes.float0) for x in outputs]
        return outputs, replaced(zeros, out, floats)

    return values_of(function(*_followed(region, inputs)))


def _followed(region: Region, inputs: list[Value]) -> list[Any]:
    """Returns the arrays; literals among half values become half too, if half can hold them."""
    strong = {value.dtype for value in inputs if not value.weak}
    return [
        value.to(region.half)
        if strong == {region.half}
        and value.weak
        and eligible(value.dtype)
        and fits(value.bounds, region.half, scales=True)
        else value.array
        for value in inputs
    ]


def _has_other_floats(equation: JaxprEqn) -> bool:
    """Whether it has operands or results of other differentiable dtypes, which autocast leaves alone."""
    dtypes = [traced_dtype(atom) for atom in (*equation.invars, *equation.outvars)]
    return any(jnp.issubdtype(dtype, jnp.inexact) and not eligible(dtype) for dtype in dtypes)


def custom_vjp(region: Region, equation: JaxprEqn, inputs: list[Value]) -> list[Value] | None:
    """Keeps the rule: the equation as it was or, where its dtype is forced, its two halves in it."""
    n_consts = equation.params.get("num_consts", 0)
    atoms = equation.invars[n_consts:]
    if region.forced not in ("lower", "float32") or not all(eligible(traced_dtype(atom)) for atom in atoms):
        return None
    region = dataclasses.replace(region, constants={})  # the rule runs when their casts are gone
    consts = [value.array for value in inputs[:n_consts]]
    const_avals, avals = _avals(equation)[:n_consts], _avals(equation)[n_consts:]
    pullback_tree: list[Any] = []

    def split(consts: Sequence[jax.Array], *primals: jax.Array) -> tuple[list[Any], list[Any]]:
        outputs, pullback = jax.vjp(lambda *x: as_traced(equation, *consts, *x), *primals)
        leaves, tree = jax.tree.flatten(pullback)
        pullback_tree[:] = [tree]
        return outputs, leaves

    traced = jax.make_jaxpr(split, return_shape=True)(const_avals, *avals)
    forward_jaxpr, (out_avals, residual_avals) = traced
    (tree,) = pullback_tree
    backward_jaxpr = jax.make_jaxpr(lambda leaves, cotangents: jax.tree.unflatten(tree, leaves)(cotangents))(
        residual_avals, out_avals
    )

    dtype = region.half if region.forced == "lower" else jnp.dtype(jnp.float32)
    arrays = [value.to(dtype) for value in inputs[n_consts:]]
    primal = functools.partial(on_arrays(region, equation.params["call_jaxpr"]), *consts)
    function = jax.custom_vjp(primal)

    # A forward half that calls the function itself wants its value, whose rule is this one.
    handlers = {**region.handlers, "custom_vjp_call": inlined}
    within = dataclasses.replace(region, handlers=handlers, memory={})

    def forward(*primals: object) -> tuple[list[Any], list[Any]]:
        results = on_arrays(within, forward_jaxpr)(*consts, *primals)
        shapes = jax.eval_shape(primal, *primals)
        outputs = [x.astype(out.dtype) for x, out in zip(results, shapes, strict=False)]
        return outputs, results[len(out_avals) :]

    def backward(residuals: list[Any], cotangents: list[Any]) -> tuple[Any, ...]:
        results = interpret(region.body(), backward_jaxpr, values_of([*residuals, *cotangents]))
        return tuple(v.to(x.dtype) for v, x in zip(results, arrays, strict=True))

    function.defvjp(forward, backward)
    return values_of(function(*arrays))


def _avals(equation: JaxprEqn) -> tuple[Any, ...]:
    return tuple(atom.aval for atom in equation.invars)
