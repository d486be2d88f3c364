"""Autocast rules that a run reads from a file."""

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Self

from jmp_train.policies import AutocastRules


@dataclasses.dataclass(frozen=True)
class RulesFile:
    """Autocast rules, and their file.

    Attributes:
      path: the path of the file.
      rules: the rules when it was read.
    """

    path: Path
    rules: AutocastRules

    @classmethod
    def read(cls, path: Path) -> Self:
        """Returns the rules of a file; raises the errors of `AutocastRules.load`.

        Args:
          path: the path of the file.
        """
        return cls(path, AutocastRules.load(path))

    @property
    def name(self) -> str:
        """The path for display, without control characters and characters outside UTF-8."""
        return "".join(c if c.isprintable() else repr(c)[1:-1] for c in str(self.path))

    @property
    def digest(self) -> str:
        """16 hexadecimal digits of the sha256 of the entries, whatever the file's name and comments."""
        tables = {field.name: getattr(self.rules, field.name) for field in dataclasses.fields(self.rules)}
        entries = {table: pairs for table, pairs in tables.items() if pairs}  # so that new tables change no digest
        return hashlib.sha256(json.dumps(entries).encode()).hexdigest()[:16]
