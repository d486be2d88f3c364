"""Search for a smallest list: takes the first items of a ranking that suffice, then removes those not needed.

The search does not depend on precision: a test function tells whether a set of items suffices.
"""

import math
from collections.abc import Callable, Hashable, Sequence
from typing import TypeVar

Item = TypeVar("Item", bound=Hashable)
Suffices = Callable[[frozenset[Item]], bool]


def smallest_list(
    ranking: Sequence[Item],
    is_costly: Callable[[Item], bool],
    group_of: Callable[[Item], Hashable],
    suffices: Suffices[Item],
) -> list[Item]:
    """Returns items that suffice and are all needed: without any of them, the others do not suffice.

    Costly items are included only if all others together do not suffice.

    Args:
      ranking: all items, those most likely to be needed first; together they must suffice.
      is_costly: returns True for items to avoid.
      group_of: returns the group of an item; groups are tried as a whole first.
      suffices: deterministic test of a set of items.

    Example:
      >>> smallest_list(range(100), lambda i: i < 50, lambda i: i // 10, lambda items: {3, 72} <= items)
      [72, 3]

    Reference: delta debugging, of Zeller and Hildebrandt, "Simplifying and isolating failure-inducing input", IEEE
    TSE 28(2), 2002.
    """
    if suffices(frozenset()):
        return []
    costly = [item for item in ranking if is_costly(item)]
    cheap = [item for item in ranking if not is_costly(item)]
    with_cheap = _smallest(costly, group_of, lambda items: suffices(items.union(cheap)))
    with_costly = _smallest(cheap, group_of, lambda items: suffices(items.union(with_cheap)))
    return needed([*with_costly, *with_cheap], suffices)


def _smallest(ranking: Sequence[Item], group_of: Callable[[Item], Hashable], suffices: Suffices[Item]) -> list[Item]:
    if suffices(frozenset()):
        return []
    kept = _first_that_suffice(ranking, suffices)
    groups: dict[Hashable, list[Item]] = {}
    for item in kept:
        groups.setdefault(group_of(item), []).append(item)

    def groups_suffice(names: frozenset[Hashable]) -> bool:
        return suffices(frozenset(item for name in names for item in groups[name]))

    names = needed(list(groups), groups_suffice)
    in_groups = {item for name in names for item in groups[name]}
    return needed([item for item in kept if item in in_groups], suffices)


def needed(items: Sequence[Item], suffices: Suffices[Item]) -> list[Item]:
    """Returns a subset of the items that suffices, and of which every item is needed.

    Args:
      items: items that suffice together; the search tries to remove the last ones first.
      suffices: see `smallest_list`.
    """
    kept, size = list(items), max(1, len(items) // 2)
    while True:
        before, end = len(kept), len(kept)
        while end > 0:
            rest = kept[: max(0, end - size)] + kept[end:]
            if suffices(frozenset(rest)):
                kept = rest
            end = max(0, end - size)
        if size > 1:
            size = math.ceil(size / 2)
        elif len(kept) == before:
            return kept


def _first_that_suffice(ranking: Sequence[Item], suffices: Suffices[Item]) -> list[Item]:
    """Returns the first 1, 2, 4, ... items: the smallest such prefix that suffices."""
    count = 1
    while count < len(ranking) and not suffices(frozenset(ranking[:count])):
        count *= 2
    return list(ranking[:count])
