"""Tables of what is in a JSON file, whatever is in it: no names of benchmarks are known here.

A list of objects, or an object of objects, is a table with a row for each of them, where that has no more than
`WIDEST` columns; else each is shown by itself. What remains is a table of names and values. Of what a row with many
other values has nested within it, only the number of entries is shown.
"""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, TypeGuard

Json = None | bool | int | float | str | Sequence["Json"] | Mapping[str, "Json"]
Record = Mapping[str, Json]

WIDEST = 30  # columns
NARROW = 6  # columns, of which none is left out
RICH = 8  # values with which a row is one, whatever else it has
LONGEST = 6  # numbers that are shown one by one
SENTENCE = 60  # letters, beyond which texts are rows of their own
UNITS = (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3))


class Table(NamedTuple):
    """Rows of cells under a title.

    Attributes:
      title: the names that lead to it in the file.
      header: a name for each column; an empty one for a list of texts.
      rows: of cells.
      shared: what all rows have, by the columns' names; no columns of the table.
    """

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    shared: Mapping[str, str]


def tables(value: Record, title: str = "") -> Iterator[Table]:
    """Yields the tables of an object, which together show all that it has.

    Args:
      value: as `json.loads` returns it.
      title: of the object.
    """
    records = _records(value)
    if records is not None and (table := _table(title, records)) is not None:
        yield table
        return
    facts = {name: x for name, x in value.items() if _is_fact(x)}
    if facts:
        yield Table(title, ("name", "value"), tuple(_cells(facts).items()), {})
    for name, child in value.items():
        if name not in facts:
            yield from _tables_of_child(child, _joined(title, name))


def _tables_of_child(value: Json, title: str) -> Iterator[Table]:
    """Yields the tables of what is no fact: an object, or a list with objects in it."""
    if _is_object(value):
        yield from tables(value, title)
        return
    assert isinstance(value, Sequence)
    if not any(_is_object(x) or _is_list(x) for x in value):
        yield Table(title, ("",), tuple((cell_of(x),) for x in value), {})
        return
    records = _records(value)
    if records is not None and (table := _table(title, records)) is not None:
        yield table
        return
    for index, child in enumerate(value, 1):
        yield from _tables_of_child(child if _is_object(child) else {"": child}, _joined(title, _label(child, index)))


def _label(value: Json, index: int) -> str:
    """Returns the first text of a list's object, such as the model that it is of, or else its place."""
    texts = [x for x in value.values() if isinstance(x, str)] if _is_object(value) else []
    return texts[0] if texts else str(index)


def _records(value: Json) -> list[tuple[str, Record]] | None:
    """Returns the objects that are to be rows, with their names, or None if there are other things among them."""
    if _is_object(value):
        parts = [(name, x if _is_list(x) else [x]) for name, x in value.items()] if len(value) > 1 else []
    else:
        parts = [("", value)] if _is_list(value) else []
    rows = [(name, row) for name, part in parts for row in part]
    objects = [(name, row) for name, row in rows if _is_object(row) and row]
    return objects if rows and len(objects) == len(rows) else None


def _table(title: str, records: list[tuple[str, Record]]) -> Table | None:
    """Returns the table of records, or None if they are too deep or too wide for one."""
    rows = [row for _, row in records]
    names = {name for row in rows for name in row}
    uniform = {name for name in names if len({_shape(row.get(name)) for row in rows}) == 1}
    deep = {name for name in names for row in rows if not _fits(row.get(name), name in uniform)}
    if deep and min(len(row.keys() - deep) for row in rows) < RICH:
        return None
    cells = [_cells(row, uniform) for row in rows]
    columns = list(dict.fromkeys(name for row in cells for name in row))
    values = {name: {row.get(name, "") for row in cells} for name in columns}
    alike = [name for name in columns if len(values[name]) == 1]
    shared = {name: cells[0][name] for name in alike} if len(columns) > NARROW and len(cells) > 1 else {}
    columns = [name for name in columns if name not in shared]
    if len(columns) > WIDEST:
        return None
    lines = [(key, *(row.get(name, "") for name in columns)) for (key, _), row in zip(records, cells, strict=True)]
    header = ("name", *columns)
    if not any(key for key, _ in records):
        header, lines = header[1:], [line[1:] for line in lines]
    return Table(title, header, tuple(lines), {name: x for name, x in shared.items() if x})


def _cells(record: Record, uniform: set[str] | None = None, is_bytes: bool = False) -> dict[str, str]:
    """Returns the cells of a record by their columns.

    Args:
      record: a flat one.
      uniform: the names whose values have the same shape in all rows, so that objects are columns; default: all.
      is_bytes: whether all its numbers are bytes; default: those in whose name the word is.
    """
    cells: dict[str, str] = {}
    for name, value in record.items():
        in_bytes = is_bytes or "bytes" in name.split("_")
        if _is_object(value) and value and (uniform is None or name in uniform):
            cells |= {_joined(name, key): cell for key, cell in _cells(value, is_bytes=in_bytes).items()}
        else:
            cells[name] = cell_of(value, in_bytes)
    return cells


def cell_of(value: Json, is_bytes: bool = False) -> str:
    """Returns a value as text.

    Args:
      value: of an object, or a list of objects, only the number of entries is shown.
      is_bytes: whether its numbers are shown in MB or what fits.
    """
    if _is_object(value) or (_is_list(value) and not _is_plain(value)):
        return f"{len(value)} entries" if value else ""
    if _is_list(value):
        numbers = [x for x in value if isinstance(x, int | float) and not isinstance(x, bool)]
        if len(numbers) < len(value) or len(value) <= LONGEST:
            return ", ".join(cell_of(x, is_bytes) for x in value)
        least, middle, most = (_number(f(numbers), is_bytes) for f in (min, statistics.median, max))
        return middle if least == most else f"{middle} ({least} to {most})"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int | float):
        return _number(value, is_bytes)
    return "" if value is None else str(value)


def _number(value: float, is_bytes: bool) -> str:
    """Returns a number with four digits, or a whole one with all of them."""
    if is_bytes:
        for unit, size in UNITS:
            if abs(value) >= size:
                return f"{value / size:.4g} {unit}"
        return f"{value:g} B"
    if isinstance(value, int) or abs(value) >= 1e4:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def _joined(*names: str) -> str:
    return ", ".join(name for name in names if name)


def _shape(value: Json) -> frozenset[tuple[str, object]] | bool:
    """Returns what values have in common that make the same columns: an object's names, or that they are plain."""
    return frozenset((name, _shape(x)) for name, x in value.items()) if _is_object(value) else _is_plain(value)


def _is_object(value: Json) -> TypeGuard[Record]:
    return isinstance(value, Mapping)


def _is_list(value: Json) -> TypeGuard[Sequence[Json]]:
    return isinstance(value, Sequence) and not isinstance(value, str)


def _is_plain(value: Json) -> bool:
    """Whether a value fits into one cell: a number, a text, or a list of numbers or short texts."""
    if _is_list(value):
        return not any(_is_object(x) or _is_list(x) or len(str(x)) > SENTENCE for x in value)
    return not _is_object(value)


def _is_fact(value: Json) -> bool:
    """Whether a value needs no table of its own: a plain one, or an object of plain ones."""
    return all(map(_is_plain, value.values())) if _is_object(value) else _is_plain(value)


def _fits(value: Json, is_uniform: bool) -> bool:
    """Whether a value can be cells of a row, by columns of its own if it has the same names in all rows."""
    if is_uniform and _is_object(value):
        return all(_fits(x, True) for x in value.values())
    return _is_fact(value)
