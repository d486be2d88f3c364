"""Emulates autocast: runs a traced function in float32 with rounding, with one run-time flag per operation.

Autocast decides the rule of each operation. If the rule allows half precision, a flag decides at run time whether the
operation rounds as the half type does. One compiled program can thus try all choices.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import ClosedJaxpr
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

from jmp_train.policies.autocasting.bound_operations import as_traced
from jmp_train.policies.autocasting.decisions import RuledEquation, integers_fit, literals_fit, settle, steps_of
from jmp_train.policies.autocasting.emulating.rounded_operations import Bit, both, either, rounded, rounded_operation
from jmp_train.policies.autocasting.interpreter import ByRules
from jmp_train.policies.autocasting.literal_bounds import result_bounds
from jmp_train.policies.autocasting.opaque import OpaqueCall
from jmp_train.policies.autocasting.primitives import (
    ARITHMETIC,
    ENTERED,
    PLACEMENT,
    PRODUCTS,
    TRANSCENDENTAL,
    in_float32,
    multiplies,
)
from jmp_train.policies.autocasting.region import Region
from jmp_train.policies.autocasting.rules import MOSTLY_HALF, AutocastRules
from jmp_train.policies.autocasting.source_lines import address_of
from jmp_train.policies.autocasting.traced_calls import run_traced
from jmp_train.policies.autocasting.values import (
    FLOAT32,
    HALVES,
    Value,
    argument,
    eligible,
    facts_of,
    note_integers,
    traced_arrays,
    traced_dtype,
)
from jmp_train.policies.programs import IN_JAX, Enter, as_jax_array, bodies_of, join, opened
from jmp_train.policies.pytrees import check_half

Args = ParamSpec("Args")
Result = TypeVar("Result")

_COMPUTE = ("lower", "demote")


# Returns the flag of an operation. Takes its addresses (a function with a custom derivative has the addresses of all
# its operations) and the equations around it, the outermost first and the operation last.
Flags = Callable[[tuple[str, ...], tuple[Any, ...]], Bit]


# Runs an operation, in half precision if a bit is set. Takes the operation, its operands, the bit, its addresses, and
# `wide`; see `rounded_operation`.
Run = Callable[..., list[Any]]


def emulated(array: Any, half: Bit = False, **about: Any) -> Value:
    """Returns an array that a program computed as a value of an emulation, in float32.

    Args:
      array: an array of any dtype; a half array is known to be half.
      half: True if it would be half.
      **about: other fields of `Value`.
    """
    if getattr(array, "dtype", None) in HALVES and not isinstance(array, jax.Ref):
        return Value(lax.convert_element_type(array, FLOAT32), half=True, **about)
    return Value(array, half=half, **about)


def _active(emulation: "Emulation", step: RuledEquation, inputs: list[Value]) -> Bit:
    """Returns the flag of an operation: whether it may run in half precision."""
    equation: Any = step.equation
    region, name, rule = emulation.region, equation.primitive.name, step.rule
    floats = [x for x, a in zip(inputs, equation.invars, strict=True) if eligible(traced_dtype(a))]
    halves = [x.half for x in floats if not x.weak]
    if rule not in ("lower", "demote", "promote") or not halves:
        return False
    if rule != "lower" and not literals_fit(region, equation, floats):
        return False
    if rule == "promote" or (rule == "demote" and equation.outvars[0].aval.shape == ()):
        met = functools.reduce(both, halves, True)
    else:
        met = functools.reduce(either, halves, rule == "lower")
    if rule == "promote":
        return met
    in_float32 = (name in TRANSCENDENTAL | ARITHMETIC and step.in_float32) or not integers_fit(region, floats)
    if met is False or (rule == "demote" and in_float32):
        return False
    return both(emulation.flags(_address(emulation, step), (*region.callers, equation)), met)


def _address(emulation: "Emulation", step: RuledEquation) -> tuple[str]:
    region = emulation.region
    return (address_of((*region.callers, step.equation), join(region.path, step.scope)),)


def _computed(emulation: "Emulation", step: RuledEquation, inputs: list[Value]) -> list[Value]:
    """Runs an operation on float32 operands, with rounding if its precision is variable and its flag is set."""
    equation, primitive = step.equation, step.equation.primitive
    active = _active(emulation, step, inputs)
    wide = step.rule == "lower" and step.is_logits
    pairs = zip(step.dtypes, equation.invars, strict=True)
    touched = [dtype is not None or eligible(traced_dtype(atom)) for dtype, atom in pairs]
    arrays = [x.to(FLOAT32) if touch else x.array for x, touch in zip(inputs, touched, strict=True)]
    params = _in_float32(equation)
    if step.rule not in _COMPUTE or active is False:  # promoted operations move or pick rounded numbers
        results = primitive.bind(*arrays, **params)
        results = list(results) if primitive.multiple_results else [results]
    else:
        arrays, address = [as_jax_array(x) for x in arrays], _address(emulation, step)
        results = emulation.operation(lambda *x: primitive.bind(*x, **params), arrays, active, address, wide=wide)
    if primitive.name in PLACEMENT:
        return [dataclasses.replace(x, array=array, casts={}) for x, array in zip(inputs, results, strict=True)]
    return [emulated(x, False if wide else active, **facts_of(equation, inputs)) for x in results]


def _in_float32(equation: Any) -> dict[str, Any]:
    """Returns the parameters of an operation with float32 in place of half types, with exact products."""
    name, params = equation.primitive.name, equation.params
    params = {
        key: FLOAT32 if key == "preferred_element_type" and value is not None and eligible(value) else value
        for key, value in params.items()
    }
    return in_float32(name, params, "float32") if name in PRODUCTS else params


def _kept(equation: Any, inputs: list[Value]) -> list[Value]:
    """Runs an equation as it was traced."""
    name, primitive = equation.primitive.name, equation.primitive
    if name == "convert_element_type":
        return [_converted(equation, inputs[0])]
    results = as_traced(equation, *traced_arrays(equation, inputs))
    about = {} if name in ENTERED else facts_of(equation, inputs)
    return [emulated(x, **about) for x in (results if primitive.multiple_results else [results])]


def _converted(equation: Any, x: Value) -> Value:
    source, dtype = traced_dtype(equation.invars[0]), equation.params["new_dtype"]
    if eligible(source) and eligible(dtype):
        if dtype == FLOAT32:
            return dataclasses.replace(x, casts={}, half=False if source in HALVES else x.half)
        return dataclasses.replace(x, array=rounded(x.to(FLOAT32), dtype), casts={}, half=True)
    (result,) = [lax.convert_element_type_p.bind(as_jax_array(x.array), **equation.params)]
    if source == jnp.bool_:
        return emulated(result, weak=True, bounds=(0.0, 1.0))
    return emulated(result, weak=x.weak, bounds=result_bounds(equation, [x.bounds]))


def _with_custom_derivative(emulation: "Emulation", equation: Any, inputs: list[Value]) -> list[Value] | None:
    """Runs a function with a custom derivative as one operation, which is half if all its operations are."""
    floats = [x for x, a in zip(inputs, equation.invars, strict=True) if eligible(traced_dtype(a))]
    has_product = equation.primitive.name == "custom_vjp_call"  # whose operands become half
    if has_product and not multiplies(equation.params["call_jaxpr"]):
        return None
    met = functools.reduce(either, (x.half for x in floats if not x.weak), has_product)
    addresses = tuple(dict.fromkeys(_addresses(emulation.region, equation.params["call_jaxpr"])))
    if met is False or not addresses or emulation.region.forced == "float32":
        return None
    active = both(emulation.flags(addresses, emulation.region.callers), met)
    arrays = list(map(as_jax_array, traced_arrays(equation, inputs)))
    results = emulation.operation(lambda *x: as_traced(equation, *x), arrays, active, addresses, wide=False)
    return [emulated(x, active) for x in results]


def _addresses(region: Region, jaxpr: Any) -> list[str]:
    """Returns the addresses of the operations in a program that may run in half precision."""
    found = []
    for equation in opened(jaxpr).eqns:
        scope, name = str(equation.source_info.name_stack), equation.primitive.name
        for body in bodies_of(equation) if name in ENTERED else ():
            found += _addresses(region.within(equation, scope), body)
        if name not in ENTERED and region.decide(equation, scope)[0] in _COMPUTE:
            found.append(address_of((*region.callers, equation), join(region.path, scope)))
    return found


def _remat(emulation: "Emulation", equation: Any, inputs: list[Value]) -> Sequence[Value] | None:
    policy = equation.params["policy"]
    if not isinstance(policy, OpaqueCall):
        return IN_JAX["remat2"](emulation, equation, inputs)
    # A function that stores in the dtypes of its arguments and accumulates in float32.
    met = functools.reduce(either, [x.half for x in inputs], False)
    results = jax.tree.leaves(policy.run(*(as_jax_array(x.array) for x in inputs)))
    return [emulated(rounded(x, emulation.region.half, met), met) for x in results]


@dataclasses.dataclass(frozen=True)
class Emulation(ByRules):
    """A program as autocast would run it, in float32.

    Attributes:
      flags: returns whether an operation is half.
      operation: runs an operation.
    """

    flags: Flags
    operation: Run

    table: ClassVar[Mapping[str, Enter]] = {
        **IN_JAX,
        "remat2": _remat,
        "custom_jvp_call": _with_custom_derivative,
        "custom_vjp_call": _with_custom_derivative,
    }

    def prepared(self, jaxpr: Any) -> "Emulation":
        """Returns the emulation with the decisions that do not depend on values."""
        return dataclasses.replace(self, steps=steps_of(self.region, jaxpr))

    def within(self, equation: Any) -> "Emulation":
        """Returns the emulation for the bodies of an equation."""
        step = self.steps[id(equation)]
        forced = step.rule if step.rule in ("lower", "float32") else self.region.forced
        region = self.region.within(equation, step.scope)
        return dataclasses.replace(self, region=dataclasses.replace(region, forced=forced, constants={}))

    def enter(self, equation: Any, inputs: list[Value]) -> Sequence[Value] | None:
        """Runs bodies, but for those that autocast keeps as they were traced."""
        return None if self.steps[id(equation)].rule == "keep" else super().enter(equation, inputs)

    def bind(self, equation: Any, inputs: list[Value]) -> Sequence[Value]:
        """Runs an operation, with rounding if its flag is set."""
        if equation.primitive.name in ENTERED:
            return _kept(equation, inputs)
        step = settle(self.region, self.steps[id(equation)], inputs)
        if step.rule == "keep" or equation.primitive.name == "convert_element_type":
            outputs = _kept(equation, inputs)
        else:
            outputs = _computed(self, step, inputs)
        note_integers(equation, inputs, outputs)
        return outputs

    def mapped(self, function: Callable[..., Any], *values: Value) -> Value:
        """Returns a value with another array."""
        return dataclasses.replace(values[0], array=function(*(as_jax_array(x.array) for x in values)), casts={})

    def packed(self, value: Value) -> Any:
        """Returns array and bit."""
        return value.array, jnp.asarray(value.half)

    def unpacked(self, arrays: Any) -> Value:
        """Returns the value of array and bit."""
        return emulated(*arrays)

    def spec(self, spec: Any) -> Any:
        """Returns how array and bit are sharded."""
        return spec, P()

    def operand(self, array: Any, outer: Value) -> Value:
        """Returns an operand, half if it is outside."""
        return emulated(array, outer.half, origin=argument(array).origin, integers=outer.integers)

    def row(self, array: Any, outer: Value) -> Value:
        """Returns a row, half if the array is."""
        return Value(array, integers=outer.integers, half=outer.half)

    def stacked(self, arrays: Any) -> Value:
        """Returns stacked outputs, half if all are."""
        array, bits = arrays
        return emulated(array, jnp.all(bits))

    def start(self, program: Any, init: list[Value], atoms: Sequence[Any], operands: Any) -> list[Value]:
        """Returns carried values in float32."""
        pairs = [(x, eligible(traced_dtype(a))) for x, a in zip(init, atoms, strict=True)]
        arrays = [jnp.asarray(x.to(FLOAT32)) if is_float else as_jax_array(x.array) for x, is_float in pairs]
        return [Value(array, half=False if x.weak else x.half) for x, array in zip(init, arrays, strict=True)]

    def following(self, new: Value, old: Value) -> Value:
        """Returns the next carried value: it is half only if it stays half."""
        array = new.to(old.dtype) if eligible(old.dtype) else new.array
        return Value(array, half=both(old.half, new.half))


def emulated_autocast(
    fn: Callable[Args, Result],
    dtype: DTypeLike,
    flags: Flags,
    *,
    rules: AutocastRules = MOSTLY_HALF,
    run: Run | None = None,
) -> Callable[Args, Result]:
    """Returns `fn` in float32, rounded as in `autocast(fn, dtype, rules=...)` for operations whose flag is set.

    Args:
      fn: see `autocast`.
      dtype: the half type.
      flags: returns whether an operation runs in half precision, for operations in which the rules allow it.
      rules: see `autocast`.
      run: runs such an operation. None rounds as the half type does.

    Returns:
      A function with the same signature, whose floating results are float32.
    """
    half = check_half(dtype, "dtype")

    def rounding(run: Callable[..., Any], arrays: Sequence[Any], active: Bit, _: Any, *, wide: bool) -> list[Any]:
        return rounded_operation(run, arrays, half, active, wide=wide)

    @functools.wraps(fn)
    def with_emulation(*args: Args.args, **kwargs: Args.kwargs) -> Result:
        def by_flags(jaxpr: ClosedJaxpr, arrays: list[Any]) -> list[Any]:
            emulation = Emulation(Region(half, rules), flags=flags, operation=run or rounding)
            return [
                as_jax_array(x.array)
                for x in emulation.evaluate(jaxpr, [emulated(x, origin=argument(x).origin) for x in arrays])
            ]

        return run_traced(by_flags, fn, args, kwargs)

    return with_emulation
