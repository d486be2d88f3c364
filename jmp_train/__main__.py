"""`python -m jmp_train` is `jmp-train`."""

import sys

from jmp_train.cli import main

if __name__ == "__main__":
    sys.exit(main())
