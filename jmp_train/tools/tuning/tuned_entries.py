"""Results of tuning: the entries in float32, products in few bits, and the verification by autocast itself."""

import dataclasses
import linecache

from jmp_train.tools.diagnosing import file_and_line
from jmp_train.tools.tuning.scores import Lost
from jmp_train.tools.tuning.tolerance import Errors


class _AtLine:
    """What belongs to a user's line, `line`."""

    line: str

    @property
    def place(self) -> str:
        """The line for people: relative to the current folder, if the file is below it."""
        return file_and_line(*self._file_and_number)

    @property
    def code(self) -> str:
        """The code of the line, or an empty string if its file cannot be read."""
        file, number = self._file_and_number
        return linecache.getline(file, number).strip() if number else ""

    @property
    def _file_and_number(self) -> tuple[str, int]:
        file, _, number = self.line.rpartition(":")
        return file, int(number) if number.isdecimal() else 0


@dataclasses.dataclass(frozen=True)
class Float32Entry(_AtLine):
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

    def __str__(self) -> str:
        return "  ".join(part for part in (" ".join(self.primitives), self.path, self.place, self.why) if part)

    @property
    def why(self) -> str:
        """Description of the loss in half precision, and the errors without the entry."""
        lost = "" if self.lost is None else str(self.lost)
        without = "" if self.without is None else f"without it: {self.without}"
        reasons = lost, "added when autocast itself was run" if self.repaired else without
        return "; ".join(filter(None, reasons))


@dataclasses.dataclass(frozen=True)
class TunedProduct(_AtLine):
    """A matrix product that could run in few bits, with what that costs.

    Attributes:
      primitive: name of jax's primitive.
      path: path of modules and scopes, or an empty string.
      line: file and number of the user's line.
      flops_share: its fraction of the flops of the forward pass.
      in_few_bits: True if it runs in few bits by the rules.
      alone: errors if only this product runs in few bits; None if that was not tried.
      without: of a product in half precision, errors if it ran in few bits too; None if that was not tried.
      not_tried: of a product that no entry can put in few bits, the reason; otherwise empty.

    Example:
      >>> print(TunedProduct("dot_general", "head", "model.py:3", 0.25, True, None))
      few bits  dot_general  head  model.py:3  25.0% of the flops
    """

    primitive: str
    path: str
    line: str
    flops_share: float
    in_few_bits: bool
    alone: Errors | None
    without: Errors | None = None
    not_tried: str = ""

    @property
    def row(self) -> tuple[str, ...]:
        """Its place, its fraction of the flops, its precision, and errors alone and with the others in few bits."""
        where = "  ".join(filter(None, (self.primitive, self.path, self.place)))
        errors = ("" if error is None else str(error) for error in (self.alone, self.without))
        where += f"  ({self.not_tried})" * bool(self.not_tried)
        runs_in = "few bits" if self.in_few_bits else "not tried" if self.not_tried else "half"
        return where, f"{self.flops_share:.1%}", runs_in, *errors

    def __str__(self) -> str:
        where, share, runs_in, alone, without = self.row
        costs = f"  alone: {alone}" * bool(alone) + f"  with the others: {without}" * bool(without)
        return f"{runs_in:<8}  {where}  {share} of the flops{costs}"


@dataclasses.dataclass(frozen=True)
class Verification:
    """The errors of autocast itself with the rules.

    Attributes:
      passed: True if the errors are tolerated on all examples, including those held out.
      errors: errors of the worst example.
      held_out: number of examples that the search did not see.
      float32_losses: losses of training steps in float32; empty if `tune` trained none.
      tuned_losses: losses of the same steps with the rules.
      curve: of products in few bits, how far their curve of losses is above that of float32, and how far that of half
        precision is: the largest excess over a tenth of the steps, divided by the mean loss. None without steps.
      uncounted: of products in few bits, number of examples whose errors do not count, because half precision alone
        exceeds the tolerance there, as where it changes what a router decides.
    """

    passed: bool
    errors: Errors
    held_out: int
    float32_losses: tuple[float, ...] = ()
    tuned_losses: tuple[float, ...] = ()
    curve: tuple[float, float] | None = None
    uncounted: int = 0

    @property
    def verdict(self) -> str:
        """Verdict on the rules, with their errors."""
        holds = f"under autocast itself it {'holds' if self.passed else 'does not hold'}: {self.errors}"
        if self.uncounted:
            holds += f"; without {self.uncounted} of the examples, on which half precision alone does not hold"
        if self.curve is None:
            return holds
        above = "losses of {} steps above float32's by at most {:.2%} (in half precision {:.2%})"
        return f"{holds};\n  {above.format(len(self.tuned_losses), *self.curve)}"
