"""Comparison of runs: speed, memory and costs beside the first run's, and why one failed or fell behind."""

import math
from collections.abc import Mapping, Sequence

from jmp_train.runs import NONFINITE, Run
from jmp_train.steps import WATCHES

_COST_TITLES = ("policy", "flops in half", "saved", "ratio", "parameters", "state", "ratio")
_COST_NOTE = (
    "saved: what the forward pass of a step leaves for its backward pass; state: parameters, optimizer's and model's"
)

WATCH_TITLES = ("policy", "lost updates", "underflow")
WATCH_NOTE = (
    "the mean share of the worst group of parameters; lost updates: updates that leave a parameter what it was; "
    "underflow: scaled gradients below the half type's smallest normal number"
)

# Modes that are known to fail where others do not, and what they lack.
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


def cost_table(runs: Sequence[Run]) -> tuple[tuple[str, ...], list[tuple[str, ...]], str]:
    """Returns titles, a row a run, and a note: what holds on any device; ratios are those beside the first.

    What devices exchange has columns where there is such.

    Args:
      runs: at least one.
    """
    first = runs[0].costs
    rows = [
        (
            run.policy,
            f"{run.costs.half_flops_share:.1%}",
            "none" if run.costs.residual_bytes is None else in_bytes(run.costs.residual_bytes),
            ratio(run.costs.residual_bytes, first.residual_bytes),
            in_bytes(run.costs.params_bytes),
            in_bytes(run.costs.state_bytes),
            ratio(run.costs.state_bytes, first.state_bytes),
        )
        for run in runs
    ]
    titles, note = _COST_TITLES, _COST_NOTE
    sent = [run.costs.exchanged_bytes for run in runs]
    if any(sent):
        rows = [(*row, in_bytes(count), ratio(count, sent[0])) for row, count in zip(rows, sent, strict=True)]
        titles, note = (*titles, "halo", "ratio"), f"{note}; halo: what a device sends of its nodes in a step"
    if len(runs) > 1:
        return titles, rows, f"1.00x: {runs[0].policy}; {note}"
    kept = [place for place, title in enumerate(titles) if title != "ratio"]
    return tuple(titles[place] for place in kept), [tuple(row[place] for place in kept) for row in rows], note


def watch_rows(runs: Sequence[Run]) -> list[tuple[str, ...]]:
    """Returns a row under `WATCH_TITLES` for each run that watched.

    Args:
      runs: any number.
    """
    return [(run.policy, *(_worst(run.watch.get(name, {})) for name in WATCHES)) for run in runs if run.watch]


def _worst(groups: Mapping[str, float]) -> str:
    """Returns "12.3% (Dense_0)" for the group with the largest share, "0" if all are 0."""
    share, group = max(((share, group) for group, share in groups.items()), default=(0.0, ""))
    return f"{share:.1%} ({group})" if share else "0"


def speed_table(runs: Sequence[Run]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Returns titles, and a row a run; speed-up and memory ratio are those beside the first.

    Memory is the device's: where one reports none, the table says nothing of it, as the process' is mostly the
    compiler's and the libraries'.

    Args:
      runs: at least one.

    Reference: ColossalAI's table of its AMP modes.
    """
    first = runs[0]
    columns = {
        "run": [run.policy for run in runs],
        "iterations/s": [_rate(run.iterations_per_second) for run in runs],
        "samples/s": ["" if run.samples_per_second is None else _rate(run.samples_per_second) for run in runs],
    }
    if not reports_memory(runs):  # a CPU, whose times differ much
        columns["s/epoch"] = [seconds_text(run) for run in runs]
    if len(runs) > 1:
        speeds = [f"{run.iterations_per_second / first.iterations_per_second:.2f}x" for run in runs]
        columns["speed-up"] = speeds
    if reports_memory(runs):
        columns["memory"] = [f"{run.memory_mb:.0f} MB" for run in runs]
        if len(runs) > 1:
            columns["memory ratio"] = [f"{run.memory_mb / first.memory_mb:.2f}x" for run in runs]
    return tuple(columns), list(zip(*columns.values(), strict=True))


def seconds_text(run: Run) -> str:
    """Returns the median epoch's seconds, and the least and the most of several epochs.

    Args:
      run: the run.
    """
    seconds = [epoch.seconds for epoch in run.epochs]
    if len(seconds) == 1:
        return f"{seconds[0]:.2f}"
    return f"{run.epoch_seconds:.2f} ({min(seconds):.2f} to {max(seconds):.2f})"


def is_on_cpu(runs: Sequence[Run]) -> bool:
    """Returns True if a run was on a CPU, whose times say little of half precision.

    Args:
      runs: at least one.
    """
    return any(run.device.endswith("cpu") for run in runs)


def reports_memory(runs: Sequence[Run]) -> bool:
    """Returns whether the peaks of memory are a device's in all runs.

    Args:
      runs: at least one.
    """
    return all(run.memory_of == "device" for run in runs)


def process_memory(runs: Sequence[Run]) -> str:
    """Returns a footnote on the peaks of memory that are a process'; "" if there are none.

    Args:
      runs: at least one.
    """
    of_processes = [run for run in runs if run.memory_of != "device"]
    if not of_processes:
        return ""
    peaks = ", ".join(f"{run.policy} {run.memory_mb:.0f} MB" for run in of_processes)
    return f"peak memory of the process, with libraries, compiler and data: {peaks}"


def in_bytes(count: int) -> str:
    """Returns a number of bytes in three digits and the unit that suits it.

    Example:
      >>> in_bytes(640), in_bytes(1_973_188), in_bytes(999_600_000)
      ('640 B', '1.97 MB', '1 GB')
    """
    units = ("B", "kB", "MB", "GB", "TB")
    power = 0
    while count >= 999.5 * 1000**power and power < len(units) - 1:
        power += 1
    return f"{count / 1000**power:.3g} {units[power]}"


def ratio(value: float | None, first: float | None) -> str:
    """Returns a number as a multiple of the first run's; "" where one of them is not known or is 0."""
    return f"{value / first:.2f}x" if value is not None and first else ""


def short_scale(scale: float) -> str:
    """Returns a loss scale in few characters; from a million on, a power of two as such.

    Example:
      >>> short_scale(65536.0), short_scale(2.0**21)
      ('65536', '2^21')
    """
    fraction, exponent = math.frexp(scale)
    return f"2^{exponent - 1}" if scale >= 1e6 and fraction == 0.5 else f"{scale:g}"


def _rate(number: float) -> str:
    return f"{number:.1f}" if number >= 10 else f"{number:.3g}"


def explain_failure(name: str, reason: str) -> str:
    """Returns why a run failed; where values overflowed, and its mode is known for that, with what the mode lacks.

    Args:
      name: of the policy or mode.
      reason: the error's text, which is all that a run's process leaves.

    Example:
      >>> explain_failure("apex-O3", "devices=9: there is no more than 8 x cpu")
      'devices=9: there is no more than 8 x cpu'
    """
    if name not in _LACKS or "finite" not in reason:
        return reason
    return f"{reason}. {_LACKS[name]}"


def metric_text(name: str, value: float) -> str:
    """Returns a metric in few characters; an accuracy as a percentage.

    Example:
      >>> metric_text("test_accuracy", 0.98611), metric_text("loss", 1.23456), metric_text("errors", 12)
      ('98.61%', '1.2346', '12')
    """
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if "accuracy" in name and 0 <= value <= 1:
        return f"{value:.2%}"
    return f"{value:.4f}" if 1e-3 <= abs(value) < 1e5 or value == 0 else f"{value:.4g}"


def shown_metrics(runs: Sequence[Run]) -> list[str]:
    """Returns the names of the metrics that tables have, the headline first.

    Args:
      runs: at least one.
    """
    return [name for name in dict.fromkeys(name for run in runs for name in run.metrics) if name != NONFINITE]


def metric_cells(run: Run, names: Sequence[str]) -> list[str]:
    """Returns a run's metrics as a table has them.

    Args:
      run: the run.
      names: of the metrics.
    """
    return [metric_text(name, run.metrics[name]) if name in run.metrics else "" for name in names]


def metric_title(name: str) -> str:
    """Returns a metric's name as a title has it.

    Example:
      >>> metric_title("test_accuracy"), metric_title("bits_per_byte")
      ('test accuracy', 'bits/byte')
    """
    return name.replace("_per_", "/").replace("_", " ")


def metrics_note(run: Run, first: Run | None = None) -> str:
    """Returns "test accuracy 98.61% (+0.10 points), bits/byte 2.1234", or the last loss of a run without metrics.

    Args:
      run: the run.
      first: the one that the accuracy is compared with; None for none.
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
    """Returns by how much a run's headline is worse than the first run's; None if there is none."""
    name = first.headline
    if name is None or name not in run.metrics:
        return None
    difference = first.metrics[name] - run.metrics[name]
    return difference if first.higher_is_better else -difference


def explain_accuracy(run: Run, first: Run) -> str | None:
    """Returns why a run is less accurate than the first one; None if it is not, or if that is not known.

    Args:
      run: the run.
      first: the one that it is compared with; a point of accuracy is not a difference.
    """
    worse = worse_by(run, first)
    if worse is None or "accuracy" not in str(first.headline) or worse <= 0.01 or run.policy not in _LACKS:
        return None
    name = metric_title(str(first.headline))
    return f"{run.policy} is {100 * worse:.2f} points of {name} below {first.policy}. {_LACKS[run.policy]}"


def explanations(runs: Sequence[Run]) -> list[str]:
    """Returns what is to be said of runs: phases, rules from a file, outputs that are not finite, a lower accuracy.

    Args:
      runs: any number; the others are compared with the first.
    """
    texts = []
    for run in runs:
        texts += [note_phases(run), note_rules(run), note_outputs(run), explain_accuracy(run, runs[0])]
    return [text for text in texts if text is not None]


def note_phases(run: Run) -> str | None:
    """Returns which precision the steps of a run with a schedule had; None if all had the same.

    Args:
      run: the run.
    """
    if not run.phases:
        return None
    said = [
        f"{phase.policy} in steps {phase.start + 1} to {phase.stop} "
        f"({phase.costs.half_flops_share:.1%} of the flops in half precision)"
        for phase in run.phases
    ]
    return f"{run.policy}: {', '.join(said)}"


def note_rules(run: Run) -> str | None:
    """Returns which file a run's rules of autocast are of; None if they are its policy's or mode's own.

    Args:
      run: the run.
    """
    return f"{run.policy}: autocast by the rules of {run.rules}" if run.rules else None


def note_outputs(run: Run) -> str | None:
    """Returns that some of a run's outputs are not finite; None if all are.

    Args:
      run: the run.
    """
    count = run.metrics.get(NONFINITE)
    if not count:
        return None
    return f"{run.policy}: for {count} of the test data the model's output is not finite, which counts as wrong"
