"""Measures the CPU speed of graph operations, compared with jraph and PyTorch Geometric.

    python benchmarks/graphs.py [--sizes 20000x500000] [--rows dot "GAT step"] [--json FILE]
    python benchmarks/graphs.py --sizes 200x3000 --seconds 1     # small, to see that it runs

Graphs have degrees by a power law and a self-loop at each node; their edges are sorted by receiver. Sums and
dots have features of 4 heads x 64, softmaxes 4 logits an edge. "gradient" is forward and backward, in
all inputs: for the weighted sum, features and weights. The GAT step is loss, gradient and update of
three layers, 4 heads x 64, 4 x 64 and 1 x 16, with ELU, mean cross-entropy and SGD; half means mixed
precision there, by `train_step`'s policies and `torch.autocast`.

Peers are jraph's operations, jitted, and PyTorch Geometric in the forms that its documentation names:
scatter, segment, `EdgeIndex`, CSR by MKL and by torch's own product, and `torch.compile`. The library
does not require it: `pip install torch==2.13 torch_geometric`; without it, ours and jraph's run. DGL, in float32,
runs in a process of its own where `make .venv-dgl/.dgl` has made its environment, or --dgl names its Python; it takes
its turn among the others. "jmp_train, native" is ours within `native_kernels()`.

Before a row is timed, each form's results are compared with float64's, the GAT step's loss and update
with those of jraph in float32. A form that raises, or is wrong, is shown with the reason and is not a peer.
All forms of a row run in one process, in turn, each with its library's default threads and until it is
done; printed are medians. What takes over five times as long as the fastest is timed once.
"""

import argparse
import gc
import importlib
import os
import statistics
import time
import warnings
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

# Without it jaxlib 0.11 and 0.12 miscompile bfloat16 fusions on the CPU.
os.environ.setdefault("XLA_FLAGS", "--xla_cpu_experimental_ynn_fusion_type=")

import jax
from graph_cases import (
    ROWS,
    TOLERANCES,
    Case,
    Form,
    Row,
    differences,
    jraph_form,
    native_form,
    our_form,
    timed,
)
from graph_dgl import DGL, PYTHON
from graph_dgl import INSTALL as INSTALL_DGL
from graph_dgl import NAME as DGL_NAME
from graph_peers import CSR_FORMS, FORMS, INSTALL, Torch, torch_form
from result_files import write_results

SIZES = ("20000x500000", "50000x2000000")
DTYPES = ("float32", "bfloat16", "float16")
OURS, NATIVE, JRAPH, JRAPH_SORTED = "jmp_train", "jmp_train, native", "jraph", "jraph, sorted"
LIBRARIES = (OURS, "jraph", "PyG", DGL_NAME)
MOST_ROUNDS, SLOW = 25, 5.0
STEP_GOAL, MKL_GOAL, HALF_GOAL = 2.0, 2.0, 1.0
HALF_NOISE = 1.05  # what two measurements of the same may differ by

Times = dict[str, dict[str, Any]]  # of a form and dtype: seconds, or the reason why there are none


class Unfit(Exception):
    """A form that cannot be measured; its text says why."""


class Peers(NamedTuple):
    """PyTorch Geometric and DGL with the graph of a case; None for those that are not there."""

    pyg: Torch | None
    dgl: DGL | None


def make(name: str, case: Case, peers: Peers, row: Row, dtype: str) -> Form | None:
    """Returns a form of a row by its name, or None if the row has no such form."""
    if name in (OURS, NATIVE):
        return (our_form if name == OURS else native_form)(case, row, dtype)
    if name == DGL_NAME:
        return peers.dgl.form(row, dtype) if peers.dgl is not None else None
    peer = peers.pyg
    if peer is not None and name in FORMS:
        return torch_form(peer, name, row, dtype)
    return jraph_form(case, row, dtype, is_sorted=name == JRAPH_SORTED)


def checked_form(name: str, case: Case, peers: Peers, row: Row, dtype: str, wanted: list[Any]) -> Form | None:
    """Returns a form that has run, with the right results, or None if the row has no such form.

    Raises:
      Unfit: it raises, or its results are wrong.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            form = make(name, case, peers, row, dtype)
            if form is None:
                return None
            found = form.check(form.run())
    except Exception as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise Unfit(f"raises {lines[0]}") from error
    difference = differences(found, wanted)
    if not difference <= TOLERANCES[dtype] * (10 if row.op == "step" else 1):
        raise Unfit(f"wrong by {difference:.2g}")
    return form


def results_wanted(case: Case, row: Row) -> list[Any]:
    """Returns what a row's results should be; the step's are jraph's in float32."""
    if row.op != "step":
        return case.wanted(row)
    form = jraph_form(case, row, "float32", is_sorted=False)
    assert form is not None
    return form.check(form.run())


def measure(case: Case, peers: Peers, row: Row, keys: list[tuple[str, str]], seconds: float) -> Times:
    """Returns the seconds of a row's forms, by name and dtype, or why there are none.

    Args:
      case: the graph.
      peers: other libraries with the graph.
      row: which operation.
      keys: names and dtypes of the forms.
      seconds: after which no further round begins.
    """
    gc.collect()
    if peers.pyg is not None:
        peers.pyg.forget()
    times: Times = {}
    forms: dict[tuple[str, str], Form] = {}
    wanted = results_wanted(case, row)
    for name, dtype in keys:
        try:
            form = checked_form(name, case, peers, row, dtype, wanted)
        except Unfit as reason:
            times.setdefault(name, {})[dtype] = str(reason)
            continue
        if form is not None:
            forms[name, dtype] = form
            times.setdefault(name, {})[dtype] = []
    names, start = list(forms), time.monotonic()
    for index in range(MOST_ROUNDS):
        shift = index % len(names)
        for name, dtype in names[shift:] + names[:shift]:
            times[name][dtype].append(timed(forms[name, dtype].run))
        if time.monotonic() - start > seconds:
            break
        if index == 0:
            fastest = min(times[name][dtype][0] for name, dtype in names)
            names = [(n, dtype) for n, dtype in names if times[n][dtype][0] <= SLOW * fastest]
    return times


def median(times: Times, name: str, dtype: str) -> float | None:
    """Returns the median seconds of a form, or None."""
    seconds = times.get(name, {}).get(dtype)
    return statistics.median(seconds) if isinstance(seconds, list) else None


def best(times: Times, names: list[str]) -> tuple[str, float] | None:
    """Returns the fastest of these forms in float32, and its median seconds."""
    medians = {name: seconds for name in names if (seconds := median(times, name, "float32"))}
    return min(medians.items(), key=lambda item: item[1], default=None)


def summary(times: Times) -> dict[str, Any]:
    """Returns what the table says of a row: the best peer, and ratios where there are both."""
    peers = [name for name in times if name not in (OURS, NATIVE)]
    ours = {dtype: median(times, OURS, dtype) for dtype in DTYPES}
    full = ours["float32"]
    result: dict[str, Any] = {"ours": ours}
    for key, names in (
        ("best_peer", peers),
        ("best_csr", [name for name in peers if name in CSR_FORMS]),
        ("best_other", [name for name in peers if name not in CSR_FORMS]),
    ):
        if (fastest := best(times, names)) is not None:
            result[key] = fastest
            if full:
                result[f"{key}/ours"] = fastest[1] / full
    if full:
        halves = {dtype: seconds for dtype in DTYPES[1:] if (seconds := ours[dtype])}
        result["half/float32"] = {dtype: seconds / full for dtype, seconds in halves.items()}
    return result


def milliseconds(seconds: float | None) -> str:
    """Returns a time for the table."""
    return "-" if seconds is None else f"{1e3 * seconds:.1f}"


def print_row(title: str, times: Times) -> None:
    """Prints the times of a row's forms, and why some have none."""
    print(f"\n{title:<34}" + "".join(f"{dtype:>10}" for dtype in DTYPES) + "   ms")
    for name, by_dtype in times.items():
        figures = "".join(f"{milliseconds(median(times, name, d)):>10}" for d in DTYPES)
        reasons: dict[str, list[str]] = {}
        for dtype, reason in by_dtype.items():
            if isinstance(reason, str):
                reasons.setdefault(reason[:90], []).append(dtype)
        notes = "; ".join(f"{', '.join(dtypes)}: {reason}" for reason, dtypes in reasons.items())
        print(f"  {name:<32}{figures}   {notes}".rstrip(), flush=True)


def print_summary(size: str, rows: dict[str, Times]) -> None:
    """Prints a line for each row: ours, the best peer and the ratios."""
    print(f"\n{size}: medians in ms, and ratios")
    print(
        f"{'':<24}" + "".join(f"{dtype:>10}" for dtype in DTYPES) + f"{'best peer':>23}{'':>10}"
        f"{'peer/ours':>11}{'bf16/f32':>10}{'f16/f32':>9}"
    )
    for title, times in rows.items():
        facts = summary(times)
        figures = "".join(f"{milliseconds(facts['ours'][dtype]):>10}" for dtype in DTYPES)
        peer, seconds = facts.get("best_peer", ("-", None))
        ratios = [facts.get("best_peer/ours"), *map(facts.get("half/float32", {}).get, DTYPES[1:])]
        text = ["-" if ratio is None else f"{ratio:.2f}" for ratio in ratios]
        print(f"{title:<24}{figures}{peer:>23}{milliseconds(seconds):>10}{text[0]:>11}{text[1]:>10}{text[2]:>9}")


def verdicts(report: dict[str, dict[str, Times]]) -> list[str]:
    """Returns one line per target that the measured sizes and rows cover."""
    ahead, sums, steps, halves, of_dgl, dgl_steps = [], [], [], [], [], []
    for size, rows in report.items():
        for title, times in rows.items():
            facts, where = summary(times), f"{title} ({size})"
            is_sum = ROWS[title].is_plain_sum
            if (ratio := facts.get("best_other/ours" if is_sum else "best_peer/ours")) is not None:
                ahead.append((ratio, where))
            if is_sum and (ratio := facts.get("best_csr/ours")) is not None:
                sums.append((ratio, where))
            if ROWS[title].op == "step" and (ratio := facts.get("best_peer/ours")) is not None:
                steps.append((ratio, where))
            native, dgl = (median(times, name, "float32") for name in (NATIVE, DGL_NAME))
            if native and dgl:
                (dgl_steps if ROWS[title].op == "step" else of_dgl).append((dgl / native, where))
            for dtype, ratio in facts.get("half/float32", {}).items():
                halves.append((1 / ratio, f"{dtype}, {where}"))
    lines = []
    for target, ratios, goal in (
        ("ahead of the best peer, but for CSR's plain sums: peer/ours", ahead, 1.0),
        ("within 2 times of CSR's plain sums: peer/ours", sums, 1 / MKL_GOAL),
        ("the GAT step in float32 twice as fast: peer/ours", steps, STEP_GOAL),
        ("native, within DGL's time: DGL/native", of_dgl, 1.0),
        ("native, the GAT step twice as fast as DGL: DGL/native", dgl_steps, STEP_GOAL),
        ("half no slower than float32: float32/half", halves, HALF_GOAL / HALF_NOISE),
    ):
        if ratios:
            missed = [f"{where}: {ratio:.2f}" for ratio, where in sorted(ratios) if ratio < goal]
            worst, where = min(ratios)
            verdict = f"MISSED at {'; '.join(missed)}" if missed else "met"
            lines.append(f"{target} at least {goal:.2f}: {verdict}; worst {worst:.2f}, {where}")
    return lines


def environment() -> dict[str, Any]:
    """Returns device, versions and threads."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    facts = {
        "device": jax.devices()[0].device_kind,
        "cpus": cpus,
        "jax": jax.__version__,
        "jax threads": cpus,
        "jraph": version("jraph"),
    }
    if has_peer():
        torch: Any = importlib.import_module("torch")
        facts |= {
            "torch": torch.__version__,
            "torch threads": torch.get_num_threads(),
            "torch_geometric": version("torch_geometric"),
        }
    return facts


def has_peer() -> bool:
    """Returns whether PyTorch Geometric is installed."""
    return all(find_spec(name) is not None for name in ("torch", "torch_geometric"))


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sizes", nargs="+", default=SIZES, metavar="NODESxEDGES")
    parser.add_argument("--rows", nargs="+", default=list(ROWS), choices=ROWS, metavar="ROW")
    parser.add_argument("--dtypes", nargs="+", default=DTYPES, choices=DTYPES)
    parser.add_argument("--libraries", nargs="+", default=LIBRARIES, choices=LIBRARIES)
    parser.add_argument("--dgl", type=Path, default=PYTHON, metavar="PYTHON", help="of an environment that has DGL")
    parser.add_argument("--seconds", type=float, default=60, help="of each row; default: 60")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    args = parser.parse_args()

    facts = environment()
    print(", ".join(f"{key} {value}" for key, value in facts.items()))
    uses_peer = "PyG" in args.libraries and has_peer()
    if "PyG" in args.libraries and not uses_peer:
        print(f"PyTorch Geometric is not installed here: {INSTALL}")
    uses_dgl = DGL_NAME in args.libraries and args.dgl.exists()
    if DGL_NAME in args.libraries and not uses_dgl:
        print(f"DGL is not installed here: {INSTALL_DGL}")
    names = [OURS, NATIVE, JRAPH, JRAPH_SORTED, *(FORMS if uses_peer else ()), *([DGL_NAME] if uses_dgl else ())]
    names = [name for name in names if name.startswith(tuple(args.libraries))]

    report: dict[str, dict[str, Times]] = {}
    for size in args.sizes:
        case = Case(*map(int, size.split("x")))
        peers = Peers(Torch(case) if uses_peer else None, DGL(case, args.dgl) if uses_dgl else None)
        degrees = case.starts[1:] - case.starts[:-1]
        print(f"\n{case.num_nodes:,} nodes, {case.num_edges:,} edges, in-degrees to {max(degrees):,}")
        report[size] = {}
        for title in args.rows:
            keys = [(name, dtype) for dtype in args.dtypes for name in names]
            times = measure(case, peers, ROWS[title], keys, args.seconds)
            report[size][title] = times
            print_row(title, times)
            if args.json:
                write(args.json, facts, report)
        if peers.dgl is not None:
            peers.dgl.close()
        print_summary(size, report[size])
    print()
    print("\n".join(verdicts(report)))


def write(file: Path, facts: dict[str, Any], report: dict[str, dict[str, Times]]) -> None:
    """Writes seconds, summaries and verdicts."""
    summaries = {size: {title: summary(times) for title, times in rows.items()} for size, rows in report.items()}
    everything = {"facts": facts, "seconds": report, "summaries": summaries}
    write_results(file, everything | {"verdicts": verdicts(report)})


if __name__ == "__main__":
    main()
