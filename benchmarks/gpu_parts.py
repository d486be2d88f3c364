"""The parts of `gpu.py`: their measurements, their machines, and the goals for the figures.

The file of results is one JSON object: the last machine, the parts by name, each with its machine, and the goals. It
is rewritten atomically after each part. A part with the present machine and versions is not run again.
"""

import importlib.metadata
import json
import platform
import re
import shutil
import statistics
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from gpu_workloads import MODES, OURS, PRECISIONS
from result_files import write_results

RESULTS = Path(__file__).parent / "results"
PACKAGES = ("jax", "jaxlib", "flax", "jmp_train", "torch", "torch_geometric")
HALVES = ("float16", "bfloat16")

Machine = dict[str, Any]
Report = dict[str, Any]


class Part(NamedTuple):
    """The measurements of one part.

    Attributes:
      workload: one of `gpu.py`'s.
      ways: who steps, by the beginnings of their names.
      precisions: of these.
      minutes: after which what has not been measured is left out; less than 9.
    """

    workload: str
    ways: tuple[str, ...]
    precisions: tuple[str, ...] = PRECISIONS
    minutes: float = 8.5


_TORCH_MODES = ("float32", "tf32", "torch", "torch-bfloat16", "naive")
_APEX_MODES = ("float32", *(mode for mode in MODES if mode.startswith("apex")))
PARTS = {  # those with goals first
    "mnist": Part("mnist", (OURS, "torch compile")),
    "gat": Part("gat", (OURS,)),
    "gat-pyg": Part("gat", ("PyG eager",)),
    "gat-pyg-compile": Part("gat", ("PyG compile",)),
    "graph-ops": Part("graph-ops", (OURS,), minutes=6.0),
    "resnet34": Part("resnet34", (OURS,), _TORCH_MODES),
    "resnet34-apex": Part("resnet34", (OURS,), _APEX_MODES),
    "vit-b16": Part("vit-b16", (OURS,), _TORCH_MODES),
    "vit-b16-apex": Part("vit-b16", (OURS,), _APEX_MODES),
    "graph-ops-peers": Part("graph-ops", ("PyG", "jraph"), minutes=6.0),
    "mnist-torch": Part("mnist", ("torch eager",), minutes=4.0),
    "resnet34-torch": Part("resnet34", ("torch eager",), minutes=6.0),
    "resnet34-torch-compile": Part("resnet34", ("torch compile",)),
    "vit-b16-torch": Part("vit-b16", ("torch eager",), minutes=6.0),
    "vit-b16-torch-compile": Part("vit-b16", ("torch compile",)),
}


def this_machine() -> Machine:
    """Returns device, driver and versions; a package that is not here has None. It starts jax's devices."""
    import jax

    devices = jax.local_devices()
    return {
        "device": devices[0].device_kind,
        "devices": len(devices),
        "driver": _driver(),
        "versions": {"python": platform.python_version()} | {name: _version(name) for name in PACKAGES},
    }


def _driver() -> str | None:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    command = (tool, "--query-gpu=driver_version", "--format=csv,noheader")
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.splitlines()[0].strip() if done.returncode == 0 and done.stdout else None


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def results_file(device: str) -> Path:
    """Returns where a device's results belong.

    Args:
      device: its kind, as jax names it.
    """
    return RESULTS / f"gpu_{re.sub(r'[^a-z0-9]+', '_', device.lower()).strip('_')}.json"


def read_report(file: Path | None) -> Report:
    """Returns what a file of results has, an empty report if it is not there."""
    if file is None or not file.exists():
        return {"parts": {}}
    return json.loads(file.read_text())


def write_report(file: Path | None, report: Report) -> None:
    """Writes a file of results, which at any moment is the old one or the new one."""
    if file is None:
        return
    file.parent.mkdir(parents=True, exist_ok=True)
    write_results(file, report, device=f"{report['devices']} x {report['device']}")


class Goal(NamedTuple):
    """A goal that the figures should meet.

    Attributes:
      name: in words.
      figures: by the variants that they are of.
      is_met: a function of a figure.
    """

    name: str
    figures: dict[str, float]
    is_met: Callable[[float], bool]

    def as_json(self) -> dict[str, Any]:
        """Returns the goal with its verdict, which is None where nothing has been measured."""
        verdict = all(map(self.is_met, self.figures.values())) if self.figures else None
        return {"goal": self.name, "is_met": verdict, "figures": self.figures}

    def line(self) -> str:
        """Returns the goal as a line to print, with the figures that miss it, or the one that is nearest to that."""
        if not self.figures:
            return f"not measured: {self.name}"
        missed = {name: x for name, x in self.figures.items() if not self.is_met(x)}
        shown = "; ".join(f"{name} {x:.2f}" for name, x in (missed or self.figures).items())
        return f"{'MISSED' if missed else 'met'}: {self.name}: {shown}"


def goals_of(report: Report) -> list[Goal]:
    """Returns the goals with the figures that a report has of them.

    Args:
      report: its "parts" have "variants", as `gpu.py` measures them.
    """
    parts = report["parts"]
    mnist = _measured(parts.get("mnist"))
    ours = {half: mnist[f"{OURS} {half}"] for half in HALVES if f"{OURS} {half}" in mnist}
    torch = {half: mnist[f"torch compile {half}"] for half in HALVES if f"torch compile {half}" in mnist}
    return [
        Goal(
            "MNIST's network in half 2.3 times as fast as in float32 without TF32",
            {half: x["times_as_fast"] for half, x in ours.items() if "times_as_fast" in x},
            lambda x: x >= 2.3,
        ),
        Goal(
            "MNIST's network in half at least as fast as torch.compile's",
            {half: _ratio(torch[half], x) for half, x in ours.items() if half in torch},
            lambda x: x >= 1,
        ),
        Goal(
            "Reddit's GAT at most a third of PyG's time an edge",
            dict(_shares_of_pyg(parts)),
            lambda x: x <= 1 / 3,
        ),
        Goal("nothing slower in half than in float32", dict(_speeds_of_halves(parts)), lambda x: x >= 1),
    ]


def _measured(part: dict[str, Any] | None) -> dict[str, Any]:
    """Returns a part's variants that have been measured."""
    variants = {} if part is None else part["variants"]
    return {label: x for label, x in variants.items() if "median_ms" in x}


def _ratio(slow: dict[str, Any], fast: dict[str, Any]) -> float:
    """Returns how many times as fast one variant is as another, which stepped in turn with it."""
    pairs = zip(slow["step_ms"], fast["step_ms"], strict=False)
    return statistics.median(a / b for a, b in pairs)


def _shares_of_pyg(parts: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """Yields, by precision, our time per edge of the whole graph as a fraction of the better one of PyG's."""
    peers = [x for name in ("gat-pyg", "gat-pyg-compile") for x in _measured(parts.get(name)).values()]
    for result in _measured(parts.get("gat")).values():
        times = [
            x["median_ms"] / x["edges"]
            for x in peers
            if x["way"].startswith("PyG") and x["precision"] == result["precision"]
        ]
        if times and result["part"] == 1:
            yield result["precision"], result["median_ms"] / result["edges"] / min(times)


def _speeds_of_halves(parts: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """Yields how many times as fast as in float32 ours are in half, whole steps and single operations."""
    for name, part in parts.items():
        variants = _measured(part)
        for label, x in variants.items():
            if x["way"].split()[0] != OURS or x["precision"] in ("float32", "tf32"):
                continue
            if "rows" not in x:
                if "times_as_fast" in x:
                    yield f"{name} {label}", x["times_as_fast"]
                continue
            first = variants.get(f"{x['way']} float32", {"rows": {}})
            for title, row in x["rows"].items():
                if "ms" in row and "ms" in first["rows"].get(title, {}):
                    yield f"{title} {label}", first["rows"][title]["ms"] / row["ms"]
