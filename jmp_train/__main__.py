"""`python -m jmp_train` is `jmp-train`."""

import sys

from jmp_train.app.cli import main

if __name__ == "__main__":
    sys.exit(main())
