"""Runs a traced function with each operation in the precision that a table of rules gives it.

The function is traced with float32 in place of half inputs, so that literals are not rounded. `decisions` first
makes those that depend on the program only. Then the equations run one by one on the actual values: `settle` chooses
the dtypes of the operands, and `binding` binds the primitive to them. Values computed only from literals are
weak: they take the dtype of the other operand, as Python numbers do.
"""

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend.core as jex
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal, Var
from jax.extend.source_info_util import user_context

from jmp_train.policies.autocasting.binding import bound, saved
from jmp_train.policies.autocasting.decisions import Step, is_entered, settle, steps_of
from jmp_train.policies.autocasting.primitives import ARITHMETIC, opened
from jmp_train.policies.autocasting.region import Region
from jmp_train.policies.autocasting.source_lines import source_of
from jmp_train.policies.autocasting.values import Value, argument, literal, on_device


def interpret(region: Region, jaxpr: ClosedJaxpr, values: Sequence[Value]) -> list[Value]:
    """Runs a jaxpr, closed or open, by the rules of a region."""
    program = opened(jaxpr)
    constants = map(region.constant, getattr(jaxpr, "consts", ()))
    environment: dict[Any, Value] = dict(zip(program.constvars, constants, strict=True))
    environment.update(zip(program.invars, values, strict=True))

    def read(atom: Var | Literal) -> Value:
        return literal(atom) if isinstance(atom, jex.Literal) else environment[atom]

    for scope, steps in itertools.groupby(steps_of(region, program), key=lambda step: step.scope):
        with jax.named_scope(scope) if scope else contextlib.nullcontext():
            for step in steps:
                equation = step.equation
                inputs = [read(atom) for atom in equation.invars]
                if not step.is_added:  # the gradient stores the result itself
                    inputs = [dataclasses.replace(x, addends=None) if x.addends else x for x in inputs]
                with _at_line_of(equation):
                    outputs = _entered(region, step, inputs) if equation.primitive.name in region.handlers else None
                    if outputs is None:
                        step = settle(region, step, inputs)
                        outputs = bound(region, step, inputs)
                        if region.log is not None:
                            _note(region, step, inputs, outputs)
                        if equation.primitive.name in ARITHMETIC:
                            outputs = [saved(region, step, outputs[0], inputs)]
                environment.update(zip(equation.outvars, outputs, strict=True))
    return [read(atom) for atom in program.outvars]


def _at_line_of(equation: JaxprEqn) -> contextlib.AbstractContextManager[Any]:
    """Makes compilers and profilers name the user's line: the equation's, or else the call of the region."""
    if not source_of([equation]):
        return contextlib.nullcontext()
    return user_context(equation.source_info.traceback)


def _entered(region: Region, step: Step, inputs: list[Value]) -> list[Value] | None:
    """Returns the results of an equation whose program runs by rules; None if it is bound as it was traced."""
    if not is_entered(region, step, inputs):
        return None
    inner = region.within(step.equation, step.scope, step.place)
    if step.rule in ("lower", "float32", "fp8"):
        inner = dataclasses.replace(inner, forced=step.rule)
    return region.handlers[step.equation.primitive.name](inner, step.equation, inputs)


def _note(region: Region, step: Step, inputs: list[Value], outputs: list[Value]) -> None:
    """Records the decision on an operation for `explain_autocast`."""
    used = [x.dtype if d is None else d for x, d in zip(inputs, step.dtypes, strict=True)]
    used = [region.recipe.forward_dtype for _ in inputs] if step.rule == "fp8" else used
    region.note(step.equation, step.scope, str(step.rule), step.reason, used, outputs)


def inlined(region: Region, equation: JaxprEqn, inputs: list[Value]) -> list[Value]:
    """Runs the body of a call by the rules of a region."""
    return interpret(region, equation.params["call_jaxpr"], inputs)


def on_arrays(region: Region, jaxpr: ClosedJaxpr, inputs: Sequence[Value] | None = None) -> Callable[..., list[Any]]:
    """Returns a function of arrays that runs a jaxpr by the rules of a region; `inputs` may describe the arrays."""
    integers = None if inputs is None else [value.integers for value in inputs]

    def run(*arrays: jax.Array) -> list[Any]:
        values = [argument(array) for array in arrays]
        for value, known in zip(values, integers or (), strict=bool(integers)):
            value.integers = known
        outputs = interpret(region.body(), jaxpr, values)
        return [on_device(value.array) for value in outputs]

    return run
