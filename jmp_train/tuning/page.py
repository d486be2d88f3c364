"""The result of a tuning as a page, and as a table for notebooks."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from jmp_train.policies.documents import Block, Code, Section, Table, Text, counted, fragment, page
from jmp_train.tuning.charts import front_chart, loss_chart
from jmp_train.tuning.evidence import Float32Entry, Verification
from jmp_train.tuning.tolerance import Tolerance

if TYPE_CHECKING:
    from jmp_train.tuning.tuned_rules import TunedRules

_ERRORS = (
    "Errors are |half - float32| / |float32|, of gradients as norms. Sums, solvers, and what is computed of float32 "
    "numbers only are float32 in any case."
)


def tuning_page(title: str, summary: str, note: str, tuned: "TunedRules") -> str:
    """Returns the page.

    Args:
      title: what was tuned.
      summary: a line.
      note: what the reader should know of the examples, or nothing.
      tuned: the result.
    """
    use = f'policy = dataclasses.replace(jt.get_policy("autocast_{tuned.dtype}"), rules=rules)'
    shares = {"flops": tuned.half_flops, "elements of results": tuned.half_elements}
    rows = [(name, f"{ours:.1%}", f"{torchs:.1%}") for name, (torchs, ours) in shares.items()]
    none = Text("No operation has to, beside sums and solvers.")
    front = front_chart(tuned.front, tuned.chosen, tuned.tolerance.gradient)
    made = f"Compiling took {tuned.compile_seconds:.1f} s. The loss scale of the trials was {tuned.loss_scale:g}."
    return page(
        title,
        [
            Text(summary, "summary"),
            Table(("in half precision", "by these rules", "by torch's table"), rows, "shares"),
            Section("What stays in float32", [_entry(entry) for entry in tuned.entries] or [none]),
            Section("The rules", [Code(f"{tuned.code()}\n{use}", "rules")]),
            Section("What was tried", [front]),
            Section("Under autocast itself", _verified(tuned.verification, note)),
        ],
        [f"{_tolerated(tuned.tolerance)} {made} {_ERRORS}"],
    )


def tuning_table(summary: str, note: str, tuned: "TunedRules") -> str:
    """Returns what a notebook shows; arguments as those of `tuning_page`."""
    rows = [(" ".join(e.primitives), e.path, e.place, e.code, e.why) for e in tuned.entries]
    table = Table(("in float32", "module", "where", "code", "why"), rows, texts=range(5))
    return fragment([Text(summary), table, Text(tuned.verification.verdict), Text(note)])


def _entry(entry: Float32Entry) -> Section:
    where = f"{entry.place} {entry.path}".strip()
    place = Text(f"{where}, {counted(entry.operations, 'operation')}", look="soft")
    return Section(" ".join(entry.primitives), [place, Code(entry.code), Text(entry.why)])


def _verified(verification: Verification, note: str) -> Sequence[Block | None]:
    look, held_out = "" if verification.passed else "failed", verification.held_out or "none"
    verdict = Text(f"{verification.verdict}, on all examples, {held_out} of them held out.", "verdict", look)
    chart = loss_chart(verification.float32_losses, verification.tuned_losses)
    said = ""
    if chart is not None:
        last = f"{verification.tuned_losses[-1]:.4g}, in float32 {verification.float32_losses[-1]:.4g}"
        said = f"The loss of step {len(verification.tuned_losses)} is {last}."
    return [verdict, Text(f"{note}." if note else "", "note"), chart, Text(said)]


def _tolerated(tolerance: Tolerance) -> str:
    if tolerance.loss == math.inf:
        return "What is tolerated a function of one's own said."
    return (
        f"Tolerated were errors of {tolerance.loss:.2g} in the loss, {tolerance.gradient:.2g} in the gradient, "
        f"{tolerance.leaf:.2g} in that of a single parameter, and a cosine of {tolerance.cosine:.2g}."
    )
