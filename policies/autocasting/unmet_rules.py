"""Finds entries of rules that apply to no operation of a program, such as those of an outdated file."""

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jax.extend.core import ClosedJaxpr

from jmp_train.policies.autocasting.decisions import can_take
from jmp_train.policies.autocasting.known_names import is_function_of_jax, nearest
from jmp_train.policies.autocasting.operations import held_jaxprs
from jmp_train.policies.autocasting.primitives import ENTERED
from jmp_train.policies.autocasting.region import tables_of
from jmp_train.policies.autocasting.rules import (
    APEX_O1,
    MOSTLY_HALF,
    TORCH_CPU,
    TORCH_CUDA,
    AutocastRules,
    Rule,
)
from jmp_train.policies.autocasting.source_lines import address_of, warn_user
from jmp_train.policies.programs import walk

_SHOWN = 3
_TABLES = (TORCH_CUDA, TORCH_CPU, APEX_O1, MOSTLY_HALF)
_SHIPPED = frozenset(name for rules in _TABLES for name, _ in rules.functions)
_SHIPPED_PRIMITIVES = frozenset(entry for rules in _TABLES for entry in rules.primitives)


class UnmetRulesWarning(UserWarning):
    """Entries of autocast rules apply to no operation: their names are wrong, or the function has changed.

    Or no operation that they match can take the rule, such as `fp8` for a path with convolutions only.

    `autocast` warns when it first traces the function, and so do `train_step` and `apply_policy` if they use rules.
    `explain_autocast` lists all such entries. Names of `primitives` and of jax's `functions` may match nothing. If
    several models share a table, filter the warning.

    Example:
      >>> import warnings
      >>> import jmp_train as jt
      >>> warnings.filterwarnings("ignore", category=jt.policies.UnmetRulesWarning)
    """


def unmet_entries(rules: AutocastRules, programs: Sequence[ClosedJaxpr]) -> tuple[str, ...]:
    """Returns the entries that apply to no operation, as text: the table, the name and the nearest name.

    Args:
      rules: the rules to check.
      programs: the traced functions.
    """
    own = {name for name, _ in rules.functions if name not in _SHIPPED and not is_function_of_jax(name)}
    tables, primitives = tables_of(rules), [entry for entry in rules.primitives if entry not in _SHIPPED_PRIMITIVES]
    if not (tables.paths or tables.operations or own or primitives):
        return ()
    places = (place for program in programs for place in walk(program, held_jaxprs))
    calls = [(place.equations, place.path) for place in places]
    paths = dict.fromkeys(path for _, path in calls)
    addresses = dict.fromkeys(address_of(e, path) for e, path in calls if e[-1].primitive.name not in ENTERED)
    functions = dict.fromkeys(str(e[-1].params["name"]) for e, _ in calls if e[-1].primitive.name in ("jit", "pjit"))
    regexes = (("paths", tables.paths, paths), ("operations", tables.operations, addresses))
    unmet = [
        _text(table, expression.pattern, found)
        for table, entries, found in regexes
        for expression, _ in entries
        if not any(map(expression.search, found))
    ]
    unmet += [_text("functions", name, functions) for name, _ in rules.functions if name in own - {*functions}]
    return *unmet, *_refused(rules, primitives, [call for call in calls if call[0][-1].primitive.name not in ENTERED])


def _refused(
    rules: AutocastRules, primitives: Sequence[tuple[str, Rule]], calls: Sequence[tuple[tuple[Any, ...], str]]
) -> Iterator[str]:
    """Yields the entries that match operations of which none can run by their rule, as text."""
    tables = tables_of(rules)
    functions = [entry for entry in rules.functions if entry[0] not in _SHIPPED]
    matches: tuple[tuple[str, Sequence[tuple[Any, Rule]], Callable[..., Any]], ...] = (
        ("primitives", primitives, lambda name, e, _: name == e[-1].primitive.name),
        ("functions", functions, lambda name, e, _: any(name == x.params.get("name") for x in e[:-1])),
        ("paths", tables.paths, lambda expression, _, path: expression.search(path)),
        ("operations", tables.operations, lambda expression, e, path: expression.search(address_of(e, path))),
    )
    for table, entries, match in matches:
        for name, rule in entries:
            met = [e[-1] for e, path in calls if match(name, e, path)] if rule in ("lower", "fp8") else []
            if met and not any(can_take(rule, equation) for equation in met):
                yield f"{table}: {getattr(name, 'pattern', name)!r}: what it matches cannot be {rule!r}"


def unmet_lines(unmet: Sequence[str]) -> list[str]:
    """Returns the last lines of a report, which list the unmet entries; no lines if there are none.

    Args:
      unmet: the result of `unmet_entries`.
    """
    head = ["entries of the rules that apply to no operation:"] if unmet else []
    return [*head, *(f"  {entry}" for entry in unmet)]


def warn_of_unmet(rules: AutocastRules, programs: Sequence[ClosedJaxpr]) -> None:
    """Warns of the entries that apply to no operation; takes the arguments of `unmet_entries`."""
    unmet = unmet_entries(rules, programs)
    if not unmet:
        return
    more = f"\n  and {len(unmet) - _SHOWN} more" if len(unmet) > _SHOWN else ""
    entries = "1 entry of the autocast rules applies" if len(unmet) == 1 else f"{len(unmet)} entries of the rules apply"
    warn_user(
        f"{entries} to no operation of the function:\n  "
        + "\n  ".join(unmet[:_SHOWN])
        + f"{more}\nThe names are wrong, or the code has changed: correct them, or run tune again. explain_autocast "
        "prints the path and the line of each operation.",
        UnmetRulesWarning,
    )


def _text(table: str, name: str, known: dict[str, None]) -> str:
    """Returns an entry and the most similar name, shortened as rules usually write it."""
    like = nearest(_as_written(name), filter(None, map(_as_written, known)))
    return f"{table}: {name!r}" + (f"; the nearest is {like[0]!r}" if like else "")


def _as_written(text: str) -> str:
    """Returns a regular expression or an address as plain text, without folders."""
    plain = re.sub(r"\.\*|[\\^$]", "", text)
    head, at, place = plain.partition("@")
    return head + at + re.sub(r"(?:[^\s/]*/)+", "", place)
