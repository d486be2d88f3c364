"""Loops, branches, remat and `shard_map` by a reading, as loops, branches, remat and `shard_map` of jax."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from jmp_train.policies.programs.loops import Scan, While, references_kept, select
from jmp_train.policies.programs.reading import RUN_ONCE, Enter, manual_axes


def as_jax_array(array: Any) -> Any:
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
        return [jax.tree.map(as_jax_array, body.packed(x)) for x in outputs]

    return run


def remat(reading: Any, equation: Any, inputs: list[Any]) -> list[Any]:
    """Runs a body under `jax.checkpoint`."""
    params, body = equation.params, on_arrays(reading, equation.params["jaxpr"], inputs)
    run = jax.checkpoint(body, prevent_cse=params["prevent_cse"], policy=params["policy"])
    return list(map(reading.unpacked, run(*(as_jax_array(reading.array(x)) for x in inputs))))


def _scan(reading: Any, equation: Any, inputs: list[Any]) -> list[Any]:
    scan = Scan.of(equation)
    consts, init, xs = scan.split(inputs)
    _, atoms, _ = scan.split(equation.invars)
    constants, rows = reading.constants(consts), reading.rows(scan.length)

    def operands(carry: list[Any]) -> list[Any]:
        return [*consts, *carry, *(reading.row(reading.given(x)[0], x) for x in xs)]

    start = reading.start(scan.program, init, atoms, operands if scan.length else None)

    def body(carry: Any, x: Any) -> tuple[Any, list[Any]]:
        (carry, state), (arrays, own) = carry, x
        inner = reading.body(own, scan.length, state)
        old = list(map(inner.unpacked, carry))
        outputs = inner.evaluate(scan.program, [*constants(), *old, *map(inner.row, arrays, xs)])
        new = list(map(inner.following, outputs, old))  # stops at the shorter one
        return ([inner.packed(x) for x in new], inner.state()), [inner.packed(y) for y in outputs[len(old) :]]

    arrays = [reading.packed(x) for x in start], ([reading.given(x) for x in xs], rows)
    (carry, state), ys = lax.scan(body, (arrays[0], reading.state()), arrays[1], **scan.options)
    reading.absorb(state)
    return [*map(reading.unpacked, carry), *map(reading.stacked, ys)]


def _while(reading: Any, equation: Any, inputs: list[Any]) -> list[Any]:
    loop = While.of(equation)
    cond_consts, body_consts, init = loop.split(inputs)
    _, _, atoms = loop.split(equation.invars)
    start = reading.start(loop.program, init, atoms, lambda carry: [*body_consts, *carry])
    arrays = jax.tree.leaves(list(map(reading.given, body_consts)))

    def go_on(reading: Any, carry: list[Any]) -> Any:
        inner = reading.body()
        return inner.holds(loop.condition, [*map(inner.inside, cond_consts), *map(inner.unpacked, carry)])

    def body(carry: Any) -> Any:
        carry, state = carry
        running = go_on(reading.trial(), carry) if loop.stops_each else None
        inner = reading.body(state=state, running=running)
        old = list(map(inner.unpacked, carry))
        with references_kept(running, arrays):
            outputs = inner.evaluate(loop.program, [*map(inner.inside, body_consts), *old])
        return select(running, [inner.packed(x) for x in map(inner.following, outputs, old)], carry), inner.state()

    first = [reading.packed(x) for x in start], reading.state()
    carry, state = lax.while_loop(lambda carry: jnp.any(go_on(reading, carry[0])), body, first)
    reading.absorb(state)
    return list(map(reading.unpacked, carry))


def _cond(reading: Any, equation: Any, inputs: list[Any]) -> list[Any] | None:
    programs = reading.branches(equation)
    if programs is None:
        return None
    index, *operands = inputs
    arrays = [as_jax_array(reading.given(x)) for x in operands]
    agreed = reading.agreed(programs, list(map(reading.operand, arrays, operands)))

    def taken(number: int) -> Callable[..., Any]:
        def run(state: Any, *arrays: Any) -> Any:
            body = reading.branch(number).body(state=state)
            outputs = body.evaluate(programs[number], list(map(body.operand, arrays, operands)))
            return [jax.tree.map(as_jax_array, body.packed(x)) for x in agreed(outputs)], body.state()

        return run

    branches = [taken(number) for number in range(len(programs))]
    results, state = lax.switch(reading.array(index), branches, reading.state(), *arrays)
    reading.absorb(state)
    return list(map(reading.unpacked, results))


def _shard_map(reading: Any, equation: Any, inputs: list[Any]) -> list[Any]:
    params, axes = equation.params, manual_axes(equation.params)
    count = math.prod(params["mesh"].shape[axis] for axis in axes)
    rows, state, each = reading.rows(count), reading.state(), P(tuple(sorted(axes)))

    def run(rows: Any, state: Any, *arrays: Any) -> Any:
        body = reading.body(jax.tree.map(lambda x: x[0], rows), count, state)
        outputs = body.evaluate(params["jaxpr"], list(map(body.operand, arrays, inputs)))
        return [jax.tree.map(as_jax_array, body.packed(x)) for x in outputs], jax.tree.map(
            lambda x: x[None], body.state()
        )

    mapped = jax.shard_map(
        run,
        mesh=params["mesh"],
        in_specs=(each, P(), *params["in_specs"]),  # each device has its own row
        out_specs=([reading.spec(spec) for spec in params["out_specs"]], each),
        axis_names=axes,
        check_vma=params["check_vma"] and not state,  # which does not say what of it varies over devices
    )
    results, states = mapped(rows, state, *map(reading.given, inputs))
    reading.absorb(states, of_devices=True)
    return list(map(reading.unpacked, results))


IN_JAX: dict[str, Enter] = {
    **dict.fromkeys(("jit", "pjit", "closed_call", "core_call"), call),
    **dict.fromkeys(("remat2", "checkpoint"), remat),
    "scan": _scan,
    "while": _while,
    "cond": _cond,
    "shard_map": _shard_map,
}
"""Programs run as jax runs them, once traced. Functions with custom derivatives are bound as they were traced."""
