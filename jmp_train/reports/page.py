"""report.html: a comparison as a page."""

import math
from collections.abc import Sequence

import jax

from jmp_train.policies import documents as doc
from jmp_train.reports import tables
from jmp_train.reports.charts import panels
from jmp_train.reports.notes import explanations, metrics_note
from jmp_train.runs import Run

_SECONDS = "An epoch's seconds are of training alone, without compilation and test; the table has the median."
_ON_CPU = (
    "XLA computes most of half precision in float32 on CPUs, so that it saves little time there; what a step saves "
    "for its backward pass and what is in half are the program's, on any device."
)


def page(task: str, runs: Sequence[Run], failures: Sequence[tuple[str, str]] = ()) -> str:
    """Returns the page as HTML.

    Args:
      task: the task's name.
      runs: at least one; the others are compared with the first.
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
