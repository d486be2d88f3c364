"""A pytest plugin that says where a suite's time goes: `pytest -p cost_report --costs FILE ...`.

FILE gets a line of JSON for each test and each collected module, with seconds of CPU (of the process and of the
processes that it waited for), of the wall, and what jax's monitoring events count as tracing, lowering and compiling.
`python tests/cost_report.py FILE` sums them by file.
"""

import collections
import json
import resource
import sys
import time
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

_EVENTS = {
    "/jax/core/compile/jaxpr_trace_duration": "trace",
    "/jax/core/compile/jaxpr_to_mlir_module_duration": "lower",
    "/jax/core/compile/backend_compile_duration": "compile",
}
_NO_COST = {"cpu": 0.0, "wall": 0.0, "trace": 0.0, "lower": 0.0, "compile": 0.0, "programs": 0}
_spent = collections.defaultdict[str, float](float)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--costs", type=Path, metavar="FILE", help="append what each test costs, as lines of JSON")


def pytest_configure(config: pytest.Config) -> None:
    import jax

    file = config.getoption("--costs")
    if file is not None:
        jax.monitoring.register_event_duration_secs_listener(_add_event)
        config.pluginmanager.register(_Costs(Path(file)))


def _add_event(event: str, duration_secs: float, **_: str | int) -> None:
    kind = _EVENTS.get(event)
    if kind is not None:
        _spent[kind] += duration_secs
        _spent["programs"] += float(kind == "compile")


def _now() -> dict[str, float]:
    own, waited_for = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = own.ru_utime + own.ru_stime + waited_for.ru_utime + waited_for.ru_stime
    return _NO_COST | {"cpu": cpu, "wall": time.monotonic()} | dict(_spent)


class _Costs:
    def __init__(self, file: Path) -> None:
        self.file = file

    @pytest.hookimpl(wrapper=True)
    def pytest_make_collect_report(self, collector: pytest.Collector) -> Generator[None, object, object]:
        if not isinstance(collector, pytest.Module):
            return (yield)
        before = _now()
        result = yield
        self._write(collector.nodeid, "import", before)
        return result

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        before = _now()
        result = yield
        self._write(item.nodeid, "test", before)
        return result

    def _write(self, name: str, kind: str, before: dict[str, float]) -> None:
        costs = {key: round(value - before[key], 4) for key, value in _now().items()}
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
        with self.file.open("a") as file:
            file.write(json.dumps({"name": name, "kind": kind, "peak_mb": memory, **costs}) + "\n")


def _by_file(lines: Iterator[str]) -> dict[str, collections.Counter[str]]:
    result = collections.defaultdict[str, collections.Counter[str]](collections.Counter)
    seen = set[str]()
    for line in lines:
        row = json.loads(line)
        name, kind = row.pop("name"), row.pop("kind")
        peak = row.pop("peak_mb")
        if kind == "import" and name in seen:
            continue  # each worker collects all modules
        seen.add(name)
        costs = result[name.partition("::")[0]]
        costs.update({"import": row["cpu"]} if kind == "import" else {"tests": 1, **row})
        costs["peak_mb"] = max(costs["peak_mb"], peak)
    return result


def main() -> None:
    with open(sys.argv[1]) as file:
        costs = _by_file(file)
    columns = ("cpu", "wall", "import", "trace", "lower", "compile", "programs", "tests", "peak_mb")
    total = collections.Counter[str]()
    print(f"{'file':60}", *(f"{column:>8}" for column in columns))
    for name, row in sorted(costs.items(), key=lambda pair: -pair[1]["cpu"]):
        print(f"{name:60}", *(f"{row[column]:8.1f}" for column in columns))
        total.update(row)
    print(f"{'all':60}", *(f"{total[column]:8.1f}" for column in columns[:-1]))


if __name__ == "__main__":
    main()
