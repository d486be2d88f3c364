"""Results of tuning: the entries in float32, and the verification by autocast itself."""

import dataclasses
import linecache

from jmp_train.tools.diagnosing import file_and_line
from jmp_train.tools.tuning.scores import Lost
from jmp_train.tools.tuning.tolerance import Errors


@dataclasses.dataclass(frozen=True)
class Float32Entry:
    """Operations that stay in float32, with the reason.

    Attributes:
      expressions: for `AutocastRules.operations`.
      primitives: names of jax's primitives.
      path: path of modules and scopes, or an empty string.
      line: file and number of the user's line.
      operations: number of matching operations.
      without: errors without this entry; None if that was not tried.
      repaired: True if only autocast itself needed the entry, not the trials.
      lost: fractions of its inputs and results that half precision cannot hold; None if they were not counted.

    Example:
      >>> entry = Float32Entry(("^norm:mul@",), ("mul",), "norm", "model.py:3", 1, None, lost=Lost(0.5, 0, 0, 0))
      >>> print(entry)
      mul  norm  model.py:3  50% of its values overflow
    """

    expressions: tuple[str, ...]
    primitives: tuple[str, ...]
    path: str
    line: str
    operations: int
    without: Errors | None
    repaired: bool = False
    lost: Lost | None = None

    @property
    def place(self) -> str:
        """The line for people: relative to the current folder, if the file is below it."""
        return file_and_line(*self._file_and_number)

    @property
    def code(self) -> str:
        """The code of the line, or an empty string if its file cannot be read."""
        file, number = self._file_and_number
        return linecache.getline(file, number).strip() if number else ""

    def __str__(self) -> str:
        return "  ".join(part for part in (" ".join(self.primitives), self.path, self.place, self.why) if part)

    @property
    def _file_and_number(self) -> tuple[str, int]:
        file, _, number = self.line.rpartition(":")
        return file, int(number) if number.isdecimal() else 0

    @property
    def why(self) -> str:
        """Description of the loss in half precision, and the errors without the entry."""
        lost = "" if self.lost is None else str(self.lost)
        without = "" if self.without is None else f"without it: {self.without}"
        reasons = lost, "added when autocast itself was run" if self.repaired else without
        return "; ".join(filter(None, reasons))


@dataclasses.dataclass(frozen=True)
class Verification:
    """The errors of autocast itself with the rules.

    Attributes:
      passed: True if the errors are tolerated on all examples, including those held out.
      errors: errors of the worst example.
      held_out: number of examples that the search did not see.
      float32_losses: losses of training steps in float32; empty if `tune` trained none.
      tuned_losses: losses of the same steps with the rules.
    """

    passed: bool
    errors: Errors
    held_out: int
    float32_losses: tuple[float, ...] = ()
    tuned_losses: tuple[float, ...] = ()

    @property
    def verdict(self) -> str:
        """Verdict on the rules, with their errors."""
        return f"under autocast itself it {'holds' if self.passed else 'does not hold'}: {self.errors}"
