"""Runs a traced program and its shadow: the same equations in float32.

Each value is a pair. The program's own dtypes compute the actual value; the same operations in float32, from float32
operands, compute its shadow, which is left out while both are the same number. Booleans and integers have no shadow:
comparisons, indices and counts of the actual values decide for both, but for those asked for. Branches and the lengths
of loops are the actual ones in any case. Each equation that can lose digits runs a third
time, in its own dtypes on the shadow's operands, which separates its own error from the inherited one.

A few equations at a time are compiled together, and equal ones once, also within a `shard_map`.
Bodies of loops and branches are compiled as one program.
"""

import ctypes
import dataclasses
import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jmp_train.policies.programs import Scan, bodies_of, manual_axes, walk
from jmp_train.policies.pytrees import has_tracers, is_key
from jmp_train.tools.diagnosing.arithmetic import bound, count_rows, dtype_of
from jmp_train.tools.diagnosing.flattening import (
    FlatOperation,
    ProgramPart,
    ProgramStage,
    compiled,
    has_references,
    is_plain,
    stacking,
    staged,
)
from jmp_train.tools.diagnosing.measures import combined, is_whole, nothing, totals_of
from jmp_train.tools.diagnosing.pairs import Pair, Ran, run_both, run_once, with_shadow
from jmp_train.tools.diagnosing.shadow_loops import (
    buffers_of,
    measuring,
    rows_of,
    segment_of,
    stride_of,
)

_FIRST = np.float32(0)  # the number of the iteration outside of all loops
_LARGE = 2**21  # elements of an array from which on a program that runs once is compiled to run faster
_ITERATIONS = 4  # that a loop of unknown length is taken to have
_HOLDING = frozenset(("scan", "while", "cond", "shard_map"))  # programs, which are measured
_MEASURED = 2**15  # elements from which on what measures is compiled to run faster, as few programs run often


Measures = jax.Array | np.ndarray  # of measures, [rows, columns]
Results = tuple[list[Pair], list[Measures]]


class Shadowing:
    """Runs programs with their shadows, and compiles equal equations once.

    Args:
      mesh: the devices of the `shard_map` that it runs in, whose values are stacked along a first axis; or None.
      axes: the mapped axes of the mesh.
      iteration: number of the loop iteration that it runs in, counted over all loops around it; float32 scalar.
        None outside of all loops.
      own: identities of the equations whose whole numbers and booleans the shadow computes for itself.
      running: in a `while` loop under `vmap`, one boolean per element: whether it runs, and is measured. None for all.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> program = jax.make_jaxpr(lambda x: jnp.float16(1) + x)(jnp.float16(0))
      >>> (pair,), blocks = Shadowing().run(program, [Pair(jnp.float16(0.1))])
      >>> float(pair.actual), round(float(pair.shadow), 6), [block.shape for block in blocks]
      (1.099609375, 1.099976, [(1, 24)])
    """

    def __init__(
        self,
        mesh: Any = None,
        axes: frozenset[str] = frozenset(),
        iteration: Any = None,
        own: frozenset[int] = frozenset(),
        running: Any = None,
    ) -> None:
        self.mesh = mesh
        self.axes = axes
        self.within = iteration is not None
        self.iteration = iteration if self.within else _FIRST
        self.own = own
        self.running = () if running is None else (running,)

    def run(self, program: Any, operands: Sequence[Pair], runs: int = 1) -> Results:
        """Returns the results, and the measures of the program's equations as blocks [rows, columns].

        Args:
          program: a jaxpr, with its constants if it has any.
          operands: its arguments.
          runs: how often it runs.
        """
        flat, stages = staged(program)
        values = dict(zip(flat.operands, operands, strict=True))
        values |= {number: self._constant(array) for number, array in flat.constants.items()}
        blocks: list[Measures] = []
        for stage in stages:
            results, found = self._part(stage, values, runs)
            blocks += found
            values |= results
            for number in stage.freed:
                values.pop(number, None)  # arrays that nothing reads any more are freed
        return [_read(x, values) for x in flat.results], blocks

    def _part(self, stage: ProgramStage, values: dict[int, Pair], runs: int) -> tuple[dict[int, Pair], list[Measures]]:
        if is_plain(stage.part.operations[0].equation):
            return self._plain(stage.part, values, runs * stage.runs)
        (op,) = stage.part.operations
        results, blocks = self.run_operation(op, [_read(x, values) for x in op.inputs])
        return dict(zip(op.writes, results, strict=True)), blocks

    def run_operation(self, op: FlatOperation, inputs: list[Pair]) -> Results:
        """Runs an operation with a program, or with values that are not arrays."""
        equation, name = op.equation, op.equation.primitive.name
        own = _Own.of(equation, self.own, inputs)
        inputs = [with_shadow(pair, own=True) for pair in inputs] if own.widened else inputs
        if name == "shard_map" and self.mesh is None and not has_tracers(inputs):
            return self._on_devices(equation, inputs)
        if name == "cond" and self.mesh is None and not has_tracers(inputs):
            return self._taken(bodies_of(equation), *inputs)
        if name == "scan" and self.mesh is None and not self.within and (stride := stride_of(equation)) > 1:
            return self._sampled(op, inputs, stride, own)
        if name in _HOLDING:
            runs = max(Scan.of(equation).length, 1) if name == "scan" else _ITERATIONS
            run = self._jit(_of_equation(measuring, ProgramPart([op], frozenset()), _in_body, own), _LARGE // runs)
            results, block, self.iteration = run(inputs, self.iteration, *self.running)
            return results, [block]
        if has_references(equation):
            return run_both(equation, list(map(with_shadow, inputs))), []  # a reference has a shadow
        return [Pair(result) for result in bound(equation, [pair.actual for pair in inputs])], []

    def _plain(self, part: ProgramPart, values: dict[int, Pair], runs: int) -> tuple[dict[int, Pair], list[Measures]]:
        """Runs equations, one after the other, as one program."""
        own = frozenset(i for i, op in enumerate(part.operations) if id(op.equation) in self.own)
        given = [_read(x, values) for x in part.given]
        results, rows = self._jit(_together(part, own), _LARGE // runs)(given, *self.running)
        # What is alike is measured by the same program, but within a loop, which is one program.
        together = [rows] if self.within and rows else [[row] for row in rows]
        blocks = [self._jit(_measuring(), _MEASURED)(alike, self.iteration) for alike in together]
        return dict(zip(part.wanted, results, strict=True)), blocks

    def _taken(self, branches: Sequence[Any], index: Pair, *operands: Pair) -> Results:
        """Runs the selected branch; the others are not measured."""
        taken = min(max(int(index.actual), 0), len(branches) - 1)
        results, blocks = self.run(branches[taken], operands)
        before, after = (sum(map(count_rows, others)) for others in (branches[:taken], branches[taken + 1 :]))
        return results, [nothing(before), *blocks, nothing(after)]

    def _sampled(self, op: FlatOperation, inputs: list[Pair], stride: int, own: "_Own") -> Results:
        """Runs a scan and measures the iterations at a stride, and the first one that loses finite numbers."""
        part, scan = ProgramPart([op], frozenset()), Scan.of(op.equation)
        made = _of_equation(segment_of, part, _in_body, own), *_of_equation(rows_of, part)
        segment, row, write = (self._jit(run, 0) for run in made)
        consts, carry, xs = scan.split(inputs)
        carry, ys = [with_shadow(pair) for pair in carry], buffers_of(op.equation, own=own.widened)
        measures, number, lost = list[np.ndarray](), 0, False
        while number < scan.length:
            results, blocks = self.run(scan.program, [*consts, *carry, *row(xs, number)], scan.length // stride)
            results = [with_shadow(pair, own=own.widened) for pair in results]
            measures.append(np.concatenate([nothing(0), *map(np.asarray, blocks)]))
            carry, ys = results[: len(carry)], write(ys, results[len(carry) :], number)
            start, stop = number + 1, min((number // stride + 1) * stride, scan.length)
            state, end, loses = segment(consts, (carry, ys), xs, start, stop, not lost)
            number = int(end)
            if loses and not lost:  # the last iteration is measured instead
                number, lost = number - 1, True
                state, _, _ = segment(consts, (carry, ys), xs, start, number, False)
            carry, ys = state
            self.iteration += number - start + 1
        return [*carry, *ys], [combined(np.stack(measures))]

    def _jit(self, run: Callable[..., Any], large: int) -> Callable[..., Any]:
        return jax.jit(run) if self.within else compiled(run, self.mesh, self.axes, large)

    def _constant(self, array: Any) -> Pair:
        return Pair(array if self.mesh is None or is_key(array) else np.asarray(array))

    def _on_devices(self, equation: Any, inputs: list[Pair]) -> Results:
        """Runs a `shard_map` with known arrays equation by equation, each on all devices."""
        params = equation.params
        mesh, axes = params["mesh"], manual_axes(params)
        stacked = [
            jax.tree.map(stacking(mesh, axes, spec)[0], pair)
            for pair, spec in zip(inputs, params["in_specs"], strict=True)
        ]
        results, blocks = Shadowing(mesh, axes, own=self.own).run(params["jaxpr"], stacked)
        whole = [
            # What is no jax.Array is a constant, the same on all devices.
            jax.tree.map(stacking(mesh, axes, spec)[1], pair) if isinstance(pair.actual, jax.Array) else pair
            for pair, spec in zip(results, params["out_specs"], strict=True)
        ]
        return whole, [combined(np.asarray(block)) if block.ndim == 3 else block for block in blocks]


@dataclasses.dataclass(frozen=True)
class _Own:
    """The equations in the program of an operation whose whole numbers the shadow computes for itself.

    Attributes:
      equations: their identities.
      widened: True if all whole numbers that the program takes and returns have shadows.
    """

    equations: frozenset[int]
    widened: bool

    @staticmethod
    def of(equation: Any, own: frozenset[int], inputs: Sequence[Pair]) -> "_Own":
        """Returns those of an operation, given those of all the program and the operands."""
        inside = own & _identities(equation) if own else own
        has_shadows = any(pair.shadow is not None and is_whole(dtype_of(pair.actual)) for pair in inputs)
        return _Own(inside, bool(inside) or has_shadows)


def _identities(equation: Any) -> set[int]:
    return {id(place.equation) for body in bodies_of(equation) for place in walk(body, bodies_of)}


def _in_body(
    own: _Own, program: Any, operands: Sequence[Pair], iteration: Any, running: Any = None
) -> tuple[list[Pair], jax.Array, Any]:
    """Runs the body of a loop or branch.

    Returns:
      The results with their shadows, the measures as one array [rows, columns], the number of the next iteration.
    """
    inside = Shadowing(iteration=iteration, own=own.equations, running=running)
    results, blocks = inside.run(program, operands)
    results = [with_shadow(pair, own=own.widened) for pair in results]
    return results, jnp.concatenate([*blocks, nothing(0)]), inside.iteration


@functools.lru_cache(maxsize=1024)
def _of_equation(make: Callable[..., Any], part: ProgramPart, *args: Any) -> Any:
    """Returns what is made of a part's only equation: the same for equal parts."""
    return make(part.operations[0].equation, *args)


@functools.lru_cache(maxsize=4096)
def _together(part: ProgramPart, own: frozenset[int]) -> Callable[..., tuple[list[Pair], list[Ran]]]:
    """Returns operations as a function from their inputs to their wanted results and measures.

    Args:
      part: the operations.
      own: places of the operations whose whole numbers the shadow computes for itself.
    """

    def run(given: list[Pair], running: Any = None) -> tuple[list[Pair], list[Ran]]:
        values, rows = list(given), list[Ran]()
        for i, (op, places) in enumerate(zip(part.operations, part.wiring, strict=True)):
            results, row = run_once(op.equation, [values[place] for place in places], own=i in own, running=running)
            values += results
            rows += [] if row is None else [row]
        return [values[place] for place in part.returned], rows

    return run


@functools.cache
def _measuring() -> Callable[[list[Ran], Any], jax.Array]:
    """Returns a function that measures equations that ran, as an array [rows, columns]."""
    return lambda rows, iteration: totals_of([row.measures() for row in rows], iteration)


def forget_programs() -> None:
    """Drops the compiled programs, and returns their memory, hundreds of megabytes, to the system."""
    for cached in (staged, _together, _measuring, _of_equation, compiled, stacking):
        cached.cache_clear()
    if sys.platform.startswith("linux"):
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # of glibc
        if trim is not None:
            trim(0)


def _read(value: int | np.ndarray, values: dict[int, Pair]) -> Pair:
    return values[value] if isinstance(value, int) else Pair(value)
