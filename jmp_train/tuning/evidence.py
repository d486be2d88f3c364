"""What tuning leaves in float32, what it tried, and what autocast itself makes of it."""

import dataclasses
import linecache

from jmp_train.policies.diagnosing import place_of
from jmp_train.tuning.scores import Lost
from jmp_train.tuning.tolerance import Errors


@dataclasses.dataclass(frozen=True)
class Float32Entry:
    """What stays in float32, and why.

    Attributes:
      expressions: for `AutocastRules.operations`.
      primitives: the names of jax's primitives.
      path: of modules and scopes; empty where there are none.
      line: file and number of the user's line.
      operations: how many operations it reaches.
      without: the errors if it were left out, and all else as it is; None if that was not tried.
      repaired: whether the trials could do without it, and autocast itself could not.
      lost: what half precision cannot hold of what it reads and makes, in float32; None if that was not counted.

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
        """The line as people are told: from the current folder, if it is below that."""
        return place_of(*self._file_and_number)

    @property
    def code(self) -> str:
        """The line itself, where its file can be read."""
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
        """What it would lose in half precision, and what goes wrong without it, in words."""
        lost = "" if self.lost is None else str(self.lost)
        without = "" if self.without is None else f"without it: {self.without}"
        reasons = lost, "added when autocast itself was run" if self.repaired else without
        return "; ".join(filter(None, reasons))


@dataclasses.dataclass(frozen=True)
class FrontPoint:
    """A choice of the Pareto front.

    Attributes:
      half_flops: the share of the flops of what can be chosen that runs in half precision.
      gradient_error: relative to float32.
      float32_operations: how many entries' worth of operations stay in float32.
    """

    half_flops: float
    gradient_error: float
    float32_operations: int


@dataclasses.dataclass(frozen=True)
class Verification:
    """What autocast itself does with the rules.

    Attributes:
      passed: whether the errors are tolerated on all examples, the held-out ones among them.
      errors: of the worst example.
      held_out: how many examples the search had not seen.
      float32_losses: of training steps in float32; empty if none were asked for.
      tuned_losses: of the same steps with the rules.
    """

    passed: bool
    errors: Errors
    held_out: int
    float32_losses: tuple[float, ...] = ()
    tuned_losses: tuple[float, ...] = ()

    @property
    def verdict(self) -> str:
        """Whether it holds, and the errors, in words."""
        return f"under autocast itself it {'holds' if self.passed else 'does not hold'}: {self.errors}"
