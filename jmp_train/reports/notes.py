"""Sentences about runs: costs and gains, rules and phases, reasons for failures and lower accuracy."""

from collections.abc import Sequence

from jmp_train.policies.documents import with_unit
from jmp_train.reports.tables import is_on_cpu, metric_cells, metric_title, ratio, shown_metrics
from jmp_train.runs import NONFINITE, Run

# Modes that are known to fail, with the reason.
_LACKS = {
    "apex-O3": (
        "apex-O3 has neither loss scale nor float32 master weights nor float32 BatchNorms: gradients below 6e-8 "
        "vanish, updates below 1/2048 of a parameter are lost, statistics above 65504 overflow; apex-O2 has all three"
    ),
    "apex-O3-bfloat16": (
        "apex-O3-bfloat16 has no float32 master weights: updates below 1/256 of a parameter are lost; apex-O2-bfloat16 "
        "has them"
    ),
}


def sentences(runs: Sequence[Run]) -> list[str]:
    """Returns one sentence per run about costs and gains, compared with the first run."""
    first, *others = runs
    head = f"{first.policy}: {metrics_note(first)}, {first.epoch_seconds:.3g} s per epoch{_saved(first)}."
    return [head, *(_sentence(run, first) for run in others)]


def _saved(run: Run) -> str:
    saved = run.costs.residual_bytes
    return "" if saved is None else f", {with_unit(saved, 'B')} saved for the backward pass"


def _sentence(run: Run, first: Run) -> str:
    times = ratio(run.costs.residual_bytes, first.costs.residual_bytes)
    compared = f" ({times})" if times else ""
    speed = f"{first.epoch_seconds / run.epoch_seconds:.2f} times as fast as {first.policy}, "
    return (
        f"{run.policy}: {metrics_note(run, first)}, {'' if is_on_cpu([run, first]) else speed}"
        f"{run.costs.half_flops_share:.1%} of the flops in half precision{_saved(run)}{compared}; "
        f"{len(run.skipped)} of {len(run.steps)} steps skipped."
    )


def metrics_note(run: Run, first: Run | None = None) -> str:
    """Returns "test accuracy 98.61% (+0.10 points), bits/byte 2.1234", or the last loss of a run without metrics.

    The points are the difference in accuracy to the first run, if it is given.
    """
    names = shown_metrics([run])
    if not names:
        return f"loss {run.epochs[-1].loss:.4f}"
    cells = metric_cells(run, names)
    worse = None if first is None else worse_by(run, first)
    if worse is not None and "accuracy" in names[0]:
        cells[0] += f" ({0.0 - 100 * worse:+.2f} points)"
    return ", ".join(f"{metric_title(name)} {cell}" for name, cell in zip(names, cells, strict=True))


def worse_by(run: Run, first: Run) -> float | None:
    """Returns how much worse a run's headline metric is than the first run's; None without one."""
    name = first.headline
    if name is None or name not in run.metrics:
        return None
    difference = first.metrics[name] - run.metrics[name]
    return difference if first.higher_is_better else -difference


def explanations(runs: Sequence[Run]) -> list[str]:
    """Returns notes about runs: phases, rules from a file, non-finite outputs, lower accuracy."""
    texts = []
    for run in runs:
        texts += [note_phases(run), note_rules(run), note_outputs(run), explain_accuracy(run, runs[0])]
    return [text for text in texts if text is not None]


def note_phases(run: Run) -> str | None:
    """Returns a note on the precisions of a run with a schedule; None without a schedule."""
    if not run.phases:
        return None
    said = [
        f"{phase.policy} in steps {phase.start + 1} to {phase.stop} "
        f"({phase.costs.half_flops_share:.1%} of the flops in half precision)"
        for phase in run.phases
    ]
    return f"{run.policy}: {', '.join(said)}"


def note_rules(run: Run) -> str | None:
    """Returns a note on the file of a run's autocast rules; None if they do not come from a file."""
    return f"{run.policy}: autocast by the rules of {run.rules}" if run.rules else None


def note_outputs(run: Run) -> str | None:
    """Returns a note on a run's outputs that are not finite; None if all are finite."""
    count = run.metrics.get(NONFINITE)
    if not count:
        return None
    return f"{run.policy}: for {count} of the test data the model's output is not finite, which counts as wrong"


def explain_accuracy(run: Run, first: Run) -> str | None:
    """Returns why a run is over a point less accurate than the first one; None if it is not, or for unknown reasons."""
    worse = worse_by(run, first)
    if worse is None or "accuracy" not in str(first.headline) or worse <= 0.01 or run.policy not in _LACKS:
        return None
    name = metric_title(str(first.headline))
    return f"{run.policy} is {100 * worse:.2f} points of {name} below {first.policy}. {_LACKS[run.policy]}"


def explain_failure(name: str, reason: str) -> str:
    """Returns why a run failed and, after an overflow in a mode that is known for it, what the mode lacks.

    Example:
      >>> explain_failure("apex-O3", "devices=9: there is no more than 8 x cpu")
      'devices=9: there is no more than 8 x cpu'
    """
    if name not in _LACKS or "finite" not in reason:
        return reason
    return f"{reason}. {_LACKS[name]}"
