"""Autocast of the primitives that hold programs: jit, loops, branches, remat, shard_map.

Each handler takes the region, the equation and its inputs, and returns the results. It returns None if autocast cannot
enter the equation, which is then bound as it was traced.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import ClosedJaxpr, JaxprEqn
from jax.sharding import PartitionSpec as P

from jmp_train.policies.autocasting.custom_derivatives import custom_jvp, custom_vjp
from jmp_train.policies.autocasting.fp8 import Contract, fp8_dot
from jmp_train.policies.autocasting.interpreter import inlined, interpret, on_arrays
from jmp_train.policies.autocasting.opaque import OpaqueCall
from jmp_train.policies.autocasting.region import Handler, Region
from jmp_train.policies.autocasting.unrounded import called, checkpointed
from jmp_train.policies.autocasting.values import (
    FLOAT32,
    HALVES,
    Value,
    argument,
    eligible,
    on_device,
    traced_dtype,
    values_of,
)
from jmp_train.policies.types import PyTree


def _jit(region: Region, equation: Any, inputs: list[Value]) -> list[Value]:
    """Inlines the body, as XLA does, so that the readers of its results decide on their dtypes."""
    params = equation.params
    inputs = _constrain(inputs, params.get("in_shardings"))
    outputs = interpret(region, params["jaxpr"], inputs)
    return _constrain(outputs, params.get("out_shardings"))


def _constrain(values: list[Value], shardings: Sequence[Any]) -> list[Value]:
    if not shardings or not any(isinstance(s, jax.sharding.Sharding) for s in shardings):
        return values
    return [
        Value(lax.with_sharding_constraint(value.array, sharding))
        if isinstance(sharding, jax.sharding.Sharding)
        else value
        for value, sharding in zip(values, shardings, strict=True)
    ]


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


def _scan(region: Region, equation: JaxprEqn, inputs: list[Value]) -> list[Value]:
    params, jaxpr = equation.params, equation.params["jaxpr"]
    region = dataclasses.replace(region, repeats=region.repeats * params["length"])
    n_consts, n_carry = scan_counts(params)
    consts, init, xs = inputs[:n_consts], inputs[n_consts:][:n_carry], inputs[n_consts + n_carry :]
    atoms = equation.invars[n_consts:][:n_carry]
    # Gradients of constants are added over the iterations: in half precision, these sums would stagnate or overflow.
    delayed = region.delayed
    scales = delayed.within(region.place) if delayed else {}
    float32_consts = [value.to(FLOAT32) if _is_half(value) else value.array for value in consts]

    def run(region: Region, carry: Sequence[Any], x: Sequence[Any]) -> tuple[list[Value], list[Any]]:
        values = [
            _cast_inside(value, array) if _is_half(value) else value.inside()
            for value, array in zip(consts, float32_consts, strict=True)
        ]
        values += [Value(array) for array in carry]
        values += [Value(a, integers=v.integers) for a, v in zip(x, xs, strict=True)]
        outputs = interpret(region.body(), jaxpr, values)
        return outputs[:n_carry], [value.array for value in outputs[n_carry:]]

    def next_dtypes(carry: Sequence[Any]) -> Sequence[Any]:
        first = [Value(x.array[0], integers=x.integers) for x in xs]
        return _result_dtypes(region, jaxpr, [*consts, *map(Value, carry), *first])[:n_carry]

    start = _stable(init, atoms, next_dtypes if params["length"] else None)
    dtypes = [array.dtype for array in start]

    def body(carry: Any, x: Any) -> tuple[Any, Any]:
        x, rows = x
        once = dataclasses.replace(region, delayed=delayed and delayed.rows(rows, params["length"]))
        outputs, ys = run(once, carry, x)
        return [v.to(dtype) for v, dtype in zip(outputs, dtypes, strict=True)], ys

    carry, ys = lax.scan(
        body,
        start,
        ([value.array for value in xs], scales),
        length=params["length"],
        reverse=params["reverse"],
        unroll=params["unroll"],
    )
    return values_of([*carry, *ys])


def _cast_inside(value: Value, array: jax.Array) -> Value:
    """Returns a half constant of a loop, cast in each iteration from an array in float32."""
    source = None if value.source is None else array
    return dataclasses.replace(value, array=array.astype(value.dtype), casts={}, source=source, made=None)


def scan_counts(params: dict[str, Any]) -> tuple[int, int]:
    """Returns the numbers of constants and of carried values among a scan's operands, which come first."""
    if "ft_in" in params:  # jax 0.11 and later
        consts, carry, _ = params["ft_in"].unpack()
        return len(consts), len(carry)
    return params["num_consts"], params["num_carry"]


def _stable(
    init: Sequence[Value], atoms: Sequence[Any], next_dtypes: Callable[[Sequence[Any]], Sequence[Any]] | None
) -> list[Any]:
    """Returns a loop's initial carry in dtypes that the body preserves: half only if it stays half."""
    arrays = [
        jnp.asarray(value.to(traced_dtype(atom)) if value.weak else value.array)
        if eligible(traced_dtype(atom))
        else value.array
        for value, atom in zip(init, atoms, strict=True)
    ]
    while next_dtypes is not None and any(_is_half(array) for array in arrays):
        found = next_dtypes(arrays)
        changed = [_is_half(array) and dtype != array.dtype for array, dtype in zip(arrays, found, strict=True)]
        if not any(changed):
            break
        arrays = [
            lax.convert_element_type(array, jnp.float32) if upcast else array
            for array, upcast in zip(arrays, changed, strict=True)
        ]
    return arrays


def _result_dtypes(region: Region, jaxpr: ClosedJaxpr, values: Sequence[Value]) -> Sequence[Any]:
    """Returns the dtypes of a program's results; traces it once for values of the same kind."""

    def find() -> list[Any]:
        found: list[Any] = []

        def note() -> None:
            results = interpret(region.unlogged().body(), jaxpr, [v.inside() for v in values])
            found[:] = [value.dtype for value in results]

        jax.eval_shape(note)
        return found

    key = ("dtypes", region.settings, *(value.kind for value in values))
    return region.remembered(key, jaxpr, find)


def _is_half(array: Any) -> bool:
    return array.dtype in HALVES and not _is_ref(array)


def _is_ref(value: object) -> bool:
    """Returns whether a value is a `jax.Ref`, whose dtype cannot change."""
    return isinstance(getattr(value, "array", value), jax.Ref)


def _while(region: Region, equation: JaxprEqn, inputs: list[Value]) -> list[Value]:
    params = equation.params
    n_cond, n_body = params["cond_nconsts"], params["body_nconsts"]
    cond_consts, body_consts = inputs[:n_cond], inputs[n_cond:][:n_body]
    init, atoms = inputs[n_cond + n_body :], equation.invars[n_cond + n_body :]
    region = dataclasses.replace(region, delayed=None)  # a `while` has no gradient, so its scales have none

    def run(region: Region, jaxpr: ClosedJaxpr, consts: Sequence[Value], carry: Sequence[Any]) -> list[Value]:
        values = [value.inside() for value in consts]
        return interpret(region.body(), jaxpr, values + [Value(array) for array in carry])

    def next_dtypes(carry: Sequence[Any]) -> Sequence[Any]:
        return _result_dtypes(region, params["body_jaxpr"], [*body_consts, *map(Value, carry)])

    start = _stable(init, atoms, next_dtypes)
    dtypes = [array.dtype for array in start]
    cond = getattr(params["cond_jaxpr"], "jaxpr", params["cond_jaxpr"])
    batched = bool(cond.outvars[0].aval.shape)  # by vmap: each element stops on its own

    def go_on(region: Region, carry: Any) -> Any:
        return run(region, params["cond_jaxpr"], cond_consts, carry)[0].array

    def body(carry: Any) -> Any:
        outputs = run(region, params["body_jaxpr"], body_consts, carry)
        new = [value.to(dtype) for value, dtype in zip(outputs, dtypes, strict=True)]
        return _where(go_on(region.unlogged(), carry), new, carry) if batched else new

    def proceed(carry: PyTree) -> Any:
        return jnp.any(go_on(region, carry))

    return values_of(lax.while_loop(proceed, body, start))


def _where(condition: jax.Array, new: Sequence[Any], old: Sequence[Any]) -> list[Any]:
    leading = range(condition.ndim)
    return [lax.select(lax.broadcast_in_dim(condition, x.shape, leading), x, y) for x, y in zip(new, old, strict=True)]


def _cond(region: Region, equation: JaxprEqn, inputs: list[Value]) -> list[Value] | None:
    if equation.params.get("branches_platforms") is not None:
        return None
    index, *operands = inputs
    jaxprs = equation.params["branches"]
    regions = [dataclasses.replace(region, place=f"{region.place}:{number}") for number in range(len(jaxprs))]
    branches = [on_arrays(*branch, operands) for branch in zip(regions, jaxprs, strict=True)]
    arrays = [on_device(value.array) for value in operands]
    values = [
        dataclasses.replace(argument(array), integers=value.integers)
        for array, value in zip(arrays, operands, strict=True)
    ]
    found = [_result_dtypes(region, jaxpr, values) for jaxpr in jaxprs]
    dtypes = [outs[0] if len(set(outs)) == 1 else jnp.dtype(jnp.float32) for outs in zip(*found, strict=True)]

    def agreeing(branch: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
        def run(*arrays: object) -> list[Any]:
            return [
                array if array.dtype == dtype else lax.convert_element_type(array, dtype)
                for array, dtype in zip(branch(*arrays), dtypes, strict=True)
            ]

        return run

    return values_of(lax.switch(index.array, [agreeing(branch) for branch in branches], *arrays))


def _shard_map(region: Region, equation: JaxprEqn, inputs: list[Value]) -> list[Value]:
    params, delayed = equation.params, region.delayed
    axes = frozenset(params.get("manual_axes") or params["newly_manual_axes"])
    scales = delayed.within(region.place) if delayed else {}

    def run(scales: dict[str, jax.Array], *arrays: jax.Array) -> list[Any]:
        rows = {place: x[0] for place, x in scales.items()}
        own = delayed and delayed.rows(rows, math.prod(params["mesh"].shape[axis] for axis in axes))
        return on_arrays(dataclasses.replace(region, delayed=own), params["jaxpr"], inputs)(*arrays)

    wrapped = jax.shard_map(
        run,
        mesh=params["mesh"],
        in_specs=(P(tuple(sorted(axes))), *params["in_specs"]),  # each device has its own scales
        out_specs=list(params["out_specs"]),
        axis_names=axes,
        check_vma=params["check_vma"],
    )
    return values_of(wrapped(scales, *(value.array for value in inputs)))


ENTERED: dict[str, Handler] = {
    "jit": _jit,
    "pjit": _jit,
    "closed_call": inlined,
    "remat2": _remat,
    "scan": _scan,
    "while": _while,
    "cond": _cond,
    "custom_jvp_call": custom_jvp,
    "custom_vjp_call": custom_vjp,
    "shard_map": _shard_map,
}
