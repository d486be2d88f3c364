"""The rows of a diagnosis before the run: equation, direction, path, line and source rows.

A row's sources are the rows whose results it reads, perhaps rearranged; in loops also those of the previous iteration.

Numbers in a line of code may change in lower precision: an epsilon becomes 0, a decay becomes 1.
"""

import dataclasses
import functools
import linecache
import os
import re
import sysconfig
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np

from jmp_train.policies.autocasting import DECIDED, lines_of
from jmp_train.policies.programs import ABSTRACTLY, Reading, join
from jmp_train.tools.diagnosing.arithmetic import dtype_of, is_measured, picks
from jmp_train.tools.diagnosing.measures import is_float, is_low

Direction = Literal["forward", "backward", "update"]

_PACKAGE = os.path.dirname(os.path.dirname(os.path.dirname(__file__)))
# What runs a user's loss function: lines further out are of the script that calls the step.
_STEPS = tuple(os.path.join(_PACKAGE, folder) for folder in ("steps", "parallel"))
_LARGE = 40  # equations of a function that is more than one operation
_OF_AUTOCAST = re.compile(rf"{re.escape(DECIDED)}(?::\w+)?(?:/|$)")  # its own scope, which no rule sees
_STARTS = frozenset(("max", "min", "reduce_max", "reduce_min", "clamp"))  # from an infinity, of which nothing is left
_STANDARD = sysconfig.get_path("stdlib")
_PACKAGES = (sysconfig.get_path("purelib"), sysconfig.get_path("platlib"))  # which may be below it
LAYERS = os.path.join(_PACKAGE, "graphs")


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
_INFINITE = _Origin()  # of an infinite constant, whose reader is not known yet


def sites_of(program: Any) -> tuple[list[Site], list[frozenset[int]]]:
    """Returns the equations of a program with rows, in order, and the rows from which its results come.

    Args:
      program: a traced program.
    """
    sites: list[Site] = []
    arguments = [_Origin(frozenset((-1 - i,))) for i in range(len(program.jaxpr.invars))]
    results = _Sites(sites, [0]).evaluate(program, arguments)
    return sites, [origin.rows for origin in results]


@dataclasses.dataclass(frozen=True)
class _Sites(Reading[_Origin]):
    """Adds the sites of a program; values are their origins.

    Attributes:
      sites: the sites so far.
      turn: the turn of the last equation.
      callers: the equations in whose bodies it is, the outermost first.
      path: path of modules and scopes around it.
      backward: True in the backward pass of a gradient.
    """

    sites: list[Site]
    turn: list[int]
    callers: tuple[Any, ...] = ()
    path: str = ""
    backward: bool = False

    table = ABSTRACTLY

    def within(self, equation: Any) -> "_Sites":
        scope = str(equation.source_info.name_stack)
        callers, path = (*self.callers, equation), join(self.path, scope)
        return dataclasses.replace(self, callers=callers, path=path, backward=self.backward or "transpose(" in scope)

    def trial(self) -> "_Sites":
        return dataclasses.replace(self, sites=list(self.sites))

    def constant(self, array: Any) -> _Origin:
        return _INFINITE if _holds_infinity(array) else _NOWHERE

    def literal(self, atom: Any) -> _Origin:
        return _INFINITE if is_infinite(atom) else _NOWHERE

    def joined(self, values: Sequence[_Origin]) -> _Origin:
        return _union(values)

    def evaluate(self, program: Any, inputs: Sequence[_Origin]) -> list[_Origin]:
        return [_NOWHERE if x is _INFINITE else x for x in super().evaluate(program, inputs)]

    def run(self, equation: Any, inputs: list[_Origin]) -> Sequence[_Origin]:
        readers = (*self.callers, equation)
        starts = equation.primitive.name in _STARTS
        constant = _NOWHERE if starts else _Origin(infinite=(readers,), fills=(readers,))
        self.turn[0] += not any(e.primitive.name in ("scan", "while") for e in self.callers)
        return super().run(equation, [constant if x is _INFINITE else x for x in inputs])

    def bind(self, equation: Any, inputs: list[_Origin]) -> Sequence[_Origin]:
        together, scope = _union(inputs), str(equation.source_info.name_stack)
        if _vanishes((*self.callers, equation)):
            together |= _Origin(zeros=((*self.callers, equation),))
        if is_measured(equation):
            direction = _direction(scope, self.backward or "transpose(" in scope, together.backward)
            origins_of_it = together.rows, together.infinite, together.fills, together.zeros
            own_path = _OF_AUTOCAST.sub("", join(self.path, scope))
            self.sites.append(Site(equation, self.callers, own_path, direction, *origins_of_it, self.turn[0]))
            if not picks(equation):  # whose readers read its operands
                together = dataclasses.replace(
                    together,
                    rows=frozenset((len(self.sites) - 1,)),
                    fills=together.fills if equation.primitive.name == "convert_element_type" else (),
                    backward=together.backward or direction != "forward",
                )
        return [together] * len(equation.outvars)


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


_NUMBER = re.compile(r"(?<![\w.])(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?(?![\w.])")
_ZERO_BY_DEFAULT = "eps_root"  # of optax's optimizers, under a root
_EPSILON = re.compile(r"(?:self\.)?\b\w*(?:eps|tiny)\w*\b", re.IGNORECASE)
_WITH_NUMBER = re.compile(r"\w+ *= *[\d.]+(?:[eE][-+]?\d+)?")


@functools.lru_cache(maxsize=4096)
def number_in_code(line: str, value: float, dtype: str) -> str | None:
    """Returns the number in a line of code that equals a value in a dtype, but not in float32; None if there is none.

    Args:
      line: the text "file:number".
      value: the value in the dtype.
      dtype: name of the dtype.
    """
    for text in _NUMBER.findall(_code(line)):
        with np.errstate(over="ignore"):
            if float(text) != value and float(np.asarray(float(text), jnp.dtype(dtype))) == value:
                return text
    return None


def is_zero_by_default(line: str) -> bool:
    """Returns whether a line of code has a number that may be 0 in float32 too.

    Args:
      line: the text "file:number".
    """
    return _ZERO_BY_DEFAULT in _code(line)


@functools.lru_cache(maxsize=4096)
def epsilon_in_code(line: str, dtype: str) -> str | None:
    """Returns the number in a line of code that is 0 in a dtype, otherwise the name of an epsilon without a number.

    Args:
      line: the text "file:number".
      dtype: name of the dtype.
    """
    names = [name for name in _EPSILON.findall(_WITH_NUMBER.sub("", _code(line))) if name != _ZERO_BY_DEFAULT]
    return number_in_code(line, 0.0, dtype) or (names[0] if names else None)


def _code(line: str) -> str:
    file, _, number = line.rpartition(":")
    return linecache.getline(file, int(number or 0)).partition("#")[0]
