"""Writes rules of autocast as Python code to copy."""

import dataclasses
from collections.abc import Sequence

from jmp_train.policies.autocasting.rules import AutocastRules

_WIDTH = 100  # most characters of a line that holds a whole table
_FIRST_COUNTS = ("paths", "operations")  # of two entries for one name; in other tables, the last one


def rules_code(rules: AutocastRules, base: str = "jt.TORCH_CUDA") -> str:
    """Returns code that adds entries to a table of rules; "" if there are none.

    Args:
      rules: the entries only.
      base: the code of the table to which they are added.

    Example:
      >>> print(rules_code(AutocastRules(primitives=(("exp", "float32"),))))
      rules = jt.TORCH_CUDA.replace(
          primitives={"exp": "float32"},
      )
    """
    lines = [f"    {_argument(table, entries)},\n" for table, entries in _tables(rules).items()]
    return f"rules = {base}.replace(\n{''.join(lines)})" if lines else ""


def replace_arguments(rules: AutocastRules) -> str:
    r"""Returns the arguments of `AutocastRules.replace` in one line.

    Args:
      rules: the entries only.

    Example:
      >>> print(replace_arguments(AutocastRules(functions=(("var", "float32"),), paths=((r"a\.b$", "lower"),))))
      functions={"var": "float32"}, paths={r"a\.b$": "lower"}
    """
    return ", ".join(f"{table}={{{', '.join(entries)}}}" for table, entries in _tables(rules).items())


def _tables(rules: AutocastRules) -> dict[str, list[str]]:
    """Returns the entries of each table that has any, as the items of a dictionary display."""
    found = {}
    for field in dataclasses.fields(rules):
        pairs: Sequence[tuple[str, str]] = getattr(rules, field.name)
        entries = dict(reversed(pairs)) if field.name in _FIRST_COUNTS else dict(pairs)
        names = dict.fromkeys(name for name, _ in pairs)
        if names:
            found[field.name] = [f"{_quoted(name)}: {_quoted(entries[name])}" for name in names]
    return found


def _argument(table: str, entries: Sequence[str]) -> str:
    line = f"{table}={{{', '.join(entries)}}}"
    if len(line) <= _WIDTH:
        return line
    return "\n        ".join([f"{table}={{", *(f"{entry}," for entry in entries)]) + "\n    }"


def _quoted(text: str) -> str:
    if not text.isprintable() or '"' in text:
        return repr(text)
    if "\\" in text:
        return repr(text) if text.endswith("\\") else f'r"{text}"'
    return f'"{text}"'
