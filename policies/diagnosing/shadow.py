"""Runs a traced program as it is, and beside it a shadow: the same equations in float32.

Each value is a pair. The actual one is computed in the program's own dtypes; its shadow by the same operations in
float32, from float32 operands, and is left out as long as it is the same number. Booleans and integers have no
shadow: what was compared, picked or counted decides for both, so that both go the same way. Each equation that can
lose something is run a third time, as it is on the shadow's operands, which parts its own error from what it inherits.

A few equations at a time are compiled together, and those that are alike once; so are those within a `shard_map`.
Bodies of loops and branches are compiled as one program.
"""

import ctypes
import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from jmp_train.policies.autocasting import scan_counts
from jmp_train.policies.diagnosing.arithmetic import bound
from jmp_train.policies.diagnosing.devices import LARGE, compiled, each_device, mapped, stacking
from jmp_train.policies.diagnosing.flattening import Operation, Part, flattened, is_plain, last_uses, parts_of
from jmp_train.policies.diagnosing.measures import combine, combined, is_float, nothing, totals_of
from jmp_train.policies.diagnosing.pairs import Pair, Ran, run_once, with_shadow
from jmp_train.policies.diagnosing.programs import count_rows, dtype_of
from jmp_train.policies.pytrees import has_tracers, is_key

_FIRST = np.float32(0)  # the number of the iteration outside of all loops
_MEASURED = 2**15  # elements from which on what measures is compiled to run faster, as few programs run often


Block = jax.Array | np.ndarray  # of measures, [rows, columns]
Results = tuple[list[Pair], list[Block]]


class Shadowing:
    """Runs programs beside their shadows; compiles equations that are alike once.

    Args:
      mesh: the devices of the `shard_map` that it runs in, whose values are stacked along a first axis; or None.
      axes: of the mesh, that are mapped.
      iteration: number of the loop iteration that it runs in, counted over all loops around it; float32 scalar.
        None outside of all loops.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> program = jax.make_jaxpr(lambda x: jnp.float16(1) + x)(jnp.float16(0))
      >>> (pair,), blocks = Shadowing().run(program, [Pair(jnp.float16(0.1))])
      >>> float(pair.actual), round(float(pair.shadow), 6), [block.shape for block in blocks]
      (1.099609375, 1.099976, [(1, 24)])
    """

    def __init__(self, mesh: Any = None, axes: frozenset[str] = frozenset(), iteration: Any = None) -> None:
        self.mesh = mesh
        self.axes = axes
        self.within = iteration is not None
        self.iteration = iteration if self.within else _FIRST

    def run(self, program: Any, operands: Sequence[Pair]) -> Results:
        """Returns the results, and the measures of the program's equations as blocks [rows, columns].

        Args:
          program: a jaxpr, with its constants if it has any.
          operands: its arguments.
        """
        flat = flattened(program)
        values = dict(zip(flat.operands, operands, strict=True))
        values |= {number: self._constant(array) for number, array in flat.constants.items()}
        last_use = last_uses(flat)
        blocks: list[Block] = []
        start = 0
        for part in parts_of(flat.operations):
            end = start + len(part)
            needed = frozenset(x for op in part for x in op.writes if last_use.get(x, -1) >= end)
            results, found = self._part(part, values, needed)
            blocks += found
            values |= results
            for number in {x for op in part for x in (*op.reads, *op.writes)}:
                if last_use.get(number, -1) < end:
                    values.pop(number, None)  # arrays that nothing reads any more are freed
            start = end
        return [_read(x, values) for x in flat.results], blocks

    def _part(
        self, part: list[Operation], values: dict[int, Pair], needed: frozenset[int]
    ) -> tuple[dict[int, Pair], list[Block]]:
        if is_plain(part[0].equation):
            return self._plain(part, values, needed)
        (op,) = part
        results, blocks = self.run_operation(op, [_read(x, values) for x in op.inputs])
        return dict(zip(op.writes, results, strict=True)), blocks

    def run_operation(self, op: Operation, inputs: list[Pair]) -> Results:
        """Runs an operation that holds a program, or one whose values are no arrays."""
        equation, name = op.equation, op.equation.primitive.name
        if name == "shard_map" and self.mesh is None and not has_tracers(inputs):
            return self._on_devices(equation, inputs)
        if name == "cond" and self.mesh is None and not has_tracers(inputs):
            return self._taken(equation.params["branches"], *inputs)
        if name in _PROGRAMS:
            run = self._jit(_holding_program(Part([op], frozenset())))
            results, block, self.iteration = run(inputs, self.iteration)
            return results, [block]
        return [Pair(result) for result in bound(equation, [pair.actual for pair in inputs])], []

    def _plain(
        self, part: list[Operation], values: dict[int, Pair], needed: frozenset[int]
    ) -> tuple[dict[int, Pair], list[Block]]:
        """Runs equations, one after the other, as one program."""
        whole = Part(part, needed)
        results, rows = self._jit(_together(whole))([_read(x, values) for x in whole.given])
        # What is alike is measured by the same program, but within a loop, which is one program.
        together = [rows] if self.within and rows else [[row] for row in rows]
        blocks = [self._jit(_measuring(), _MEASURED)(alike, self.iteration) for alike in together]
        return dict(zip(whole.wanted, results, strict=True)), blocks

    def _taken(self, branches: Sequence[Any], index: Pair, *operands: Pair) -> Results:
        """Runs the branch that is taken; of the others nothing is measured."""
        taken = min(max(int(index.actual), 0), len(branches) - 1)
        results, blocks = self.run(branches[taken], operands)
        before, after = (sum(map(count_rows, others)) for others in (branches[:taken], branches[taken + 1 :]))
        return results, [nothing(before), *blocks, nothing(after)]

    def _jit(self, run: Callable[..., Any], large: int = LARGE) -> Callable[..., Any]:
        return jax.jit(run) if self.within else compiled(run, self.mesh, self.axes, large)

    def _constant(self, array: Any) -> Pair:
        return Pair(array if self.mesh is None or is_key(array) else np.asarray(array))

    def _on_devices(self, equation: Any, inputs: list[Pair]) -> Results:
        """Runs a `shard_map` whose arrays are there equation by equation, each on all devices."""
        params = equation.params
        mesh, axes = params["mesh"], _manual_axes(params)
        stacked = [
            jax.tree.map(stacking(mesh, axes, spec)[0], pair)
            for pair, spec in zip(inputs, params["in_specs"], strict=True)
        ]
        results, blocks = Shadowing(mesh, axes).run(params["jaxpr"], stacked)
        whole = [
            # What is no jax.Array is a constant, the same on all devices.
            jax.tree.map(stacking(mesh, axes, spec)[1], pair) if isinstance(pair.actual, jax.Array) else pair
            for pair, spec in zip(results, params["out_specs"], strict=True)
        ]
        return whole, [combined(np.asarray(block)) if block.ndim == 3 else block for block in blocks]


def _in_body(program: Any, operands: Sequence[Pair], iteration: Any) -> tuple[list[Pair], jax.Array, Any]:
    """Runs the body of a loop or branch.

    Returns:
      The results with their shadows, the measures as one array [rows, columns], the number of the next iteration.
    """
    inside = Shadowing(iteration=iteration)
    results, blocks = inside.run(program, operands)
    return [with_shadow(pair) for pair in results], jnp.concatenate([*blocks, nothing(0)]), inside.iteration


def _scan(equation: Any) -> Callable[..., Any]:
    params, program = equation.params, equation.params["jaxpr"]
    n_consts, n_carry = scan_counts(params)
    rows = count_rows(program)

    def run(inputs: list[Pair], iteration: Any) -> Any:
        consts, start, xs = inputs[:n_consts], inputs[n_consts:][:n_carry], inputs[n_consts + n_carry :]

        def body(carry: Any, x: list[Pair]) -> Any:
            values, matrix, iteration = carry
            outputs, found, iteration = _in_body(program, [*consts, *values, *x], iteration)
            return (outputs[:n_carry], combine(matrix, found), iteration + 1), outputs[n_carry:]

        first = [with_shadow(pair) for pair in start], nothing(rows), jnp.asarray(iteration)
        options = {name: params[name] for name in ("length", "reverse", "unroll")}
        (values, matrix, iteration), ys = lax.scan(body, first, xs, **options)
        return [*values, *ys], matrix, iteration

    return run


def _while(equation: Any) -> Callable[..., Any]:
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
            outputs, found, iteration = _in_body(program, [*body_consts, *values], iteration)
            return outputs, combine(matrix, found), iteration + 1

        first = [with_shadow(pair) for pair in start], nothing(rows), jnp.asarray(iteration)
        return lax.while_loop(go_on, body, first)

    return run


def _cond(equation: Any) -> Callable[..., Any]:
    branches = equation.params["branches"]
    counts = [count_rows(branch) for branch in branches]

    def taken(number: int) -> Callable[..., Any]:
        def branch(operands: list[Pair], iteration: jax.Array) -> Any:
            results, found, iteration = _in_body(branches[number], operands, iteration)
            matrices: list[Block] = [nothing(count) for count in counts]
            matrices[number] = found
            return results, jnp.concatenate(matrices), iteration

        return branch

    def run(inputs: list[Pair], iteration: Any) -> Any:
        index, *operands = inputs
        programs = [taken(number) for number in range(len(branches))]
        return lax.switch(index.actual, programs, operands, jnp.asarray(iteration))

    return run


def _shard_map(equation: Any) -> Callable[..., Any]:
    """Returns a `shard_map` that is in a program compiled as a whole."""
    params = equation.params
    mesh, axes = params["mesh"], _manual_axes(params)
    each = each_device(mesh, axes)

    def run(inputs: list[Pair], iteration: Any) -> Any:
        def body(inputs: list[Pair], iteration: jax.Array) -> Any:
            results, matrix, iteration = _in_body(params["jaxpr"], inputs, iteration)
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


@functools.lru_cache(maxsize=1024)
def _holding_program(part: Part) -> Callable[..., Any]:
    return _PROGRAMS[part.operations[0].equation.primitive.name](part.operations[0].equation)


_PROGRAMS = {"scan": _scan, "while": _while, "cond": _cond, "shard_map": _shard_map}


def _manual_axes(params: dict[str, Any]) -> frozenset[str]:
    return frozenset(params.get("manual_axes") or params["newly_manual_axes"])


@functools.lru_cache(maxsize=4096)
def _together(part: Part) -> Callable[[list[Pair]], tuple[list[Pair], list[Ran]]]:
    """Returns operations as a function of what they are given, to what is wanted of their results and is measured."""

    def run(given: list[Pair]) -> tuple[list[Pair], list[Ran]]:
        values, rows = list(given), list[Ran]()
        for op, places in zip(part.operations, part.wiring, strict=True):
            results, row = run_once(op.equation, [values[place] for place in places])
            values += results
            rows += [] if row is None else [row]
        return [values[place] for place in part.returned], rows

    return run


@functools.cache
def _measuring() -> Callable[[list[Ran], Any], jax.Array]:
    """Returns what measures equations that ran, as an array [rows, columns]."""
    return lambda rows, iteration: totals_of([row.measures() for row in rows], iteration)


def forget_programs() -> None:
    """Forgets what was compiled, and gives its memory, hundreds of megabytes, back to the system."""
    for cached in (_together, _measuring, _holding_program, compiled, stacking):
        cached.cache_clear()
    if sys.platform.startswith("linux"):
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # of glibc
        if trim is not None:
            trim(0)


def _read(value: int | np.ndarray, values: dict[int, Pair]) -> Pair:
    return values[value] if isinstance(value, int) else Pair(value)
