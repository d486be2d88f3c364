"""The child process of `jmp-train compare`: trains what its argument describes, by this same package.

It is started as `python -P train_process.py CALL`, so that nothing is imported from the current folder. `python -P -m
jmp_train` would not find the package in the current folder, as in a checkout, or would find another one.
"""

import importlib.util
import sys
from pathlib import Path


def _main() -> int:
    folder = Path(__file__).parents[2]
    spec = importlib.util.spec_from_file_location(
        "jmp_train", folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    assert spec is not None
    assert spec.loader is not None
    package = importlib.util.module_from_spec(spec)
    sys.modules["jmp_train"] = package
    spec.loader.exec_module(package)
    from jmp_train.app.cli.compare import run_child

    return run_child(sys.argv[1])


if __name__ == "__main__":
    sys.exit(_main())
