"""`python -m jmp_train.diagnose TASK` is `jmp-train diagnose TASK`. An import would hide `jt.diagnose`, so it fails."""

import sys

if __name__ == "jmp_train.diagnose":
    raise ImportError("jmp_train.diagnose is a function: `from jmp_train import diagnose`; as a module it is a command")

if __name__ == "__main__":  # not in processes that a script starts
    from jmp_train.cli import main

    sys.exit(main(["diagnose", *sys.argv[1:]]))
