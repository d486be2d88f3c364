"""Loops, branches, remat and `shard_map` by a reading, as loops, branches, remat and `shard_map` of jax."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from jmp_train.policies.programs.loops import Scan, While, branches_of, references_kept, select
from jmp_train.policies.programs.reading import Enter
from jmp_train.policies.programs.walking import RUN_ONCE, manual_axes


def on_device(array: Any) -> Any:
    """Returns a NumPy array as a jax array, and anything else, such as a reference, unchanged."""
    return jnp.asarray(array) if isinstance(array, np.ndarray | np.generic) else array


def call(reading: Any, equation: Any, inputs: list[Any]) -> list[Any]:
    """Runs the program of a call in place, as XLA does, between the constraints of a jitted function."""
    params = equation.params
    inputs = _constrained(reading, inputs, params.get("in_shardings"))
    outputs = reading.evaluate(params[RUN_ONCE[equation.primitive.name]], inputs)
    return _constrained(reading, outputs, params.get("out_shardings"))


def _constrained(reading: Any, values: list[Any], shardings: Sequence[Any] | None) -> list[Any]:
    return [
        reading.mapped(lambda x, to=sharding: lax.with_sharding_constraint(x, to), value)
        if isinstance(sharding, jax.sharding.Sharding)
        else value
        for value, sharding in zip(values, shardings or [None] * len(values), strict=True)
    ]


def on_arrays(reading: Any, program: Any, outer: Sequence[Any]) -> Callable[..., list[Any]]:
    """Returns a body as a function of arrays, which returns what leaves it; `outer` are the operands as values."""

    def run(*arrays: Any) -> list[Any]:
        body = reading.body()
        outputs = body.evaluate(program, list(map(body.operand, arrays, outer)))
        return [jax.tree.map(on_device, body.packed(x)) for x in outputs]

    return run


def remat(reading: Any, equation: Any, inputs: list[Any]) -> list[Any]:
    """Runs a body under `jax.checkpoint`."""
    params, body = equation.params, on_arrays(reading, equation.params["jaxpr"], inputs)
    run = jax.checkpoint(body, prevent_cse=params["prevent_cse"], policy=params["policy"])
    return list(map(reading.unpacked, run(*(on_device(reading.array(x)) for x in inputs))))


def _scan(reading: Any, equation: Any, inputs: list[Any]) -> list[Any]:
    scan = Scan.of(equation)
    consts, init, xs = scan.split(inputs)
    _, atoms, _ = scan.split(equation.invars)
    constants, rows = reading.constants(consts), reading.rows(scan.length)

    def operands(carry: list[Any]) -> list[Any]:
        return [*consts, *carry, *(reading.row(reading.array(x)[0], x) for x in xs)]

    start = reading.start(scan.program, init, atoms, operands if scan.length else None)

    def body(carry: list[Any], x: Any) -> tuple[list[Any], list[Any]]:
        arrays, own = x
        inner = reading.body(own, scan.length)
        old = list(map(inner.unpacked, carry))
        outputs = inner.evaluate(scan.program, [*constants(), *old, *map(inner.row, arrays, xs)])
        new = list(map(inner.following, outputs, old))  # stops at the shorter one
        return [inner.packed(x) for x in new], [inner.packed(y) for y in outputs[len(old) :]]

    arrays = [reading.packed(x) for x in start], ([reading.array(x) for x in xs], rows)
    carry, ys = lax.scan(body, *arrays, **scan.options)
    return [*map(reading.unpacked, carry), *map(reading.stacked, ys)]


def _while(reading: Any, equation: Any, inputs: list[Any]) -> list[Any]:
    loop = While.of(equation)
    cond_consts, body_consts, init = loop.split(inputs)
    _, _, atoms = loop.split(equation.invars)
    start = reading.start(loop.program, init, atoms, lambda carry: [*body_consts, *carry])
    arrays = list(map(reading.array, body_consts))

    def go_on(reading: Any, carry: list[Any]) -> Any:
        inner = reading.body()
        values = [*map(inner.inside, cond_consts), *map(inner.unpacked, carry)]
        return inner.array(inner.evaluate(loop.condition, values)[0])

    def body(carry: list[Any]) -> list[Any]:
        running = go_on(reading.trial(), carry) if loop.stops_each else None
        inner = reading.body()
        old = list(map(inner.unpacked, carry))
        with references_kept(running, arrays):
            outputs = inner.evaluate(loop.program, [*map(inner.inside, body_consts), *old])
        return select(running, [inner.packed(x) for x in map(inner.following, outputs, old)], carry)

    carry = lax.while_loop(lambda carry: jnp.any(go_on(reading, carry)), body, [reading.packed(x) for x in start])
    return list(map(reading.unpacked, carry))


def _cond(reading: Any, equation: Any, inputs: list[Any]) -> list[Any] | None:
    programs = branches_of(equation)
    if programs is None:
        return None
    index, *operands = inputs
    arrays = [on_device(reading.array(x)) for x in operands]
    agreed = reading.agreed(programs, list(map(reading.operand, arrays, operands)))

    def taken(number: int) -> Callable[..., list[Any]]:
        def run(*arrays: Any) -> list[Any]:
            body = reading.branch(number).body()
            outputs = body.evaluate(programs[number], list(map(body.operand, arrays, operands)))
            return [jax.tree.map(on_device, body.packed(x)) for x in agreed(outputs)]

        return run

    results = lax.switch(reading.array(index), [taken(i) for i in range(len(programs))], *arrays)
    return list(map(reading.unpacked, results))


def _shard_map(reading: Any, equation: Any, inputs: list[Any]) -> list[Any]:
    params, axes = equation.params, manual_axes(equation.params)
    count = math.prod(params["mesh"].shape[axis] for axis in axes)
    rows = reading.rows(count)

    def run(rows: Any, *arrays: Any) -> list[Any]:
        body = reading.body(jax.tree.map(lambda x: x[0], rows), count)
        outputs = body.evaluate(params["jaxpr"], list(map(body.operand, arrays, inputs)))
        return [jax.tree.map(on_device, body.packed(x)) for x in outputs]

    mapped = jax.shard_map(
        run,
        mesh=params["mesh"],
        in_specs=(P(tuple(sorted(axes))), *params["in_specs"]),  # each device has its own row
        out_specs=[reading.spec(spec) for spec in params["out_specs"]],
        axis_names=axes,
        check_vma=params["check_vma"],
    )
    return list(map(reading.unpacked, mapped(rows, *map(reading.array, inputs))))


IN_JAX: dict[str, Enter] = {
    **dict.fromkeys(("jit", "pjit", "closed_call", "core_call"), call),
    **dict.fromkeys(("remat2", "checkpoint"), remat),
    "scan": _scan,
    "while": _while,
    "cond": _cond,
    "shard_map": _shard_map,
}
"""Programs run as jax runs them, once traced. Functions with custom derivatives are bound as they were traced."""
