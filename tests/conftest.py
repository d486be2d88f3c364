"""Eight virtual devices, strict dtypes, rings of tests, and no skip that is not on the committed list."""

import collections
import contextlib
import ctypes
import gc
import os
import platform
import re
import resource
import shutil
import signal
import subprocess
import sys
import zlib
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any


def _processor() -> str:
    """Returns a short name for this kind of processor: programs for one kind may not run on another."""
    info = Path("/proc/cpuinfo")  # not there on macOS
    lines = info.read_text().splitlines() if info.exists() else [f"flags: {platform.processor()}"]
    flags = sorted({line for line in lines if line.startswith(("flags", "Features"))})
    return f"{zlib.crc32(repr(flags).encode()):08x}"


# Before jax starts: with fewer threads than this, eight virtual devices on few cores deadlock.
os.environ.setdefault("NPROC", "32")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")
XLA_FLAGS = [
    # jaxlib 0.11 and 0.12 leave bfloat16 results of some fused convolutions unwritten on CPUs.
    "--xla_cpu_experimental_ynn_fusion_type=",
    # Programs that run once: plainer machine code of the same operations, made in less than half the time.
    "--xla_backend_optimization_level=0",
    # Both cores are busy with tests already: parts of a program, compiled side by side, take a fifth more.
    "--xla_cpu_parallel_codegen_split_count=1",
]
if tuple(map(int, version("jaxlib").split(".")[:2])) < (0, 11):  # which took the flag away
    XLA_FLAGS.append("--xla_cpu_use_fusion_emitters=false")
os.environ.setdefault("XLA_FLAGS", " ".join(XLA_FLAGS))
# What one process has compiled, no other one and no later run compiles again; `pytest --cache-clear` forgets it.
COMPILED = Path(__file__).parents[1] / ".pytest_cache" / "d" / f"compiled-{_processor()}"
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(COMPILED))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")

# Where this is set, every process that a test starts would compile the whole package first.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# `nohup` and `&` have signals ignored, which the processes that tests start would inherit; not so what is handled.
for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT):
    if signal.getsignal(number) == signal.SIG_IGN:
        signal.signal(number, lambda *_: None)

# Looking for garbage among modules and tests, which all stay, is a quarter of the time that collecting tests takes.
gc.disable()

import jax
import pytest

jax.config.update("jax_numpy_dtype_promotion", "strict")

# Beyond this the compiled programs of earlier tests are dropped: megabytes of a process.
MOST_MEMORY = 1400
# Beyond this the compiled programs of earlier runs are deleted: megabytes on disk.
MOST_KEPT = 1000


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--allowed-skips",
        type=Path,
        metavar="FILE",
        help="fail if a test is skipped for a reason that no regular expression in FILE matches",
    )
    parser.addoption(
        "--share",
        metavar="I/N",
        help="run one N-th of the selected tests, chosen by the hash of their names; I may be any number. "
        "If N is a multiple of 6, the share is of a sixth of the files, and no other is imported",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Gives items their rings: most doctests are quick, what wants `.venv-plan` is full; see also `quick_cases`."""
    cases = collections.defaultdict[str, list[pytest.Item]](list)
    for item in items:
        if isinstance(item, pytest.DoctestItem):
            # Some examples compile much, and what they show has tests of its own.
            compiles = any(f"/{folder}/" in item.nodeid for folder in ("graphs", "quantizing", "tuning"))
            item.add_marker(pytest.mark.full if compiles else pytest.mark.quick)
        if "plan_python" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.full)
        if item.get_closest_marker("quick_cases") is not None:
            cases[item.nodeid.partition("[")[0]].append(item)
    for group in cases.values():
        marker = group[0].get_closest_marker("quick_cases")
        assert marker is not None
        for item in sorted(group, key=lambda item: _hash(item.nodeid))[marker.args[0] :]:
            item.add_marker(pytest.mark.full)
    (index, count), _ = _share(config)
    items[:] = [item for item in items if _hash(item.nodeid) % count == index]


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    gc.freeze()
    gc.set_threshold(10_000)  # a program's trace alone makes more objects than the default 700, each time
    gc.enable()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leaves out files of tests that have none of the share."""
    _, (index, count) = _share(config)
    name = os.path.relpath(collection_path, config.rootpath)
    is_test = name.endswith(".py") and collection_path.name != "conftest.py"
    return True if is_test and _hash(name) % count != index else None


def _share(config: pytest.Config) -> tuple[tuple[int, int], tuple[int, int]]:
    """Returns which of how many parts of the tests of a file is asked for, and of which part of the files."""
    index, count = map(int, (config.getoption("--share") or "0/1").split("/"))
    files = 6 if count % 6 == 0 else 1
    tests = count // files
    return (index // files % tests, tests), (index % files, files)


def _hash(name: str) -> int:
    """Returns a number that is the same in every process, unlike hash()."""
    return zlib.crc32(name.encode())


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown() -> None:
    """Keeps a process near 1.5 GB: with each small program, jax keeps more than a megabyte."""
    statm = Path("/proc/self/statm")  # not there on macOS
    if statm.exists() and int(statm.read_text().split()[1]) * resource.getpagesize() > MOST_MEMORY * 2**20:
        jax.clear_caches()
        # Else glibc keeps what is free for itself: the process stays as large, and the next test's end clears again.
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)


@pytest.fixture
def plan_python(monkeypatch: pytest.MonkeyPatch) -> str:
    """Returns the interpreter of the environment beside this one that has the plan extra."""
    jax.devices()  # this process has read its flags then, and GPUs are compiled for as users do
    monkeypatch.setenv("XLA_FLAGS", "")
    environment = Path(f"{sys.prefix}-plan")
    if not any(environment.glob("lib/*/site-packages/jax_cuda12_plugin")):
        pytest.skip(f"no environment with the plan extra is there: {environment}")
    return str(environment / "bin" / "python")


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Lets `compile_program` find XLA's compiler for CUDA, and keep what it compiles for this test alone."""
    _find_compiler("cuda", monkeypatch, tmp_path)


@pytest.fixture
def tpu_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The same for libtpu."""
    _find_compiler("tpu", monkeypatch, tmp_path)


def _find_compiler(platform: str, monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    from jmp_train.tools.aot import PluginError
    from jmp_train.tools.aot.compiling import compiler_path

    jax.devices()  # this process has read its flags then, and devices are compiled for as users do
    try:
        packages = compiler_path(platform)
    except PluginError as error:
        pytest.skip(str(error))
    monkeypatch.setenv("XLA_FLAGS", "")
    monkeypatch.setenv("JMP_TRAIN_CACHE", str(cache))
    if packages is not None:
        for folder in packages.parent.glob("compiler-*"):  # a test may want both
            if not (cache / folder.name).exists():
                (cache / folder.name).symlink_to(folder)


@pytest.fixture
def pids(tmp_path: Path) -> Iterator[Path]:
    """Yields the folder in which processes note their ids; what is left of them is killed."""
    from process_helpers import kill_all

    folder = tmp_path / "pids"
    folder.mkdir()
    yield folder
    kill_all([int(file.read_text()) for file in folder.iterdir()])


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        _bound_compiled_programs()
    file = config.getoption("--allowed-skips")
    if file is not None:
        lines = [line.strip() for line in file.read_text().splitlines()]
        patterns = [line for line in lines if line and not line.startswith("#")]
        config.pluginmanager.register(SkipCheck(patterns))
    if config.getoption("--share") is not None:
        config.pluginmanager.register(FailureAges())


def _bound_compiled_programs() -> None:
    """Deletes the programs of earlier runs if they are many, and those of processes that ended while they wrote."""
    entries = list(os.scandir(COMPILED)) if COMPILED.exists() else []
    sizes: dict[str, int] = {}
    for entry in entries:
        with contextlib.suppress(FileNotFoundError):  # another run deletes there
            sizes[entry.path] = entry.stat().st_size
    if sum(sizes.values()) > MOST_KEPT * 2**20:
        shutil.rmtree(COMPILED, ignore_errors=True)  # another run may write there
        return
    for path, size in sizes.items():
        if size == 0:
            Path(path).unlink(missing_ok=True)


class SkipCheck:
    """Fails the session for skips whose reason is not listed."""

    def __init__(self, patterns: list[str]) -> None:
        self.patterns = patterns
        self.unlisted: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if not hasattr(report, "wasxfail"):
            self._look_at(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self._look_at(report)

    def _look_at(self, report: Any) -> None:
        if not report.skipped:
            return
        reason = report.longrepr[2].removeprefix("Skipped: ")
        if not any(re.fullmatch(pattern, reason) for pattern in self.patterns):
            self.unlisted.append(f"{report.nodeid}: {reason}")

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self.unlisted:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self.unlisted:
            terminalreporter.section("skipped for reasons that are not on the list", red=True)
            for line in self.unlisted:
                terminalreporter.write_line(line)


class FailureAges:
    """Prints how long each failure of a share may be old: its turn comes once in many commits."""

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
        reports = [x for kind in ("failed", "error") for x in terminalreporter.getreports(kind)]
        if reports:
            terminalreporter.section("since when these may have failed", red=True)
        for name in dict.fromkeys(report.nodeid for report in reports):
            age = _age(config.rootpath / name.partition("::")[0])
            terminalreporter.write_line(f"{name}: {age}")


def _age(file: Path) -> str:
    """Returns since when a test may have failed: since its file changed last, when it passed as a rule."""

    def git(*arguments: str) -> str:
        command = ("git", *arguments)
        result = subprocess.run(command, cwd=file.parent, capture_output=True, text=True, check=False)
        return result.stdout.strip()

    if git("rev-parse", "--is-shallow-repository") != "false":
        return "unknown, without the history of the repository"
    commit, _, date = git("log", "-1", "--format=%h %cs", "--", file.name).partition(" ")
    if not commit or git("status", "--porcelain", "--", file.name):
        return "now, its file is not committed as it is"
    count = git("rev-list", "--count", f"{commit}..HEAD")
    return f"since {commit} of {date}, {count} commits ago, at the earliest: its file changed there"
