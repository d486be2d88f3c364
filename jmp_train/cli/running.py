"""What every command does around its own work: reads the call, reports errors in a line, and returns an exit code."""

import argparse
from collections.abc import Callable

from jmp_train.cli.errors import INTERRUPTED, is_of_interrupt, report_error
from jmp_train.command_start import interrupts_raised


def run_command(parser: Callable[[], argparse.ArgumentParser], arguments: list[str]) -> int:
    """Runs what a parser says a call is about, and returns the exit code.

    Args:
      parser: makes it; what it reads has `run`, a function of what it read that returns an exit code.
      arguments: of the call.
    """
    try:
        with interrupts_raised():
            args = parser().parse_args(arguments)
            return args.run(args)
    except KeyboardInterrupt:
        return INTERRUPTED
    except Exception as error:  # noqa: BLE001 - whatever it is, its user gets a line
        return INTERRUPTED if is_of_interrupt(error) else report_error(error, arguments)
