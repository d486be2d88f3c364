"""The commands `jmp-train` and `python -m jmp_train.diagnose`."""

from jmp_train.cli.diagnose_script import diagnose_script_main as diagnose_script_main
from jmp_train.cli.entry import main as main
