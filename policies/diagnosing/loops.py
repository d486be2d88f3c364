"""Loops, branches and `shard_map`s as functions of pairs, each compiled as one program that measures its body."""

from collections.abc import Callable
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from jmp_train.policies.autocasting import scan_counts
from jmp_train.policies.diagnosing.devices import each_device, mapped
from jmp_train.policies.diagnosing.measures import combine, combined, is_float, nothing
from jmp_train.policies.diagnosing.pairs import Pair, with_shadow
from jmp_train.policies.diagnosing.programs import count_rows, dtype_of
from jmp_train.policies.diagnosing.sampling import InBody


def _scan(equation: Any, in_body: InBody) -> Callable[..., Any]:
    params, program = equation.params, equation.params["jaxpr"]
    n_consts, n_carry = scan_counts(params)
    rows = count_rows(program)

    def run(inputs: list[Pair], iteration: Any) -> Any:
        consts, start, xs = inputs[:n_consts], inputs[n_consts:][:n_carry], inputs[n_consts + n_carry :]

        def body(carry: Any, x: list[Pair]) -> Any:
            values, matrix, iteration = carry
            outputs, found, iteration = in_body(program, [*consts, *values, *x], iteration)
            return (outputs[:n_carry], combine(matrix, found), iteration + 1), outputs[n_carry:]

        first = [with_shadow(pair) for pair in start], nothing(rows), jnp.asarray(iteration)
        options = {name: params[name] for name in ("length", "reverse", "unroll")}
        (values, matrix, iteration), ys = lax.scan(body, first, xs, **options)
        return [*values, *ys], matrix, iteration

    return run


def _while(equation: Any, in_body: InBody) -> Callable[..., Any]:
    params = equation.params
    n_cond, n_body = params["cond_nconsts"], params["body_nconsts"]
    condition, program = params["cond_jaxpr"], params["body_jaxpr"]
    rows = count_rows(program)

    def run(inputs: list[Pair], iteration: Any) -> Any:
        cond_consts, body_consts, start = inputs[:n_cond], inputs[n_cond:][:n_body], inputs[n_cond + n_body :]

        def go_on(carry: Any) -> jax.Array:
            (flag,) = jex.jaxpr_as_fun(condition)(*(pair.actual for pair in (*cond_consts, *carry[0])))
            return jnp.any(flag)

        def body(carry: Any) -> Any:
            values, matrix, iteration = carry
            outputs, found, iteration = in_body(program, [*body_consts, *values], iteration)
            return outputs, combine(matrix, found), iteration + 1

        first = [with_shadow(pair) for pair in start], nothing(rows), jnp.asarray(iteration)
        return lax.while_loop(go_on, body, first)

    return run


def _cond(equation: Any, in_body: InBody) -> Callable[..., Any]:
    branches = equation.params["branches"]
    counts = [count_rows(branch) for branch in branches]

    def taken(number: int) -> Callable[..., Any]:
        def branch(operands: list[Pair], iteration: jax.Array) -> Any:
            results, found, iteration = in_body(branches[number], operands, iteration)
            matrices: list[Any] = [nothing(count) for count in counts]
            matrices[number] = found
            return results, jnp.concatenate(matrices), iteration

        return branch

    def run(inputs: list[Pair], iteration: Any) -> Any:
        index, *operands = inputs
        programs = [taken(number) for number in range(len(branches))]
        return lax.switch(index.actual, programs, operands, jnp.asarray(iteration))

    return run


def _shard_map(equation: Any, in_body: InBody) -> Callable[..., Any]:
    """Returns a `shard_map` inside of a program that is compiled as a whole."""
    params = equation.params
    mesh, axes = params["mesh"], manual_axes(params)
    each = each_device(mesh, axes)

    def run(inputs: list[Pair], iteration: Any) -> Any:
        def body(inputs: list[Pair], iteration: jax.Array) -> Any:
            results, matrix, iteration = in_body(params["jaxpr"], inputs, iteration)
            return results, matrix[None], iteration[None]

        specs = [
            Pair(spec, None if pair.shadow is None else spec)
            for pair, spec in zip(inputs, params["in_specs"], strict=True)
        ]
        out_specs = [
            Pair(spec, spec if is_float(dtype_of(variable)) else None)
            for variable, spec in zip(equation.outvars, params["out_specs"], strict=True)
        ]
        on_devices = mapped(body, mesh, axes, (specs, P()), (out_specs, each, each))
        results, matrices, iterations = on_devices(inputs, jnp.asarray(iteration))
        return results, combined(matrices), iterations.max()

    return run


PROGRAMS = {"scan": _scan, "while": _while, "cond": _cond, "shard_map": _shard_map}
"""By the name of an operation, what returns it as a function of pairs."""


def manual_axes(params: dict[str, Any]) -> frozenset[str]:
    """Returns the axes of the mesh over which a `shard_map` maps, given its parameters."""
    return frozenset(params.get("manual_axes") or params["newly_manual_axes"])
