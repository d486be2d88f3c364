"""Autocast of the primitives that hold programs: jit, loops, branches, remat, shard_map.

Each handler takes the region, the equation and its inputs, and returns the results. It returns None if autocast cannot
enter the equation, which is then bound as it was traced.
"""

import dataclasses
from typing import Any

import jax
from jax import lax
from jax.extend.core import JaxprEqn

from jmp_train.policies.autocasting.custom_derivatives import custom_jvp, custom_vjp
from jmp_train.policies.autocasting.fp8 import Contract, fp8_dot
from jmp_train.policies.autocasting.interpreter import Autocast, on_arrays
from jmp_train.policies.autocasting.opaque import OpaqueCall
from jmp_train.policies.autocasting.region import Handler, Region
from jmp_train.policies.autocasting.unrounded import called, checkpointed
from jmp_train.policies.autocasting.values import Value, values_of
from jmp_train.policies.programs import IN_JAX, on_device


def _remat(region: Region, equation: JaxprEqn, inputs: list[Value]) -> list[Value]:
    params = equation.params
    if isinstance(params["policy"], OpaqueCall):
        return _opaque(region, equation, inputs)
    body = on_arrays(region, params["jaxpr"], inputs)
    options = {"prevent_cse": params["prevent_cse"], "policy": params["policy"]}
    sources = [x.source if region.delayed is None else None for x in inputs]  # no derivative rule may hold scales
    return values_of(checkpointed(body, [value.array for value in inputs], sources, **options))


def _opaque(region: Region, equation: Any, inputs: list[Value]) -> list[Value]:
    """Calls the function itself, or multiplies in 8 bits if it is a matrix product with the rule "fp8"."""
    arrays = [on_device(value.array) for value in inputs]
    call = equation.params["policy"]
    if call.contract is not None:
        product = _product_of(equation, call.contract)
        rule, reason = region.decide(product, "")
        if rule == "fp8":
            lhs, rhs = arrays
            scales = region.delayed.of(region.place) if region.delayed else None
            result = fp8_dot(lhs, rhs, call.contract, region.recipe, equation.outvars[0].aval.dtype, scales)
            outputs = [Value(result, product=True)]
            region.note(product, "", rule, reason, (region.recipe.forward_dtype,) * 2, outputs)
            return outputs
    return values_of(called(call.run, arrays, [value.source for value in inputs]))


def _product_of(equation: Any, contract: Contract) -> JaxprEqn:
    """Returns the matrix product of an opaque call as an equation, to look up its rule."""
    operands = [jax.ShapeDtypeStruct(x.aval.shape, x.aval.dtype) for x in equation.invars]
    traced = jax.make_jaxpr(lambda x, y: lax.dot_general(x, y, (contract, ((), ()))))(*operands)
    return traced.eqns[0].replace(source_info=equation.source_info)


def _by(name: str) -> Handler:
    """Returns the handler that runs the bodies of a primitive as jax does."""

    def run(region: Region, equation: Any, inputs: list[Value]) -> Any:
        if name == "while":  # it has no gradient, so its scales have none
            region = dataclasses.replace(region, delayed=None)
        return IN_JAX[name](Autocast(region), equation, inputs)

    return run


ENTERED: dict[str, Handler] = {
    **{name: _by(name) for name in ("jit", "pjit", "closed_call", "scan", "while", "cond", "shard_map")},
    "remat2": _remat,
    "custom_jvp_call": custom_jvp,
    "custom_vjp_call": custom_vjp,
}
