"""Gradients of half values that are read many times, added in float32 (`with_float32_sums`).

The traced program runs again, equation by equation. A value that `ReadCounts` finds is cast to float32 once, and back
to half for each of its readers, so the forward pass has the same bits, and the gradients of the readers are added in
float32 and rounded once.

jax adds the gradients of all reads of a value in the value's own dtype. In bfloat16, the 257th of equal gradients is
lost; in float16, the 2,049th.
"""

import contextlib
import contextvars
import dataclasses
import functools
import math
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, ParamSpec, TypeVar

import jax
import jax.extend.core as jex
import jax.numpy as jnp
from jax import lax
from jax.core import ShapedArray, Tracer
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, Primitive, Var
from jax.typing import DTypeLike

from jmp_train.policies.autocasting import (
    COMPUTED,
    HALVES,
    OpaqueCall,
    as_traced,
    at_line_of,
    bind,
    cast,
    literal,
    run_traced,
    traced_dtype,
    warn_user,
)
from jmp_train.policies.programs import IN_JAX, Enter, Reading, Scan, bodies_of, branches_of, opened
from jmp_train.policies.pytrees import Carried, is_inexact_array, is_nnx

MOST_READS = 8  # a sum of 8 gradients is off by at most 3.5 units of rounding
ELEMENTWISE = frozenset(("add", "sub", "mul", "div", "max", "min", "pow", "atan2", "rem", "nextafter", "select_n"))
_ENTERED = frozenset(("jit", "pjit", "closed_call", "remat2", "checkpoint", "scan", "cond", "shard_map"))


@dataclasses.dataclass(frozen=True, eq=False)
class ProgramReads:
    """A traced program, and its values that are read often.

    Attributes:
      jaxpr: the program.
      consts: the values of its constants.
      often: the variables that are read often.
      reads: how many times each argument is read, at most.
      inner: by the identity of an equation, the programs that it holds, if these must be rewritten.
    """

    jaxpr: Jaxpr
    consts: Sequence[Any]
    often: frozenset[Var]
    reads: Sequence[float]
    inner: Mapping[int, Sequence["ProgramReads"]]

    @property
    def is_rewritten(self) -> bool:
        """True if the gradients of some of its values need float32 sums."""
        return bool(self.often or self.inner)


class ReadCounts:
    """Counts the reads of half values that may have gradients; programs that occur several times are read once."""

    def __init__(self) -> None:
        self._programs: dict[Any, ProgramReads] = {}

    def of(self, jaxpr: Any, active: Sequence[bool]) -> ProgramReads:
        """Returns the counts of a program.

        Args:
          jaxpr: a jaxpr, closed or open, which stays alive as long as the counts.
          active: whether each argument may have a gradient. Constants may if they are traced.
        """
        key = (id(jaxpr), *active)
        if key not in self._programs:
            self._programs[key] = self._counted(opened(jaxpr), getattr(jaxpr, "consts", ()), active)
        return self._programs[key]

    def _counted(self, jaxpr: Jaxpr, consts: Sequence[Any], active: Sequence[bool]) -> ProgramReads:
        live = {v for v, is_active in zip(jaxpr.invars, active, strict=True) if is_active}
        live |= {v for v, const in zip(jaxpr.constvars, consts, strict=False) if isinstance(const, Tracer)}
        reads: Any = Counter()
        inner: dict[int, Sequence[ProgramReads]] = {}
        for equation in jaxpr.eqns:
            given = [not isinstance(atom, jex.Literal) and atom in live for atom in equation.invars]
            if not any(given) or equation.primitive.name == "stop_gradient":
                continue
            live.update(v for v in equation.outvars if _is_inexact(v))
            programs = self._held(equation, given)
            try:
                times = [float(count) for count in _times(equation, programs)]
            except (TypeError, jax.errors.InconclusiveDimensionOperation):  # for symbolic shapes
                times = [math.inf] * len(equation.invars)
            for atom, is_live, count in zip(equation.invars, given, times, strict=True):
                if is_live and is_half(atom):
                    reads[atom] += count
            if any(program.is_rewritten for program in programs) or _sums_in_half(equation, given, times):
                inner[id(equation)] = programs
        often = frozenset(v for v, count in reads.items() if count > MOST_READS)
        return ProgramReads(jaxpr, consts, often, [reads[v] for v in jaxpr.invars], inner)

    def _held(self, equation: Any, given: Sequence[bool]) -> list[ProgramReads]:
        """Returns the programs of an equation that is entered."""
        name = equation.primitive.name
        if name not in _ENTERED or isinstance(equation.params.get("policy"), OpaqueCall):
            return []
        if name == "cond":
            return [self.of(branch, given[1:]) for branch in branches_of(equation) or ()]
        if name == "scan":
            scan = Scan.of(equation)
            (consts, _, xs), (_, carry, _) = scan.split(given), scan.split(equation.invars)
            given = [*consts, *map(_is_inexact, carry), *xs]  # a carried value may come from any of the operands
        return [self.of(body, given) for body in bodies_of(equation)]


def _times(equation: Any, programs: Sequence[ProgramReads]) -> Sequence[float]:
    """Returns how many times an equation reads an element of each operand, at most."""
    name, params = equation.primitive.name, equation.params
    once = [1.0] * len(equation.invars)
    if name == "scan" and programs:
        scan = Scan.of(equation)
        consts, _, _ = scan.split(programs[0].reads)
        return [*(scan.length * max(1.0, count) for count in consts), *once[len(consts) :]]
    if name in ("jit", "pjit", "closed_call") and programs:
        return programs[0].reads
    if name in ELEMENTWISE:  # operands of size 1 are broadcast
        size = equation.outvars[0].aval.size
        return [size / max(1, atom.aval.size) for atom in equation.invars]
    operand, *indices = equation.invars
    if name == "gather" and not params["unique_indices"]:
        batch = params["dimension_numbers"].operand_batching_dims
        slices = math.prod(indices[0].aval.shape[:-1])
        once[0] = max(1.0, slices / max(1, math.prod(operand.aval.shape[d] for d in batch)))
    elif name in ("broadcast_in_dim", "tile") or (
        name in ("slice", "dynamic_slice") and all(isinstance(i, jex.Literal) for i in indices)
    ):
        once[0] = equation.outvars[0].aval.size / max(1, operand.aval.size)
    return once


def _sums_in_half(equation: Any, given: Sequence[bool], times: Sequence[float]) -> bool:
    """Returns whether an equation is a loop that would add the gradients of a constant in half precision."""
    atoms = zip(equation.invars, given, times, strict=True)
    return equation.primitive.name == "scan" and any(
        is_live and is_half(atom) and count > MOST_READS for atom, is_live, count in atoms
    )


def is_half(atom: Var | Literal) -> bool:
    """Returns whether a variable or literal of a program is an array in half precision."""
    return isinstance(atom.aval, ShapedArray) and traced_dtype(atom) in HALVES


def _is_inexact(atom: Var | Literal) -> bool:
    return jnp.issubdtype(traced_dtype(atom) or jnp.int32, jnp.inexact)


_NEEDS_VALUES = (
    "the function needs the values of its arguments and cannot be traced. Under the policy, gradients of half values "
    "that are read many times, such as embeddings, are added in half precision. Use jnp.where or lax.cond, not if"
)
Args = ParamSpec("Args")
Result = TypeVar("Result")
Read = Callable[[ClosedJaxpr, tuple[Any, ...], dict[str, Any]], None]
_READ: contextvars.ContextVar[Read | None] = contextvars.ContextVar("who reads the next program", default=None)


@contextlib.contextmanager
def program_read(read: Read | None) -> Iterator[None]:
    """Passes the program of the next function of `with_float32_sums` and its arguments to `read`."""
    token = _READ.set(read)
    try:
        yield
    finally:
        _READ.reset(token)


def with_float32_sums(fn: Callable[Args, Result]) -> Callable[Args, Result]:
    """Returns `fn` with gradients of half values that are read many times added in float32.

    `ReadCounts` finds these values. The results have the same bits. `fn` runs as it is within linen and haiku modules
    and, with a warning, if tracing fails.

    Args:
      fn: a function of pytrees.
    """

    @functools.wraps(fn)
    def run(*args: Args.args, **kwargs: Args.kwargs) -> Result:
        read = _READ.get()
        with program_read(None):  # functions within have readers of their own
            if not _has_traced_halves((args, kwargs)) or in_module():
                return fn(*args, **kwargs)
            traced: list[bool] = []

            def run_program(jaxpr: ClosedJaxpr, arrays: list[Any]) -> list[Any]:
                traced.append(True)
                if read is not None:
                    read(jaxpr, args, kwargs)
                active = [isinstance(x, Tracer) and is_inexact_array(x) for x in arrays]
                return _Sums(ReadCounts().of(jaxpr, active)).evaluate(jaxpr, arrays)

            try:
                return run_traced(run_program, fn, args, kwargs, as_float32=False)
            except Exception:
                if traced:
                    raise
            result = fn(*args, **kwargs)  # raises the error again, or needs the values of its arguments
        warn_user(_NEEDS_VALUES, UserWarning)
        return result

    return run


def in_module() -> bool:
    """Returns whether a linen or haiku module is running, whose state an additional trace would change."""
    linen, haiku = sys.modules.get("flax.linen.module"), sys.modules.get("haiku")
    if linen is not None and linen._context.module_stack[-1] is not None:
        return True
    if haiku is None:
        return False
    try:
        haiku.running_init()
    except ValueError:
        return False
    return True


def _has_traced_halves(tree: object) -> bool:
    leaves = jax.tree.leaves(tree, is_leaf=is_nnx)
    return any(isinstance(x, Tracer) and x.dtype in HALVES for x in [*leaves, *Carried(tree, len).arrays])


@dataclasses.dataclass(frozen=True, slots=True)
class _Often:
    """A half value that is read often: in float32, and its own dtype."""

    array: Any
    dtype: Any

    def to_half(self) -> Any:
        return cast(self.array, self.dtype)

    def spread(self, shape: tuple[int, ...]) -> Any:
        """Returns the value in half precision, broadcast to the shape of an elementwise operation."""
        if self.array.shape == shape:
            return self.to_half()
        return cast(lax.broadcast_in_dim(self.array, shape, range(self.array.ndim)), self.dtype)


def _half(value: Any) -> Any:
    return value.to_half() if isinstance(value, _Often) else value


@dataclasses.dataclass(frozen=True)
class _Sums(Reading[Any]):
    """A program whose values that are read often are `_Often`.

    Attributes:
      program: the reads of the current program.
      bodies: those of the programs that the current equation holds.
    """

    program: ProgramReads
    bodies: Sequence[ProgramReads] = ()

    table: ClassVar[Mapping[str, Enter]] = {name: enter for name, enter in IN_JAX.items() if name != "while"}

    def evaluate(self, program: Any, inputs: Sequence[Any]) -> list[Any]:
        counted = next((x for x in self.bodies if x.jaxpr is opened(program)), self.program)
        return list(map(_half, super(_Sums, _Sums(counted)).evaluate(program, inputs)))

    def written(self, variable: Any, value: Any) -> Any:
        is_new = variable in self.program.often and not isinstance(value, _Often)
        return _Often(cast(value, jnp.float32), value.dtype) if is_new else value

    def literal(self, atom: Any) -> Any:
        return literal(atom).array

    def array(self, value: Any) -> Any:
        return _half(value)

    def run(self, equation: Any, inputs: list[Any]) -> Sequence[Any]:
        scope = str(equation.source_info.name_stack)
        with jax.named_scope(scope) if scope else contextlib.nullcontext(), at_line_of(equation):
            results = super().run(equation, inputs)
            return list(map(self.written, equation.outvars, results))  # the casts have this line too

    def within(self, equation: Any) -> "_Sums":
        return _Sums(self.program, self.program.inner[id(equation)])

    def enter(self, equation: Any, inputs: list[Any]) -> Sequence[Any] | None:
        return super().enter(equation, inputs) if id(equation) in self.program.inner else None

    def bind(self, equation: Any, inputs: list[Any]) -> Sequence[Any]:
        name, params = equation.primitive.name, equation.params
        if isinstance(inputs[0] if inputs else None, _Often):
            first, *rest = inputs
            if name == "convert_element_type" and params["new_dtype"] == jnp.float32:
                return [first.array]
            if name in ("broadcast_in_dim", "tile"):
                return [cast(bind(equation.primitive, [first.array], params), first.dtype)]
            if name == "gather":
                return [_gather(equation.primitive, tuple(params.items()), first.dtype)(first.array, *rest)]
        shape = equation.outvars[0].aval.shape if name in ELEMENTWISE else None
        arrays = [x.spread(shape) if isinstance(x, _Often) and shape is not None else _half(x) for x in inputs]
        results = bind(equation.primitive, arrays, params) if name in COMPUTED else as_traced(equation, *arrays)
        return results if equation.primitive.multiple_results else [results]


@functools.lru_cache(maxsize=4096)
def _gather(primitive: Primitive, params: tuple[tuple[str, Any], ...], dtype: DTypeLike) -> Callable[..., Any]:
    """Returns a gather of half rows from a float32 array; only their gradient is added in float32."""

    @jax.custom_jvp
    def rows(array: jax.Array, indices: jax.Array) -> Any:
        return bind(primitive, [cast(array, dtype), indices], dict(params))

    @rows.defjvp
    def tangents(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, Any]:
        zeros_outside = {**dict(params), "fill_value": 0}
        return rows(*primals), cast(bind(primitive, [tangents[0], primals[1]], zeros_outside), dtype)

    return rows
