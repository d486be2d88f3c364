"""Values of a program under autocast: arrays, with facts about their origin.

Values remember the half operations that made them. A float32 number divided by a denominator that overflowed is 0: a
plausible number, which hides the overflow. So a float32 quotient runs those of its denominator again in float32.

The derivative of a cast to half rounds gradients to half. A node that 70,000 edges read has a gradient beyond float16,
even if it is added in float32. So the half value that an operation on graphs stores of a float32 array remembers that
array: reads in float32 have the half number's value, and the float32 array gets their gradient.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn, Literal, Var
from jax.typing import DTypeLike

from jmp_train.policies.autocasting.integers import Integers, integers_in_result, operand
from jmp_train.policies.autocasting.literal_bounds import UNKNOWN, Bounds, literal_bounds, result_bounds
from jmp_train.policies.autocasting.primitives import (
    ARITHMETIC,
    LAYOUT,
    PICKS,
    PLACEMENT,
    PRODUCTS,
    cast,
    names,
    saving,
)

_WIDTHS = (np.dtype(jnp.float16), np.dtype(jnp.bfloat16), np.dtype(np.float32))
HALVES, FLOAT32 = _WIDTHS[:2], _WIDTHS[2]

_MAY_OVERFLOW = ARITHMETIC | names("exp exp2")
_FOLLOWED = (
    (_MAY_OVERFLOW | LAYOUT | PICKS | names("reduce_max reduce_min square integer_pow sqrt abs"))
    | names("max min clamp select_n gt ge lt le concatenate pad split")
) - PLACEMENT  # which pass on what is known
_LONGEST = 32  # operations in a row


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Made:
    """The operation that made a value.

    Attributes:
      equation: the operation.
      inputs: its operands.
      position: the place of the value among its results.
      depth: the number of operations in a row that are known.
    """

    equation: JaxprEqn
    inputs: tuple["Value", ...]
    position: int
    depth: int


@dataclasses.dataclass(slots=True)
class Value:
    """A value of the running program.

    Attributes:
      array: an array or tracer in the dtype that the rules gave it.
      weak: True for values computed only from literals.
      bounds: the least and greatest magnitude of a weak value.
      origin: the original size of an argument or constant that was only moved; otherwise None.
      given: True for an argument or constant, or a row of one, that was only moved.
      product: True for results of a matrix product or convolution, possibly moved.
      scaled: True for products and quotients of a half value.
      casts: the array in other dtypes, if the program computed the value.
      integers: the integers that it was computed from, if any.
      addends: the addition and its addends, if the value is a float32 sum that takes more memory than they do.
      shared: True if the value is read more than once.
      source: the float32 array that a stored half array was cast from, which gets the gradients of reads in float32.
      made: the operation that made it, if half precision may have overflowed on the way.
      half: in an emulation, whose arrays are float32: a bit that is set if it would be half.
    """

    array: Any
    weak: bool = False
    bounds: Bounds = UNKNOWN
    origin: int | None = None
    given: bool = False
    product: bool = False
    scaled: bool = False
    casts: dict[Any, Any] = dataclasses.field(default_factory=dict)
    integers: Integers | None = None
    addends: tuple[Callable[..., Any], "Sequence[Value]"] | None = None
    shared: bool = False
    source: Any = None
    made: Made | None = None
    half: bool | jax.Array = False

    @property
    def dtype(self) -> Any:
        """The dtype of the array."""
        return self.array.dtype

    def to(self, dtype: DTypeLike) -> Any:
        """Returns the array in a dtype.

        Float32 arguments are cast for each use. XLA merges the casts, and the gradients of all uses are added in
        float32. A sum in bfloat16 would lose the 257th of equal gradients.
        """
        if self.dtype == dtype:
            return self.array
        if self.source is not None and dtype == FLOAT32:
            return unrounded(self.array, self.source)
        if _is_numpy(self.array):
            with np.errstate(over="ignore", invalid="ignore"):
                return np.asarray(self.array).astype(dtype)
        if self.origin is not None and self.dtype not in HALVES:
            return cast(self.array, dtype)
        if dtype not in self.casts:
            self.casts[dtype] = cast(self.array, dtype)
        return self.casts[dtype]

    @property
    def kind(self) -> tuple[Any, ...]:
        """The facts about the value on which the dtypes of a program's results depend."""
        made = (self.product, self.scaled, self.integers)
        return self.dtype, self.weak, self.bounds, self.origin, *made

    def inside(self) -> "Value":
        """Returns the value for the body of a loop or branch, which makes its own casts."""
        return dataclasses.replace(self, casts={}, addends=None, made=None)


def argument(array: jax.Array) -> Value:
    """Returns an argument or constant as a value."""
    array = _as_array(array)
    return Value(array, origin=getattr(array, "size", None), given=True)


def literal(atom: Any) -> Value:
    """Returns a literal as a value."""
    dtype = traced_dtype(atom)
    array = np.asarray(atom.val, dtype) if eligible(dtype) else _as_array(atom.val)
    is_number = jnp.issubdtype(dtype, jnp.number)
    return Value(array, weak=True, bounds=literal_bounds(atom.val) if is_number else UNKNOWN)


def values_of(arrays: Sequence[Any]) -> list[Value]:
    """Returns the results of another program as values."""
    return [Value(array) for array in arrays]


def results_of(equation: JaxprEqn, arrays: Sequence[Any], inputs: Sequence[Value]) -> list[Value]:
    """Returns the results of an equation as values, with the facts that follow from its inputs."""
    name = equation.primitive.name
    if name in PLACEMENT:
        return [
            dataclasses.replace(x, array=array, casts={}, source=None) for x, array in zip(inputs, arrays, strict=True)
        ]
    about = facts_of(equation, inputs)
    return [Value(array, **about) for array in arrays]


def facts_of(equation: JaxprEqn, inputs: Sequence[Value]) -> dict[str, Any]:
    """Returns the facts about an equation's results that follow from its inputs, as fields of `Value`."""
    is_moved = equation.primitive.name in LAYOUT
    floats = [v for v, a in zip(inputs, equation.invars, strict=True) if eligible(traced_dtype(a))]
    weak = bool(inputs) and all(value.weak for value in floats or inputs)
    return {
        "weak": weak,
        "bounds": result_bounds(equation, [v.bounds for v in inputs]) if weak else UNKNOWN,
        "origin": inputs[0].origin if is_moved else None,
        "given": (is_moved or equation.primitive.name == "dynamic_slice") and inputs[0].given,
        "product": inputs[0].product if is_moved else equation.primitive.name in PRODUCTS,
    }


def note_integers(equation: JaxprEqn, inputs: Sequence[Value], outputs: Sequence[Value]) -> None:
    """Records which integers the results of an equation were computed from."""
    name = equation.primitive.name
    begins = name in ("iota", "convert_element_type")
    if name in PLACEMENT or not (begins or any(x.integers is not None for x in inputs)):
        return  # results of a placement keep the integers of their inputs
    operands = [
        operand(atom, x.integers, weak=x.weak, given=x.origin is not None)
        for atom, x in zip(equation.invars, inputs, strict=True)
    ]
    found = integers_in_result(equation, operands)
    for output in outputs if found is not None else ():
        output.integers = found


def note_operation(equation: JaxprEqn, half: DTypeLike, inputs: Sequence[Value], outputs: Sequence[Value]) -> None:
    """Records the operation that made its results, if half precision may have overflowed on the way."""
    name = equation.primitive.name
    if name not in _FOLLOWED:
        return
    depth = 1 + max((x.made.depth for x in inputs if x.made is not None), default=0)
    begins = name in _MAY_OVERFLOW and outputs[0].dtype == half
    if (begins or depth > 1) and depth <= _LONGEST:
        for position, output in enumerate(outputs):
            output.made = Made(equation, tuple(inputs), position, depth)


def without_overflow(equation: Any, dtypes: Sequence[Any], inputs: list[Value]) -> list[Value]:
    """Returns an equation's operands, in float32 all the way if it divides in float32 by what may have overflowed."""
    place = _denominator(equation, inputs)
    if place is None or dtypes[place] != FLOAT32 or inputs[place].made is None:
        return inputs
    made = [x.made for x in inputs if x.made is not None]
    leaves = _leaves(made)

    def run(*arrays: jax.Array) -> list[Any]:
        done = dict(zip(leaves, arrays, strict=True))
        return [_computed(each, done) for each in made]

    # One float32 value of each, to which the gradients of numerator and denominator are added: they may cancel.
    arrays = [x.to(FLOAT32) if x.dtype in HALVES else x.array for x in leaves.values()]
    exact = iter(saving(run, arrays, [x.array for x in leaves.values()], prevent_cse=False))
    return [x if x.made is None else Value(next(exact)) for x in inputs]


def _denominator(equation: Any, inputs: Sequence[Value]) -> int | None:
    """Returns the place of the operand by which an equation divides."""
    match equation.primitive.name:
        case "div":
            return 1
        case "rsqrt":
            return 0
        case "integer_pow":
            return 0 if equation.params["y"] < 0 else None
        case "pow":
            exponent = inputs[1].array
            return 0 if isinstance(exponent, np.ndarray) and bool(np.all(exponent < 0)) else None
    return None


def _leaves(made: Sequence[Made]) -> dict[int, Value]:
    """Returns the arrays from which operations made values, by the identity of the array."""
    leaves: dict[int, Value] = {}
    waiting, seen = list(made), set[int]()
    while waiting:
        each = waiting.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        waiting.extend(x.made for x in each.inputs if x.made is not None)
        leaves.update({id(x.array): x for x in each.inputs if x.made is None and not _is_numpy(x.array)})
    return leaves


def _computed(made: Made, done: dict[int, Any]) -> Any:
    """Returns a value, computed in float32 by the operations that made it.

    Args:
      made: the operation that made it.
      done: what is known, by the identity of the array or of the operation.
    """
    if id(made) not in done:
        equation = made.equation
        arrays = [done.get(id(x.array), x.array) if x.made is None else _computed(x.made, done) for x in made.inputs]
        results = equation.primitive.bind(*upcast_operands(equation, arrays), **equation.params)
        done[id(made)] = results[made.position] if equation.primitive.multiple_results else results
    return done[id(made)]


def _is_numpy(array: object) -> bool:
    return isinstance(array, np.ndarray | np.generic)


def eligible(dtype: DTypeLike) -> bool:
    """Returns whether autocast casts values of this dtype: float16, bfloat16 or float32."""
    return dtype in _WIDTHS


def traced_dtype(atom: Var | Literal) -> Any:
    """Returns the dtype that a variable or literal has in the traced program."""
    return getattr(atom.aval, "dtype", None)


def _as_array(value: object) -> Any:
    """Returns a Python scalar, which a `while` may have as operand, as a jax array."""
    return jnp.asarray(value) if isinstance(value, bool | int | float | complex) else value


def variables_read(equation: JaxprEqn) -> list[Any]:
    """Returns the variables that an equation reads."""
    return [atom for atom in equation.invars if not isinstance(atom, jex.Literal)]


def upcast_operands(equation: JaxprEqn, arrays: Sequence[Any]) -> list[Any]:
    """Returns the operands of an equation, with the floating ones in float32."""
    return [
        lax.convert_element_type(array, FLOAT32) if eligible(traced_dtype(atom)) else array
        for array, atom in zip(arrays, equation.invars, strict=True)
    ]


def traced_arrays(equation: JaxprEqn, values: Sequence[Value]) -> list[Any]:
    """Returns the operands of an equation in the dtypes that they have in the traced program."""
    dtypes = map(traced_dtype, equation.invars)
    return [x.to(dtype) if eligible(dtype) else x.array for x, dtype in zip(values, dtypes, strict=True)]


def replaced(items: Sequence[Any], mask: Sequence[bool], new: Sequence[Any]) -> list[Any]:
    """Returns the items, with new ones in place of those that a mask selects."""
    rest = iter(new)
    pairs = zip(items, mask, strict=True)
    return [next(rest) if is_chosen else item for item, is_chosen in pairs]


Arrays = Sequence[Any]


@jax.custom_jvp
def unrounded(half: jax.Array, source: jax.Array) -> jax.Array:
    """Returns a half array upcast; its gradient is that of the float32 array that it was cast from."""
    del source
    return cast(half, jnp.float32)


@unrounded.defjvp
def _tangent(primals: tuple[jax.Array, jax.Array], tangents: tuple[jax.Array, jax.Array]) -> tuple[Any, Any]:
    return unrounded(*primals), tangents[1]


def checkpointed(run: Callable[..., Any], arrays: Arrays, sources: Arrays, **options: Any) -> Any:
    """Returns `run(*arrays, sources=sources)` under `jax.checkpoint`, which stores the arrays and not their sources.

    Args:
      run: a function of arrays; without sources it gets none.
      arrays: its arrays.
      sources: for each array, the float32 array that it was cast from, or None.
      **options: options of `jax.checkpoint`.
    """
    if all(source is None for source in sources):
        return jax.checkpoint(run, **options)(*arrays)
    stored = [i for i, source in enumerate(sources) if source is not None]

    def with_sources(*operands: Any) -> Any:
        return run(*operands[: len(arrays)], sources=_placed(sources, stored, operands[len(arrays) :]))

    operands, saved = ([*arrays, *(each[i] for i in stored)] for each in (sources, arrays))
    return saving(with_sources, operands, saved, **options)


def called(run: Callable[..., Any], arrays: Arrays, sources: Arrays) -> list[Any]:
    """Returns the results of a function that is opaque to autocast; the gradient recomputes it, with float32 arrays.

    Args:
      run: a function of the arrays, differentiable in reverse mode.
      arrays: see `checkpointed`.
      sources: see `checkpointed`.
    """
    if all(source is None for source in sources):
        return jax.tree.leaves(run(*arrays))
    floats = [i for i, x in enumerate(arrays) if jnp.issubdtype(x.dtype, jnp.inexact)]

    @jax.custom_vjp
    def call(arrays: Arrays, sources: Arrays) -> list[Any]:
        del sources
        return jax.tree.leaves(run(*arrays))

    def forward(arrays: Arrays, sources: Arrays) -> tuple[list[Any], Arrays]:
        return call(arrays, sources), arrays

    def backward(arrays: Arrays, cotangents: Arrays) -> tuple[Arrays, Arrays]:
        wanted = [i for i, x in enumerate(cotangents) if jnp.issubdtype(x.dtype, jnp.inexact)]

        def of_floats(some: Arrays) -> Arrays:
            results = jax.tree.leaves(run(*_placed(arrays, floats, some)))
            return [results[i].astype(cotangents[i].dtype) for i in wanted]

        upcast = [arrays[i] if sources[i] is None else cast(arrays[i], jnp.float32) for i in floats]
        (found,) = jax.vjp(of_floats, upcast)[1]([cotangents[i] for i in wanted])
        gradients = _placed([None] * len(arrays), floats, found)
        pairs = list(zip(gradients, sources, strict=True))
        return [g if s is None else None for g, s in pairs], [None if s is None else g for g, s in pairs]

    call.defvjp(forward, backward)
    return call(arrays, sources)


def _placed(items: Arrays, places: Sequence[int], new: Arrays) -> list[Any]:
    """Returns the items, with new ones at some places."""
    items = list(items)
    for place, item in zip(places, new, strict=True):
        items[place] = item
    return items


def float32_aval(aval: Any) -> Any:
    """Returns the type of an array with float32 in place of half, so that literals are not rounded."""
    return aval.update(dtype=FLOAT32) if eligible(aval.dtype) and aval.dtype != FLOAT32 else aval
