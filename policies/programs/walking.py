"""The programs that equations of a traced program hold, and a walk through all of them.

What jax calls the parameters of calls and loops stands here, and in the modules that run them.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
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
    branches = (equation.params["branches"][_branch_here(platforms)],)
    return equation.replace(params={**equation.params, "branches": branches, "branches_platforms": None})


@functools.cache
def _branch_here(platforms: tuple[Any, ...]) -> int:
    """Returns the number of the branch that runs on this platform."""
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
