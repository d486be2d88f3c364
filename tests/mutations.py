"""Plants faults, one at a time, and looks whether the tests notice: `python tests/mutations.py --ring quick`.

A fault is planted in a copy of the tracked files, in which pytest then runs, so that the checkout never changes. First
run the tests that mirror the module, then the others of the ring; what fails counts if it passes without the fault.
"""

import argparse
import dataclasses
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RINGS = {"quick": "quick and not full", "all": "not gpu"}  # as the Makefile has them, for pytest's -m
# pytest, but that hypothesis does not look for the smallest example that fails, which may take minutes.
PYTEST = """
import sys, pytest
class WithoutShrinking:
    def pytest_configure(self):
        from hypothesis import Phase, settings
        settings.register_profile("mutations", phases=(Phase.explicit, Phase.generate))
        settings.load_profile("mutations")
sys.exit(pytest.main(sys.argv[1:], plugins=[WithoutShrinking()]))
"""
NOTHING_RAN = 5  # pytest's exit code
# It holds that faults can be planted, which is so no more in the copy that has one.
CHECK_OF_THE_LIST = "tests/project/test_mutations.py"


@dataclasses.dataclass(frozen=True)
class Mutation:
    """A fault: what takes the place of a text that is in a file exactly once, and the tests that mirror the file."""

    name: str
    file: str
    old: str
    new: str
    mirror: str

    def source(self, root: Path = ROOT) -> str:
        """Returns the file's text with the fault; raises ValueError if `old` is not there exactly once."""
        text = (root / self.file).read_text()
        if (count := text.count(self.old)) != 1:
            raise ValueError(f"mutation {self.name!r}: its old text is {count} times in {self.file}, not once")
        return text.replace(self.old, self.new)

    @property
    def change(self) -> str:
        """The file, and the words that differ, old and new."""
        old, new = self.old.split(), self.new.split()
        while old and new and old[0] == new[0]:
            old, new = old[1:], new[1:]
        while old and new and old[-1] == new[-1]:
            old, new = old[:-1], new[:-1]
        before, after = (" ".join(words) or "nothing" for words in (old, new))
        return f"{self.file}: {_shortened(before)} -> {_shortened(after)}"


def _shortened(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:57]}..."


MUTATIONS = tuple(
    Mutation(**fault) for fault in tomllib.loads((Path(__file__).parent / "planted_faults.toml").read_text())["fault"]
)


@contextmanager
def compiled_once() -> Iterator[None]:
    """Keeps compiled programs for all faults: what one leaves as it is need not be compiled again for the next."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that copies are deleted, as they are after Ctrl-C
    with tempfile.TemporaryDirectory(prefix="mutation-cache-") as cache:
        os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", cache)
        yield


@contextmanager
def copied_tree() -> Iterator[Path]:
    """Yields a temporary copy of the tracked files as they are in the checkout, links as links."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True, text=True).stdout
    with tempfile.TemporaryDirectory(prefix="mutation-", ignore_cleanup_errors=True) as folder:
        for name in filter(None, listed.split("\0")):
            if os.path.lexists(ROOT / name):  # not what is deleted, and not committed yet
                target = Path(folder, name)
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, target, follow_symlinks=False)
        yield Path(folder)


def pytest_call(tree: Path, *arguments: str) -> dict[str, Any]:
    """Returns the arguments with which `subprocess` runs pytest in a copy of the tree."""
    options = ["-q", "--tb=no", "-p", "no:cacheprovider", f"--ignore={CHECK_OF_THE_LIST}"]
    return {
        "args": [sys.executable, "-c", PYTEST, *options, *arguments],
        "cwd": tree,
        # Before the editable install: the processes that tests start import the copy, too.
        "env": {**os.environ, "PYTHONPATH": str(tree)},
    }


def failures(tree: Path, *arguments: str) -> list[str]:
    """Returns the tests that fail when pytest runs with these arguments in a copy of the tree."""
    call = pytest_call(tree, "-rfE", *arguments)
    done = subprocess.run(**call, capture_output=True, text=True, check=False)
    found = [line.split(" - ")[0].split(" ", 1)[1] for line in done.stdout.splitlines() if _names_failure(line)]
    if not found and done.returncode not in (0, NOTHING_RAN):
        raise SystemExit(f"pytest ended with {done.returncode} and named no test:\n{done.stdout}{done.stderr}")
    return found


def _names_failure(line: str) -> bool:
    return line.startswith(("FAILED ", "ERROR "))


def first_failure(mutation: Mutation, ring: str, mirror_only: bool) -> str | None:
    """Returns the first test of a ring that a fault makes fail, those of the mirror first; None if there is none."""
    options = ["-x", "-m", RINGS[ring]]
    with copied_tree() as tree:
        (tree / mutation.file).write_text(mutation.source(tree))
        found = failures(tree, *options, mutation.mirror)
        if not found and not mirror_only:
            found = failures(tree, *options, f"--deselect={mutation.mirror}")
    return found[0] if found else None


def failing_without_faults(tests: Sequence[str]) -> set[str]:
    """Returns those of the tests that fail in a copy without any fault."""
    if not tests:
        return set()
    with copied_tree() as tree:
        return set(failures(tree, *tests))


def check(mutations: Sequence[Mutation], ring: str, mirror_only: bool) -> int:
    """Prints a line a fault, and returns how many of them no test has caught."""
    caught: dict[str, str] = {}
    for mutation in mutations:
        begin = time.monotonic()
        test = first_failure(mutation, ring, mirror_only)
        if test is not None:
            caught[mutation.name] = test
        seconds = time.monotonic() - begin
        print(f"{mutation.name:<19} {seconds:>5.0f} s  {test or 'NOT CAUGHT'}\n{'':28}{mutation.change}", flush=True)
    false = failing_without_faults(list(dict.fromkeys(caught.values())))
    for name, test in caught.items():
        if test in false:
            print(f"{name}: does not count, {test} fails without the fault, too")
    missed = [mutation.name for mutation in mutations if caught.get(mutation.name) in (None, *false)]
    print(f"{len(mutations) - len(missed)} of {len(mutations)} caught; not caught: {', '.join(missed) or 'none'}")
    return len(missed)


def main() -> int:
    """Checks the faults that the command line names, and returns 1 if too many are not caught."""
    parser = argparse.ArgumentParser(description="Plants faults and looks whether the tests notice.")
    names = [mutation.name for mutation in MUTATIONS]
    parser.add_argument("--ring", choices=RINGS, default="quick", help="which tests run; default: quick")
    parser.add_argument("--only", nargs="+", choices=names, metavar="NAME", default=names, help=", ".join(names))
    parser.add_argument("--mirror-only", action="store_true", help="run no more than the tests that mirror the module")
    options = parser.parse_args()
    chosen = [mutation for mutation in MUTATIONS if mutation.name in options.only]
    with compiled_once():
        missed = check(chosen, options.ring, options.mirror_only)
    return int(missed > (len(chosen) // 10 if options.ring == "quick" else 0))  # two of twenty


if __name__ == "__main__":
    sys.exit(main())
