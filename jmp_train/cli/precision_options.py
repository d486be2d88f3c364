"""Reads the options `--rules`, `--state-dtypes`, `--parameters` and `--fp8`, and checks who accepts them."""

import argparse
from collections import Counter
from collections.abc import Sequence

from jmp_train.cli.arguments import precisions_without_device
from jmp_train.cli.errors import WrongCall
from jmp_train.runs import AUTOCAST_CHOICES, FewBits, RulesFile, autocasts, is_schedule

_IN_HALF = "for example params=bfloat16,compute=bfloat16"
_AUTOCASTING = "use autocast_bfloat16 or autocast_float16"


def read_rules(args: argparse.Namespace, names: Sequence[str]) -> RulesFile | None:
    """Returns the autocast rules of a call; None if it has none.

    Args:
      args: the parsed arguments.
      names: the policies, modes and schedules of the call; those that autocast take the rules.

    Raises:
      WrongCall: none of them autocasts, or the file is missing or has no rules.
    """
    file = args.rules
    if file is None:
        return None
    if not any(map(takes_rules, names)):
        do = "does" if len(names) == 1 else "do"
        raise WrongCall(f"--rules {file}: {', '.join(names)} {do} not autocast; use {AUTOCAST_CHOICES}")
    try:
        return RulesFile.read(file)
    except OSError as error:
        raise WrongCall(f"--rules {file}: {error.strerror}") from error
    except ValueError as error:
        raise WrongCall(f"--rules {error}") from error


def takes_rules(name: str) -> bool:
    """Returns whether a policy or mode, or one in a schedule, autocasts.

    Args:
      name: the policy, mode or schedule.
    """
    return any(autocasts(phase.precision) for phase in precisions_without_device(name))


def read_few_bits(args: argparse.Namespace, names: Sequence[str]) -> FewBits:
    """Returns the few-bits options of a call.

    Args:
      args: the parsed arguments.
      names: the policies, modes and schedules of the call; each option must apply to one of them.

    Raises:
      WrongCall: an option applies to none of them.
    """
    few_bits = FewBits(tuple(args.state_dtypes), args.parameters, args.fp8)
    fields = Counter(text.rpartition("=")[0] for text in few_bits.state_dtypes)
    repeated = [field for field, count in fields.items() if count > 1]
    if repeated:
        raise WrongCall(f"--state-dtypes names {repeated[0]} more than once")
    taken = [few_bits_taken(few_bits, name) for name in names]
    said = ", ".join(names)
    if few_bits.parameters and not any(part.parameters for part in taken):
        raise WrongCall(
            f"--parameters {few_bits.parameters} is for policies with parameters in half precision, which {said} "
            f"{'is' if len(names) == 1 else 'are'} not; {_IN_HALF}"
        )
    if few_bits.fp8 and not any(part.fp8 for part in taken):
        do = "does" if len(names) == 1 else "do"
        raise WrongCall(f"--fp8 {few_bits.fp8}: {said} {do} not autocast as policies; {_AUTOCASTING}")
    for name, part in zip(names, taken, strict=True):
        if part.has_fp8_state and is_schedule(name):
            raise WrongCall(f"--fp8 {part.fp8} has a state, which the phases of {name} cannot share")
    return few_bits


def few_bits_taken(few_bits: FewBits, name: str) -> FewBits:
    """Returns the few-bits options that apply to a policy or mode, or to a phase of a schedule.

    Args:
      few_bits: the options of the call.
      name: the policy, mode or schedule.
    """
    parts = [few_bits.for_precision(phase.precision) for phase in precisions_without_device(name)]
    return FewBits(
        few_bits.state_dtypes,
        next((part.parameters for part in parts if part.parameters), None),
        next((part.fp8 for part in parts if part.fp8), None),
    )
