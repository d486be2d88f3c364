"""Traced programs: those that equations hold, a walk through all of them, and readings.

A reading is the kind of value that a run of a program computes with, and how an equation changes such values. What jax
calls the parameters of calls and loops stands here, and in the modules that run them.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Generic, Self, TypeVar

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
from jax import lax

# What holds a program that runs once, with the parameter that holds it.
RUN_ONCE = {
    **dict.fromkeys(("jit", "pjit", "remat2", "checkpoint"), "jaxpr"),
    **dict.fromkeys(("closed_call", "core_call", "custom_jvp_call", "custom_vjp_call"), "call_jaxpr"),
    "custom_vmap_call": "call",
}
_TRANSFORMATIONS = re.compile(r"\b(?:jvp|transpose|vmap|rematted_computation|checkpoint)\(|\)")


def opened(program: Any) -> Any:
    """Returns a program, closed or open, as an open jaxpr."""
    return getattr(program, "jaxpr", program)


def programs_in(equation: Any) -> list[Any]:
    """Returns the programs among the parameters of an equation, reducers included, as open jaxprs."""
    held = jax.tree.leaves(list(equation.params.values()))
    return [opened(x) for x in held if isinstance(x, jex.Jaxpr | jex.ClosedJaxpr)]


def bodies_of(equation: Any) -> list[Any]:
    """Returns the programs that an equation runs on arrays, each with its constants if it has any.

    The condition of a `while` loop is not among them.
    """
    name, params = equation.primitive.name, equation.params
    if name in RUN_ONCE:
        return [params[RUN_ONCE[name]]]
    match name:
        case "scan" | "shard_map":
            return [params["jaxpr"]]
        case "while":
            return [params["body_jaxpr"]]
        case "cond":
            return list(params["branches"])
    return []


def branches_of(equation: Any) -> Sequence[Any] | None:
    """Returns the programs of a `cond`; None if the platform selects among them."""
    return None if equation.params.get("branches_platforms") is not None else equation.params["branches"]


def on_this_platform(equation: Any) -> Any:
    """Returns an equation; of a `cond` by platform, with the branch of this one only."""
    platforms = equation.params.get("branches_platforms")
    if platforms is None:
        return equation
    branches = (equation.params["branches"][_branch_here(platforms, jnp.zeros(()).device)],)
    return equation.replace(params={**equation.params, "branches": branches, "branches_platforms": None})


@functools.cache
def _branch_here(platforms: tuple[Any, ...], device: Any) -> int:
    """Returns the number of the branch that runs on the default device, which `device` tells apart in the cache."""
    numbers = {name: functools.partial(jnp.int32, i) for i, names in enumerate(platforms) for name in names or ()}
    default = functools.partial(jnp.int32, len(platforms) - 1)
    return int(jax.jit(functools.partial(lax.platform_dependent, default=default, **numbers))())


def scan_counts(params: dict[str, Any]) -> tuple[int, int]:
    """Returns the numbers of constants and of carried values among a scan's operands, which come first."""
    if "ft_in" in params:  # jax 0.11 and later
        consts, carry, _ = params["ft_in"].unpack()
        return len(consts), len(carry)
    return params["num_consts"], params["num_carry"]


def manual_axes(params: dict[str, Any]) -> frozenset[str]:
    """Returns the axes of the mesh over which a `shard_map` maps, given its parameters."""
    return frozenset(params.get("manual_axes") or params["newly_manual_axes"])


def repeats_of(equation: Any) -> int:
    """Returns how many times an equation runs the programs that it holds, 1 if that is not known."""
    params = equation.params
    grid = getattr(params.get("grid_mapping"), "grid", ())  # of a Pallas kernel
    return params.get("length", 1) * math.prod(size for size in grid if isinstance(size, int))


def join(path: str, scope: str) -> str:
    """Returns a path joined with a scope, without the names of transformations."""
    scope = _TRANSFORMATIONS.sub("", scope)
    return f"{path}/{scope}" if path and scope else path or scope


@dataclasses.dataclass(frozen=True)
class Place:
    """An equation, and where it is in a program.

    Attributes:
      equation: the equation.
      callers: the equations in whose bodies it is, the outermost first.
      repeats: how many times the loops around it run it, as far as that is known.
    """

    equation: Any
    callers: tuple[Any, ...] = ()
    repeats: int = 1

    @property
    def equations(self) -> tuple[Any, ...]:
        """Its callers and the equation itself."""
        return (*self.callers, self.equation)

    @property
    def path(self) -> str:
        """The path of modules and scopes around it."""
        return functools.reduce(join, (str(e.source_info.name_stack) for e in self.equations), "")


def walk(
    program: Any,
    within: Callable[[Any], Iterable[Any]] = programs_in,
    callers: tuple[Any, ...] = (),
    repeats: int = 1,
) -> Iterator[Place]:
    """Yields the equations of a program and of the programs that they hold, each holder before what it holds.

    Args:
      program: a jaxpr, closed or open.
      within: returns the programs of an equation that are entered.
      callers: the equations around the program.
      repeats: how many times it runs.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> def power(x):
      ...     return jax.lax.fori_loop(0, 3, lambda i, y: jnp.sin(y), x)
      >>> [(p.equation.primitive.name, p.repeats) for p in walk(jax.make_jaxpr(power)(1.0))]
      [('scan', 1), ('add', 3), ('sin', 3)]
    """
    for equation in opened(program).eqns:
        yield Place(equation, callers, repeats)
        for inner in within(equation):
            yield from walk(inner, within, (*callers, equation), repeats * repeats_of(equation))


V = TypeVar("V")
Enter = Callable[[Any, Any, list[Any]], "Sequence[Any] | None"]
"""Runs an equation that holds programs by a reading: takes the reading for its bodies, the equation and its inputs.
Returns None if it is bound as it was traced."""


class Reading(Generic[V]):
    """The kind of value of a run of a program, and how equations change such values. By default, values are arrays.

    `table` runs the equations that hold programs: `INLINED`, `IN_JAX`, `IN_PYTHON` or `ABSTRACTLY`. A reading defines
    `bind` for all others, and for values that are more than arrays how these are taken apart.

    Attributes:
      table: by name of a primitive, what runs the programs that it holds.

    Example:
      >>> import jax
      >>> from jmp_train.policies.programs import IN_JAX, Reading
      >>> class Doubled(Reading):
      ...     table = IN_JAX
      ...     def bind(self, equation, inputs):
      ...         return [2 * x for x in super().bind(equation, inputs)]
      >>> program = jax.make_jaxpr(lambda x: jax.lax.fori_loop(0, 3, lambda i, y: y + i, x))(1)
      >>> [int(x) for x in Doubled().evaluate(program, [1])]
      [28]
    """

    table: ClassVar[Mapping[str, Enter]] = {}

    # A program
    def evaluate(self, program: Any, inputs: Sequence[V]) -> list[V]:
        """Returns the results of a program.

        Args:
          program: a jaxpr, with its constants if it has any.
          inputs: its arguments.
        """
        jaxpr, reading = opened(program), self.prepared(opened(program))
        given = (*map(reading.constant, _constants(program)), *inputs)
        variables = (*jaxpr.constvars, *jaxpr.invars)
        values: dict[Any, V] = dict(zip(variables, map(reading.written, variables, given), strict=True))

        def read(atom: Any) -> V:
            return reading.literal(atom) if isinstance(atom, jex.Literal) else values[atom]

        for equation, unread in zip(jaxpr.eqns, _last_reads(jaxpr), strict=True):
            outputs = reading.run(equation, [read(atom) for atom in equation.invars])
            values.update(zip(equation.outvars, map(reading.written, equation.outvars, outputs), strict=True))
            for variable in unread:
                del values[variable]  # frees its memory
        return [read(atom) for atom in jaxpr.outvars]

    def prepared(self, jaxpr: Any) -> Self:
        """Returns the reading for the equations of a program, with the facts that it needs about all of them."""
        del jaxpr
        return self

    def run(self, equation: Any, inputs: list[V]) -> Sequence[V]:
        """Returns the results of an equation."""
        outputs = self.enter(equation, inputs)
        return self.bind(equation, inputs) if outputs is None else outputs

    def enter(self, equation: Any, inputs: list[V]) -> Sequence[V] | None:
        """Returns the results of an equation whose programs run by this reading, None for other equations."""
        enter = self.table.get(equation.primitive.name)
        return None if enter is None else enter(self.within(equation), equation, inputs)

    def bind(self, equation: Any, inputs: list[V]) -> Sequence[V]:
        """Returns the results of an equation that is one operation, or whose programs run as they were traced."""
        primitive = equation.primitive
        results = primitive.bind(*map(self.array, inputs), **primitive.get_bind_params(equation.params))
        return list(map(self.unpacked, results if primitive.multiple_results else [results]))

    def written(self, variable: Any, value: V) -> V:
        """Returns a value as a variable of the program holds it."""
        del variable
        return value

    def within(self, equation: Any) -> Self:
        """Returns the reading for the bodies of an equation."""
        del equation
        return self

    def trial(self) -> Self:
        """Returns the reading for a run that does not count, because the same program runs again."""
        return self

    # Values
    def constant(self, array: Any) -> V:
        """Returns a constant of a program as a value; None stands for an array that is not known."""
        return self.unpacked(array)

    def literal(self, atom: Any) -> V:
        """Returns a literal as a value."""
        return self.constant(np.asarray(atom.val, atom.aval.dtype))

    def array(self, value: V) -> Any:
        """Returns the array of a value, which decides about loops and branches."""
        return value

    def holds(self, condition: Any, values: list[V]) -> Any:
        """Returns whether a loop goes on, given its condition and the values that this reads."""
        return self.array(self.evaluate(condition, values)[0])

    def given(self, value: V) -> Any:
        """Returns what of a value enters a body, as a pytree of arrays."""
        return self.array(value)

    def mapped(self, function: Callable[..., Any], *values: V) -> V:
        """Returns a value whose arrays are a function of those of others: a row, a stack, a choice of elements."""
        arrays = jax.tree.map(function, *map(self.packed, values))
        return self.unpacked(arrays)

    def packed(self, value: V) -> Any:
        """Returns what of a value leaves a body, as a pytree of arrays."""
        return self.array(value)

    def unpacked(self, arrays: Any) -> Any:
        """Returns the value of a pytree of arrays."""
        return arrays

    # Bodies in jax
    def body(self, rows: Any = (), count: int = 0, state: Any = (), running: Any = None) -> Self:
        """Returns the reading for one run of a body.

        Args:
          rows: one of the `count` rows that `rows` returned, if any.
          count: their number.
          state: what the run before has passed on.
          running: the elements of a `while` loop under `vmap` that still run; None for all.
        """
        del rows, count, state, running
        return self

    def state(self) -> Any:
        """Returns arrays that a run of a body passes on to the next one, besides values."""
        return ()

    def absorb(self, state: Any, *, of_devices: bool = False) -> None:
        """Takes what the last run of a body passed on, for a `shard_map` that of all devices, stacked."""

    def rows(self, count: int) -> Any:
        """Returns arrays with one row for each iteration of a scan, or for each device."""
        del count
        return ()

    def operand(self, array: Any, outer: V) -> V:
        """Returns an operand of a body, given as `given` returned it, and as value outside of it."""
        del outer
        return self.unpacked(array)

    def row(self, array: Any, outer: V) -> V:
        """Returns a row of a scan's operand, given as array and as value of all rows."""
        return self.operand(array, outer)

    def inside(self, value: V) -> V:
        """Returns a value from outside of a loop for its body."""
        return value

    def constants(self, values: Sequence[V]) -> Callable[[], list[V]]:
        """Returns what makes the constants of a scan in each iteration; their gradients are added over iterations."""
        return lambda: list(map(self.inside, values))

    def start(
        self, program: Any, init: list[V], atoms: Sequence[Any], operands: Callable[[list[V]], list[V]] | None
    ) -> list[V]:
        """Returns the values with which a loop starts, of kinds that its body preserves.

        Args:
          program: its body.
          init: its initial values.
          atoms: the variables or literals of these.
          operands: returns the operands of a first iteration that starts with some values; None if there is none.
        """
        del program, atoms, operands
        return init

    def following(self, new: V, old: V) -> V:
        """Returns a result of a loop's body as the next iteration's value, of the kind of the one before."""
        del old
        return new

    def stacked(self, arrays: Any) -> V:
        """Returns the outputs of a scan's iterations as one value."""
        return self.unpacked(arrays)

    def branches(self, equation: Any) -> Sequence[Any] | None:
        """Returns the programs of a `cond`; None if it is bound as traced: by default if the platform selects."""
        return branches_of(equation)

    def branch(self, number: int) -> Self:
        """Returns the reading for a branch."""
        del number
        return self

    def agreed(self, branches: Sequence[Any], operands: list[V]) -> Callable[[list[V]], list[V]]:
        """Returns what makes the results of branches alike, given their programs and operands."""
        del branches, operands
        return lambda results: results

    def spec(self, spec: Any) -> Any:
        """Returns how a `shard_map` shards what leaves its body of a result, given how it shards the result."""
        return spec

    # Bodies as facts
    def joined(self, values: Sequence[V]) -> V:
        """Returns what is known of a value that is one of several: of a branch, or of an iteration of a loop."""
        raise NotImplementedError


def _last_reads(jaxpr: Any) -> list[list[Any]]:
    """Returns, for each equation of a program, the variables that nothing reads any more afterwards."""
    read = {atom for atom in jaxpr.outvars if not isinstance(atom, jex.Literal)}
    found = []
    for equation in reversed(jaxpr.eqns):
        used = {x: None for x in (*equation.invars, *equation.outvars) if not isinstance(x, jex.Literal)}
        found.append([x for x in used if x not in read])
        read.update(used)
    return found[::-1]


def _constants(program: Any) -> Sequence[Any]:
    """Returns the constants of a program; those of an open one are not known."""
    return getattr(program, "consts", None) or [None] * len(opened(program).constvars)
