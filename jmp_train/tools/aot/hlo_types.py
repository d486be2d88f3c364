"""Types of arrays and tuples in the text of HLO."""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import zip_longest

COMMENT = re.compile(r"/\*.*?\*/")
"""What the text counts long lists with: "/*index=5*/"."""


@dataclass(frozen=True, slots=True)
class ArrayType:
    """The dtype and shape of an array.

    Attributes:
      dtype: XLA's name: "f16", "bf16", "f32", "s32", "pred".
      shape: the lengths of the axes, on one device.
      layout: the order of the axes in memory, and on TPUs the tiles: "1,0:T(8,128)"; "" if unknown.

    Example:
      >>> ArrayType("f16", (1000, 64)).n_bytes
      128000
      >>> ArrayType("f32", (1000, 3), "1,0:T(8,128)").stored_bytes  # whole tiles: 3 columns take the place of 128
      512000
    """

    dtype: str
    shape: tuple[int, ...]
    layout: str = field(default="", repr=False, compare=False)

    @property
    def size(self) -> int:
        """Number of elements of the array."""
        return math.prod(self.shape)

    @property
    def n_bytes(self) -> int:
        """Bytes of the array, without padding."""
        return math.ceil(_bits(self.dtype) * self.size / 8)

    @property
    def stored_bytes(self) -> int:
        """Bytes of the array in memory: on TPUs whole tiles, elsewhere `n_bytes`."""
        tile = _TILE.search(self.layout)
        if tile is None:
            return self.n_bytes
        order = [int(n) for n in self.layout.partition(":")[0].split(",") if n]
        lengths = [self.shape[axis] for axis in order]  # the axis of neighbors in memory first
        sizes = [int(n) for n in reversed(tile[1].split(","))]
        lengths += [1] * (len(sizes) - len(lengths))
        whole = [-(-n // size) * size for n, size in zip_longest(lengths, sizes, fillvalue=1)]
        return math.ceil(_bits(self.dtype) * math.prod(whole) / 8)

    @property
    def is_in_main_memory(self) -> bool:
        """Returns whether the array is in the device's main memory, not in a TPU core's vector or scalar memory."""
        return _TILE.search(self.layout) is None or "S(" not in self.layout


@lru_cache(maxsize=4096)
def array_types(type_: str) -> tuple[ArrayType, ...]:
    """Returns the arrays of a type, those of tuples in order, without tokens and the like.

    Args:
      type_: the type of an instruction.

    Example:
      >>> array_types("(s32[], f16[2,3]{1,0:T(8,128)}, token[])")
      (ArrayType(dtype='s32', shape=()), ArrayType(dtype='f16', shape=(2, 3)))
    """
    return tuple(
        ArrayType(dtype, tuple(int(n.removeprefix("<=")) for n in lengths.split(",") if n), layout)
        for dtype, lengths, layout in _ARRAY.findall(type_)
        if _bits(dtype)
    )


def tuple_types(type_: str) -> tuple[str, ...]:
    """Returns the types of a tuple's elements; for another type, the type itself.

    Args:
      type_: the type of an instruction.

    Example:
      >>> tuple_types("(s32[], /*index=1*/(f16[2,3]{1,0}, f32[]))")
      ('s32[]', '(f16[2,3]{1,0}, f32[])')
    """
    return tuple(COMMENT.sub("", part) for part in split_outside(type_[1:-1])) if type_[:1] == "(" else (type_,)


def split_outside(text: str, separator: str = ", ") -> Iterator[str]:
    """Yields the parts of a text between separators outside of brackets and strings.

    Args:
      text: text with strings in double quotes.
      separator: the separator.

    Example:
      >>> list(split_outside('calls=%f, window={size=3, pad=1}, name="a, b"'))
      ['calls=%f', 'window={size=3, pad=1}', 'name="a, b"']
    """
    depth = start = 0
    for token in _STRING_OR_BRACKET.finditer(text):
        if token[0] in "([{":
            depth += 1
        elif token[0] in ")]}":
            depth -= 1
        elif token[0] == "," and depth == 0 and text.startswith(separator, token.start()):
            yield text[start : token.start()]
            start = token.start() + len(separator)
    if text[start:]:
        yield text[start:]


_STRING_OR_BRACKET = re.compile(r'"(?:[^"\\]|\\.)*"|[()\[\]{},]')
_ARRAY = re.compile(r"\b([a-z]\w*)\[([\d,<=]*)\](?:\{([^}]*)\})?")
_TILE = re.compile(r":T\(([\d,]+)\)")


@lru_cache
def _bits(dtype: str) -> int:
    """Returns the number of bits per element from XLA's name; 0 for tokens and the like."""
    number = re.search(r"\d+", dtype)
    return int(number[0]) if number else 8 * (dtype == "pred")
