"""`TunedRules`: the result of tuning, with the evidence for it: entries in float32, products in few bits, errors."""

import dataclasses
import linecache
import math
from collections.abc import Sequence
from typing import Any

from jmp_train.policies import MOSTLY_HALF, TORCH_CPU, TORCH_CUDA
from jmp_train.policies.autocasting import AutocastRules, Recipe, rules_code
from jmp_train.tools import documents as doc
from jmp_train.tools.diagnosing import file_and_line
from jmp_train.tools.tuning.scores import Lost
from jmp_train.tools.tuning.tolerance import Errors, Tolerance


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


_ERRORS = (
    "Errors are |half - float32| / |float32|, of gradients as norms. Sums, solvers, and what is computed of float32 "
    "numbers only are float32 in any case."
)


_TABLES = {"jt.MOSTLY_HALF": MOSTLY_HALF, "jt.TORCH_CUDA": TORCH_CUDA, "jt.TORCH_CPU": TORCH_CPU}


@dataclasses.dataclass(frozen=True)
class TunedRules:
    """Result of `tune`; it prints as a table.

    Attributes:
      rules: for `autocast`, `AutocastPolicy` and AMP modes.
      dtype: name of the half type.
      entries: operations that stay in float32, apart from sums and solvers.
      choices: number of operations, or groups of operations, whose precision could be chosen.
      complete: True if the search was completed, so that each entry is needed.
      trials: number of choices that were tried.
      seconds: time of the trials, without compilation.
      compile_seconds: time to compile the programs.
      loss_scale: loss scale of the trials.
      tolerance: tolerance of the errors.
      half_flops: fractions of the flops in half precision, with torch's table and with these rules.
      half_elements: the same for elements of results.
      verification: verification by autocast itself.
      steps_taken: training steps of the least trained state among the examples; None if no state counts them.
      recipe: for `AutocastPolicy.fp8` and `autocast`, if products in few bits were tuned; otherwise None.
      products: the products that could run in few bits, those with the most flops first.

    Example:
      >>> import jax.numpy as jnp, jmp_train as jt
      >>> w, x = jnp.full((2, 2), 0.5), jnp.full((2, 2), 300.0)
      >>> tuned = jt.tune(lambda w, x: jnp.sqrt((x @ w) ** 2).mean(), [(w, x)])
      >>> tuned.entries[0].primitives, tuned.entries[0].why
      (('integer_pow',), '50% of its values overflow; without it: not finite')
    """

    rules: AutocastRules
    dtype: str
    entries: tuple[Float32Entry, ...]
    choices: int
    complete: bool
    trials: int
    seconds: float
    compile_seconds: float
    loss_scale: float
    tolerance: Tolerance
    half_flops: tuple[float, float]
    half_elements: tuple[float, float]
    verification: Verification
    steps_taken: int | None = None
    recipe: Recipe | None = None
    products: tuple[TunedProduct, ...] = ()

    @property
    def few_bits_flops(self) -> float:
        """The fraction of the flops of the forward pass that run in few bits."""
        return sum(product.flops_share for product in self.products if product.in_few_bits)

    def code(self) -> str:
        """Returns the rules as Python code, which starts with one of the package's tables if it has their entries."""
        fields = {field.name: getattr(self.rules, field.name) for field in dataclasses.fields(self.rules)}
        for base, table in _TABLES.items():
            added = {name: tuple(x for x in new if x not in getattr(table, name)) for name, new in fields.items()}
            if table.replace(**{name: dict(pairs) for name, pairs in added.items()}) == self.rules:
                return rules_code(AutocastRules(**added), base=base) or f"rules = {base}"
        return rules_code(self.rules, base="jt.AutocastRules()")

    def to_json(self) -> dict[str, Any]:
        """Returns the fields as JSON values, with the rules as code."""
        fields = {name: value for name, value in vars(self).items() if name not in ("rules", "recipe")}
        recipe = None if self.recipe is None else str(self.recipe)
        return doc.as_json(fields | {"recipe": recipe, "few_bits_flops": self.few_bits_flops, "code": self.code()})

    def to_html(self, title: str = "Tuned rules") -> str:
        """Returns an HTML page that needs no network: entries, rules as code, and the losses of training steps.

        Args:
          title: title of the page, such as the name of the tuned function.

        Example:
          >>> import pathlib, tempfile
          >>> import jax.numpy as jnp, jmp_train as jt
          >>> tuned = jt.tune(lambda w, x: jnp.sqrt((x @ w) ** 2), [(jnp.eye(3), jnp.full((3, 3), 300.0))])
          >>> file = pathlib.Path(tempfile.mkdtemp()) / "tuned.html"
          >>> file.write_text(tuned.to_html("a norm"), encoding="utf-8") > 1000
          True
        """
        made = f"Compiling took {self.compile_seconds:.1f} s. The loss scale of the trials was {self.loss_scale:g}."
        return doc.page(title, self._blocks, [f"{_tolerated(self.tolerance)} {made} {_ERRORS}"])

    def _repr_html_(self) -> str:
        return doc.fragment(self._blocks)

    @property
    def _blocks(self) -> list[doc.Element | None]:
        if self.recipe is not None:
            rows = [x.row for x in self.products]
            use = f"policy = dataclasses.replace(policy, rules=rules, fp8=jt.policies.{self.recipe})"
            return [
                doc.Text(self._summary, "summary"),
                doc.Table(("product", "flops", "runs in", "alone in few bits", "with the others"), rows, "products"),
                doc.Section("The rules", [doc.Code(f"{self.code()}\n{use}", "rules")]),
                doc.Section("Under autocast itself", _verified(self.verification, self._note)),
            ]
        use = f'policy = dataclasses.replace(jt.get_policy("autocast_{self.dtype}"), rules=rules)'
        shares = {"flops": self.half_flops, "elements of results": self.half_elements}
        rows = [(name, f"{ours:.1%}", f"{torchs:.1%}") for name, (torchs, ours) in shares.items()]
        none = doc.Text("No operation has to, beside sums and solvers.")
        return [
            doc.Text(self._summary, "summary"),
            doc.Table(("in half precision", "by these rules", "by torch's table"), rows, "shares"),
            doc.Section("What stays in float32", [_entry(entry) for entry in self.entries] or [none]),
            doc.Section("The rules", [doc.Code(f"{self.code()}\n{use}", "rules")]),
            doc.Section("Under autocast itself", _verified(self.verification, self._note)),
        ]

    @property
    def _summary(self) -> str:
        if self.recipe is not None:
            few = sum(product.in_few_bits for product in self.products)
            head = f"{few} of {doc.counted(self.choices, 'product')} in {self.dtype} by {self.recipe}"
            tried = f"{self.few_bits_flops:.1%} of the flops; {self.trials} trials in {self.seconds:.1f} s"
            return f"{head}: {tried}" if self.complete else f"{head}: {tried}; the search was stopped"
        kept = f"{len(self.entries)} entr{'y' if len(self.entries) == 1 else 'ies'} in float32"
        head = f"{kept} of {self.choices} that could be {self.dtype}; {self.trials} trials in {self.seconds:.1f} s"
        return head if self.complete else f"{head}; not all of them may be needed: the search was stopped"

    @property
    def _note(self) -> str:
        """Notes about the loss scale and the examples; empty if there are none."""
        notes = []
        if self.loss_scale < 1:
            notes.append(
                f"the gradients fit {self.dtype} only with a loss scale of {self.loss_scale:.2g}: training needs one "
                "whose min_loss_scale is not above it"
            )
        if self.steps_taken == 0:
            notes.append(
                "the examples' state is from before the first step of training: tune again after some hundred steps"
            )
        return "; ".join(notes)

    def __str__(self) -> str:
        if self.recipe is not None:
            rows = [f"  {product}" for product in self.products]
            return "\n".join(filter(None, [self._summary, *rows, self.verification.verdict, self._note]))
        (table, tuned), (table_elements, tuned_elements) = self.half_flops, self.half_elements
        lines = [
            self._summary,
            *(f"  {entry}" for entry in self.entries),
            f"in half precision: {tuned:.1%} of the flops (torch's table: {table:.1%}),",
            f"  {tuned_elements:.1%} of the elements of results (torch's table: {table_elements:.1%})",
            self.verification.verdict,
            self._note,
        ]
        return "\n".join(filter(None, lines))


def _entry(entry: Float32Entry) -> doc.Section:
    where = f"{entry.place} {entry.path}".strip()
    place = doc.Text(f"{where}, {doc.counted(entry.operations, 'operation')}", look="soft")
    return doc.Section(" ".join(entry.primitives), [place, doc.Code(entry.code), doc.Text(entry.why)])


def _verified(verification: Verification, note: str) -> Sequence[doc.Element | None]:
    look, held_out = "" if verification.passed else "failed", verification.held_out or "none"
    verdict = doc.Text(f"{verification.verdict}, on all examples, {held_out} of them held out.", "verdict", look)
    chart = loss_chart(verification.float32_losses, verification.tuned_losses)
    said = ""
    if chart is not None:
        last = f"{verification.tuned_losses[-1]:.4g}, in float32 {verification.float32_losses[-1]:.4g}"
        said = f"The loss of step {len(verification.tuned_losses)} is {last}."
    return [verdict, doc.Text(f"{note}." if note else "", "note"), chart, doc.Text(said)]


def _tolerated(tolerance: Tolerance) -> str:
    if tolerance.loss == math.inf:
        return "What is tolerated a function of one's own said."
    return (
        f"Tolerated were errors of {tolerance.loss:.2g} in the loss, {tolerance.gradient:.2g} in the gradient, "
        f"{tolerance.leaf:.2g} in that of a single parameter, and a cosine of {tolerance.cosine:.2g}."
    )


def loss_chart(float32: Sequence[float], tuned: Sequence[float]) -> doc.Chart | None:
    """Returns a chart of the losses of the same steps in float32 and with the rules; None without losses.

    Args:
      float32: losses in float32.
      tuned: losses with the rules, a thinner line. Curves have gaps at losses that are not finite.
    """
    finite = [loss for loss in (*float32, *tuned) if math.isfinite(loss)]
    if not finite:
        return None
    x = doc.linear_axis(1, max(len(float32), len(tuned), 2), title="step", has_grid=False, least_step=1)
    marks = [
        doc.curve(doc.Style("first", "loss in float32", 5), enumerate(float32, 1)),
        doc.curve(doc.Style("second", "loss by the rules"), enumerate(tuned, 1)),
    ]
    y = doc.linear_axis(min(finite), max(finite))
    return doc.Chart("Losses of the same steps in float32 and by the rules", x, y, marks)
