"""Emulates autocast: runs a traced function in float32 with rounding, with one run-time flag per operation.

Autocast decides the rule of each operation. If the rule allows half precision, a flag decides at run time whether the
operation rounds as the half type does. One compiled program can thus try all choices.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, ParamSpec, Protocol, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import ClosedJaxpr
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

from jmp_train.policies.autocasting.bound_operations import as_traced
from jmp_train.policies.autocasting.decisions import Step, integers_fit, literals_fit, settle, steps_of
from jmp_train.policies.autocasting.emulating.rounded_operations import Bit, both, either, rounded, rounded_operation
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
    literal,
    note_integers,
    traced_dtype,
)
from jmp_train.policies.programs import IN_JAX, Enter, Reading, bodies_of, join, on_device, opened
from jmp_train.policies.pytrees import check_half

Args = ParamSpec("Args")
Result = TypeVar("Result")

_COMPUTE = ("lower", "demote")


# Returns the flag of an operation. Takes its addresses (a function with a custom derivative has the addresses of all
# its operations) and the equations around it, the outermost first and the operation last.
Flags = Callable[[tuple[str, ...], tuple[Any, ...]], Bit]


class Run(Protocol):
    """Runs an operation, in half precision if a bit is set."""

    def __call__(
        self, run: Callable[..., Any], arrays: Sequence[Any], active: Bit, addresses: tuple[str, ...], *, wide: bool
    ) -> list[Any]:
        """Returns the results of the operation; see `rounded_operation`."""
        ...


@dataclasses.dataclass(slots=True)
class Emulated:
    """A value of the emulated program.

    Attributes:
      value: the value; its array is float32 if autocast could make it half.
      half: True if it would be half.
    """

    value: Value
    half: Bit = False

    @property
    def array(self) -> Any:
        """The array."""
        return self.value.array


def emulated(array: Any, half: Bit = False, **about: Any) -> Emulated:
    """Returns an array that a program computed as an emulated value, in float32.

    Args:
      array: an array of any dtype; a half array is known to be half.
      half: True if it would be half.
      **about: fields of `Value`.
    """
    if getattr(array, "dtype", None) in HALVES and not isinstance(array, jax.Ref):
        return Emulated(Value(lax.convert_element_type(array, FLOAT32), **about), True)
    return Emulated(Value(array, **about), half)


def _argument(array: Any) -> Emulated:
    return emulated(array, origin=argument(array).origin)


def _active(emulation: "Emulation", step: Step, inputs: list[Emulated]) -> Bit:
    """Returns the flag of an operation: whether it may run in half precision."""
    equation: Any = step.equation
    region, name, rule = emulation.region, equation.primitive.name, step.rule
    floats = [x for x, a in zip(inputs, equation.invars, strict=True) if eligible(traced_dtype(a))]
    strong = [x for x in floats if not x.value.weak]
    if rule not in ("lower", "demote", "promote") or not strong:
        return False
    values = [x.value for x in floats]
    if rule != "lower" and not literals_fit(region, equation, values):
        return False
    is_scalar, halves = equation.outvars[0].aval.shape == (), [x.half for x in strong]
    if rule == "promote" or (rule == "demote" and is_scalar):
        met = functools.reduce(both, halves, True)
    else:
        met = functools.reduce(either, halves, rule == "lower")
    if rule == "promote":
        return met
    if rule == "demote" and (
        (name in TRANSCENDENTAL | ARITHMETIC and step.in_float32) or not integers_fit(region, values)
    ):
        return False
    if met is False:
        return False
    callers = (*region.callers, equation)
    return both(emulation.flags((address_of(callers, join(region.path, step.scope)),), callers), met)


def _computed(emulation: "Emulation", step: Step, inputs: list[Emulated]) -> list[Emulated]:
    """Runs an operation on float32 operands, with rounding if its precision is variable and its flag is set."""
    equation, primitive = step.equation, step.equation.primitive
    active = _active(emulation, step, inputs)
    wide = step.rule == "lower" and step.is_logits
    pairs = zip(step.dtypes, equation.invars, strict=True)
    touched = [dtype is not None or eligible(traced_dtype(atom)) for dtype, atom in pairs]
    arrays = [x.value.to(FLOAT32) if touch else x.array for x, touch in zip(inputs, touched, strict=True)]
    params = _in_float32(equation)
    if step.rule not in _COMPUTE or active is False:  # promoted operations move or pick rounded numbers
        results = primitive.bind(*arrays, **params)
        results = list(results) if primitive.multiple_results else [results]
    else:
        region = emulation.region
        address = (address_of((*region.callers, equation), join(region.path, step.scope)),)
        arrays = [on_device(x) for x in arrays]
        results = emulation.operation(lambda *x: primitive.bind(*x, **params), arrays, active, address, wide=wide)
    if primitive.name in PLACEMENT:
        pairs = zip(inputs, results, strict=True)
        return [Emulated(dataclasses.replace(x.value, array=array, casts={}), x.half) for x, array in pairs]
    about = facts_of(equation, [x.value for x in inputs])
    return [emulated(x, False if wide else active, **about) for x in results]


def _in_float32(equation: Any) -> dict[str, Any]:
    """Returns the parameters of an operation with float32 in place of half types, with exact products."""
    name, params = equation.primitive.name, equation.params
    params = {
        key: FLOAT32 if key == "preferred_element_type" and value is not None and eligible(value) else value
        for key, value in params.items()
    }
    return in_float32(name, params, "float32") if name in PRODUCTS else params


def _kept(equation: Any, inputs: list[Emulated]) -> list[Emulated]:
    """Runs an equation as it was traced."""
    name, primitive = equation.primitive.name, equation.primitive
    if name == "convert_element_type":
        return [_converted(equation, inputs[0])]
    arrays = [
        x.value.to(traced_dtype(a)) if eligible(traced_dtype(a)) and traced_dtype(a) is not None else x.array
        for x, a in zip(inputs, equation.invars, strict=True)
    ]
    results = as_traced(equation, *arrays)
    about = {} if name in ENTERED else facts_of(equation, [x.value for x in inputs])
    results = list(results) if primitive.multiple_results else [results]
    return [emulated(x, **about) for x in results]


def _converted(equation: Any, x: Emulated) -> Emulated:
    source, dtype = traced_dtype(equation.invars[0]), equation.params["new_dtype"]
    if eligible(source) and eligible(dtype):
        if dtype == FLOAT32:
            return Emulated(dataclasses.replace(x.value, casts={}), False if source in HALVES else x.half)
        return Emulated(dataclasses.replace(x.value, array=rounded(x.value.to(FLOAT32), dtype), casts={}), True)
    (result,) = [lax.convert_element_type_p.bind(on_device(x.array), **equation.params)]
    if source == jnp.bool_:
        return emulated(result, weak=True, bounds=(0.0, 1.0))
    return emulated(result, weak=x.value.weak, bounds=result_bounds(equation, [x.value.bounds]))


def _with_custom_derivative(emulation: "Emulation", equation: Any, inputs: list[Emulated]) -> list[Emulated] | None:
    """Runs a function with a custom derivative as one operation, which is half if all its operations are."""
    floats = [x for x, a in zip(inputs, equation.invars, strict=True) if eligible(traced_dtype(a))]
    strong = [x for x in floats if not x.value.weak]
    met: Bit = equation.primitive.name == "custom_vjp_call"  # it has a product, whose operands become half
    if met and not multiplies(equation.params["call_jaxpr"]):
        return None
    for x in strong:
        met = either(met, x.half)
    addresses = tuple(dict.fromkeys(_addresses(emulation.region, equation.params["call_jaxpr"])))
    if met is False or not addresses or emulation.region.forced == "float32":
        return None
    active = both(emulation.flags(addresses, emulation.region.callers), met)
    arrays = [
        on_device(x.value.to(traced_dtype(a)) if eligible(traced_dtype(a)) else x.array)
        for x, a in zip(inputs, equation.invars, strict=True)
    ]
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


def _remat(emulation: "Emulation", equation: Any, inputs: list[Emulated]) -> Sequence[Emulated] | None:
    policy = equation.params["policy"]
    if isinstance(policy, OpaqueCall):
        return _opaque(emulation, policy, inputs, [on_device(x.array) for x in inputs])
    return IN_JAX["remat2"](emulation, equation, inputs)


def _opaque(
    emulation: "Emulation", policy: OpaqueCall, inputs: Sequence[Emulated], arrays: Sequence[Any]
) -> list[Emulated]:
    """Runs a function that stores in the dtypes of its arguments and accumulates in float32."""
    met = functools.reduce(either, [x.half for x in inputs], False)
    results = jax.tree.leaves(policy.run(*arrays))
    return [emulated(rounded(x, emulation.region.half, met), met) for x in results]


@dataclasses.dataclass(frozen=True)
class Emulation(Reading[Emulated]):
    """A program as autocast would run it, in float32.

    Attributes:
      region: the autocast region, whose rules decide which operations may be half.
      flags: returns whether an operation is half.
      operation: runs an operation.
      steps: the equations of the current program with the decisions on them, by identity.
    """

    region: Region
    flags: Flags
    operation: Run
    steps: Mapping[int, Step] = dataclasses.field(default_factory=dict)

    table: ClassVar[Mapping[str, Enter]] = {
        **IN_JAX,
        "remat2": _remat,
        "custom_jvp_call": _with_custom_derivative,
        "custom_vjp_call": _with_custom_derivative,
    }

    def prepared(self, jaxpr: Any) -> "Emulation":
        """Returns the emulation with the decisions that do not depend on values."""
        steps = {id(step.equation): step for step in steps_of(self.region, jaxpr)}
        return dataclasses.replace(self, steps=steps)

    def within(self, equation: Any) -> "Emulation":
        """Returns the emulation for the bodies of an equation."""
        step = self.steps[id(equation)]
        forced = step.rule if step.rule in ("lower", "float32") else self.region.forced
        region = self.region.within(equation, step.scope)
        return dataclasses.replace(self, region=dataclasses.replace(region, forced=forced, constants={}))

    def enter(self, equation: Any, inputs: list[Emulated]) -> Sequence[Emulated] | None:
        """Runs bodies, but for those that autocast keeps as they were traced."""
        return None if self.steps[id(equation)].rule == "keep" else super().enter(equation, inputs)

    def bind(self, equation: Any, inputs: list[Emulated]) -> Sequence[Emulated]:
        """Runs an operation, with rounding if its flag is set."""
        if equation.primitive.name in ENTERED:
            return _kept(equation, inputs)
        values = [x.value for x in inputs]
        step = settle(self.region, self.steps[id(equation)], values)
        if step.rule == "keep" or equation.primitive.name == "convert_element_type":
            outputs = _kept(equation, inputs)
        else:
            outputs = _computed(self, step, inputs)
        note_integers(equation, values, [x.value for x in outputs])
        return outputs

    def constant(self, array: Any) -> Emulated:
        """Returns a constant."""
        return Emulated(self.region.constant(array))

    def literal(self, atom: Any) -> Emulated:
        """Returns a literal."""
        return Emulated(literal(atom))

    def array(self, value: Emulated) -> Any:
        """Returns the array."""
        return value.array

    def mapped(self, function: Callable[..., Any], *values: Emulated) -> Emulated:
        """Returns a value with another array."""
        arrays = (on_device(x.array) for x in values)
        return Emulated(dataclasses.replace(values[0].value, array=function(*arrays), casts={}), values[0].half)

    def packed(self, value: Emulated) -> Any:
        """Returns array and bit."""
        return value.array, jnp.asarray(value.half)

    def unpacked(self, arrays: Any) -> Emulated:
        """Returns the value of array and bit."""
        return emulated(*arrays)

    def spec(self, spec: Any) -> Any:
        """Returns how array and bit are sharded."""
        return spec, P()

    def operand(self, array: Any, outer: Emulated) -> Emulated:
        """Returns an operand, half if it is outside."""
        return emulated(array, outer.half, origin=argument(array).origin, integers=outer.value.integers)

    def row(self, array: Any, outer: Emulated) -> Emulated:
        """Returns a row, half if the array is."""
        return Emulated(Value(array, integers=outer.value.integers), outer.half)

    def stacked(self, arrays: Any) -> Emulated:
        """Returns stacked outputs, half if all are."""
        array, bits = arrays
        return emulated(array, jnp.all(bits))

    def inside(self, value: Emulated) -> Emulated:
        """Returns a value for the body of a loop."""
        return Emulated(value.value.inside(), value.half)

    def start(self, program: Any, init: list[Emulated], atoms: Sequence[Any], operands: Any) -> list[Emulated]:
        """Returns carried values in float32."""
        return [
            Emulated(
                Value(jnp.asarray(x.value.to(FLOAT32)) if eligible(traced_dtype(a)) else on_device(x.array)),
                False if x.value.weak else x.half,
            )
            for x, a in zip(init, atoms, strict=True)
        ]

    def following(self, new: Emulated, old: Emulated) -> Emulated:
        """Returns the next carried value: it is half only if it stays half."""
        array = new.value.to(old.array.dtype) if eligible(old.array.dtype) else new.array
        return Emulated(Value(array), both(old.half, new.half))


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

    def rounding(
        run: Callable[..., Any], arrays: Sequence[Any], active: Bit, addresses: tuple[str, ...], *, wide: bool
    ) -> list[Any]:
        del addresses
        return rounded_operation(run, arrays, half, active, wide=wide)

    @functools.wraps(fn)
    def with_emulation(*args: Args.args, **kwargs: Args.kwargs) -> Result:
        def by_flags(jaxpr: ClosedJaxpr, arrays: list[Any]) -> list[Any]:
            emulation = Emulation(Region(half, rules), flags, run or rounding)
            return [on_device(x.array) for x in emulation.evaluate(jaxpr, list(map(_argument, arrays)))]

        return run_traced(by_flags, fn, args, kwargs)

    return with_emulation
