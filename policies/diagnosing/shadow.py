"""Runs a traced program as it is, and beside it a shadow: the same equations in float32.

Each value is a pair. The actual one is computed in the program's own dtypes; its shadow by the same operations in
float32, from float32 operands, and is left out as long as it is the same number. Booleans and integers have no
shadow: what was compared, picked or counted decides for both, so that both go the same way. Each equation that can
lose something is run a third time, as it is on the shadow's operands, which parts its own error from what it inherits.

Equations are compiled one by one, those that are part_ once, so that all that is rounded in the program is rounded
here; so are those within a `shard_map`. Bodies of loops and branches are compiled as one program.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from jmp_train.policies.autocasting import scan_counts
from jmp_train.policies.diagnosing.arithmetic import bound, in_float32, magnitude_of_terms, rounded
from jmp_train.policies.diagnosing.compiling import compiler_options
from jmp_train.policies.diagnosing.flattening import Operation, Part, flattened, is_plain, key_of, parts_of
from jmp_train.policies.diagnosing.measures import (
    Elementwise,
    combine,
    combined,
    is_float,
    is_low,
    measured,
    measured_absorbed,
    measured_whole,
    nothing,
    totals_of,
    widened,
)
from jmp_train.policies.diagnosing.programs import count_rows, dtype_of, is_measured
from jmp_train.policies.pytrees import has_tracers, is_key

_FIRST = np.float32(0)  # the number of the iteration outside of all loops


@dataclasses.dataclass(frozen=True)
class Pair:
    """A value of the program.

    Attributes:
      actual: as the program computes it.
      shadow: in float32; None where it is the same number, or no float.
    """

    actual: Any
    shadow: Any = None


jax.tree_util.register_dataclass(Pair, ("actual", "shadow"), ())

Results = tuple[list[Pair], list[jax.Array]]


class Shadowing:
    """Runs programs beside their shadows; compiles equations that are part_ once.

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
      (1.099609375, 1.099976, [(1, 22)])
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
        last_use = {number: i for i, op in enumerate(flat.operations) for number in op.reads}
        last_use |= dict.fromkeys((x for x in flat.results if isinstance(x, int)), len(flat.operations))
        blocks: list[jax.Array] = []
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
    ) -> tuple[dict[int, Pair], list[jax.Array]]:
        if is_plain(part[0].equation):
            return self._plain(part, values, needed)
        ((equation, inputs),) = ((op.equation, [_read(x, values) for x in op.inputs]) for op in part)
        results, blocks = self._program(equation, inputs)
        return dict(zip(part[0].writes, results, strict=True)), blocks

    def _program(self, equation: Any, inputs: list[Pair]) -> Results:
        """Runs an equation that holds a program, or one whose values are no arrays."""
        name = equation.primitive.name
        if name == "shard_map" and self.mesh is None and not has_tracers(inputs):
            return self._on_devices(equation, inputs)
        if name in _PROGRAMS:
            run = self._jit(_holding_program(_Holding(equation)))
            results, block, self.iteration = run(inputs, self.iteration)
            return results, [block]
        return [Pair(result) for result in bound(equation, [pair.actual for pair in inputs])], []

    def _plain(
        self, part: list[Operation], values: dict[int, Pair], needed: frozenset[int]
    ) -> tuple[dict[int, Pair], list[jax.Array]]:
        """Runs equations, one after the other, as one program."""
        together = Part(part, needed)
        given = [_read(x, values) for x in together.given]
        results, matrix = self._jit(_together(together))(given, self.iteration)
        return dict(zip(together.wanted, results, strict=True)), [] if matrix is None else [matrix]

    def _jit(self, run: Callable[..., Any]) -> Callable[..., Any]:
        return jax.jit(run) if self.within else _compiled(run, self.mesh, self.axes)

    def _constant(self, array: Any) -> Pair:
        return Pair(array if self.mesh is None or is_key(array) else np.asarray(array))

    def _on_devices(self, equation: Any, inputs: list[Pair]) -> Results:
        """Runs a `shard_map` whose arrays are there equation by equation, each on all devices."""
        params = equation.params
        mesh, axes = params["mesh"], _manual_axes(params)
        stacked = [
            jax.tree.map(_stacking(mesh, axes, spec)[0], pair)
            for pair, spec in zip(inputs, params["in_specs"], strict=True)
        ]
        results, blocks = Shadowing(mesh, axes).run(params["jaxpr"], stacked)
        whole = [
            # What is no jax.Array is a constant, the same on all devices.
            jax.tree.map(_stacking(mesh, axes, spec)[1], pair) if isinstance(pair.actual, jax.Array) else pair
            for pair, spec in zip(results, params["out_specs"], strict=True)
        ]
        return whole, [combined(block) if block.ndim == 3 else block for block in blocks]


@functools.lru_cache(maxsize=512)  # each is a part of a process' memory maps, of which there is a limit
def _compiled(run: Callable[..., Any], mesh: Any, axes: frozenset[str]) -> Callable[..., Any]:
    """Compiles a function; of values that are stacked over the devices of a mesh each device is given its own."""
    options = compiler_options(jax.default_backend())
    if mesh is None:
        return jax.jit(run, compiler_options=options)

    def unstacked(stacked: Any, same: Any) -> Any:
        own = jax.tree.map(lambda x, y: y if x is None else x[0], stacked, same, is_leaf=lambda x: x is None)
        return jax.tree.map(lambda x: jnp.asarray(x)[None], run(*own))

    each = _each_device(mesh, axes)
    compiled = jax.jit(_mapped(unstacked, mesh, axes, (each, P()), each), compiler_options=options)
    return lambda *args: compiled(*_parted(args))


@functools.lru_cache(maxsize=256)
def _stacking(mesh: Any, axes: frozenset[str], spec: P) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Returns what stacks values that are split over devices along a first axis, and what takes them apart again."""
    each = _each_device(mesh, axes)
    stack = jax.jit(_mapped(lambda x: x[None], mesh, axes, spec, each))
    return stack, jax.jit(_mapped(lambda x: x[0], mesh, axes, each, spec))


def _each_device(mesh: Any, axes: frozenset[str]) -> P:
    return P(tuple(name for name in mesh.axis_names if name in axes))


def _mapped(run: Callable[..., Any], mesh: Any, axes: frozenset[str], in_specs: Any, out_specs: Any) -> Any:
    return jax.shard_map(run, mesh=mesh, in_specs=in_specs, out_specs=out_specs, axis_names=axes, check_vma=False)


def _parted(tree: Any) -> tuple[Any, Any]:
    """Returns the arrays of a tree that are stacked over devices, and what is the same on all of them."""
    stacked = jax.tree.map(lambda x: x if isinstance(x, jax.Array) else None, tree)
    return stacked, jax.tree.map(lambda x: None if isinstance(x, jax.Array) else x, tree)


def _in_body(program: Any, operands: Sequence[Pair], iteration: Any) -> tuple[list[Pair], jax.Array, Any]:
    """Runs the body of a loop or branch.

    Returns:
      The results with their shadows, the measures as one array [rows, columns], the number of the next iteration.
    """
    inside = Shadowing(iteration=iteration)
    results, blocks = inside.run(program, operands)
    return [_with_shadow(pair) for pair in results], jnp.concatenate([*blocks, nothing(0)]), inside.iteration


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

        first = [_with_shadow(pair) for pair in start], nothing(rows), jnp.asarray(iteration)
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

        first = [_with_shadow(pair) for pair in start], nothing(rows), jnp.asarray(iteration)
        return lax.while_loop(go_on, body, first)

    return run


def _cond(equation: Any) -> Callable[..., Any]:
    branches = equation.params["branches"]
    counts = [count_rows(branch) for branch in branches]

    def taken(number: int) -> Callable[..., Any]:
        def branch(operands: list[Pair], iteration: jax.Array) -> Any:
            results, found, iteration = _in_body(branches[number], operands, iteration)
            matrices = [nothing(count) for count in counts]
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
    each = _each_device(mesh, axes)

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
        mapped = _mapped(body, mesh, axes, (specs, P()), (out_specs, each, each))
        results, matrices, iterations = mapped(inputs, jnp.asarray(iteration))
        return results, combined(matrices), iterations.max()

    return run


class _Holding:
    """An equation that holds a program; equal to others that hold the very same."""

    def __init__(self, equation: Any) -> None:
        self.equation = equation
        self._key = key_of(equation)

    def __hash__(self) -> int:
        return hash(self._key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Holding) and self._key == other._key


@functools.lru_cache(maxsize=1024)
def _holding_program(holding: _Holding) -> Callable[..., Any]:
    return _PROGRAMS[holding.equation.primitive.name](holding.equation)


_PROGRAMS = {"scan": _scan, "while": _while, "cond": _cond, "shard_map": _shard_map}


def _manual_axes(params: dict[str, Any]) -> frozenset[str]:
    return frozenset(params.get("manual_axes") or params["newly_manual_axes"])


@functools.lru_cache(maxsize=4096)
def _together(part: Part) -> Callable[..., Any]:
    """Returns operations as a function of what they are given, to what is wanted of their results and the measures."""

    def run(given: list[Pair], iteration: Any) -> tuple[list[Pair], jax.Array | None]:
        values, rows = list(given), []
        for op, places in zip(part.operations, part.wiring, strict=True):
            results, row = _once(op.equation, [values[place] for place in places])
            values += results
            rows += [row] if row else []
        return [values[place] for place in part.returned], totals_of(rows, iteration) if rows else None

    return run


def _once(equation: Any, inputs: list[Pair]) -> tuple[list[Pair], list[Elementwise]]:
    """Runs an equation: its results, and what is measured of their elements, which is nothing if it has no row."""
    has_row = is_measured(equation)
    loses = has_row and any(is_low(dtype_of(atom)) for atom in (*equation.invars, *equation.outvars))
    actual = bound(equation, [pair.actual for pair in inputs])
    exact = all(pair.shadow is None for pair in inputs)
    wide = [_shadow_of(pair) for pair in inputs]
    shadows = None if exact and not loses else in_float32(equation, wide)
    if shadows is None:
        results = [Pair(x) for x in actual]
        return results, _measures(equation, inputs, results, None, None) if has_row else []
    results = [Pair(x, y if is_float(dtype_of(x)) else None) for x, y in zip(actual, shadows, strict=True)]
    if not has_row:
        return results, []
    if not loses:
        return results, _measures(equation, inputs, results, None, None)
    local = actual if exact else bound(equation, [_rounded_shadow(pair) for pair in inputs])
    local = lax.optimization_barrier(local)  # or a compiler may leave the rounding out
    return results, _measures(equation, inputs, results, local, magnitude_of_terms(equation, wide))


def _measures(
    equation: Any, inputs: list[Pair], results: list[Pair], local: list[Any] | None, terms: Any
) -> list[Elementwise]:
    """Returns what is measured of the elements of an equation's results that are floats."""
    floats = [i for i, pair in enumerate(results) if is_float(dtype_of(pair.actual))]
    own = [None] * len(results) if local is None else local
    found = [measured(results[i].actual, results[i].shadow, own[i], terms) for i in floats]
    first, name = results[floats[0]], equation.primitive.name
    if not is_low(dtype_of(first.actual)) or first.shadow is None:
        return found
    if name in ("add", "sub", "add_any") and len(inputs) == 2:
        found.append(measured_absorbed(first.actual, *(pair.actual for pair in inputs)))
    if name in ("convert_element_type", "iota") and local is not None:
        found.append(measured_whole(local[floats[0]], first.shadow))
    return found


def _read(value: int | np.ndarray, values: dict[int, Pair]) -> Pair:
    return values[value] if isinstance(value, int) else Pair(value)


def _with_shadow(pair: Pair) -> Pair:
    """Returns a pair of arrays whose shadow is there if it is a float, as loops carry it."""
    if pair.shadow is not None or not is_float(dtype_of(pair.actual)):
        return pair
    return Pair(pair.actual, _shadow_of(pair))


def _shadow_of(pair: Pair) -> Any:
    if pair.shadow is not None:
        return pair.shadow
    dtype = dtype_of(pair.actual)
    return lax.convert_element_type(pair.actual, widened(dtype)) if is_low(dtype) else pair.actual


def _rounded_shadow(pair: Pair) -> Any:
    if pair.shadow is None:
        return pair.actual
    return rounded(pair.shadow, dtype_of(pair.actual))
