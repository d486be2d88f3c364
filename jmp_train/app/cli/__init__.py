"""The command `jmp-train`."""

from jmp_train.app.cli.entry import main as main
