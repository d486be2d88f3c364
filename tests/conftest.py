"""Eight virtual devices, strict dtypes, and no skip that is not on the committed list."""

import os
import re
import signal
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

# Before jax starts: with fewer threads than this, eight virtual devices on few cores deadlock.
os.environ.setdefault("NPROC", "32")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")
XLA_FLAGS = [
    # jaxlib 0.11 and 0.12 leave bfloat16 results of some fused convolutions unwritten on CPUs.
    "--xla_cpu_experimental_ynn_fusion_type=",
    # Programs that run once: plainer machine code of the same operations, made in less than half the time.
    "--xla_backend_optimization_level=0",
]
if tuple(map(int, version("jaxlib").split(".")[:2])) < (0, 11):  # which took the flag away
    XLA_FLAGS.append("--xla_cpu_use_fusion_emitters=false")
os.environ.setdefault("XLA_FLAGS", " ".join(XLA_FLAGS))

# `nohup` and `&` have signals ignored, which the processes that tests start would inherit; not so what is handled.
for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT):
    if signal.getsignal(number) == signal.SIG_IGN:
        signal.signal(number, lambda *_: None)

import jax
import pytest

jax.config.update("jax_numpy_dtype_promotion", "strict")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--allowed-skips",
        type=Path,
        metavar="FILE",
        help="fail if a test is skipped for a reason that no regular expression in FILE matches",
    )


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
def pids(tmp_path: Path) -> Iterator[Path]:
    """Yields the folder in which processes note their numbers; what is left of them is killed."""
    from process_helpers import kill_all

    folder = tmp_path / "pids"
    folder.mkdir()
    yield folder
    kill_all([int(file.read_text()) for file in folder.iterdir()])


def pytest_configure(config: pytest.Config) -> None:
    file = config.getoption("--allowed-skips")
    if file is not None:
        lines = [line.strip() for line in file.read_text().splitlines()]
        patterns = [line for line in lines if line and not line.startswith("#")]
        config.pluginmanager.register(SkipCheck(patterns))


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
