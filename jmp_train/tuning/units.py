"""The operations whose precision can be chosen, each with its addresses, and the flags that choose it at run time."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jmp_train.policies.autocasting import PRODUCTS, AutocastRules, elements_of, flops_of
from jmp_train.policies.autocasting.emulating import Bit, both, emulated_autocast
from jmp_train.tuning.subjects import Example, Subject, Transform


@dataclasses.dataclass(frozen=True)
class Unit:
    """Operations that one entry of the rules decides on together.

    Attributes:
      addresses: as `AutocastRules.operations` finds them; several where a function with a custom derivative holds them.
      operations: how many there are.
      flops: of all of them, forward.
      elements: of their results.
    """

    addresses: tuple[str, ...]
    operations: int
    flops: int
    elements: int

    @property
    def path(self) -> str:
        """Of modules and scopes."""
        return self.addresses[0].partition("@")[0].rpartition(":")[0]

    @property
    def primitives(self) -> tuple[str, ...]:
        """The names of jax's primitives."""
        return tuple(sorted({primitive_of(address) for address in self.addresses}))

    @property
    def is_product(self) -> bool:
        """Whether there is a matrix product or convolution among them, where half precision gains most."""
        return not PRODUCTS.isdisjoint(self.primitives)

    @property
    def group(self) -> str:
        """What it belongs to: its module or, without one, its line."""
        return self.path or self.addresses[0].partition("@")[2]


def primitive_of(address: str) -> str:
    """Returns the primitive's name in an address."""
    return address.partition("@")[0].rpartition(":")[2]


def find_units(subject: Subject, example: Example, dtype: Any, rules: AutocastRules) -> list[Unit]:
    """Returns the operations that rules let run in half precision, in the order in which they run.

    Args:
      subject: what is tuned.
      example: its arguments.
      dtype: the half type.
      rules: by which all that can be is half.
    """
    together: dict[str, set[str]] = {}
    counted: dict[str, list[int]] = {}

    def note(addresses: tuple[str, ...], equations: tuple[Any, ...]) -> Bit:
        merged = set(addresses).union(*(together.get(address, ()) for address in addresses))
        together.update(dict.fromkeys(merged, merged))
        repeats = 1
        for caller in equations[:-1]:
            repeats *= caller.params.get("length", 1) if caller.primitive.name == "scan" else 1
        counts = counted.setdefault(addresses[0], [0, 0, 0])
        for i, count in enumerate((1, repeats * flops_of(equations[-1]), repeats * elements_of(equations[-1]))):
            counts[i] += count
        return True

    transform = flagged(note, dtype, rules)
    jax.eval_shape(lambda: subject.objective(transform, *example))
    units: dict[frozenset[str], list[int]] = {}
    for address, counts in counted.items():
        total = units.setdefault(frozenset(together[address]), [0, 0, 0])
        total[:] = [a + b for a, b in zip(total, counts, strict=True)]
    return [Unit(tuple(sorted(addresses)), *counts) for addresses, counts in units.items()]


def flagged(flags: Callable[..., Bit], dtype: Any, rules: AutocastRules, run: Any = None) -> Transform:
    """Returns what emulates functions under autocast; see `emulated_autocast`."""
    return lambda fn: emulated_autocast(fn, dtype, flags, rules=rules, run=run)


def index_of(units: Sequence[Unit]) -> dict[str, int]:
    """Returns the number of the unit that an address belongs to."""
    return {address: number for number, unit in enumerate(units) for address in unit.addresses}


def flags_from(array: jax.Array, numbers: dict[str, int]) -> Callable[..., Bit]:
    """Returns flags as an emulation takes them.

    Args:
      array: bool [units], whether each may run in half precision.
      numbers: see `index_of`.
    """

    def flag(addresses: tuple[str, ...], equations: tuple[Any, ...]) -> Bit:
        del equations
        bit: Bit = True
        for number in sorted({numbers[address] for address in addresses}):
            bit = both(bit, array[number])
        return bit

    return flag
