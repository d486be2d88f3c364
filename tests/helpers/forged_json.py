"""JSON data of which one node is replaced: by a wrong type, a huge or negative number, deep nesting, a repeated key."""

import json
import zlib
from collections.abc import Iterator
from typing import Any

DEEP, TWICE = "@deep@", "@twice@"
CONTROL = "\x1b[31mred\n\u202e"
VALUES = (None, 2**70, -1, 1.5, True, "", CONTROL, [], {}, [[]], DEEP, TWICE)


def places(node: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield place
    if isinstance(node, dict | list):
        for key in node if isinstance(node, dict) else range(len(node)):
            yield from places(node[key], (*place, key))


def replaced(header: Any, place: tuple[Any, ...], value: Any) -> bytes:
    """Returns the header's text with another value in a place, or with the place's key twice."""
    copy = {"": json.loads(json.dumps(header))}
    *parents, last = ("", *place)
    node: Any = copy
    for key in parents:
        node = node[key]
    if value != TWICE:
        node[last] = value
    elif isinstance(node, dict) and place:
        node[TWICE] = node[last]
    else:
        node[last] = [node[last], node[last]]
    text = json.dumps(copy[""]).replace(f'"{TWICE}"', json.dumps(last))
    return text.replace(f'"{DEEP}"', 10_000 * "[" + 10_000 * "]").encode()


def every_forgery(data: Any, part: int = 1) -> list[bytes]:
    """Returns the texts in which one node is replaced by one of the values; of these one in `part`, always the same."""
    every = [(place, value) for place in places(data) for value in VALUES]
    return [replaced(data, *row) for row in every if zlib.crc32(repr(row).encode()) % part == 0]
