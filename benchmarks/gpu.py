"""Measures step time and peak memory on the present accelerator, compared with torch, in parts that resume.

    make bench-gpu                       # parts that fit into 9 minutes; again, until none is left
    make bench-gpu MINUTES=120
    python benchmarks/gpu.py --parts mnist gat --again
    python benchmarks/gpu.py --tiny      # in a small size, for a machine that has a CPU only

A part is some variants of a workload, and takes less than 9 minutes; `gpu_parts.py` lists them. The results of a
finished part go to a file in `results/`, one per kind of device. The part runs again only with another driver or other
versions, or with `--again`. The last lines list the goals that the figures meet.

Each variant (a library in a precision) has its own process, so that peak memory and compilation are separate. All
variants take turns in each round, so that disturbances affect all of them. The script prints medians over the rounds,
and ratios to the same library in float32. torch runs, if it is installed, in its documented best form: channels_last,
cudnn.benchmark, fused optimizers, in-place ReLU, scaled_dot_product_attention; eager and with torch.compile. It needs
no data and no network.

`mnist` is the training step of a convolutional network. `resnet34` and `vit-b16` are those of the tasks `cifar10` and
`vit-b16`, in float32 and in every AMP mode; torch trains the same networks by autocast. `gat` is the step of the task
`reddit`, on a synthetic graph of 114.8 million edges, compared with PyTorch Geometric's layers on as many edges as
fit, and with ours on these too. `graph-ops` are sums, softmax, dot and attention on a power-law graph. All variants
but those of `mnist` and `resnet34` may fill the device, so each finishes before the next starts; generating the graph
counts toward a part's minutes.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from gpu_amp import RESNET34, VIT_B16
from gpu_gat import GAT_STEP
from gpu_mnist import MNIST
from gpu_operations import GRAPH_OPERATIONS
from gpu_parts import PARTS, Machine, Part, Report, goals_of, read_report, results_file, this_machine, write_report
from gpu_workloads import MODES, OURS, PRECISIONS, PREPARED, Variant, Workload, part_text
from result_files import RUNS

WORKLOADS = {
    "mnist": MNIST,
    "resnet34": RESNET34,
    "vit-b16": VIT_B16,
    "gat": GAT_STEP,
    "graph-ops": GRAPH_OPERATIONS,
}
ALL_PRECISIONS = (*PRECISIONS, *MODES)
ROUND_SECONDS = 0.5  # of each variant
ROUNDS = 15
LONGEST = 4  # times as long as its rounds should take, after which a variant begins no other
GRACE = 15.0  # seconds beyond the deadline, after which what still runs is ended
LOGGED = 40  # lines of a failed variant's standard error that the JSON file has
NEEDS = {"torch": ("torch",), "PyG": ("torch", "torch_geometric")}  # by a way's first word

Results = dict[str, dict[str, Any]]  # of each variant: facts and step times, or why it failed


class Failed(Exception):
    """A variant's process that ended.

    Args:
      reason: why, in a line.
      log: the last lines of its standard error.
    """

    def __init__(self, reason: str, log: str = "") -> None:
        super().__init__(reason)
        self.log = log


class Worker:
    """The process of a variant, which makes a given number of steps and returns their seconds.

    Args:
      workload: its name.
      variant: who steps.
      size: of the workload.
      folder: of what the workload has prepared.
      deadline: in the time of `time.monotonic`, after which it is ended.
    """

    def __init__(self, workload: str, variant: Variant, size: float, folder: str, deadline: float) -> None:
        self.errors = tempfile.TemporaryFile("w+")  # noqa: SIM115  # closed with the worker
        self.deadline = deadline
        arguments = [workload, *map(str, variant), str(size), folder]
        command = [sys.executable, __file__, "--worker", *arguments]
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            text=True,
            env={
                **os.environ,
                "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
                "JAX_TRACEBACK_FILTERING": "off",  # so that the last line is the error's
            },
        )

    def ask(self, steps: int) -> Any:
        """Returns the seconds of a number of steps or, for 0 steps, the facts."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            self.process.stdin.write(f"{steps}\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            pass  # the answer below will be missing
        left = max(0.0, self.deadline + GRACE - time.monotonic())
        timer = threading.Timer(left, self.process.kill)
        timer.start()
        line = self.process.stdout.readline()
        timer.cancel()
        if line:
            return json.loads(line)
        self.process.wait()
        if time.monotonic() > self.deadline + GRACE:
            raise Failed("ended for lack of time")
        self.errors.seek(0)
        lines = self.errors.read().strip().splitlines()
        reason = lines[-1] if lines else f"ended with exit code {self.process.returncode}"
        raise Failed(reason, "\n".join(lines[-LOGGED:]))

    def close(self) -> None:
        """Ends the process."""
        self.process.kill()
        self.process.communicate()
        self.errors.close()


def work(workload: str, way: str, precision: str, part: str, size: str, folder: str) -> None:
    """Answers a parent's requests, until it closes the pipe."""
    answers, sys.stdout = sys.stdout, sys.stderr  # libraries print as they like
    variant = Variant(way, precision, float(part))
    job = WORKLOADS[workload].job(variant, float(size), Path(folder))
    for line in sys.stdin:
        steps = int(line)
        print(json.dumps(job.steps(steps) if steps else job.facts()), file=answers, flush=True)


def prepare(name: str, size: float, folder: str, deadline: float) -> str | None:
    """Makes a workload's data, in a process of its own and on the host; returns why it failed, or None."""
    if WORKLOADS[name].prepare is None or Path(folder, PREPARED).exists():
        return None
    start = time.monotonic()
    command = [sys.executable, __file__, "--prepare", name, str(size), folder]
    try:
        subprocess.run(
            command,
            env={**os.environ, "JAX_PLATFORMS": "cpu"},
            timeout=max(0.0, deadline - start),
            check=True,
            capture_output=True,
            text=True,
        )
    except subprocess.TimeoutExpired:
        return "no time was left when its data were there"
    except subprocess.CalledProcessError as error:
        lines = error.stderr.strip().splitlines()
        return f"no data: {lines[-1] if lines else f'exit code {error.returncode}'}"
    print(f"{name}: made its data in {time.monotonic() - start:.0f} s", flush=True)
    return None


def variants_of_part(part: Part, precisions: Sequence[str]) -> tuple[list[Variant], list[str]]:
    """Returns a part's variants for which all is installed, and the packages that are missing for the others.

    Args:
      part: which.
      precisions: of the variants.
    """
    wanted = [
        x
        for x in WORKLOADS[part.workload].variants
        if x.way.startswith(part.ways) and x.precision in part.precisions and x.precision in precisions
    ]
    missing = {
        way: [module for module in NEEDS.get(way, ()) if find_spec(module) is None]
        for way in dict.fromkeys(variant.way.split()[0] for variant in wanted)
    }
    absent = list(dict.fromkeys(module for modules in missing.values() for module in modules))
    return [x for x in wanted if not missing[x.way.split()[0]]], absent


def measure(workload: str, variants: list[Variant], size: float, rounds: int, deadline: float, folder: str) -> Results:
    """Returns the facts and step times of some variants of a workload, or why they failed.

    Args:
      workload: its name.
      variants: which of it.
      size: of the workload.
      rounds: how often each variant is measured.
      deadline: in the time of `time.monotonic`; what does not fit is left out, and said so.
      folder: of what the workload prepares, which may be there.
    """
    results: Results = {}
    groups = [variants] if WORKLOADS[workload].is_together else [[variant] for variant in variants]
    failure = prepare(workload, size, folder, deadline)
    if failure is not None:
        print(f"{workload}: {failure}", flush=True)
        return {variant.label: {"failed": failure} for variant in variants}
    while groups:
        group = groups.pop(0)
        results |= measure_group(workload, group, size, folder, rounds, deadline)
        for variant in group:  # variants that fit only a part are compared with ours on that part
            twin = Variant(OURS, variant.precision, results[variant.label].get("part", 1.0))
            if twin.part < 1 and twin.label not in results:
                groups.insert(0, [twin])
    return results


def measure_group(
    name: str, variants: list[Variant], size: float, folder: str, rounds: int, deadline: float
) -> Results:
    """Returns the results of variants whose processes live, and step in turn, at the same time."""
    results: Results = {}
    workers: dict[str, Worker] = {}
    counts: dict[str, int] = {}
    begin = time.monotonic()
    full_time = ROUND_SECONDS * rounds * len(variants)

    def attempt(variant: str, steps: int) -> Any:
        try:
            return workers[variant].ask(steps)
        except Failed as failure:
            workers.pop(variant).close()
            results[variant] = {"failed": str(failure), "log": failure.log}
            print(f"{variant}: {failure}", flush=True)
            return None

    try:
        for variant in variants:
            label = variant.label
            if time.monotonic() > deadline - 2 * ROUND_SECONDS * rounds:
                results[label] = {"failed": "left out for lack of time"}
                print(f"{label}: left out for lack of time", flush=True)
                continue
            workers[label] = Worker(name, variant, size, folder, deadline)
            if (seconds := attempt(label, 3)) is not None:
                counts[label] = max(1, round(3 * ROUND_SECONDS / seconds))
                results[label] = {**variant._asdict(), "step_ms": []}
        start = time.monotonic()
        for index in range(rounds):
            if time.monotonic() > min(deadline, start + LONGEST * full_time) and index:
                break
            for label in list(workers):
                if (seconds := attempt(label, counts[label])) is not None:
                    results[label]["step_ms"].append(1e3 * seconds / counts[label])
        for label in list(workers):
            if (facts := attempt(label, 0)) is not None:
                results[label] |= facts
                if len(variants) == 1:
                    print_progress(label, results[label], time.monotonic() - begin)
    finally:
        for worker in workers.values():
            worker.close()
    return results


def print_progress(label: str, result: dict[str, Any], seconds: float) -> None:
    """Prints what is known of a variant as soon as it is, in case that the run is ended."""
    ms, memory = statistics.median(result["step_ms"]), result["memory_mb"]
    print(f"{label}: {ms:.2f} ms/step, {memory:.0f} MB; took {seconds:.0f} s", flush=True)


def add_ratios(results: Results) -> None:
    """Adds each variant's median, and its speed and memory relative to the same way in float32."""
    done = [result for result in results.values() if result.get("step_ms")]
    firsts = {(x["way"], x["part"]): x for x in done if x["precision"] == "float32"}
    for result in done:
        result["median_ms"] = statistics.median(result["step_ms"])
        first = firsts.get((result["way"], result["part"]))
        if first is not None:
            rounds = zip(first["step_ms"], result["step_ms"], strict=False)
            result["times_as_fast"] = statistics.median(a / b for a, b in rounds)
            result["of_the_memory"] = result["memory_mb"] / first["memory_mb"]


def print_results(name: str, workload: Workload, size: float, results: Results) -> None:
    """Prints a table of the variants of a part of a workload."""
    done = {name: result for name, result in results.items() if "median_ms" in result}
    facts = next(iter(done.values()), {"device": "nothing", "memory_of": "device"})
    versions = dict.fromkeys(result["version"] for result in done.values())
    print(f"\n{name}, {workload.unit} {size:,g}, on {', '.join([facts['device'], *versions])}")
    print(f"{'':<30}{'ms/step':>9}{'peak MB':>9}{'program MB':>12}{'compile s':>11}{'speed':>8}{'memory':>8}")
    for result in done.values():
        label = f"{result['way']} {result['precision']}{part_text(result['part'])}"
        program = "" if result["program_mb"] is None else f"{result['program_mb']:.0f}"
        ratios = [result.get(ratio) for ratio in ("times_as_fast", "of_the_memory")]
        print(
            f"{label:<30}{result['median_ms']:>9.2f}{result['memory_mb']:>9.0f}{program:>12}"
            f"{result['compile_seconds']:>11.1f}"
            + "".join(f"{'-' if ratio is None else f'{ratio:.2f}':>8}" for ratio in ratios)
        )
    print(f"peak: of the {facts['memory_of']}; speed and memory: beside the same way in float32")
    for line in comparisons(done) + table_of_rows(done):
        print(line)
    print(workload.note)


def comparisons(results: Results) -> list[str]:
    """Returns a line for each variant that was given a part of the data, and ours on that part."""
    lines = []
    for result in results.values():
        twin = results.get(Variant(OURS, result["precision"], result["part"]).label)
        if "edges" in result and result["way"] != OURS and twin is not None and "edges" in twin:
            lines.append(
                f"{result['way']} {result['precision']} on {result['edges']:,} edges: {OURS} is "
                f"{result['median_ms'] / twin['median_ms']:.2f} times as fast, in "
                f"{twin['memory_mb'] / result['memory_mb']:.3f} of the memory"
            )
            reasons = result["too_large"].items()
            lines += [f"  {part} of the edges: {reason}" for part, reason in reasons]
    return lines


def table_of_rows(results: Results) -> list[str]:
    """Returns a table of the operations that a step has, for workloads of operations."""
    lines = []
    for title in next((result["rows"] for result in results.values() if "rows" in result), {}):
        lines += [f"{title:<30}{'ms':>9}{'extra MB':>10}"]
        for label, result in results.items():
            row = result["rows"][title]
            if "failed" in row:
                lines.append(f"  {label:<28}  {row['failed']}")
                continue
            extra = "" if row["extra_mb"] is None else f"{row['extra_mb']:.0f}"
            lines.append(f"  {label:<28}{row['ms']:>9.3f}{extra:>10}")
    return lines


def run_part(name: str, args: argparse.Namespace, minutes: float, folder: Path) -> dict[str, Any]:
    """Returns a part's results, which are printed too.

    Args:
      name: of the part.
      args: of the command line.
      minutes: it may take.
      folder: where workloads prepare their data.
    """
    part = PARTS[name]
    workload = WORKLOADS[part.workload]
    size = workload.tiny_size if args.tiny else workload.size
    begin = time.monotonic()
    variants, absent = variants_of_part(part, args.precisions)
    own = folder / part.workload
    own.mkdir(exist_ok=True)
    results = measure(part.workload, variants, size, args.rounds, begin + 60 * minutes, str(own)) if variants else {}
    add_ratios(results)
    if results:
        print_results(name, workload, size, results)
    if absent:
        print(f"{name}: not installed here: {', '.join(absent)}", flush=True)
    seconds = round(time.monotonic() - begin, 1)
    about = {"workload": part.workload, workload.unit: size, "note": workload.note}
    return about | {"seconds": seconds, "absent": absent, "variants": results}


def run_parts(names: Sequence[str], args: argparse.Namespace, machine: Machine, file: Path | None) -> Report:
    """Runs the parts that fit into the minutes, one at least, and returns the report with them.

    Args:
      names: of the parts.
      args: of the command line.
      machine: that runs them.
      file: of results, which is written after each part; None for none.
    """
    report = read_report(file)
    settings = {"tiny": args.tiny, "precisions": list(args.precisions), "rounds": args.rounds}
    parts, here = report["parts"], {"machine": machine, "settings": settings}
    begin, ran, left = time.monotonic(), 0, []
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            if not args.again and here.items() <= parts.get(name, {}).items():
                print(f"{name}: is there already", flush=True)
                continue
            minutes = PARTS[name].minutes
            if ran and time.monotonic() - begin + 60 * minutes > 60 * args.minutes:
                left.append(name)
                continue
            parts[name] = here | run_part(name, args, min(minutes, args.minutes), Path(folder))
            ran += 1
            goals = [goal.as_json() for goal in goals_of(report)]
            report = {RUNS: report.get(RUNS, []), **machine, "goals": goals, "parts": parts}
            write_report(file, report)
    if left:
        print(f"left for another run, which goes on from here: {' '.join(left)}")
    return report


def machine_of_workers() -> Machine:
    """Returns `this_machine`, by a process of its own: this one leaves the device to the workers."""
    command = [sys.executable, __file__, "--machine"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="default: all")
    parser.add_argument("--again", action="store_true", help="also runs parts that have results")
    parser.add_argument("--precisions", nargs="+", choices=ALL_PRECISIONS, default=ALL_PRECISIONS)
    parser.add_argument("--minutes", type=float, default=9.0, help="in all, for one part at least; default: 9")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"default: {ROUNDS}")
    parser.add_argument("--tiny", action="store_true", help="small sizes, whose figures are kept by --json only")
    parser.add_argument("--json", type=Path, metavar="FILE", help="of results; default: results/gpu_<device>.json")
    parser.add_argument("--worker", nargs=6, help=argparse.SUPPRESS)
    parser.add_argument("--prepare", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--machine", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker is not None:
        return work(*args.worker)
    if args.machine:
        return print(json.dumps(this_machine()))
    if args.prepare is not None:
        name, size, folder = args.prepare
        make = WORKLOADS[name].prepare
        assert make is not None
        return make(float(size), Path(folder))

    machine = machine_of_workers()
    file = args.json or (None if args.tiny else results_file(machine["device"]))
    report = run_parts(args.parts, args, machine, file)
    for goal in goals_of(report):
        print(goal.line())
    if file is not None:
        print(f"results: {file}")
    return None


if __name__ == "__main__":
    main()
