"""Prints what `jmp_train.plan` finds: largest batches, savings by ZeRO-1 and FSDP, and distances from measurements.

    python benchmarks/plan.py [--parts largest shardings tables measured] [--cases mnist resnet34 vit-b16 gat]
    python benchmarks/plan.py --tiny                # one small case of each part, to see that it runs

No GPU is needed: all steps are compiled ahead of time. `largest` searches for the largest batch of each model on each
GPU, and prints the memory of one more example; for the GAT it is the largest graph, with 50 edges per node. Without a
cache, it takes an hour on two cores. `shardings` compiles the tasks' steps for eight GPUs. `tables` compiles the steps
of `amp_memory.py` and `gat_memory.py`, whose peaks are XLA's count of live values; a plan has this and the allocated
bytes, with gaps. `measured` runs the cases in float32 and in the policy on this machine's GPU, and prints peak and
time next to the plan's; without a GPU, it compares the bytes of arguments in a CPU's program.
"""

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gat_memory
import jax
from example_tasks import load_task
from measured_programs import Measured, devices_here, measure_program
from result_files import write_results

import jmp_train as jt
from jmp_train.aot import GPUS, export_program
from jmp_train.app.runs import planned_step
from jmp_train.planning import Machine, PlanSearch, Workload

PARTS = ("largest", "shardings", "tables", "measured")
TASKS = {"mnist": "mnist", "resnet34": "cifar10", "vit-b16": "vit-b16"}
PLANNED = ("V100-16GB", "A100-40GB", "H100-80GB")
ARGUMENTS = ("parameters", "optimizer state", "model state", "batch", "other arguments")
RESULTS = Path(__file__).parent / "results"
EDGES_A_NODE = 50

Make = Callable[[Any], tuple[Any, Any, Any]]


def main() -> None:
    """Prints a table for each part."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--cases", nargs="+", choices=[*TASKS, "gat"], default=[*TASKS, "gat"])
    parser.add_argument("--gpus", nargs="+", default=PLANNED)
    parser.add_argument("--policy", default="autocast_float16", help="of the largest batches and the shardings")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    if args.tiny:
        args.cases, args.gpus = ["mnist"], ["V100-16GB"]

    results: dict[str, Any] = {"jax": jax.__version__}
    if "largest" in args.parts:
        results["largest"] = largest(args)
    if "shardings" in args.parts:
        results["shardings"] = shardings(args)
    if "tables" in args.parts:
        results["tables"] = tables(args)
    if "measured" in args.parts:
        results["measured"] = measured(args)
    if args.json is not None:
        planned = f"{', '.join(args.gpus)}, compiled for, not run"
        write_results(args.json, results, device=None if "measured" in args.parts else planned)


def largest(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Prints the largest batch of each case on each GPU."""
    print(f"largest batch in {args.policy}; GB that it takes, of those there are, and those of one example more")
    print(f"{'model':10}{'GPU':12}{'batch':>9}{'GB':>8}{'of':>8}{'next':>8}{'tried':>7}{'monotonic':>11}{'named':>8}")
    results = []
    for case in args.cases:
        make, size = case_of(case)
        for gpu in args.gpus:
            workload = Workload(make, policies=args.policy, batch_size=size)
            (row,) = jt.plan(workload, gpu, PlanSearch(progress=note)).rows
            found, named = row.largest, share_with_source(row)
            if found is None or found.bytes is None:
                print(f"{case:10}{gpu:12}{'none':>9}")
                continue
            gigabytes = [x / 1e9 for x in (found.bytes, row.usable_bytes, found.next_bytes)]
            print(
                f"{case:10}{gpu:12}{found.size:9}{''.join(f'{x:8.3f}' for x in gigabytes)}{len(found.tried):7}"
                f"{'yes' if found.is_monotonic else 'no':>11}{named:8.1%}",
                flush=True,
            )
            results.append({"case": case, **row.to_json(buffers=0), "next_bytes": found.next_bytes, "named": named})
    return results


def shardings(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Prints the bytes of parameters and optimizer state on each of eight devices, compared with one."""
    results = []
    for case in args.cases:
        if case == "gat":  # a whole graph, which is not sharded
            continue
        make, size = case_of(case)
        machines = [Machine("A100-40GB", gpus) for gpus in (1, 8)]
        search = PlanSearch(largest_batch=False, shardings=["replicated", "zero1", "fsdp"], progress=note)
        plan = jt.plan(Workload(make, policies=args.policy, batch_size=size), machines, search)
        print(f"\n{case}, A100-40GB: MB of parameters and optimizer state on each device, shares of those on one, peak")
        first = plan.rows[0].bytes_by_kind
        for row in plan.rows:
            cells = "".join(cell_of(row.bytes_by_kind.get(kind, 0), first.get(kind, 0)) for kind in ARGUMENTS[:2])
            print(f"{row.placement!s:26}{cells}{row.peak_bytes / 1e6:12.2f}", flush=True)
            results.append({"case": case, **row.to_json(buffers=0)})
    return results


def cell_of(n_bytes: int, first: int) -> str:
    """Returns megabytes, and their fraction of the first row's, if there is one."""
    return f"{n_bytes / 1e6:10.2f}" + (f"{n_bytes / first:8.4f}" if first > 1e6 else f"{'':8}")


def tables(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Prints the peaks of other benchmarks' tables, and those that a plan has."""
    print(f"\n{'':10}{'':20}{'table, GB':>11}{'live, GB':>11}{'plan, GB':>11}")
    rows = []
    for entry in json.loads((RESULTS / "amp_memory.json").read_text())["steps"]:
        if entry["task"] not in TASKS.values() or (
            args.tiny and (entry["task"], entry["mode"]) != ("mnist", "float32")
        ):
            continue  # the first of which this file has no case
        make, size = case_of(next(case for case, task in TASKS.items() if task == entry["task"]))
        rows.append((entry["task"], entry["mode"], make, size, entry))
    for entry in [] if args.tiny else json.loads((RESULTS / "gat_memory.json").read_text())["steps"]:
        rows.append(("gat " + entry["heads"], entry["policy"], of_reddit(entry["heads"]), 1, entry))
    results = []
    for name, policy, make, size, entry in rows:
        workload = Workload(make, policies=policy, batch_size=size)
        (row,) = jt.plan(workload, entry["gpu"], ONE_SIZE).rows
        found = {"table": entry["peak_bytes"], "live": row.live_bytes, "plan": row.peak_bytes}
        print(f"{name:10}{policy:20}{''.join(f'{n / 1e9:11.2f}' for n in found.values())}", flush=True)
        results.append({"name": name, "policy": policy, **found})
    return results


def measured(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Prints the plan for the present GPU next to measurements; for a CPU, the figures that can be compared."""
    here = devices_here()
    gpu = next((name for name, gpu in GPUS.items() if gpu.description == here.device), None)
    print(f"\nplan and measurement on {here.device}")
    results = []
    for case in args.cases:
        make, size = case_of(case)
        for policy in ("float32", args.policy):
            workload = Workload(make, policies=policy, batch_size=size)
            (row,) = jt.plan(workload, gpu or "V100-16GB", ONE_SIZE).rows
            found = measured_here(make, policy, size, "cpu" if gpu is None else "cuda") if row.fits else None
            print(f"{case:10}{policy:20}{comparison(row, found)}", flush=True)
            results.append({"case": case, **row.to_json(buffers=0), "measured": None if found is None else vars(found)})
    return results


def measured_here(make: Make, policy: str, size: int, platform: str) -> Measured:
    """Returns what the step takes on the device that is here."""
    step, state, batches = make(policy)
    arguments = (jax.eval_shape(lambda: state), jax.eval_shape(lambda: batches(size)))
    program = export_program(step, arguments, names=("state", "batch"), donated=(0,), platform=platform)
    return measure_program(program, runs=1 if platform == "cpu" else 10)


def comparison(row: jt.planning.PlanRow, found: Measured | None) -> str:
    """Returns a line with a plan's row and the measurement."""
    if found is None:
        return "does not fit"
    if found.peak_bytes is None:
        planned = sum(row.bytes_by_kind.get(kind, 0) for kind in ARGUMENTS)
        return f"arguments: plan {planned} bytes, measured {found.argument_bytes}"
    off = row.peak_bytes / found.peak_bytes - 1
    return (
        f"peak {row.peak_bytes / 1e9:.3f} GB, measured {found.peak_bytes / 1e9:.3f} GB ({off:+.1%}); "
        f"time at least {1e3 * row.step_seconds_bound:.2f} ms, measured {1e3 * found.seconds:.2f} ms"
    )


def case_of(case: str) -> tuple[Make, int]:
    """Returns what makes the step of a case in a policy, and the size of a batch to begin with."""
    if case == "gat":
        return lambda policy: gat(policy, "1 1 1", lambda n: gat_memory.reddit_shapes(n, EDGES_A_NODE * n)), 100_000
    task = load_task(TASKS[case], synthetic=True)
    return lambda policy: planned_step(task, policy), task.batch_size or 1


def of_reddit(heads: str) -> Make:
    """Returns what makes the GAT's step on Reddit's graph, which is one example."""
    return lambda policy: gat(policy, heads, lambda _: gat_memory.reddit_shapes(), gat_memory.NODES)


def gat(policy: str, heads: str, graph_of: Callable[[int], Any], nodes: int | None = None) -> tuple[Any, Any, Any]:
    """Returns the GAT's step, its state, and its graphs by the number of nodes."""
    step, (state, _), _ = gat_memory.train_step(policy, *heads.split())
    return step, state, lambda n: gat_memory.batch_of(graph_of(n), n if nodes is None else nodes, policy)


def share_with_source(row: jt.planning.PlanRow) -> float:
    """Returns the fraction of the peak in buffers that have a line or are an argument with a known path."""
    return sum(buffer.n_bytes for buffer in row.buffers if buffer.source) / row.peak_bytes


def note(done: int, what: str) -> None:
    """Says on standard error what is compiled next."""
    print(f"  {done:3} {what}", file=sys.stderr, flush=True)


ONE_SIZE = PlanSearch(largest_batch=False, progress=note)

if __name__ == "__main__":
    main()
