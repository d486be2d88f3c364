"""Measures `import jmp_train`, compared with importing its dependencies.

    python benchmarks/import_time.py [--runs 15]

Each run is a fresh process that imports and reports its own time; the two imports take turns.
"""

import argparse
import os
import statistics
import subprocess
import sys

LIBRARIES = "import jax, flax, optax, jraph"
OURS = "import jmp_train"


def seconds_to_import(statement: str) -> float:
    """Returns the seconds that a fresh interpreter needs for an import statement."""
    code = f"import time; start = time.perf_counter(); {statement}; print(time.perf_counter() - start)"
    # Installed packages have their bytecode beside them, so the checkout gets its own too.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    result = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, env=environment)
    return float(result.stdout)


def main() -> None:
    """Prints the medians and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--runs", type=int, default=15)
    runs = parser.parse_args().runs
    times: dict[str, list[float]] = {LIBRARIES: [], OURS: []}
    for index in range(-1, runs):  # one to warm up the disk
        for statement, seconds in times.items():
            elapsed = seconds_to_import(statement)
            if index >= 0:
                seconds.append(elapsed)
    medians = {statement: statistics.median(seconds) for statement, seconds in times.items()}
    for statement, median in medians.items():
        print(f"{statement:<32} {median:.3f} s (median of {runs})")
    print(f"ratio {medians[OURS] / medians[LIBRARIES]:.3f}")


if __name__ == "__main__":
    main()
