"""Comparison of runs: speed, memory and costs beside the first run's, and why one failed or fell behind."""

import math
from collections.abc import Mapping, Sequence

from jmp_train.runs import Run
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
    sent = [run.costs.exchanged_bytes for run in runs]
    if not any(sent):
        return _COST_TITLES, rows, _COST_NOTE
    rows = [(*row, in_bytes(count), ratio(count, sent[0])) for row, count in zip(rows, sent, strict=True)]
    note = f"{_COST_NOTE}; halo: what a device sends of its nodes in a step, forward and backward"
    return (*_COST_TITLES, "halo", "ratio"), rows, note


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
    titles = ("run", "iterations/s", "samples/s", "speed-up")
    rows = [
        (
            run.policy,
            _rate(run.iterations_per_second),
            _rate(run.samples_per_second),
            f"{run.iterations_per_second / first.iterations_per_second:.2f}x",
        )
        for run in runs
    ]
    if not reports_memory(runs):
        return titles, rows
    memory = [(f"{run.memory_mb:.0f} MB", f"{run.memory_mb / first.memory_mb:.2f}x") for run in runs]
    both = [(*row, *cells) for row, cells in zip(rows, memory, strict=True)]
    return (*titles, "memory", "memory ratio"), both


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


def bits_note(run: Run) -> str:
    """Returns ", 2.1234 bits/byte" of a run whose labels are bytes, else "".

    Args:
      run: the run.
    """
    return "" if run.bits_per_byte is None else f", {run.bits_per_byte:.4f} bits/byte"


def explain_accuracy(name: str, points: float, first: str) -> str | None:
    """Returns why a run is less accurate than the first one; None if it is not, or if that is not known.

    Args:
      name: of the policy or mode.
      points: by how many percent of the test data it is below the first run; one is not a difference.
      first: the first run's name.
    """
    if points <= 1 or name not in _LACKS:
        return None
    return f"{name} is {points:.2f} points of test accuracy below {first}. {_LACKS[name]}"


def explanations(runs: Sequence[Run]) -> list[str]:
    """Returns what is to be said of runs: phases, rules from a file, outputs that are not finite, a lower accuracy.

    Args:
      runs: any number; the first one's accuracy is what the others are beside.
    """
    texts = []
    for run in runs:
        points = 100 * (runs[0].test_accuracy - run.test_accuracy)
        texts += [
            note_phases(run),
            note_rules(run),
            note_outputs(run),
            explain_accuracy(run.policy, points, runs[0].policy),
        ]
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
    if not run.nonfinite_outputs:
        return None
    return (
        f"{run.policy}: for {run.nonfinite_outputs} of the test data the model's output is not finite, which counts "
        "as wrong"
    )
