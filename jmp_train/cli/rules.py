"""The option `--rules`: rules of autocast from a file, for the policies and modes that autocast."""

from collections.abc import Sequence
from pathlib import Path

from jmp_train.cli.arguments import precisions_without_device
from jmp_train.cli.errors import WrongCall
from jmp_train.runs import AUTOCAST_CHOICES, RulesFile, autocasts


def read_rules(file: Path | None, names: Sequence[str]) -> RulesFile | None:
    """Returns the rules that a call names; None if it names none.

    Args:
      file: the one named.
      names: of the policies, modes and schedules of the call, of which those that autocast take the rules.

    Raises:
      WrongCall: none of them autocasts, or the file is missing or is none of rules.
    """
    if file is None:
        return None
    if not any(map(takes_rules, names)):
        do = "does" if len(names) == 1 else "do"
        raise WrongCall(f"--rules {file}: {', '.join(names)} {do} not autocast; {AUTOCAST_CHOICES} do")
    try:
        return RulesFile.read(file)
    except OSError as error:
        raise WrongCall(f"--rules {file}: {error.strerror}") from error
    except ValueError as error:
        raise WrongCall(f"--rules {error}") from error


def takes_rules(name: str) -> bool:
    """Returns whether a policy or mode autocasts, or one of a schedule.

    Args:
      name: of it.
    """
    return any(autocasts(phase.precision) for phase in precisions_without_device(name))
