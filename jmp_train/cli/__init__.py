"""The command `jmp-train`."""

from jmp_train.cli.entry import main as main
