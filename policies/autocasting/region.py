"""Autocast regions: the rules of a program under autocast, and what was decided for it."""

import dataclasses
import functools
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import jax
from jax import lax
from jax.extend.core import JaxprEqn

from jmp_train.policies.autocasting.fp8 import DEFAULT_RECIPE, DelayedScales, Recipe
from jmp_train.policies.autocasting.primitive_kinds import CALLS, PRODUCTS
from jmp_train.policies.autocasting.rules import AutocastRules, Rule
from jmp_train.policies.autocasting.source_lines import address_of
from jmp_train.policies.autocasting.values import Value, argument

Found = TypeVar("Found")

# What runs under this name was decided by an inner region, and an outer one leaves it as it is.
DECIDED = "jmp_train.autocast"
INNER_REGION = "decided by an inner region"  # a reason
_FIXED = re.compile(rf"{re.escape(DECIDED)}:(\w+)")  # by `autocast_as`


class BannedOperationError(TypeError):
    """An operation that the rules ban; the message says what to do instead.

    Example:
      >>> import jax.numpy as jnp
      >>> from jmp_train.policies import TORCH_CUDA, autocast
      >>> rules = TORCH_CUDA.replace(banned={"fft": "take it outside"})
      >>> autocast(jnp.fft.fft, rules=rules)(jnp.ones(4))
      Traceback (most recent call last):
      jmp_train.policies.autocasting.region.BannedOperationError: autocast bans fft: take it outside
    """


@dataclasses.dataclass(frozen=True)
class Decision:
    """What was decided for one equation: a row of `explain_autocast`."""

    path: str
    rule: str
    reason: str
    equation: Any
    callers: tuple[Any, ...]
    repeats: int
    dtypes_in: tuple[str, ...]
    dtypes_out: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Region:
    """What holds throughout an autocast region.

    Attributes:
      half: the half type.
      rules: the table.
      handlers: by primitive, what enters those that hold programs; see `autocast_control`.
      path: of modules and scopes around what is interpreted now.
      forced: "lower", "float32" or "fp8", where a rule gave that to all of the function interpreted now.
      callers: the equations in whose bodies it is, the outermost first.
      repeats: how often the body of the loops around it runs, where that is known.
      log: where decisions are noted, or None.
      programs: where traced functions are noted, or None.
      constants: those of the programs so far, by identity.
      memory: what was found out about programs; see `remembered`.
      recipe: of products in 8 bits.
      delayed: their scales, where these come from outside.
      place: of the body that is interpreted now; see `place_of`.
    """

    half: Any
    rules: AutocastRules
    handlers: Mapping[str, "Handler"]
    path: str = ""
    forced: Rule | None = None
    callers: tuple[Any, ...] = ()
    repeats: int = 1
    log: list[Decision] | None = None
    programs: list[Any] | None = None
    constants: dict[int, Value] = dataclasses.field(default_factory=dict)
    memory: dict[Any, tuple[Any, Any]] = dataclasses.field(default_factory=dict)
    recipe: Recipe = DEFAULT_RECIPE
    delayed: DelayedScales | None = None
    place: str = ""

    @property
    def settings(self) -> tuple[Any, ...]:
        """What decisions within a program depend on beside the program itself."""
        if self.rules.operations:  # which know the lines of callers too
            return self.forced, self.path, tuple(map(id, self.callers))
        return self.forced, self.path if self.rules.paths else ""

    def remembered(self, key: object, program: object, find: Callable[[], Found]) -> Found:
        """Returns what `find` finds out about a program, which is asked once; the key says what about it."""
        key = (key, id(program))
        if key not in self.memory:
            self.memory[key] = program, find()  # which keeps the program, and with it its identity
        return self.memory[key][1]

    def constant(self, array: jax.Array) -> Value:
        """Returns a constant of some body as the same value each time."""
        return self.constants.setdefault(id(array), argument(array))

    def body(self) -> "Region":
        """Returns the region for the body of a loop or branch, whose casts must not leak out."""
        inside = {key: value.inside() for key, value in self.constants.items()}
        return dataclasses.replace(self, constants=inside)

    def within(self, equation: JaxprEqn, scope: str, place: str = "") -> "Region":
        """Returns the region for the body of an equation in that scope, at that place."""
        callers = (*self.callers, equation)
        return dataclasses.replace(self, path=join(self.path, scope), callers=callers, place=place)

    def note(
        self,
        equation: JaxprEqn,
        scope: str,
        rule: str,
        reason: str,
        dtypes_in: Sequence[Any],
        outputs: Sequence[Value],
    ) -> None:
        """Notes what was decided for an equation in that scope, if decisions are noted."""
        if self.log is not None:
            dtypes = tuple(map(str, dtypes_in)), tuple(str(x.dtype) for x in outputs)
            path = join(self.path, scope)
            self.log.append(Decision(path, rule, reason, equation, self.callers, self.repeats, *dtypes))

    def unlogged(self) -> "Region":
        """Returns the region for a trial run."""
        return dataclasses.replace(self, log=None, delayed=None)

    def rule_of(self, equation: JaxprEqn) -> tuple[Rule | None, str]:
        """Returns the rule of an equation of the program that is interpreted now; see `decide`, which is asked once."""
        scope = str(equation.source_info.name_stack)
        if DECIDED in scope.replace(f"{DECIDED}:", ""):
            return "keep", INNER_REGION
        return self.remembered(("rule", self.settings), equation, lambda: self.decide(equation, scope))

    def decide(self, equation: JaxprEqn, scope: str) -> tuple[Rule | None, str]:
        """Returns the rule of an equation, None where no table names it, and where it is from."""
        name = equation.primitive.name
        function = equation.params.get("name") if name in ("jit", "pjit") else None
        tables = tables_of(self.rules)
        for banned in (name, function):
            if banned in tables.banned:
                raise BannedOperationError(f"autocast bans {banned}: {tables.banned[banned]}")
        takes_8_bits = name in self.handlers or in_8_bits(equation)
        entries = (entry for entry in self._entries(tables, equation, scope) if takes_8_bits or entry[0] != "fp8")
        return next(entries, (None, "no rule"))

    def _entries(self, tables: "Tables", equation: JaxprEqn, scope: str) -> Iterator[tuple[Rule, str]]:
        """Yields the rules that tables have for an equation, that which counts first, and where they are from."""
        name = equation.primitive.name
        function = equation.params.get("name") if name in ("jit", "pjit") else None
        if tables.operations and name not in self.handlers:
            address = address_of((*self.callers, equation), join(self.path, scope))
            for expression, rule in tables.operations:
                if expression.search(address):
                    yield rule, f"operation {expression.pattern!r}"
        if tables.paths:
            path = join(self.path, scope)
            for expression, rule in tables.paths:
                if expression.search(path):
                    yield rule, f"path {expression.pattern!r}"
        if DECIDED in scope and (fixed := _FIXED.findall(scope)):
            yield fixed[-1], "autocast_as"
        if function in tables.functions:
            yield tables.functions[function], f"function {function!r}"
        for module in jax_modules(equation):
            if module in tables.functions:
                yield tables.functions[module], f"function of {module}"
        if self.forced is not None:
            yield self.forced, f"within a function of rule {self.forced!r}"
        rule = tables.primitives.get(name)
        if rule in ("lower", "fp8") and name in PRODUCTS:
            rule = rule if in_8_bits(equation) else "lower"
            yield _no_matrix_product(equation) or (rule, f"primitive {name!r}")
        elif rule is not None:
            yield rule, f"primitive {name!r}"


# Returns an equation's results, or None where it has to be bound as it was traced.
Handler = Callable[[Region, Any, list[Value]], list[Value] | None]


@dataclasses.dataclass(frozen=True)
class Tables:
    """Rules, made ready to be looked up."""

    primitives: dict[str, Rule]
    functions: dict[Any, Rule]
    paths: tuple[tuple[re.Pattern[str], Rule], ...]
    banned: dict[Any, str]
    operations: tuple[tuple[re.Pattern[str], Rule], ...]


@functools.lru_cache(maxsize=64)
def tables_of(rules: AutocastRules) -> Tables:
    """Returns rules as tables."""
    return Tables(
        dict(rules.primitives),
        dict(rules.functions),
        _compiled(rules.paths),
        dict(rules.banned),
        _compiled(rules.operations),
    )


def _compiled(pairs: tuple[tuple[str, Rule], ...]) -> tuple[tuple[re.Pattern[str], Rule], ...]:
    return tuple((re.compile(expression), rule) for expression, rule in pairs)


def jax_modules(equation: Any) -> tuple[str, ...]:
    """Returns in which of jax's modules a called function is, ("jax.numpy.linalg", "jax.numpy", "jax")."""
    body = equation.params.get(CALLS.get(equation.primitive.name))
    info = getattr(getattr(body, "jaxpr", body), "debug_info", None)
    return _modules_of(getattr(info, "func_src_info", None) or "")


_FILE = re.compile(rf" at {re.escape(os.path.dirname(jax.__file__))}\W(?:_src\W)?(.+)\.py:\d+$")


@functools.lru_cache(maxsize=1024)
def _modules_of(source: str) -> tuple[str, ...]:
    found = _FILE.search(source)
    parts = ["jax", *re.split(r"[\\/]", found.group(1))] if found else []
    return tuple(".".join(parts[:count]) for count in range(len(parts), 0, -1))


def in_8_bits(equation: JaxprEqn) -> bool:
    """Whether an equation is a matrix product that can multiply in 8 bits."""
    if equation.primitive.name != "dot_general" or _no_matrix_product(equation) is not None:
        return False
    _, (batch, _) = equation.params["dimension_numbers"]
    return not batch


def _no_matrix_product(equation: Any) -> tuple[Rule, str] | None:
    """Returns rule and reason of products to which the rule of matrix products does not apply."""
    precision = equation.params.get("precision")
    if lax.Precision.HIGHEST in (precision if isinstance(precision, tuple) else (precision,)):
        return "float32", "precision=HIGHEST"
    if equation.primitive.name != "dot_general":
        return None
    (contracted, _), (batch, _) = equation.params["dimension_numbers"]
    if not contracted:
        return "promote", "outer product"
    if len(batch) < len(equation.outvars[0].aval.shape):
        return None
    if not batch:
        return "float32", "inner product"
    return ("float32", "a square") if equation.invars[0] is equation.invars[1] else None


def join(path: str, scope: str) -> str:
    """Returns a path and a scope in it as one path, without the names of transformations."""
    scope = re.sub(r"\b(?:jvp|transpose|vmap|rematted_computation|checkpoint)\(|\)", "", scope)
    return f"{path}/{scope}" if path and scope else path or scope
