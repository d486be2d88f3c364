"""A comparison in words, and as the page report.html."""

import math
from collections.abc import Iterator, Sequence

import jax

from jmp_train.app.reports import tables
from jmp_train.app.reports.run_charts import panels
from jmp_train.app.runs import NONFINITE, Failed, Run
from jmp_train.tools import documents as doc

_SECONDS = "An epoch's seconds are of training alone, without compilation and test; the table has the median."
_ON_CPU = (
    "XLA computes most of half precision in float32 on CPUs, so that it saves little time there; what a step saves "
    "for its backward pass and what is in half are the program's, on any device."
)


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


def page(task: str, runs: Sequence[Run], failures: Sequence[tuple[str, str]] = ()) -> str:
    """Returns the page as HTML.

    Args:
      task: the task's name.
      runs: the runs, at least one; the others are compared with the first.
      failures: (policy, reason) of each failed run.
    """
    said = [doc.Text(text) for text in (*sentences(runs), *explanations(runs))]
    failed = [doc.Text(f"{policy} did not end: {reason}", look="failed") for policy, reason in failures]
    devices = " and ".join(dict.fromkeys(run.device for run in runs))
    memory = tables.process_memory(runs)
    return doc.page(
        f"{task}: {' / '.join(run.policy for run in runs)}",
        [
            *said,
            *failed,
            tables.runs_table(runs, has_ranges=True),
            tables.cost_table(runs),
            tables.speed_table(runs),
            tables.watch_table(runs),
            doc.Panels(panels(runs)),
            *map(_epochs, runs),
        ],
        [
            f"On {devices} with jax {jax.__version__}. {_SECONDS}",
            *([_ON_CPU] if tables.is_on_cpu(runs) else []),
            *([f"{memory[0].upper()}{memory[1:]}."] if memory else []),
        ],
    )


def sentences(runs: Sequence[Run]) -> list[str]:
    """Returns one sentence per run about costs and gains, compared with the first run."""
    first, *others = runs
    head = f"{first.policy}: {metrics_note(first)}, {first.epoch_seconds:.3g} s per epoch{_saved(first)}."
    return [head, *(_sentence(run, first) for run in others)]


def _saved(run: Run) -> str:
    saved = run.costs.residual_bytes
    return "" if saved is None else f", {doc.with_unit(saved, 'B')} saved for the backward pass"


def _sentence(run: Run, first: Run) -> str:
    times = tables.ratio(run.costs.residual_bytes, first.costs.residual_bytes)
    compared = f" ({times})" if times else ""
    speed = f"{first.epoch_seconds / run.epoch_seconds:.2f} times as fast as {first.policy}, "
    return (
        f"{run.policy}: {metrics_note(run, first)}, {'' if tables.is_on_cpu([run, first]) else speed}"
        f"{run.costs.half_flops_share:.1%} of the flops in half precision{_saved(run)}{compared}; "
        f"{len(run.skipped)} of {len(run.steps)} steps skipped."
    )


def _epochs(run: Run) -> doc.Section:
    rows = [
        (
            str(epoch.epoch),
            f"{epoch.loss:.4f}",
            "" if math.isnan(epoch.learning_rate) else f"{epoch.learning_rate:.2e}",
            f"{epoch.seconds:.2f}",
            tables.short_scale(epoch.loss_scale),
            str(epoch.skipped_steps),
        )
        for epoch in run.epochs
    ]
    heads = ("epoch", "loss", "learning rate", "seconds", "scale", "skipped")
    return doc.Section(f"{run.policy}, epoch by epoch", [doc.Table(heads, rows)], is_folded=True)


def metrics_note(run: Run, first: Run | None = None) -> str:
    """Returns "test accuracy 98.61% (+0.10 points), bits/byte 2.1234", or the last loss of a run without metrics.

    The points are the difference in accuracy to the first run, if it is given.
    """
    names = tables.shown_metrics([run])
    if not names:
        return f"loss {run.epochs[-1].loss:.4f}"
    cells = [tables.metric_text(run, name) for name in names]
    worse = None if first is None else worse_by(run, first)
    if worse is not None and "accuracy" in names[0]:
        cells[0] += f" ({0.0 - 100 * worse:+.2f} points)"
    return ", ".join(f"{title} {cell}" for title, cell in zip(tables.metric_titles(names).values(), cells, strict=True))


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
        name = tables.metric_title(str(first.headline))
        yield f"{run.policy} is {100 * worse:.2f} points of {name} below {first.policy}. {_LACKS[run.policy]}"


def explain_failure(name: str, failed: Failed) -> str:
    """Returns the reason for a run's failure and, after an overflow in a mode prone to it, the mode's weakness.

    Example:
      >>> explain_failure("apex-O3", Failed("devices=9: there is no more than 8 x cpu"))
      'devices=9: there is no more than 8 x cpu'
    """
    return f"{failed.reason}. {_LACKS[name]}" if failed.is_nonfinite and name in _LACKS else failed.reason
