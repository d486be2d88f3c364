"""Which tests run a line, and pytest in a fork of this process on just these: the two speeds of `mutate.py`."""

import ast
import dataclasses
import importlib
import json
import multiprocessing
import os
import resource
import signal
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
QUICK = "quick and not full"  # as the Makefile has it, for pytest's -m
MOST_CPU = 120.0  # seconds of one fault's tests; those that would come later are not run
_HANGS = {"cpu": 2 * MOST_CPU, "wall": 1800}  # seconds after which a fault counts as caught: a test hangs


@dataclasses.dataclass(frozen=True)
class Recording:
    """Which lines each test of the quick ring ran, and what it cost.

    Attributes:
      folder: with the files that `record` has written.
    """

    folder: Path

    @cached_property
    def costs(self) -> dict[str, float]:
        """CPU seconds of each test."""
        rows = map(json.loads, (self.folder / "costs.jsonl").read_text().splitlines())
        return {row["name"]: row["cpu"] for row in rows if row["kind"] == "test"}

    @cached_property
    def texts(self) -> dict[str, int]:
        """The checksum that each module had."""
        return json.loads((self.folder / "texts.json").read_text())

    @cached_property
    def _lines(self) -> Any:
        from coverage import CoverageData

        data = CoverageData(str(self.folder / "lines"))
        data.read()
        return data

    def lines(self, file: str) -> dict[int, set[str]]:
        """Returns the tests that ran each line of a module; the lines of its import alone have none.

        Args:
          file: the module's path from the root.
        """
        found = [name for name in self._lines.measured_files() if name.endswith(f"/{file}")]
        contexts = self._lines.contexts_by_lineno(min(found, key=len)) if found else {}
        return {line: {name.rpartition("|")[0] for name in names if name} for line, names in contexts.items()}

    def tests(self, file: str, text: str, line: int) -> list[str]:
        """Returns the tests that may notice a change of a line, in the order in which they find it soonest.

        First come those of the module's folder, then the others; among each the tests that ran the line, by file and
        cost, then the others of these files: what jax or Python has cached runs in the first test only. Tests of a
        line that no test ran are those that ran any of the module, and if there are none, those of the folder.

        Args:
          file: the module's path from the root.
          text: its source.
          line: in it, from 1.
        """
        lines = self.lines(file)
        known = self.texts.get(file) == checksum(text)
        ran = set().union(*(lines.get(number, ()) for number in statement_lines(text, line))) if known else set()
        ran = ran or set().union(*lines.values()) or {test for test in self.costs if folder_of(test) == folder_of(file)}
        files = set(map(file_of, ran))
        near = {test for test in self.costs if file_of(test) in files}
        own = f"test_{Path(file).name}"

        def order(test: str) -> tuple[Any, ...]:
            of_folder, at = folder_of(test) == folder_of(file), file_of(test)
            cost = self.costs.get(test, 0.0)
            return (not of_folder, test not in ran, Path(at).name != own, by_file.get(at, 0.0), at, cost, test)

        by_file: dict[str, float] = {}
        for test in ran:
            at = file_of(test)
            by_file[at] = by_file.get(at, 0.0) + self.costs.get(test, 0.0)
        return sorted(ran | near, key=order)


def checksum(text: str) -> int:
    """Returns a number that changes with a text."""
    return zlib.crc32(text.encode())


def file_of(test: str) -> str:
    """Returns the file of a test by its pytest name."""
    return test.partition("::")[0]


def folder_of(name: str) -> str:
    """Returns the folder of a module, or the one that a test mirrors: "policies/optimizers"."""
    parts = Path(file_of(name)).parts[:-1]
    if len(parts) > 1 and (parts[0] == "tests" or parts[1] in ("policies", "graphs")):
        parts = parts[1:]  # doctests of `policies` are collected through the link `jmp_train/policies`
    return "/".join(parts[:2])


def statement_lines(text: str, line: int) -> range:
    """Returns the lines of the innermost statement at a line; those of its head, if it has a body."""
    found = range(line, line + 1)
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.stmt) and node.lineno <= line <= (node.end_lineno or node.lineno):
            body = getattr(node, "body", None)
            end = body[0].lineno - 1 if body else node.end_lineno or node.lineno
            if line <= end:
                found = range(node.lineno, end + 1)
    return found


def record(folder: Path, files: Iterable[str]) -> None:
    """Runs the quick ring with coverage, and writes which lines of modules each test ran, and what it cost.

    Args:
      folder: for the files.
      files: modules, from the root, whose texts are noted.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for file in folder.iterdir():
        file.unlink()
    texts = {file: checksum((ROOT / file).read_text()) for file in files}
    (folder / "texts.json").write_text(json.dumps(texts))
    coverage = ["--cov", "--cov-context=test", "--cov-report="]
    costs = ["-p", "cost_report", "--costs", str(folder / "costs.jsonl")]
    command = [sys.executable, "-m", "pytest", "-q", "-n", "2", "--dist", "loadfile", "-m", QUICK, *coverage, *costs]
    environment = {**os.environ, "COVERAGE_FILE": str(folder / "lines")}
    if subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode > 1:
        raise SystemExit("the quick ring did not run")


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What became of a run of tests.

    Attributes:
      failed: the first test that failed, what went wrong before any could run, or None.
      cpu: seconds of the run.
      left_out: how many tests were not run, as the time was up.
    """

    failed: str | None
    cpu: float
    left_out: int


class _Selected:
    """Runs tests in an order, up to the first that fails, and until their time is up."""

    def __init__(self, tests: Collection[str], known: Collection[str], most_cpu: float) -> None:
        self.order = {name: i for i, name in enumerate(tests)}
        self.known = set(known)
        self.most_cpu = most_cpu
        self.failed: str | None = None
        self.left = 0

    def pytest_configure(self) -> None:
        from hypothesis import Phase, settings

        # Hypothesis does not look for the smallest example that fails, which may take minutes.
        settings.register_profile("mutations", phases=(Phase.explicit, Phase.generate))
        settings.load_profile("mutations")

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Keeps the tests of the list, and first those that are newer than the recording."""
        items[:] = [item for item in items if item.nodeid in self.order or item.nodeid not in self.known]
        items.sort(key=lambda item: self.order.get(item.nodeid, -1))
        self.left = len(items)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.failed = self.failed or report.nodeid

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed = self.failed or report.nodeid

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> None:
        self.left -= 1
        if _cpu() > self.most_cpu and self.left:
            item.session.shouldstop = "the time is up"


def _cpu() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def preload() -> None:
    """Imports what tests import from elsewhere, so that forks need not; nothing of the project is imported."""
    importlib.import_module("conftest")  # sets the devices and XLA's flags before jax reads them
    for name in ("flax.linen", "flax.nnx", "haiku", "jraph", "optax", "orbax.checkpoint"):
        importlib.import_module(name)
    assert "jmp_train" not in sys.modules


def outcome_of(tree: Path, tests: Collection[str], known: Collection[str], most_cpu: float = MOST_CPU) -> Outcome:
    """Runs quick tests in a fork, in this order, up to the first that fails.

    Args:
      tree: a copy of the project, which is imported.
      tests: their names.
      known: all names of the recording; what else is in the tests' files is run first.
      most_cpu: seconds after which no further test begins.
    """
    files = list(dict.fromkeys(map(file_of, tests)))
    files = [file for file in files if (tree / file).exists()]
    if not files:
        return Outcome(None, 0.0, 0)
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    selected = _Selected(tests, known, most_cpu)
    process = context.Process(target=_run, args=(tree, files, selected, sender.send))
    begin = time.monotonic()
    process.start()
    sender.close()
    try:
        if not receiver.poll(_HANGS["wall"]):
            return Outcome("hangs", most_cpu, 0)
        return receiver.recv()
    except EOFError:
        process.join()
        if process.exitcode is None or process.exitcode >= 0:  # not by a signal
            raise SystemExit(f"pytest did not run: the fork ended with {process.exitcode}") from None
        return Outcome(f"ends by signal {-process.exitcode}", time.monotonic() - begin, 0)
    finally:
        assert process.pid is not None
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.join()


def _run(tree: Path, files: list[str], selected: _Selected, send: Callable[[Outcome], None]) -> None:
    os.setsid()
    resource.setrlimit(resource.RLIMIT_CPU, (int(_HANGS["cpu"]), resource.RLIM_INFINITY))
    os.chdir(tree)
    os.environ["PYTHONPATH"] = str(tree)
    sys.path.insert(0, str(tree))
    with open(os.devnull, "w") as nothing:
        os.dup2(nothing.fileno(), 1)
        os.dup2(nothing.fileno(), 2)
    options = ["-q", "-x", "--tb=no", "-p", "no:cacheprovider", "-m", QUICK]
    code = pytest.main([*options, *files], plugins=[selected])
    failed = selected.failed
    if failed is None and code in (pytest.ExitCode.INTERNAL_ERROR, pytest.ExitCode.USAGE_ERROR):
        failed = f"pytest ended with {code!r}"
    send(Outcome(failed, _cpu(), 0 if failed else selected.left))
