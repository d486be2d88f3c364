"""Scales that an autocast region gets from outside, one set per product in 8 bits.

A product is identified by its place in the program. If a loop or several devices run a product several times, its
scales have one row per run. The "gradients" of the scales are the largest magnitudes in the product, so each run
returns its own. Gradients of shared scales would be added up.
"""

import contextlib
import contextvars
import dataclasses
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import jax

_BODY = ":"  # separates the place of a body from places within it; no scope contains it
_SEPARATORS = re.compile(rf"[/\s{_BODY}]+")


@dataclasses.dataclass(frozen=True)
class DelayedScales:
    """The scales of a region's products in 8 bits.

    Attributes:
      scales: float32 [..., 3] by place of the product, with one axis per loop and `shard_map` around it that autocast
        has not entered yet.
      found: a dictionary to record places and the lengths of the axes that their scales need; None if the places are
        known.
      extents: the lengths of the loops and the numbers of devices around the current program.
    """

    scales: Mapping[str, jax.Array]
    found: dict[str, tuple[int, ...]] | None = None
    extents: tuple[int, ...] = ()

    def of(self, place: str) -> jax.Array | None:
        """Returns the scales of a product; None if its place is only recorded."""
        if self.found is not None:
            self.found[place] = self.extents
            return None
        return self.scales[place]

    def within(self, place: str) -> dict[str, jax.Array]:
        """Returns the scales of the products in the body at a place."""
        return {name: scales for name, scales in self.scales.items() if name.startswith(f"{place}{_BODY}")}

    def rows(self, scales: Mapping[str, jax.Array], extent: int) -> "DelayedScales":
        """Returns the scales for one run of a body, given its rows."""
        return dataclasses.replace(self, scales=scales, extents=(*self.extents, extent))


_SCALES: contextvars.ContextVar[DelayedScales | None] = contextvars.ContextVar("fp8 scales", default=None)


@contextlib.contextmanager
def fp8_scales(scales: DelayedScales | None) -> Iterator[None]:
    """Gives scales to the outermost autocast region that runs within this context.

    Args:
      scales: the scales of its products; None for no scales, as in a region within another.
    """
    token = _SCALES.set(scales)
    try:
        yield
    finally:
        _SCALES.reset(token)


def given_scales() -> DelayedScales | None:
    """Returns the scales that a region gets in the current context."""
    return _SCALES.get()


def place_of(equation: Any, scope: str, outer: str, counts: Counter[str]) -> str:
    """Returns the place of an equation, which is unique in the program.

    Args:
      equation: an equation that multiplies or holds a program.
      scope: its scope, relative to the body around it.
      outer: the place of that body.
      counts: the number of uses of each place in that body so far; the function increments it.
    """
    name = equation.params.get("name") or equation.primitive.name
    own = ".".join(_SEPARATORS.sub(".", part) for part in (scope, str(name)) if part)
    place = f"{outer}{_BODY}{own}" if outer else own
    counts[place] += 1
    return place if counts[place] == 1 else f"{place}~{counts[place]}"
