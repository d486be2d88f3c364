"""A traced program as one list of operations, split into parts that are compiled together.

Equal parts, such as those of a network's layers, are compiled once.

Parts are compiled for one device or for those of a `shard_map`, each with its own values. Such values are stacked along
a first axis, which is sharded over the devices.
"""

import collections
import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from jmp_train.policies.autocasting import PRODUCTS
from jmp_train.policies.programs import INLINED, RUN_ONCE, Reading, bodies_of, opened
from jmp_train.tools.diagnosing.arithmetic import dtype_of

_LONGEST = 24  # operations of a part: of fewer there are more programs to compile, of more fewer are alike


@dataclasses.dataclass(frozen=True)
class FlatOperation:
    """An equation with the numbers of the values that it reads and writes.

    Attributes:
      equation: an equation of a traced program.
      inputs: for each operand, the number of the value or the literal. The starts of a slice follow as literals.
      writes: numbers of its results.
      callers: the equations whose bodies were inlined around it, the outermost first.
    """

    equation: Any
    inputs: tuple[int | np.ndarray, ...]
    writes: tuple[int, ...]
    callers: tuple[Any, ...]

    @property
    def reads(self) -> tuple[int, ...]:
        """Numbers of the values that it reads."""
        return tuple(x for x in self.inputs if isinstance(x, int))


@dataclasses.dataclass(frozen=True)
class Flat:
    """A program whose calls are inlined.

    Attributes:
      operands: numbers of its arguments.
      constants: values of the constants by number.
      operations: the operations in the order of execution.
      results: numbers of its results, or literals.
    """

    operands: tuple[int, ...]
    constants: dict[int, Any]
    operations: list[FlatOperation]
    results: tuple[int | np.ndarray, ...]


def flattened(program: Any) -> Flat:
    """Returns a program with the bodies of `jit`, `remat` and custom derivatives inlined.

    Args:
      program: a jaxpr, with its constants if it has any.
    """
    operands = tuple(range(len(opened(program).invars)))
    reading = _Flattening({}, [], itertools.count(len(operands)))
    results = reading.evaluate(program, operands)
    return Flat(operands, reading.arrays, reading.operations, tuple(results))


@dataclasses.dataclass(frozen=True)
class _Flattening(Reading[int | np.ndarray]):
    """Inlines calls; values are their numbers, or literals."""

    arrays: dict[int, Any]
    operations: list[FlatOperation]
    numbers: Iterator[int]
    callers: tuple[Any, ...] = ()

    table = INLINED

    def within(self, equation: Any) -> "_Flattening":
        return dataclasses.replace(self, callers=(*self.callers, equation))

    def constant(self, array: Any) -> int:
        number = next(self.numbers)
        self.arrays[number] = array
        return number

    def literal(self, atom: Any) -> np.ndarray:
        return np.asarray(atom.val, dtype_of(atom))

    def bind(self, equation: Any, inputs: list[int | np.ndarray]) -> tuple[int, ...]:
        writes = tuple(itertools.islice(self.numbers, len(equation.outvars)))
        self.operations.append(FlatOperation(equation, (*inputs, *_starts(equation)), writes, self.callers))
        return writes


def operation_of(equation: Any) -> FlatOperation:
    """Returns an equation as an operation on values of its own."""
    reads = range(len(equation.invars))
    writes = range(len(reads), len(reads) + len(equation.outvars))
    return FlatOperation(equation, (*reads, *_starts(equation)), tuple(writes), ())


def last_uses(flat: Flat) -> dict[int, int]:
    """Returns the place of the last operation that reads each value; results of the program are read at the end."""
    last = {number: i for i, op in enumerate(flat.operations) for number in op.reads}
    return last | dict.fromkeys((x for x in flat.results if isinstance(x, int)), len(flat.operations))


@dataclasses.dataclass(frozen=True)
class ProgramStage:
    """A part of a program in the order of execution.

    Attributes:
      part: the operations that run together.
      freed: numbers of the values that nothing reads afterwards.
      runs: number of equal parts in the program.
    """

    part: "ProgramPart"
    freed: tuple[int, ...]
    runs: int


@functools.lru_cache(maxsize=256)
def staged(program: Any) -> tuple[Flat, list[ProgramStage]]:
    """Returns a program as one list of operations and as the parts that run one after the other.

    Args:
      program: a jaxpr, with its constants if it has any.
    """
    flat = flattened(program)
    last_use = last_uses(flat)
    parts, freed, end = list[ProgramPart](), list[tuple[int, ...]](), 0
    for operations in parts_of(flat.operations):
        end += len(operations)
        used = {number: last_use.get(number, -1) for op in operations for number in (*op.reads, *op.writes)}
        parts.append(ProgramPart(operations, frozenset(number for number, last in used.items() if last >= end)))
        freed.append(tuple(number for number, last in used.items() if last < end))
    runs = collections.Counter(parts)
    return flat, [ProgramStage(part, own, runs[part]) for part, own in zip(parts, freed, strict=True)]


def is_plain(equation: Any) -> bool:
    """Returns whether an equation contains no program and has arrays as values, so that it is compiled with others."""
    atoms = (*equation.invars, *equation.outvars)
    are_arrays = all(hasattr(x.aval, "dtype") and hasattr(x.aval, "shape") for x in atoms)
    return are_arrays and not bodies_of(equation) and not has_references(equation)


def has_references(equation: Any) -> bool:
    """Returns whether an equation makes, reads or writes a `jax.Ref`, which no compiled function returns."""
    return any(hasattr(x.aval, "inner_aval") for x in (*equation.invars, *equation.outvars))


def parts_of(operations: Sequence[FlatOperation]) -> Iterator[list[FlatOperation]]:
    """Yields operations that run together: each with a program separately, the others from product to product.

    Args:
      operations: the operations in the order of execution.
    """
    part: list[FlatOperation] = []
    for op in operations:
        alone = not is_plain(op.equation)
        if part and (alone or len(part) == _LONGEST or op.equation.primitive.name in PRODUCTS):  # which begins a layer
            yield part
            part = []
        part.append(op)
        if alone:
            yield part
            part = []
    if part:
        yield part


class ProgramPart:
    """Operations that run together; equal to others with the same operations on values of the same types.

    Args:
      operations: the operations in the order of execution.
      wanted: numbers of the values that are read later.

    Attributes:
      operations: the operations in the order of execution.
      given: values that they read but do not compute, each once: numbers, then literals.
      wiring: for each operation, the places of its operands among given and computed values.
      wanted: numbers of the results that are read later.
      returned: their places.
    """

    def __init__(self, operations: Sequence[FlatOperation], wanted: frozenset[int]) -> None:
        self.operations = tuple(operations)
        made = {number for op in operations for number in op.writes}
        numbers = dict.fromkeys(x for op in operations for x in op.reads if x not in made)
        literals = [x for op in operations for x in op.inputs if not isinstance(x, int)]
        self.given: tuple[int | np.ndarray, ...] = (*numbers, *literals)
        places: dict[int, int] = {number: place for place, number in enumerate(numbers)}
        literal, result = len(numbers), len(self.given)
        wiring = []
        for op in operations:
            own = []
            for x in op.inputs:
                own.append(places[x] if isinstance(x, int) else literal)
                literal += not isinstance(x, int)
            wiring.append(tuple(own))
            places.update(zip(op.writes, range(result, result + len(op.writes)), strict=True))
            result += len(op.writes)
        self.wiring = tuple(wiring)
        self.wanted = tuple(number for op in operations for number in op.writes if number in wanted)
        self.returned = tuple(places[number] for number in self.wanted)
        keys = tuple(_types(op.equation) if _starts(op.equation) else _key(op.equation) for op in operations)
        self._key = keys, self.wiring, self.returned

    def __hash__(self) -> int:
        return hash(self._key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ProgramPart) and self._key == other._key


def _key(equation: Any) -> Any:
    """Returns a key, equal for equations with the same operation, parameters, programs and types."""
    name = equation.primitive.name
    if name in RUN_ONCE:
        params: Any = _of_program(equation.params[RUN_ONCE[name]])
    else:
        params = tuple((key, _of_parameter(value)) for key, value in equation.params.items())
    try:
        hash(params)
    except TypeError:  # a parameter that cannot be hashed
        params = id(equation)
    return params, _types(equation)


def _types(equation: Any) -> Any:
    """Returns the operation of an equation with the dtypes and shapes of its operands and results."""
    atoms = (*equation.invars, *equation.outvars)
    return equation.primitive, tuple((dtype_of(x), getattr(x.aval, "shape", ())) for x in atoms)


def _starts(equation: Any) -> tuple[np.ndarray, ...]:
    """Returns where a slice starts, as further operands: slices of the same size are one program, wherever they start.

    Empty for other equations and for slices with strides.
    """
    if equation.primitive.name != "slice" or equation.params["strides"] is not None:
        return ()
    return tuple(np.asarray(start, np.int32) for start in equation.params["start_indices"])


def _of_parameter(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(_of_parameter, value))
    return _of_program(value) if isinstance(value, jex.Jaxpr | jex.ClosedJaxpr) else value


def _of_program(program: Any) -> Any:
    """Returns a key, equal for programs with the same equations and wiring, and the same arrays as constants."""
    jaxpr = opened(program)
    numbers: dict[Any, int] = {}

    def number(variable: Any) -> Any:
        if isinstance(variable, jex.Literal):
            return np.asarray(variable.val).tobytes(), dtype_of(variable)
        return numbers.setdefault(variable, len(numbers))

    given = [(number(x), dtype_of(x), getattr(x.aval, "shape", ())) for x in (*jaxpr.constvars, *jaxpr.invars)]
    equations = [(_key(e), *map(number, (*e.invars, *e.outvars))) for e in jaxpr.eqns]
    constants = tuple(map(id, getattr(program, "consts", ())))
    return tuple(given), tuple(equations), tuple(map(number, jaxpr.outvars)), constants


LARGE = 2**19  # elements of an array, with which compiling longer is made up for by running faster
# What a program rounds has to be rounded here too.
_EVERYWHERE = {"xla_allow_excess_precision": False}
_SOON = {
    "cpu": {
        "xla_backend_optimization_level": 0,
        "xla_llvm_disable_expensive_passes": True,
        "xla_cpu_use_fusion_emitters": False,
        "xla_cpu_parallel_codegen_split_count": 1,  # or small programs take twice as long
    },
    "gpu": {"xla_gpu_autotune_level": 0},
}
_LARGE = {"cpu": {"xla_backend_optimization_level": 1}}


@contextlib.contextmanager
def nonfinite_allowed() -> Iterator[None]:
    """Lets programs return NaN and infinities, which are measured, even under `jax_debug_nans` and `jax_debug_infs`."""
    with jax.debug_nans(False), jax.debug_infs(False):
        yield


@functools.lru_cache(maxsize=512)  # each is a part of a process' memory maps, of which there is a limit
def compiled(run: Callable[..., Any], mesh: Any, axes: frozenset[str], large: int = LARGE) -> Callable[..., Any]:
    """Compiles a function; each device of a mesh gets its part of stacked values.

    Args:
      run: the function.
      mesh: the devices; None for one device.
      axes: the mapped axes of the mesh.
      large: number of elements of an array above which it is compiled to run faster.
    """
    if mesh is None:
        soon, fast = _jitted(run)
        return lambda *args: (fast if _holds(large, args) else soon)(*args)

    def unstacked(stacked: Any, same: Any) -> Any:
        own = jax.tree.map(lambda x, y: y if x is None else x[0], stacked, same, is_leaf=lambda x: x is None)
        return jax.tree.map(lambda x: jnp.asarray(x)[None], run(*own))

    each = each_device(mesh, axes)
    soon, fast = _jitted(mapped(unstacked, mesh, axes, (each, P()), each))
    return lambda *args: (fast if _holds(large, args) else soon)(*_parted(args))


def _jitted(run: Callable[..., Any]) -> list[Callable[..., Any]]:
    """Returns a function compiled quickly, and compiled to run faster."""
    platform = jax.default_backend()
    return [jax.jit(run, compiler_options=compiler_options(platform, large)) for large in (False, True)]


def _holds(elements: int, args: Any) -> bool:
    """Returns whether an argument's array has at least a number of elements."""
    return any(np.size(x) >= elements for x in jax.tree.leaves(args))


@functools.lru_cache(maxsize=256)
def stacking(mesh: Any, axes: frozenset[str], spec: P) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Returns a function that stacks values of devices along a first axis, and its inverse."""
    each = each_device(mesh, axes)
    stack = jax.jit(mapped(lambda x: x[None], mesh, axes, spec, each))
    return stack, jax.jit(mapped(lambda x: x[0], mesh, axes, each, spec))


def each_device(mesh: Any, axes: frozenset[str]) -> P:
    """Returns the spec of values stacked over the devices."""
    return P(tuple(name for name in mesh.axis_names if name in axes))


def mapped(run: Callable[..., Any], mesh: Any, axes: frozenset[str], in_specs: Any, out_specs: Any) -> Any:
    """Returns a function as each device runs it, in a `shard_map` without checks of varying values."""
    return jax.shard_map(run, mesh=mesh, in_specs=in_specs, out_specs=out_specs, axis_names=axes, check_vma=False)


def _parted(tree: Any) -> tuple[Any, Any]:
    """Returns the arrays of a tree that are stacked over devices, and the replicated ones."""
    stacked = jax.tree.map(lambda x: x if isinstance(x, jax.Array) else None, tree)
    return stacked, jax.tree.map(lambda x: None if isinstance(x, jax.Array) else x, tree)


@functools.cache
def compiler_options(platform: str, large: bool) -> dict[str, bool | int]:
    """Returns the options of XLA for a platform that this version has.

    Args:
      platform: "cpu", "gpu" or "tpu".
      large: True if the programs have large arrays, for which longer compilation pays off.
    """
    options = _EVERYWHERE | _SOON.get(platform, {}) | (_LARGE.get(platform, {}) if large else {})
    return {name: value for name, value in options.items() if _is_option(name, value)}


@functools.cache
def _is_option(name: str, value: bool | int) -> bool:
    try:
        jax.jit(jnp.negative, compiler_options={name: value}).lower(jnp.float32(0)).compile()
    except (jax.errors.JaxRuntimeError, ValueError):
        return False
    return True
