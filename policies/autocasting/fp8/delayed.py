"""Scales that an autocast region gets from outside, one set for each of its products in 8 bits.

A product is known by the place where it stands in the program. The scales of one that a loop runs again and again, or
several devices, have a row for each run, so that their "gradients", the largest magnitudes that the product has seen,
come out one by one: gradients of what all runs share would be added up.
"""

import contextlib
import contextvars
import dataclasses
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import jax

_BODY = ":"  # between the place of a body and what is in it; no scope has it
_SEPARATORS = re.compile(rf"[/\s{_BODY}]+")


@dataclasses.dataclass(frozen=True)
class DelayedScales:
    """The scales of a region's products in 8 bits.

    Attributes:
      scales: float32 [..., 3] by the place of the product, with one axis for each loop and `shard_map` around it that
        is not entered yet.
      found: where places are noted, with the lengths of the axes that their scales need; None if they are known.
      extents: the lengths of the loops and numbers of devices around what runs now.
    """

    scales: Mapping[str, jax.Array]
    found: dict[str, tuple[int, ...]] | None = None
    extents: tuple[int, ...] = ()

    def of(self, place: str) -> jax.Array | None:
        """Returns the scales of a product, None where it is only noted."""
        if self.found is not None:
            self.found[place] = self.extents
            return None
        return self.scales[place]

    def within(self, place: str) -> dict[str, jax.Array]:
        """Returns the scales of the products in the body of a loop at a place."""
        return {name: scales for name, scales in self.scales.items() if name.startswith(f"{place}{_BODY}")}

    def rows(self, scales: Mapping[str, jax.Array], extent: int) -> "DelayedScales":
        """Returns them for one run of a body, given its rows."""
        return dataclasses.replace(self, scales=scales, extents=(*self.extents, extent))


_SCALES: contextvars.ContextVar[DelayedScales | None] = contextvars.ContextVar("fp8 scales", default=None)


@contextlib.contextmanager
def fp8_scales(scales: DelayedScales | None) -> Iterator[None]:
    """Gives scales to the first autocast region that runs within, which is the outermost one.

    Args:
      scales: those of its products; None for none, which every region has that is within another.
    """
    token = _SCALES.set(scales)
    try:
        yield
    finally:
        _SCALES.reset(token)


def given_scales() -> DelayedScales | None:
    """Returns the scales that a region gets here."""
    return _SCALES.get()


def place_of(equation: Any, scope: str, outer: str, counts: Counter[str]) -> str:
    """Returns the place of an equation, which no other in the program has.

    Args:
      equation: that multiplies or holds a program.
      scope: that it is in, relative to the body around it.
      outer: the place of that body.
      counts: of the places so far in that body; it is counted there.
    """
    name = equation.params.get("name") or equation.primitive.name
    own = ".".join(_SEPARATORS.sub(".", part) for part in (scope, str(name)) if part)
    place = f"{outer}{_BODY}{own}" if outer else own
    counts[place] += 1
    return place if counts[place] == 1 else f"{place}~{counts[place]}"
