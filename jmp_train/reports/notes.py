"""Notes on runs: metrics, rules and phases, reasons for failures and lower accuracy."""

from collections.abc import Iterator, Sequence

from jmp_train.reports.tables import metric_text, metric_title, shown_metrics
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


def metrics_note(run: Run, first: Run | None = None) -> str:
    """Returns "test accuracy 98.61% (+0.10 points), bits/byte 2.1234", or the last loss of a run without metrics.

    The points are the difference in accuracy to the first run, if it is given.
    """
    names = shown_metrics([run])
    if not names:
        return f"loss {run.epochs[-1].loss:.4f}"
    cells = [metric_text(run, name) for name in names]
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
    return [note for run in runs for note in _notes(run, runs[0])]


def _notes(run: Run, first: Run) -> Iterator[str]:
    if run.phases:
        said = [
            f"{phase.policy} in steps {phase.start + 1} to {phase.stop} "
            f"({phase.costs.half_flops_share:.1%} of the flops in half precision)"
            for phase in run.phases
        ]
        yield f"{run.policy}: {', '.join(said)}"
    if run.rules:
        yield f"{run.policy}: autocast by the rules of {run.rules}"
    if count := run.metrics.get(NONFINITE):
        yield f"{run.policy}: for {count} of the test data the model's output is not finite, which counts as wrong"
    worse = worse_by(run, first) or 0
    if worse > 0.01 and "accuracy" in str(first.headline) and run.policy in _LACKS:
        name = metric_title(str(first.headline))
        yield f"{run.policy} is {100 * worse:.2f} points of {name} below {first.policy}. {_LACKS[run.policy]}"


def explain_failure(name: str, reason: str) -> str:
    """Returns why a run failed and, after an overflow in a mode that is known for it, what the mode lacks.

    Example:
      >>> explain_failure("apex-O3", "devices=9: there is no more than 8 x cpu")
      'devices=9: there is no more than 8 x cpu'
    """
    if name not in _LACKS or "finite" not in reason:
        return reason
    return f"{reason}. {_LACKS[name]}"
