"""The rows of a diagnosis before the run: equation, direction, path, line and source rows.

A row's sources are the rows whose results it reads, perhaps rearranged; in loops also those of the previous iteration.
"""

import dataclasses
import functools
import os
import re
import sysconfig
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import jax.extend.core as jex
import numpy as np

from jmp_train.policies.autocasting import DECIDED, join, lines_of, opened, scan_counts
from jmp_train.policies.diagnosing.arithmetic import BODIES, bodies_of, dtype_of, is_measured, picks
from jmp_train.policies.diagnosing.constants import epsilon_in_code
from jmp_train.policies.diagnosing.measures import is_float, is_low

Direction = Literal["forward", "backward", "update"]

_HOUSE = os.path.dirname(os.path.dirname(os.path.dirname(__file__)))
# What runs a user's loss function: lines further out are of the script that calls the step.
_STEPS = tuple(os.path.join(_HOUSE, room) for room in ("steps", "parallel"))
_LARGE = 40  # equations of a function that is more than one operation
_OF_AUTOCAST = re.compile(rf"{re.escape(DECIDED)}(?::\w+)?(?:/|$)")  # its own scope, which no rule sees
_STARTS = frozenset(("max", "min", "reduce_max", "reduce_min", "clamp"))  # from an infinity, of which nothing is left
_STANDARD = sysconfig.get_path("stdlib")
_PACKAGES = (sysconfig.get_path("purelib"), sysconfig.get_path("platlib"))  # which may be below it
LAYERS = os.path.join(_HOUSE, "graphs")


@dataclasses.dataclass(frozen=True)
class Site:
    """An equation with a row.

    Attributes:
      equation: the equation of the traced program.
      callers: the equations in whose bodies it is, the outermost first.
      path: path of modules and scopes.
      direction: direction of its pass.
      sources: the numbers of the rows whose results it reads; -1 - i for argument number i of the function.
      infinite: the sites of infinite constants that it depends on.
      fills: those that it reads, perhaps rearranged.
      zeros: the sites of epsilons that it reads and that are 0 in lower precision.
      turn: the position of the equation in the order of execution, where a loop counts once.
    """

    equation: Any
    callers: tuple[Any, ...]
    path: str
    direction: Direction
    sources: frozenset[int]
    infinite: tuple[Any, ...]
    fills: tuple[Any, ...]
    zeros: tuple[Any, ...]
    turn: int

    @functools.cached_property
    def line(self) -> str:
        """The file and line of the user's code, or of the library that the user called."""
        return user_line((*self.callers, self.equation))

    @property
    def function(self) -> str:
        """The name of the innermost jitted function around it; empty if there is none or it is large.

        Functions with a `shard_map` or a derivative count as steps, not as operations; so do functions without a name.
        """
        jitted = [e.params for e in self.callers if e.primitive.name in ("jit", "pjit")]
        if not jitted or _is_step(jitted[-1]["jaxpr"].jaxpr) or not jitted[-1]["name"].isidentifier():
            return ""
        return jitted[-1]["name"]

    @property
    def under_autocast(self) -> bool:
        """True if autocast has rewritten it."""
        return any(DECIDED in str(e.source_info.name_stack) for e in (*self.callers, self.equation))


def _is_step(jaxpr: Any) -> bool:
    """Returns whether a jitted function is larger than an operation or a layer."""
    is_holding = any(
        e.primitive.name == "shard_map" or "transpose(" in str(e.source_info.name_stack) for e in jaxpr.eqns
    )
    return is_holding or len(jaxpr.eqns) > _LARGE


def user_line(equations: Sequence[Any]) -> str:
    """Returns the file and line of the innermost user's code between an equation and the step that runs it.

    Without one, it is the line of the library that the user called; empty for this library and Python's own.

    Args:
      equations: nested equations, the outermost first.
    """
    fallback = ""
    for line, is_installed in lines_of(equations):
        if line.startswith(_STEPS):
            break
        if line.startswith(LAYERS) or (line.startswith(_STANDARD) and not line.startswith(_PACKAGES)):
            continue
        if not is_installed:
            return line
        fallback = fallback or line
    return fallback


def frames_of(site: Site) -> Iterator[tuple[str, str]]:
    """Yields file and function of an operation's frames, the innermost first, up to the user's line or the step."""
    line = site.line
    for equation in reversed((*site.callers, site.equation)):
        traceback = equation.source_info.traceback
        for frame in () if traceback is None else traceback.frames:
            if f"{frame.file_name}:{frame.line_num}" == line:
                return
            yield frame.file_name, frame.function_name


@dataclasses.dataclass(frozen=True)
class _Origin:
    """The origin of a value: rows, and constants that are infinite or vanish, as (callers, equation)."""

    rows: frozenset[int] = frozenset()
    infinite: tuple[Any, ...] = ()
    fills: tuple[Any, ...] = ()
    zeros: tuple[Any, ...] = ()
    backward: bool = False

    def __or__(self, other: "_Origin") -> "_Origin":
        return _Origin(
            rows=self.rows | other.rows,
            infinite=_merged(self.infinite, other.infinite),
            fills=_merged(self.fills, other.fills),
            zeros=_merged(self.zeros, other.zeros),
            backward=self.backward or other.backward,
        )


def _merged(first: tuple[Any, ...], second: tuple[Any, ...]) -> tuple[Any, ...]:
    known = {id(equations[-1]) for equations in first}
    return first + tuple(equations for equations in second if id(equations[-1]) not in known)


_NOWHERE = _Origin()


def sites_of(program: Any) -> tuple[list[Site], list[frozenset[int]]]:
    """Returns the equations of a program with rows, in order, and the rows from which its results come.

    Args:
      program: a traced program.
    """
    sites: list[Site] = []
    arguments = [_Origin(frozenset((-1 - i,))) for i in range(len(program.jaxpr.invars))]
    results = _walk(program, arguments, sites, (), "", False, [0])
    return sites, [origin.rows for origin in results]


def _walk(
    program: Any,
    operands: Sequence[_Origin],
    sites: list[Site],
    callers: tuple[Any, ...],
    path: str,
    backward: bool,
    turn: list[int],
) -> list[_Origin]:
    """Adds the sites of a program, and returns the origins of its results."""
    jaxpr = opened(program)
    origins: dict[Any, _Origin] = dict.fromkeys(jaxpr.constvars, _NOWHERE)
    origins.update(zip(jaxpr.invars, operands, strict=True))
    constants = zip(jaxpr.constvars, getattr(program, "consts", ()), strict=False)
    infinite = {variable for variable, array in constants if _holds_infinity(array)}

    def read(atom: Any, *readers: Any) -> _Origin:
        is_constant = atom in infinite if not isinstance(atom, jex.Literal) else is_infinite(atom)
        if is_constant and readers and readers[-1].primitive.name not in _STARTS:
            return _Origin(infinite=(readers,), fills=(readers,))
        return _NOWHERE if isinstance(atom, jex.Literal) else origins[atom]

    is_looped = any(e.primitive.name in ("scan", "while") for e in callers)
    for equation in jaxpr.eqns:
        scope = str(equation.source_info.name_stack)
        inputs = [read(atom, *callers, equation) for atom in equation.invars]
        together = _union(inputs)
        is_backward = backward or "transpose(" in scope
        turn[0] += not is_looped
        if bodies := bodies_of(equation):
            within = (*callers, equation)
            results = _of_bodies(equation, bodies, inputs, sites, (within, join(path, scope), is_backward, turn))
        else:
            if _vanishes((*callers, equation)):
                together |= _Origin(zeros=((*callers, equation),))
            if is_measured(equation):
                direction = _direction(scope, is_backward, together.backward)
                origins_of_it = together.rows, together.infinite, together.fills, together.zeros
                own_path = _OF_AUTOCAST.sub("", join(path, scope))
                sites.append(Site(equation, callers, own_path, direction, *origins_of_it, turn[0]))
                if not picks(equation):  # whose readers read its operands
                    together = dataclasses.replace(
                        together,
                        rows=frozenset((len(sites) - 1,)),
                        fills=together.fills if equation.primitive.name == "convert_element_type" else (),
                        backward=together.backward or direction != "forward",
                    )
            results = [together] * len(equation.outvars)
        origins.update(zip(equation.outvars, results, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _of_bodies(
    equation: Any, bodies: Sequence[Any], inputs: list[_Origin], sites: list[Site], around: tuple[Any, ...]
) -> list[_Origin]:
    name, params = equation.primitive.name, equation.params
    if name in BODIES or name == "shard_map":
        return _walk(bodies[0], inputs, sites, *around)
    if name == "cond":
        results = [_walk(body, inputs[1:], sites, *around) for body in bodies]
        return [_union(found) | inputs[0] for found in zip(*results, strict=True)]
    if name == "scan":
        n_consts, n_carry = scan_counts(params)
        consts, carry, xs = inputs[:n_consts], inputs[n_consts:][:n_carry], inputs[n_consts + n_carry :]
    else:
        n_cond, n_consts = params["cond_nconsts"], params["body_nconsts"]
        consts, carry, xs = inputs[n_cond:][:n_consts], inputs[n_cond + n_consts :], []
    first = _walk(bodies[0], [*consts, *carry, *xs], list(sites), *around)
    carry = [a | b for a, b in zip(carry, first[: len(carry)], strict=True)]
    results = _walk(bodies[0], [*consts, *carry, *xs], sites, *around)
    return [a | b for a, b in zip(results, [*carry, *results[len(carry) :]], strict=True)]


def _union(origins: Sequence[_Origin]) -> _Origin:
    together = _NOWHERE
    for origin in origins:
        together |= origin
    return together


def _direction(scope: str, backward: bool, after_backward: bool) -> Direction:
    if backward:
        return "backward"
    return "update" if after_backward and "jvp(" not in scope else "forward"


def is_infinite(atom: Any) -> bool:
    """Returns whether an equation reads a floating constant with an infinity."""
    if not isinstance(atom, jex.Literal) or not is_float(getattr(atom.aval, "dtype", None)):
        return False
    return bool(np.isinf(np.asarray(atom.val, np.float64)).any())


def _holds_infinity(array: Any) -> bool:
    return is_float(getattr(array, "dtype", None)) and bool(np.isinf(np.asarray(array, np.float32)).any())


def _vanishes(equations: tuple[Any, ...]) -> bool:
    """Returns whether the last equation adds, or takes the maximum with, an epsilon that is 0 in lower precision."""
    equation = equations[-1]
    if equation.primitive.name not in ("add", "max", "clamp"):
        return False
    zeros = [x for x in equation.invars if isinstance(x, jex.Literal) and is_low(dtype_of(x)) and not np.any(x.val)]
    return bool(zeros) and epsilon_in_code(user_line(equations), str(dtype_of(zeros[0]))) is not None
