"""Emulates autocast: runs a traced function in float32 with rounding, with one run-time flag per operation.

Autocast decides the rule of each operation. If the rule allows half precision, a flag decides at run time whether the
operation rounds as the half type does. One compiled program can thus try all choices.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, Protocol, TypeVar

import jax
import jax.extend.core as jex
import jax.numpy as jnp
from jax import lax
from jax.extend.core import ClosedJaxpr, JaxprEqn
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

from jmp_train.policies.autocasting.decisions import Step, integers_fit, literals_fit, settle, steps_of
from jmp_train.policies.autocasting.emulating.rounded_operations import Bit, both, either, rounded, rounded_operation
from jmp_train.policies.autocasting.higher_order import ENTERED, scan_counts
from jmp_train.policies.autocasting.interpreter import as_traced
from jmp_train.policies.autocasting.literal_bounds import result_bounds
from jmp_train.policies.autocasting.opaque import OpaqueCall
from jmp_train.policies.autocasting.primitives import (
    ARITHMETIC,
    PLACEMENT,
    PRODUCTS,
    TRANSCENDENTAL,
    in_float32,
    multiplies,
    opened,
)
from jmp_train.policies.autocasting.region import Region, join
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
    on_device,
    traced_dtype,
)
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


@dataclasses.dataclass(frozen=True)
class Emulation:
    """The settings of an emulated program.

    Attributes:
      region: the autocast region, whose rules decide which operations may be half.
      flags: returns whether an operation is half.
      run: runs an operation.
    """

    region: Region
    flags: Flags
    run: Run

    def within(self, equation: JaxprEqn, scope: str, rule: str | None) -> "Emulation":
        """Returns the emulation for the body of an equation in a scope."""
        region = self.region.within(equation, scope)
        forced = rule if rule in ("lower", "float32") else region.forced
        return dataclasses.replace(self, region=dataclasses.replace(region, forced=forced, constants={}))  # pyright: ignore[reportArgumentType]


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


def emulate(emulation: Emulation, jaxpr: Any, inputs: Sequence[Emulated]) -> list[Emulated]:
    """Returns the results of a jaxpr, emulated.

    Args:
      emulation: the settings of the program.
      jaxpr: a jaxpr, with its constants if it has any.
      inputs: its arguments.
    """
    region, program = emulation.region, opened(jaxpr)
    environment: dict[Any, Emulated] = {}
    for variable, constant in zip(program.constvars, getattr(jaxpr, "consts", ()), strict=True):
        environment[variable] = Emulated(region.constant(constant))
    environment.update(zip(program.invars, inputs, strict=True))

    def read(atom: Any) -> Emulated:
        return Emulated(literal(atom)) if isinstance(atom, jex.Literal) else environment[atom]

    for step in steps_of(region, program):
        outputs = _results(emulation, step, [read(atom) for atom in step.equation.invars])
        environment.update(zip(step.equation.outvars, outputs, strict=True))
    return [read(atom) for atom in program.outvars]


def _results(emulation: Emulation, step: Step, inputs: list[Emulated]) -> list[Emulated]:
    equation, name = step.equation, step.equation.primitive.name
    if step.rule != "keep" and name in _PROGRAMS:
        outputs = _PROGRAMS[name](emulation.within(equation, step.scope, step.rule), equation, inputs)
        if outputs is not None:
            return outputs
    if name in ENTERED:
        return _kept(equation, inputs)
    values = [x.value for x in inputs]
    step = settle(emulation.region, step, values)
    if step.rule == "keep" or name == "convert_element_type":
        outputs = _kept(equation, inputs)
    else:
        outputs = _computed(emulation, step, inputs)
    note_integers(equation, values, [x.value for x in outputs])
    return outputs


def _active(emulation: Emulation, step: Step, inputs: list[Emulated]) -> Bit:
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


def _computed(emulation: Emulation, step: Step, inputs: list[Emulated]) -> list[Emulated]:
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
        results = emulation.run(lambda *x: primitive.bind(*x, **params), arrays, active, address, wide=wide)
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


def _inlined(emulation: Emulation, equation: Any, inputs: list[Emulated]) -> list[Emulated]:
    params = equation.params
    return emulate(emulation, params["call_jaxpr"] if "call_jaxpr" in params else params["jaxpr"], inputs)


def _with_custom_derivative(emulation: Emulation, equation: Any, inputs: list[Emulated]) -> list[Emulated] | None:
    """Runs a function with a custom derivative as one operation, which is half if all its operations are."""
    floats = [x for x, a in zip(inputs, equation.invars, strict=True) if eligible(traced_dtype(a))]
    strong = [x for x in floats if not x.value.weak]
    met: Bit = equation.primitive.name == "custom_vjp_call"  # it has a product, whose operands become half
    if met and not multiplies(equation.params["call_jaxpr"]):
        return None
    for x in strong:
        met = either(met, x.half)
    addresses = tuple(dict.fromkeys(_addresses(emulation, equation.params["call_jaxpr"])))
    if met is False or not addresses or emulation.region.forced == "float32":
        return None
    active = both(emulation.flags(addresses, emulation.region.callers), met)
    arrays = [
        on_device(x.value.to(traced_dtype(a)) if eligible(traced_dtype(a)) else x.array)
        for x, a in zip(inputs, equation.invars, strict=True)
    ]
    results = emulation.run(lambda *x: as_traced(equation, *x), arrays, active, addresses, wide=False)
    return [emulated(x, active) for x in results]


def _addresses(emulation: Emulation, jaxpr: Any) -> list[str]:
    """Returns the addresses of the operations in a program that may run in half precision."""
    region, found = emulation.region, []
    for equation in opened(jaxpr).eqns:
        scope = str(equation.source_info.name_stack)
        body = equation.params.get("call_jaxpr", equation.params.get("jaxpr"))
        if equation.primitive.name in ENTERED and body is not None:
            found += _addresses(emulation.within(equation, scope, None), body)
        elif equation.primitive.name not in ENTERED and region.decide(equation, scope)[0] in _COMPUTE:
            found.append(address_of((*region.callers, equation), join(region.path, scope)))
    return found


def _scan(emulation: Emulation, equation: Any, inputs: list[Emulated]) -> list[Emulated]:
    params, jaxpr = equation.params, equation.params["jaxpr"]
    emulation = dataclasses.replace(
        emulation, region=dataclasses.replace(emulation.region, repeats=emulation.region.repeats * params["length"])
    )
    n_consts, n_carry = scan_counts(params)
    consts, init, xs = inputs[:n_consts], inputs[n_consts:][:n_carry], inputs[n_consts + n_carry :]
    start, bits = _carried(init, equation.invars[n_consts:][:n_carry])

    def body(carry: Any, x: Any) -> Any:
        arrays, bits = carry
        values = [*map(_inside, consts), *map(emulated, arrays, bits)]
        values += [Emulated(Value(a, integers=v.value.integers), v.half) for a, v in zip(x, xs, strict=True)]
        outputs = emulate(emulation, jaxpr, values)
        ys = [(y.array, jnp.asarray(y.half)) for y in outputs[n_carry:]]
        return _next(arrays, bits, outputs[:n_carry]), ys

    options = {name: params[name] for name in ("length", "reverse", "unroll")}
    (arrays, bits), ys = lax.scan(body, (start, bits), [x.array for x in xs], **options)
    return [*map(emulated, arrays, bits), *(emulated(y, jnp.all(bit)) for y, bit in ys)]


def _carried(init: Sequence[Emulated], atoms: Sequence[Any]) -> tuple[list[Any], list[jax.Array]]:
    """Returns the initial carry of a loop: arrays in float32, and a bit for each that is set if it is half."""
    arrays = [
        jnp.asarray(x.value.to(FLOAT32)) if eligible(traced_dtype(a)) else on_device(x.array)
        for x, a in zip(init, atoms, strict=True)
    ]
    return arrays, [jnp.asarray(False if x.value.weak else x.half) for x in init]


def _next(arrays: Sequence[Any], bits: Sequence[Any], outputs: Sequence[Emulated]) -> tuple[list[Any], list[Any]]:
    """Returns the carry of a loop's next iteration: a value is half only if it stays half."""
    new = [x.value.to(a.dtype) if eligible(a.dtype) else x.array for x, a in zip(outputs, arrays, strict=True)]
    return new, [jnp.asarray(both(bit, x.half)) for bit, x in zip(bits, outputs, strict=True)]


def _inside(x: Emulated) -> Emulated:
    return Emulated(x.value.inside(), x.half)


def _while(emulation: Emulation, equation: Any, inputs: list[Emulated]) -> list[Emulated] | None:
    params = equation.params
    if getattr(params["cond_jaxpr"], "jaxpr", params["cond_jaxpr"]).outvars[0].aval.shape:
        return None
    n_cond, n_body = params["cond_nconsts"], params["body_nconsts"]
    cond_consts, body_consts = inputs[:n_cond], inputs[n_cond:][:n_body]
    init = inputs[n_cond + n_body :]
    start, bits = _carried(init, equation.invars[n_cond + n_body :])

    def go_on(carry: Any) -> Any:
        values = [*map(_inside, cond_consts), *map(emulated, *carry)]
        return emulate(emulation, params["cond_jaxpr"], values)[0].array

    def body(carry: Any) -> Any:
        arrays, bits = carry
        values = [*map(_inside, body_consts), *map(emulated, arrays, bits)]
        return _next(arrays, bits, emulate(emulation, params["body_jaxpr"], values))

    arrays, bits = lax.while_loop(go_on, body, (start, bits))
    return list(map(emulated, arrays, bits))


def _cond(emulation: Emulation, equation: Any, inputs: list[Emulated]) -> list[Emulated] | None:
    if equation.params.get("branches_platforms") is not None:
        return None
    index, *operands = inputs
    call, arrays = _on_arrays(emulation, operands)
    branches = [lambda *arrays, branch=branch: call(branch, *arrays) for branch in equation.params["branches"]]
    return [emulated(x, bit) for x, bit in lax.switch(index.array, branches, *arrays)]


def _on_arrays(emulation: Emulation, inputs: Sequence[Emulated]) -> tuple[Callable[..., Any], list[Any]]:
    """Returns a function that runs a program on arrays and returns pairs of array and bit, and the input arrays."""

    def call(jaxpr: Any, *arrays: jax.Array) -> list[Any]:
        values = [
            emulated(a, x.half, origin=argument(a).origin, integers=x.value.integers)
            for a, x in zip(arrays, inputs, strict=True)
        ]
        outputs = emulate(emulation, jaxpr, values)
        return [(on_device(x.array), jnp.asarray(x.half)) for x in outputs]

    return call, [on_device(x.array) for x in inputs]


def _remat(emulation: Emulation, equation: Any, inputs: list[Emulated]) -> list[Emulated]:
    params = equation.params
    call, arrays = _on_arrays(emulation, inputs)
    if isinstance(params["policy"], OpaqueCall):
        return _opaque(emulation, params["policy"], inputs, arrays)
    body = jax.checkpoint(
        lambda *arrays: call(params["jaxpr"], *arrays), prevent_cse=params["prevent_cse"], policy=params["policy"]
    )
    return [emulated(x, bit) for x, bit in body(*arrays)]


def _opaque(
    emulation: Emulation, policy: OpaqueCall, inputs: Sequence[Emulated], arrays: Sequence[Any]
) -> list[Emulated]:
    """Runs a function that stores in the dtypes of its arguments and accumulates in float32."""
    met = functools.reduce(either, [x.half for x in inputs], False)
    results = jax.tree.leaves(policy.run(*arrays))
    return [emulated(rounded(x, emulation.region.half, met), met) for x in results]


def _shard_map(emulation: Emulation, equation: Any, inputs: list[Emulated]) -> list[Emulated]:
    params = equation.params
    call, arrays = _on_arrays(emulation, inputs)
    run = jax.shard_map(
        functools.partial(call, params["jaxpr"]),
        mesh=params["mesh"],
        in_specs=tuple(params["in_specs"]),
        out_specs=[(spec, P()) for spec in params["out_specs"]],
        axis_names=frozenset(params.get("manual_axes") or params["newly_manual_axes"]),
        check_vma=params["check_vma"],
    )
    return [emulated(x, bit) for x, bit in run(*arrays)]


_PROGRAMS: dict[str, Callable[[Emulation, Any, list[Emulated]], list[Emulated] | None]] = {
    **dict.fromkeys(("jit", "pjit", "closed_call"), _inlined),
    "remat2": _remat,
    "scan": _scan,
    "while": _while,
    "cond": _cond,
    "custom_jvp_call": _with_custom_derivative,
    "custom_vjp_call": _with_custom_derivative,
    "shard_map": _shard_map,
}


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
            emulation = Emulation(Region(half, rules, ENTERED), flags, run or rounding)
            return [on_device(x.array) for x in emulate(emulation, jaxpr, list(map(_argument, arrays)))]

        return run_traced(by_flags, fn, args, kwargs)

    return with_emulation
