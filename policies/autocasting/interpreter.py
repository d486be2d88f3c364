"""Runs a traced function with each operation in the precision that a table of rules gives it.

The function is traced with float32 in place of half inputs, so that literals are not rounded. `decisions` first
makes those that depend on the program only. Then the equations run one by one on the actual values: `settle` chooses
the dtypes of the operands, and the primitive is bound to them. Values computed only from literals are weak: they
take the dtype of the other operand, as Python numbers do.

Primitives that hold programs have handlers: jit, loops, branches, remat, shard_map. Each takes the reading of the
bodies, the equation and its inputs, and returns the results. It returns None if autocast cannot enter the equation,
which is then bound as it was traced.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import JaxprEqn

from jmp_train.policies.autocasting.bound_operations import chosen_at_run_time, computed, product_in_8_bits
from jmp_train.policies.autocasting.custom_derivatives import custom_jvp, custom_vjp
from jmp_train.policies.autocasting.decisions import RuledEquation, is_entered, steps_of
from jmp_train.policies.autocasting.opaque import Contract, OpaqueCall
from jmp_train.policies.autocasting.primitives import CALLS, ENTERED, body_of, results_inside
from jmp_train.policies.autocasting.readers import noting_complements, readers_of
from jmp_train.policies.autocasting.region import Region, in_8_bits
from jmp_train.policies.autocasting.source_lines import at_line_of, user_line_of
from jmp_train.policies.autocasting.values import (
    FLOAT32,
    HALVES,
    Value,
    argument,
    called,
    checkpointed,
    eligible,
    literal,
    traced_dtype,
    values_of,
)
from jmp_train.policies.programs import IN_JAX, Enter, Reading, as_jax_array, programs_in, walk


def _is_half(array: Any) -> bool:
    """Returns whether an array or value is half; the dtype of a `jax.Ref` cannot change."""
    return array.dtype in HALVES and not isinstance(getattr(array, "array", array), jax.Ref)


def _cast_inside(value: Value, array: jax.Array) -> Value:
    """Returns a half constant of a loop, cast in each iteration from an array in float32."""
    source = None if value.source is None else array
    return dataclasses.replace(value, array=array.astype(value.dtype), casts={}, source=source, made=None)


def _remat(reading: Any, equation: JaxprEqn, inputs: list[Value]) -> Sequence[Value]:
    params, arrays = equation.params, [value.array for value in inputs]
    if isinstance(params["policy"], OpaqueCall):
        return _opaque(reading, equation, inputs)

    def run(*arrays: Any, sources: Sequence[Any] = (None,) * len(inputs)) -> list[Any]:
        operands = map(reading.operand, arrays, inputs)
        values = [dataclasses.replace(x, source=source) for x, source in zip(operands, sources, strict=True)]
        return [as_jax_array(value.array) for value in reading.body().evaluate(params["jaxpr"], values)]

    options = {"prevent_cse": params["prevent_cse"], "policy": params["policy"]}
    is_free = reading.region.delayed is None and reading.region.key is None  # which no derivative may hold
    sources = [x.source if is_free else None for x in inputs]
    return values_of(checkpointed(run, arrays, sources, **options))


def _opaque(reading: Any, equation: Any, inputs: list[Value]) -> list[Value]:
    """Calls the function itself, or multiplies in 8 bits if it is a matrix product with the rule "fp8"."""
    region, call = reading.region, equation.params["policy"]
    if call.contract is not None:
        product = _product_of(equation, call.contract)
        rule, reason = region.decide(product, "")
        if rule == "fp8":
            dtype = equation.outvars[0].aval.dtype
            numbers = call.contract, ((), ())
            few = functools.partial(product_in_8_bits, region, region.place, inputs, numbers, dtype)
            outputs = [chosen_at_run_time(region, product, "", few, lambda: _called(call, inputs)[0])]
            region.note(product, "", rule, reason, (region.recipe.forward_dtype,) * 2, outputs)
            return outputs
    return _called(call, inputs)


def _called(call: OpaqueCall, inputs: list[Value]) -> list[Value]:
    return values_of(called(call.run, [as_jax_array(x.array) for x in inputs], [x.source for x in inputs]))


def _product_of(equation: Any, contract: Contract) -> JaxprEqn:
    """Returns the matrix product of an opaque call as an equation, to look up its rule."""
    operands = [jax.ShapeDtypeStruct(x.aval.shape, x.aval.dtype) for x in equation.invars]
    traced = jax.make_jaxpr(lambda x, y: lax.dot_general(x, y, (contract, ((), ()))))(*operands)
    return traced.eqns[0].replace(source_info=equation.source_info)


HANDLERS: Mapping[str, Enter] = {
    **{name: enter for name, enter in IN_JAX.items() if name in ENTERED},
    "remat2": _remat,
    "custom_jvp_call": custom_jvp,
    "custom_vjp_call": custom_vjp,
}


@dataclasses.dataclass(frozen=True)
class ByRules(Reading[Value]):
    """A program and the decisions of autocast on it.

    Attributes:
      region: the region.
      steps: the equations of the current program with the decisions on them, by identity.
    """

    region: Region
    steps: Mapping[int, RuledEquation] = dataclasses.field(default_factory=dict, kw_only=True)

    def constant(self, array: Any) -> Value:
        """Returns a constant of any body."""
        return self.region.constant(array)

    def literal(self, atom: Any) -> Value:
        """Returns a literal, which is weak."""
        return literal(atom)

    def array(self, value: Value) -> Any:
        """Returns the array."""
        return value.array

    def inside(self, value: Value) -> Value:
        """Returns a value for a body, which makes its own casts."""
        return value.inside()


@dataclasses.dataclass(frozen=True)
class Autocast(ByRules):
    """A program under autocast.

    Attributes:
      read_again: the variables of the current program that are read more than once.
      splits_key: False within a `shard_map` that knows what varies over devices; a product then tells them apart.
    """

    table = HANDLERS
    read_again: frozenset[Any] = frozenset()
    splits_key: bool = True

    def prepared(self, jaxpr: Any) -> "Autocast":
        """Returns the reading with the decisions that do not depend on values."""
        region = noting_complements(self.region, jaxpr)
        return Autocast(region, readers_of(region, jaxpr).read_again, steps=steps_of(region, jaxpr))

    def written(self, variable: Any, value: Value) -> Value:
        """Marks the value of a variable that is read more than once."""
        if variable in self.read_again:
            value.shared = True
        return value

    def run(self, equation: Any, inputs: list[Value]) -> Sequence[Value]:
        """Runs an equation in the scope that it was traced in."""
        step = self.steps[id(equation)]
        if not step.is_added:  # the gradient stores the result itself
            inputs = [dataclasses.replace(x, addends=None) if x.addends else x for x in inputs]
        scope = jax.named_scope(step.scope) if step.scope else contextlib.nullcontext()
        with scope, at_line_of(equation):
            try:
                return super().run(equation, inputs)
            except TypeError as error:
                if not self._lacks_forward_mode(equation, error):
                    raise
                raise TypeError(
                    f"{user_line_of((*self.region.callers, equation))}: products in 8 or 4 bits have no derivatives in "
                    "forward mode, as of jax.jvp; take these within the function that autocast gets, or use another "
                    "rule than 'fp8'"
                ) from error

    def _lacks_forward_mode(self, equation: Any, error: TypeError) -> bool:
        """Returns whether products in 8 bits caused jax's error of functions without forward-mode derivatives."""
        if "can't apply forward-mode" not in str(error) or not self.region.takes_8_bits:
            return False
        within = (place.equation for body in programs_in(equation) for place in walk(body))
        return any(in_8_bits(x, self.region.recipe) for x in (equation, *within))

    def enter(self, equation: Any, inputs: list[Value]) -> Sequence[Value] | None:
        """Runs the programs of an equation by the rules; returns None if it is bound as it was traced."""
        return super().enter(equation, inputs) if is_entered(self.region, self.steps[id(equation)], inputs) else None

    def within(self, equation: Any) -> "Autocast":
        """Returns the reading for the bodies of an equation."""
        region, step, name = self.region, self.steps[id(equation)], equation.primitive.name
        inner = region.within(equation, step.scope, step.place)
        if step.rule in ("lower", "float32", "fp8"):
            inner = dataclasses.replace(inner, forced=region.word_of(equation)[0])
        if step.in_float32 and name in CALLS and len(equation.outvars) == 1:
            results = results_inside(body_of(equation), equation, equation.outvars)
            inner = dataclasses.replace(inner, read_in_float32=results)
        if name == "while":  # it has no gradient, so its scales have none
            inner = dataclasses.replace(inner, delayed=None)
        return Autocast(inner, splits_key=not equation.params.get("check_vma", False))

    def bind(self, equation: Any, inputs: list[Value]) -> Sequence[Value]:
        """Runs an operation by its rule."""
        return computed(self.region, self.steps[id(equation)], inputs)

    def trial(self) -> "Autocast":
        """Returns the reading without a log and without scales."""
        return self.changed(log=None, delayed=None)

    def changed(self, **settings: Any) -> "Autocast":
        """Returns the reading of a program with other settings of the region."""
        return Autocast(dataclasses.replace(self.region, **settings))

    def unpacked(self, arrays: Any) -> Value:
        """Returns an array that is a result of a body."""
        return Value(arrays)

    def body(self, rows: Any = (), count: int = 0, state: Any = (), running: Any = None) -> "Autocast":
        """Returns the reading for a body, whose casts stay there; it gets scales of products in 8 bits, or a key."""
        del state, running
        region = self.region.body()
        if count and region.delayed:
            region = dataclasses.replace(region, delayed=region.delayed.rows(rows, count))
        elif isinstance(rows, jax.Array):
            region = dataclasses.replace(region, key=rows)
        return Autocast(region)

    def rows(self, count: int) -> Any:
        """Returns the scales of the products in 8 bits within, or one random key for each run."""
        if self.region.key is not None:
            return jax.random.split(self.region.key, count) if self.splits_key else ()
        return self.region.delayed.within(self.region.place) if self.region.delayed else ()

    def operand(self, array: Any, outer: Value) -> Value:
        """Returns an operand of a body as an argument."""
        value = argument(array)
        value.integers, value.given = outer.integers, outer.given
        return value

    def row(self, array: Any, outer: Value) -> Value:
        """Returns a row."""
        return Value(array, integers=outer.integers, given=outer.given)

    def constants(self, values: Sequence[Value]) -> Callable[[], list[Value]]:
        """Returns what casts half constants of a scan in each iteration.

        Their gradients are added over the iterations: in half precision, these sums would stagnate or overflow.
        """
        arrays = [value.to(FLOAT32) if _is_half(value) else None for value in values]
        pairs = list(zip(values, arrays, strict=True))
        return lambda: [value.inside() if array is None else _cast_inside(value, array) for value, array in pairs]

    def start(self, program: Any, init: list[Value], atoms: Sequence[Any], operands: Any) -> list[Value]:
        """Returns carried values in dtypes that the body preserves: half only if they stay half."""
        arrays = [
            jnp.asarray(value.to(traced_dtype(atom)) if value.weak else value.array)
            if eligible(traced_dtype(atom))
            else value.array
            for value, atom in zip(init, atoms, strict=True)
        ]
        while operands is not None and any(map(_is_half, arrays)):
            found = self._result_dtypes(program, operands(list(map(Value, arrays))))
            changed = [_is_half(x) and dtype != x.dtype for x, dtype in zip(arrays, found, strict=False)]
            if not any(changed):
                break
            pairs = zip(arrays, changed, strict=True)
            arrays = [lax.convert_element_type(x, FLOAT32) if upcast else x for x, upcast in pairs]
        return list(map(Value, arrays))

    def following(self, new: Value, old: Value) -> Value:
        """Returns the next carried value, in the dtype of the one before."""
        return Value(new.to(old.dtype))

    def branch(self, number: int) -> "Autocast":
        """Returns the reading for a branch, which is a place of its own."""
        return self.changed(place=f"{self.region.place}:{number}")

    def agreed(self, branches: Sequence[Any], operands: list[Value]) -> Callable[[list[Value]], list[Value]]:
        """Returns what casts the results of branches to common dtypes."""
        found = [self._result_dtypes(branch, operands) for branch in branches]
        dtypes = [outs[0] if len(set(outs)) == 1 else FLOAT32 for outs in zip(*found, strict=True)]

        def agree(results: list[Value]) -> list[Value]:
            pairs = zip(map(as_jax_array, (x.array for x in results)), dtypes, strict=True)
            return [Value(x if x.dtype == dtype else lax.convert_element_type(x, dtype)) for x, dtype in pairs]

        return agree

    def _result_dtypes(self, program: Any, values: Sequence[Value]) -> Sequence[Any]:
        """Returns the dtypes of a program's results; traces it once for values of the same kind."""

        def find() -> list[Any]:
            found: list[Any] = []

            def note() -> None:
                results = self.trial().body().evaluate(program, [v.inside() for v in values])
                found[:] = [value.dtype for value in results]

            jax.eval_shape(note)
            return found

        key = ("dtypes", self.region.settings, *(value.kind for value in values))
        return self.region.remembered(key, program, find)
