"""Converts units to entries of autocast's rules: the shortest expressions that match only these operations."""

import dataclasses
import re
from collections.abc import Collection, Sequence

from jmp_train.tuning.units import Unit, primitive_of


@dataclasses.dataclass(frozen=True)
class Entry:
    """An entry of the rules.

    Attributes:
      expressions: for `AutocastRules.operations`.
      units: numbers of the units that it matches.
    """

    expressions: tuple[str, ...]
    units: frozenset[int]


def entries_of(chosen: Collection[int], units: Sequence[Unit]) -> list[Entry]:
    """Returns entries that match only the chosen units, in their order.

    Args:
      chosen: numbers of units.
      units: all units.
    """
    found: dict[tuple[str, ...], set[int]] = {}
    for number in sorted(chosen):
        expressions = tuple(dict.fromkeys(_expression(x, chosen, units) for x in units[number].addresses))
        found.setdefault(expressions, set()).add(number)
    return [Entry(expressions, frozenset(numbers)) for expressions, numbers in found.items()]


def _expression(address: str, chosen: Collection[int], units: Sequence[Unit]) -> str:
    """Returns the shortest expression that matches an address, and no unit that was not chosen."""
    head, _, lines = address.partition("@")
    path = head.rpartition(":")[0]
    inner, _, outer = lines.partition(" from ")
    operation = f"^{re.escape(path)}:{re.escape(primitive_of(address))}@"
    at_line = f"{operation}.*{_file(inner)}"
    of_caller = f"{at_line} from .*{_file(outer)}$" if outer else f"{at_line}$"
    shorter = [operation] if path else []
    shorter += [f"{at_line}( from |$)", of_caller]
    for expression in shorter:
        if re.search(expression, address) and _reached(expression, units) <= set(chosen):
            return expression.replace("( from |$)", "$") if not outer else expression
    return f"^{re.escape(address)}$"


def _file(line: str) -> str:
    """Returns an expression for a line that also matches on other machines: folder, file and line number."""
    return re.escape("/".join(line.replace("\\", "/").split("/")[-2:]))


def _reached(expression: str, units: Sequence[Unit]) -> set[int]:
    search = re.compile(expression).search
    return {number for number, unit in enumerate(units) if any(map(search, unit.addresses))}
