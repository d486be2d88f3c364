"""`python -m jmp_train.diagnose SCRIPT:FUNCTION`. An import would hide the function of the same name, so it fails."""

import sys

if __name__ == "jmp_train.diagnose":
    raise ImportError("jmp_train.diagnose is a function: `from jmp_train import diagnose`; as a module it is a command")

if __name__ == "__main__":  # and not in processes that a script starts
    from jmp_train.cli import diagnose_script_main

    sys.exit(diagnose_script_main())
