"""Autocast of the primitives that hold programs: jit, loops, branches, remat, shard_map.

Each handler takes the reading of the bodies, the equation and its inputs, and returns the results. It returns None if
autocast cannot enter the equation, which is then bound as it was traced.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax import lax
from jax.extend.core import JaxprEqn

from jmp_train.policies.autocasting.bound_operations import chosen_at_run_time, product_in_8_bits
from jmp_train.policies.autocasting.custom_derivatives import custom_jvp, custom_vjp
from jmp_train.policies.autocasting.opaque import Contract, OpaqueCall
from jmp_train.policies.autocasting.primitives import ENTERED
from jmp_train.policies.autocasting.unrounded import called, checkpointed
from jmp_train.policies.autocasting.values import Value, values_of
from jmp_train.policies.programs import IN_JAX, Enter, as_jax_array


def _remat(reading: Any, equation: JaxprEqn, inputs: list[Value]) -> Sequence[Value]:
    params, arrays = equation.params, [value.array for value in inputs]
    if isinstance(params["policy"], OpaqueCall):
        return _opaque(reading, equation, inputs)

    def run(*arrays: Any, sources: Sequence[Any] = (None,) * len(inputs)) -> list[Any]:
        operands = map(reading.operand, arrays, inputs)
        values = [dataclasses.replace(x, source=source) for x, source in zip(operands, sources, strict=True)]
        return [as_jax_array(value.array) for value in reading.body().evaluate(params["jaxpr"], values)]

    options = {"prevent_cse": params["prevent_cse"], "policy": params["policy"]}
    is_free = reading.region.delayed is None and reading.region.key is None  # which no derivative may hold
    sources = [x.source if is_free else None for x in inputs]
    return values_of(checkpointed(run, arrays, sources, **options))


def _opaque(reading: Any, equation: Any, inputs: list[Value]) -> list[Value]:
    """Calls the function itself, or multiplies in 8 bits if it is a matrix product with the rule "fp8"."""
    region, call = reading.region, equation.params["policy"]
    if call.contract is not None:
        product = _product_of(equation, call.contract)
        rule, reason = region.decide(product, "")
        if rule == "fp8":
            dtype = equation.outvars[0].aval.dtype
            numbers = call.contract, ((), ())
            few = functools.partial(product_in_8_bits, region, region.place, inputs, numbers, dtype)
            outputs = [chosen_at_run_time(region, product, "", few, lambda: _called(call, inputs)[0])]
            region.note(product, "", rule, reason, (region.recipe.forward_dtype,) * 2, outputs)
            return outputs
    return _called(call, inputs)


def _called(call: OpaqueCall, inputs: list[Value]) -> list[Value]:
    return values_of(called(call.run, [as_jax_array(x.array) for x in inputs], [x.source for x in inputs]))


def _product_of(equation: Any, contract: Contract) -> JaxprEqn:
    """Returns the matrix product of an opaque call as an equation, to look up its rule."""
    operands = [jax.ShapeDtypeStruct(x.aval.shape, x.aval.dtype) for x in equation.invars]
    traced = jax.make_jaxpr(lambda x, y: lax.dot_general(x, y, (contract, ((), ()))))(*operands)
    return traced.eqns[0].replace(source_info=equation.source_info)


HANDLERS: Mapping[str, Enter] = {
    **{name: enter for name, enter in IN_JAX.items() if name in ENTERED},
    "remat2": _remat,
    "custom_jvp_call": custom_jvp,
    "custom_vjp_call": custom_vjp,
}
