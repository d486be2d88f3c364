"""What a comparison says of its runs beside each one's own numbers: how fast, how large, and why one fell behind."""

from collections.abc import Sequence

from jmp_train.records import Run

SPEED_TITLES = ("run", "memory", "iterations/s", "samples/s", "speed-up", "memory ratio")

# Modes that are known to fail where others do not, and what they lack.
_LACKS = {
    "apex-O3": (
        "apex-O3 has neither loss scale nor float32 masters nor float32 BatchNorms: gradients below 6e-8 vanish, "
        "updates below 1/2048 of a parameter are lost, statistics above 65504 overflow; apex-O2 has all three"
    ),
    "apex-O3-bfloat16": (
        "apex-O3-bfloat16 has no float32 masters: updates below 1/256 of a parameter are lost; apex-O2-bfloat16 "
        "has them"
    ),
}


def speed_rows(runs: Sequence[Run]) -> list[tuple[str, ...]]:
    """Returns a row a run under `SPEED_TITLES`; speed-up and memory ratio are those beside the first.

    Args:
      runs: at least one.

    Reference: ColossalAI's table of its AMP modes.
    """
    first = runs[0]
    return [
        (
            run.policy,
            f"{run.memory_mb:.0f} MB",
            _rate(run.iterations_per_second),
            _rate(run.samples_per_second),
            f"{run.iterations_per_second / first.iterations_per_second:.2f}x",
            f"{run.memory_mb / first.memory_mb:.2f}x",
        )
        for run in runs
    ]


def _rate(number: float) -> str:
    return f"{number:.1f}" if number >= 10 else f"{number:.3g}"


def explain_failure(name: str, reason: str) -> str:
    """Returns why a run failed; where numbers did, and its mode is known for that, with what the mode lacks.

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


def explain_accuracy(name: str, points: float, first: str) -> str | None:
    """Returns why a run is less accurate than the first one; None if it is not, or if that is not known.

    Args:
      name: of the policy or mode.
      points: by how many percent of the test data it is below the first run; one is no difference.
      first: the first run's name.
    """
    if points <= 1 or name not in _LACKS:
        return None
    return f"{name} is {points:.2f} points of test accuracy below {first}. {_LACKS[name]}"


def explanations(runs: Sequence[Run]) -> list[str]:
    """Returns a sentence for each run with outputs that are not finite, or less accurate for a known reason.

    Args:
      runs: any number; the first one's accuracy is what the others are beside.
    """
    texts = []
    for run in runs:
        points = 100 * (runs[0].test_accuracy - run.test_accuracy)
        texts += [note_outputs(run), explain_accuracy(run.policy, points, runs[0].policy)]
    return [text for text in texts if text is not None]


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
