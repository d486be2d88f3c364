"""GPT-2 small from one TPU chip to 256, and from one H100 to 64 on 8 hosts; the search for a placement; published fits.

    python benchmarks/plan_pods.py [--parts scaling search tasks published] [--json FILE]
    python benchmarks/plan_pods.py --tiny                # one small case of each part, to see that it runs

No TPU and no GPU is needed: everything is compiled ahead of time, in a cache of its own, so that nothing is compiled
before. `jmp-train plan --install` and `--install tpu` install the compilers. A program takes about two minutes of CPU
time. `--json` adds to what FILE has, so parts and machines can run one by one.

`scaling` plans eight windows of 1,024 tokens per chip: weak scaling, in which arithmetic per chip stays the same.
`search` finds the fastest placement on two machines, with eight windows per chip of the larger one. `tasks` compares a
plan's memory with libtpu's own. `published` plans configurations whose memory others have reported;
`published_fits.py` has the reports. Times of a plan are CPU seconds of tracing and compiling.
"""

import argparse
import dataclasses
import json
import os
import resource
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from example_tasks import load_task, task_module
from published_fits import REPORTS, planned
from result_files import write_results

import jmp_train as jt
from jmp_train.aot import CompiledProgram, compile_program, export_program, tpu_slice
from jmp_train.app.runs import planned_step
from jmp_train.planning import Machine, Plan, PlanRow, PlanSearch, Workload
from jmp_train.policies.files import cache_folder

SLICES = ("v5e:1x1", "v5e:2x2", "v5e:4x4", "v5e:8x8", "v5e:16x16")
CLUSTERS = ("1x1", "1x8", "2x8", "8x8")  # hosts, GPUs of each
GPU = "H100-80GB"
SEARCHES = {  # the smaller machine and the larger one
    "8 and 64 H100": (Machine(GPU, 8), Machine(GPU, 8, hosts=8)),
    "64 and 256 v5e": (Machine("v5e:8x8"), Machine("v5e:16x16")),
}
TASKS = ("digits", "karate", "cora", "lm", "mnist", "proteins", "reddit", "cifar10", "vit-b16")
CHIPS = ("v5e:1x1", "v6e:1x1")
POLICY = "autocast_bfloat16"
WINDOWS = 8  # per chip


def main() -> None:
    """Prints a table for each part."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--parts", nargs="+", choices=[*PARTS], default=[*PARTS])
    parser.add_argument("--slices", nargs="*", default=SLICES, help="of TPUs, for scaling")
    parser.add_argument("--clusters", nargs="*", default=CLUSTERS, metavar="HOSTSxGPUS", help="for scaling")
    parser.add_argument("--shardings", nargs="+", default=["replicated", "fsdp"])
    parser.add_argument("--searches", nargs="+", choices=[*SEARCHES], default=[*SEARCHES])
    parser.add_argument("--tasks", nargs="+", default=TASKS)
    parser.add_argument("--chips", nargs="+", default=CHIPS, help="for tasks")
    parser.add_argument("--reports", nargs="+", choices=[*REPORTS], default=[*REPORTS])
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    args.model = "gpt2-small"
    if args.tiny:
        args.model = "tiny"
        args.slices, args.clusters, args.tasks, args.chips = ["v5e:2x2"], ["1x2"], ["digits"], ["v5e:1x1"]
        args.searches, args.reports = ["8 and 64 H100"], args.reports[:1]

    results = json.loads(args.json.read_text()) if args.json is not None and args.json.exists() else {}
    cached = own_cache()
    try:
        for part in args.parts:
            for key, entry in PARTS[part](args):
                results.setdefault(part, {})[key] = entry
                if args.json is not None:
                    write_results(args.json, results, device="TPUs and GPUs that it names, compiled for, not run")
    finally:
        cached.cleanup()


def scaling(args: argparse.Namespace) -> Iterator[tuple[str, Any]]:
    """Prints and yields what GPT-2 small needs on each number of chips, with as many windows per chip."""
    print(
        f"\nGPT-2 small, {WINDOWS} windows of 1,024 tokens per chip, {POLICY}: least milliseconds of a step, per chip"
    )
    print(f"{'':42}{'peak GB':>9}{'of':>8}{'products':>10}{'compute':>9}{'links':>8}{'hosts':>8}{'CPU s':>8}")
    clusters = [tuple(map(int, name.split("x"))) for name in args.clusters]
    machines = [*map(Machine, args.slices), *(Machine(GPU, gpus, hosts) for hosts, gpus in clusters)]
    for machine in machines:
        for sharding in args.shardings if machine.devices > 1 else ["replicated"]:
            search = PlanSearch(largest_batch=False, shardings=sharding)
            plan, seconds = timed(args.model, WINDOWS * machine.devices, [machine], search)
            entry = {**entry_of(plan.rows[0]), "plan_cpu_seconds": seconds}
            print(line_of(entry), flush=True)
            yield f"{entry['device']}, {entry['placement']}", entry


def search(args: argparse.Namespace) -> Iterator[tuple[str, Any]]:
    """Prints and yields what the search for a placement has tried, with as many windows per chip on the largest."""
    for name in args.searches:
        machines = SEARCHES[name]
        windows = WINDOWS * machines[-1].devices
        plan, seconds = timed(args.model, windows, machines, PlanSearch(placement=True))
        print(f"\nplacement of {windows} windows on {name}: {len(plan.rows)} compiled, {seconds:.0f} CPU seconds")
        print(plan, flush=True)
        best = plan.fastest
        yield (
            name,
            {
                "batch_size": windows,
                "fastest": None if best is None else f"{best.device}, {best.placement}",
                "compiled": len(plan.rows),
                "cut": len(plan.cuts),
                "plan_cpu_seconds": seconds,
                "rows": [entry_of(row) for row in plan.rows],
                "cuts": [vars(cut) for cut in plan.cuts],
            },
        )


def tasks(args: argparse.Namespace) -> Iterator[tuple[str, Any]]:
    """Prints and yields the memory of the tasks' steps on a chip, beside libtpu's `memory_analysis`.

    libtpu's arguments, results and temporaries leave out constants, which a plan counts: they are compared without.
    """
    print(f"\n{'':28}{'plan':>14}{'constants':>14}{'libtpu':>14}{'CPU s':>8}")
    for name in args.tasks:
        for chip in args.chips:
            before = cpu_seconds()
            found = compiled_task(name, chip)
            parts = found.argument_bytes + found.output_bytes - found.alias_bytes + found.temp_bytes
            entry = {
                "peak_bytes": found.allocated_bytes,
                "constant_bytes": found.allocated_bytes - parts,
                "libtpu_bytes": found.reported_bytes,
                "plan_cpu_seconds": cpu_seconds() - before,
            }
            own = found.reported_bytes
            numbers = "".join(f"{n:14,}" for n in (found.allocated_bytes, entry["constant_bytes"], own or 0))
            off = "refused" if own is None else f"{parts / own - 1:+.2%}"
            print(f"{name + ', ' + chip:28}{numbers}{entry['plan_cpu_seconds']:8.0f} {off}", flush=True)
            yield f"{name}, {chip}", entry


def compiled_task(name: str, chip: str) -> CompiledProgram:
    """Returns the compiled step of a task on one chip."""
    options: Any = task_module(name).Options
    without_data = "synthetic" in {field.name for field in dataclasses.fields(options)}
    task = load_task(name, **({"synthetic": True} if without_data else {}))
    step, state, batches = planned_step(task, POLICY)
    arguments = (state, jax.eval_shape(lambda: batches(None)))
    program = export_program(step, arguments, names=("state", "batch"), donated=(0,), platform="tpu")
    return compile_program(program, tpu_slice(chip))


def published(args: argparse.Namespace) -> Iterator[tuple[str, Any]]:
    """Prints and yields whether configurations fit whose memory others have reported."""
    print(f"\n{'':34}{'needs GB':>10}{'of':>8}{'fits':>6}{'reported':>10}{'CPU s':>8}")
    for name in args.reports:
        before = cpu_seconds()
        entry = {**planned(REPORTS[name]), "plan_cpu_seconds": cpu_seconds() - before}
        fits, reported = ("yes" if x else "no" for x in (entry["fits"], entry["reported_fits"]))
        sizes = f"{entry['needed_bytes'] / 1e9:10.2f}{entry['usable_bytes'] / 1e9:8.2f}"
        print(f"{name:34}{sizes}{fits:>6}{reported:>10}{entry['plan_cpu_seconds']:8.0f}", flush=True)
        yield name, entry


PARTS = {"scaling": scaling, "search": search, "tasks": tasks, "published": published}


def timed(model: str, windows: int, machines: Sequence[Machine], search: PlanSearch) -> tuple[Plan, float]:
    """Returns a plan of a language model, and the CPU seconds that it took."""
    before = cpu_seconds()
    task = load_task("lm", model=model)
    workload = Workload(lambda policy: planned_step(task, policy), policies=POLICY, batch_size=windows)
    return jt.plan(workload, machines, search), cpu_seconds() - before


def cpu_seconds() -> float:
    """Returns the CPU seconds of this process, and of those that it has waited for."""
    used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(one.ru_utime + one.ru_stime for one in used)


def entry_of(row: PlanRow) -> dict[str, Any]:
    """Returns what the results have of a row; times in seconds, bytes of each device."""
    costs = row.costs
    return {
        "device": row.device,
        "devices": row.placement.devices,
        "hosts": row.placement.hosts,
        "placement": str(row.placement),
        "batch_size": row.batch_size,
        "peak_bytes": row.peak_bytes,
        "usable_bytes": row.usable_bytes,
        "fits": row.fits,
        "parameter_bytes": row.bytes_by_kind.get("parameters", 0),
        "optimizer_bytes": row.bytes_by_kind.get("optimizer state", 0),
        "step_seconds_bound": row.step_seconds_bound,
        "products_seconds": costs.products_seconds,
        "compute_seconds": costs.compute_seconds,
        "link_seconds": sum(item.seconds for item in costs.communication),
        "between_hosts_seconds": sum(item.seconds_between_hosts for item in costs.communication),
        "sent_bytes": sum(item.sent_bytes for item in costs.communication),
        "sent_between_hosts": sum(item.sent_between_hosts for item in costs.communication),
    }


def line_of(entry: Mapping[str, Any]) -> str:
    """Returns a line of the table of `scaling`."""
    times = (1e3 * entry[f"{name}_seconds"] for name in ("products", "compute", "link", "between_hosts"))
    name = f"{entry['device']}, {entry['placement']}"
    sizes = f"{entry['peak_bytes'] / 1e9:9.2f}{entry['usable_bytes'] / 1e9:8.2f}"
    return f"{name:42}{sizes}{''.join(f'{x:9.2f}' for x in times)}{entry['plan_cpu_seconds']:8.0f}"


def own_cache() -> tempfile.TemporaryDirectory[str]:
    """Has programs compiled into a new cache, which has the installed compilers, and returns its folder."""
    folder = tempfile.TemporaryDirectory(prefix="plan_pods_")
    for compiler in cache_folder().glob("compiler-*"):
        (Path(folder.name) / compiler.name).symlink_to(compiler)
    os.environ["JMP_TRAIN_CACHE"] = folder.name
    return folder


if __name__ == "__main__":
    main()
