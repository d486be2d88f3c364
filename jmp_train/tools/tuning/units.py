"""Units of tuning: operations with their addresses, the run-time flags of their precision, and entries of rules.

An entry has the shortest expressions that match only its operations.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax

from jmp_train.policies.autocasting import PRODUCTS, elements_of, flops_of
from jmp_train.policies.autocasting.emulating import Bit, both, emulated_autocast
from jmp_train.policies.programs import repeats_of
from jmp_train.tools.diagnosing import line_expression
from jmp_train.tools.tuning.tuned_functions import Example, Subject


@dataclasses.dataclass(frozen=True)
class Unit:
    """Operations whose precision one entry of the rules sets together.

    Attributes:
      addresses: addresses for `AutocastRules.operations`; several for a function with a custom derivative.
      operations: number of operations.
      flops: their flops in the forward pass.
      elements: number of elements of their results.
      is_free: False for a product that must not run in few bits.
      by_path: False for a product that entries of a path leave alone, as attention's; those of operations do not.
      not_tried: why a product that the recipe could run in few bits is not free; otherwise empty.
    """

    addresses: tuple[str, ...]
    operations: int
    flops: int
    elements: int
    is_free: bool = True
    by_path: bool = True
    not_tried: str = ""

    @property
    def path(self) -> str:
        """The path of modules and scopes."""
        return self.addresses[0].partition("@")[0].rpartition(":")[0]

    @property
    def line(self) -> str:
        """The user's line: file and number."""
        return self.addresses[0].partition("@")[2].rpartition(" from ")[2]

    @property
    def primitives(self) -> tuple[str, ...]:
        """The names of jax's primitives."""
        return tuple(sorted({primitive_of(address) for address in self.addresses}))

    @property
    def is_product(self) -> bool:
        """True if the unit has a matrix product or convolution, where half precision gains most."""
        return not PRODUCTS.isdisjoint(self.primitives)

    @property
    def group(self) -> str:
        """The module of the unit or, without one, its line."""
        return self.path or self.addresses[0].partition("@")[2]


def primitive_of(address: str) -> str:
    """Returns the name of the primitive in an address."""
    return address.partition("@")[0].rpartition(":")[2]


def find_units(subject: Subject, example: Example, dtype: Any) -> list[Unit]:
    """Returns the operations that may run in half precision, in the order in which they run.

    Args:
      subject: the tuned function or step.
      example: its arguments.
      dtype: the half type.
    """
    together: dict[str, set[str]] = {}
    counted: dict[str, list[int]] = {}

    def note(addresses: tuple[str, ...], equations: tuple[Any, ...]) -> Bit:
        merged = set(addresses).union(*(together.get(address, ()) for address in addresses))
        together.update(dict.fromkeys(merged, merged))
        repeats = math.prod(map(repeats_of, equations[:-1]))
        counts = counted.setdefault(addresses[0], [0, 0, 0])
        for i, count in enumerate((1, repeats * flops_of(equations[-1]), repeats * elements_of(equations[-1]))):
            counts[i] += count
        return True

    transform = functools.partial(emulated_autocast, dtype=dtype, flags=note)
    jax.eval_shape(lambda: subject.objective(transform, *example))
    units: dict[frozenset[str], list[int]] = {}
    for address, counts in counted.items():
        total = units.setdefault(frozenset(together[address]), [0, 0, 0])
        total[:] = [a + b for a, b in zip(total, counts, strict=True)]
    return [Unit(tuple(sorted(addresses)), n, flops, size) for addresses, (n, flops, size) in units.items()]


def unit_of(address: str, decisions: Sequence[Any], *, is_free: bool, by_path: bool, not_tried: str) -> Unit:
    """Returns the operations of autocast's decisions at an address.

    Args:
      address: the address.
      decisions: the decisions.
      is_free: see `Unit`.
      by_path: see `Unit`.
      not_tried: see `Unit`.
    """
    flops, elements = (sum(x.repeats * of(x.equation) for x in decisions) for of in (flops_of, elements_of))
    return Unit((address,), len(decisions), flops, elements, is_free, by_path, not_tried)


def index_of(units: Sequence[Unit]) -> dict[str, int]:
    """Returns the number of the unit that an address belongs to, for units to choose from."""
    return {x: number for number, unit in enumerate(units) if unit.is_free for x in unit.addresses}


def flags_from(array: jax.Array, numbers: dict[str, int]) -> Callable[..., Bit]:
    """Returns the flags of an emulation.

    Args:
      array: bool [units], True if the unit may run in half precision.
      numbers: see `index_of`.
    """

    def flag(addresses: tuple[str, ...], equations: tuple[Any, ...]) -> Bit:
        del equations
        bit: Bit = True
        for number in sorted({numbers.get(address, -1) for address in addresses}):
            bit = both(bit, number >= 0 and array[number])
        return bit

    return flag


@dataclasses.dataclass(frozen=True)
class Entry:
    """An entry of the rules.

    Attributes:
      expressions: for `AutocastRules.operations`.
      units: numbers of the units that it matches.
    """

    expressions: tuple[str, ...]
    units: frozenset[int]


def entries_of(chosen: Collection[int], units: Sequence[Unit], may_match: Collection[int] | None = None) -> list[Entry]:
    """Returns entries that match only the chosen units, in their order.

    Args:
      chosen: numbers of units.
      units: all units.
      may_match: numbers of all units that they may match; by default the chosen ones.
    """
    may_match = chosen if may_match is None else may_match
    found: dict[tuple[str, ...], set[int]] = {}
    for number in sorted(chosen):
        expressions = tuple(dict.fromkeys(_expression(x, may_match, units) for x in units[number].addresses))
        found.setdefault(expressions, set()).add(number)
    return [Entry(expressions, frozenset(numbers)) for expressions, numbers in found.items()]


def fp8_entries(chosen: Collection[int], units: Sequence[Unit]) -> tuple[list[str], list[str]]:
    """Returns expressions for `AutocastRules.paths`, and for `operations`, that match only the chosen units.

    A path has all products of a module, the outermost one in which all that it reaches are chosen.

    Args:
      chosen: numbers of units.
      units: all units.
    """
    parts = [unit.path.split("/") for unit in units]
    reached = [i for i, unit in enumerate(units) if unit.is_free or unit.by_path]
    paths: dict[str, None] = {}
    left = []
    for number in sorted(chosen):
        by_path = units[number].path and units[number].by_path
        prefixes = [parts[number][:size] for size in range(1, len(parts[number]) + 1) if by_path]
        within = ([i for i in reached if parts[i][: len(prefix)] == prefix] for prefix in prefixes)
        pairs = (prefix for prefix, others in zip(prefixes, within, strict=True) if set(others) <= set(chosen))
        if (prefix := next(pairs, None)) is not None:
            paths[f"^{re.escape('/'.join(prefix))}(/|$)"] = None
        else:
            left.append(number)
    return list(paths), [x for number in left for x in entries_of([number], units, chosen)[0].expressions]


def _expression(address: str, chosen: Collection[int], units: Sequence[Unit]) -> str:
    """Returns the shortest expression that matches an address, and no unit that was not chosen."""
    head, _, lines = address.partition("@")
    path = head.rpartition(":")[0]
    inner, _, outer = lines.partition(" from ")
    operation = f"^{re.escape(path)}:{re.escape(primitive_of(address))}@"
    at_line = f"{operation}.*{line_expression(inner)}"
    of_caller = f"{at_line} from .*{line_expression(outer)}$" if outer else f"{at_line}$"
    shorter = [operation] if path else []
    shorter += [f"{at_line}( from |$)", of_caller]
    for expression in shorter:
        if re.search(expression, address) and _reached(expression, units) <= set(chosen):
            return expression.replace("( from |$)", "$") if not outer else expression
    return f"^{re.escape(address)}$"


def _reached(expression: str, units: Sequence[Unit]) -> set[int]:
    search = re.compile(expression).search
    return {number for number, unit in enumerate(units) if any(map(search, unit.addresses))}
