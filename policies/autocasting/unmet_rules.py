"""Finds entries of rules that apply to no operation of a program, such as those of an outdated file."""

import re
from collections.abc import Iterable, Sequence

from jmp_train.policies.autocasting.decisions import can_take
from jmp_train.policies.autocasting.known_names import is_function_of_jax, nearest
from jmp_train.policies.autocasting.operations import held_jaxprs
from jmp_train.policies.autocasting.primitives import ENTERED
from jmp_train.policies.autocasting.region import Region
from jmp_train.policies.autocasting.rules import (
    APEX_O1,
    MOSTLY_HALF,
    TORCH_CPU,
    TORCH_CUDA,
)
from jmp_train.policies.autocasting.source_lines import address_of, warn_user
from jmp_train.policies.programs import Place, walk

_SHOWN = 3
_TABLES = (TORCH_CUDA, TORCH_CPU, APEX_O1, MOSTLY_HALF)
_SHIPPED = frozenset(name for rules in _TABLES for name, _ in rules.functions)
_SHIPPED_PRIMITIVES = frozenset(entry for rules in _TABLES for entry in rules.primitives)


class UnmetRulesWarning(UserWarning):
    """Entries of autocast rules apply to no operation: their names are wrong, or the function has changed.

    Or no operation that they match can take the rule, such as `fp8` for a path with attention's products only.

    `autocast` warns when it first traces the function, and so do `train_step` and `apply_policy` if they use rules.
    `explain_autocast` lists all such entries. Names of `primitives` and of jax's `functions` may match nothing. If
    several models share a table, filter the warning.

    Example:
      >>> import warnings
      >>> import jmp_train as jt
      >>> warnings.filterwarnings("ignore", category=jt.policies.UnmetRulesWarning)
    """


def unmet_entries(region: Region) -> tuple[str, ...]:
    """Returns the entries that apply to no operation, as text: the table, the name and the nearest name.

    After these come entries that match only operations that cannot run by their rule.

    Args:
      region: an autocast region that has run, with the traced functions.
    """
    rules, programs = region.rules, region.programs or ()
    kept = {id(equation) for equation in region.refused or ()}
    tables = {
        "paths": rules.paths,
        "operations": rules.operations,
        "functions": [entry for entry in rules.functions if entry[0] not in _SHIPPED],
        "primitives": [entry for entry in rules.primitives if entry not in _SHIPPED_PRIMITIVES],
    }
    places = [place for program in programs for place in walk(program, held_jaxprs)] if any(tables.values()) else []
    unmet, refused = [], []
    for table, entries in tables.items():
        found = [(place.equation, _names(table, place)) for place in places] if entries else []
        for name, rule in entries:
            matches = re.compile(name).search if table in ("paths", "operations") else name.__eq__
            met = [equation for equation, names in found if any(map(matches, names))]
            operations = [equation for equation in met if equation.primitive.name not in ENTERED]
            taking = (x for x in operations if id(x) not in kept and can_take(rule, x, region.recipe))
            if not met and table != "primitives" and not (table == "functions" and is_function_of_jax(name)):
                unmet.append(_text(table, name, {known for _, names in found for known in names}))
            elif operations and rule in ("lower", "fp8") and next(taking, None) is None:
                refused.append(f"{table}: {name!r}: what it matches cannot be {rule!r}")
    return *unmet, *refused


def _names(table: str, place: Place) -> list[str]:
    """Returns the names of an equation by which the entries of a table match it."""
    match table:
        case "paths":
            return [place.path]
        case "functions":
            return [str(x.params["name"]) for x in place.equations if x.primitive.name in ("jit", "pjit")]
    if place.equation.primitive.name in ENTERED:
        return []
    return [place.equation.primitive.name if table == "primitives" else address_of(place.equations, place.path)]


def unmet_lines(unmet: Sequence[str]) -> list[str]:
    """Returns the last lines of a report, which list the unmet entries; no lines if there are none.

    Args:
      unmet: the result of `unmet_entries`.
    """
    head = ["entries of the rules that apply to no operation:"] if unmet else []
    return [*head, *(f"  {entry}" for entry in unmet)]


def warn_of_unmet(region: Region) -> None:
    """Warns of the entries that apply to no operation; takes the argument of `unmet_entries`."""
    unmet = unmet_entries(region)
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


def _text(table: str, name: str, known: Iterable[str]) -> str:
    """Returns an entry and the most similar name, shortened as rules usually write it."""
    like = nearest(_as_written(name), filter(None, map(_as_written, known)))
    return f"{table}: {name!r}" + (f"; the nearest is {like[0]!r}" if like else "")


def _as_written(text: str) -> str:
    """Returns a regular expression or an address as plain text, without folders."""
    plain = re.sub(r"\.\*|[\\^$]", "", text)
    head, at, place = plain.partition("@")
    return head + at + re.sub(r"(?:[^\s/]*/)+", "", place)
