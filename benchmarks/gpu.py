"""Step time and peak memory of whole training steps on whatever accelerator is there, beside torch.

    python benchmarks/gpu.py [--workloads mnist] [--minutes 8] [--json FILE]
    python benchmarks/gpu.py --tiny     # in a small size, for a machine that has a CPU only

Each variant (who steps, and in which precision) lives in a process of its own, so that its peak memory
is its own, and compiles there. Then all step in turn, round after round, so that what slows the machine
slows all of them. Printed are medians over the rounds, and ratios to the same way in float32. torch runs
where it is installed, in its documented best form: channels_last, cudnn.benchmark, fused Adam, in-place
ReLU; eager and with torch.compile. No data and no network are needed.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from gpu_workloads import PRECISIONS, WORKLOADS, Variant

ROUND_SECONDS = 0.5  # of each variant
ROUNDS = 15
NOTEBOOK = "the notebook, torch.amp beside float32: 2.3 times as fast, 0.63 of the memory"


class Failed(Exception):
    """A variant's process that ended; its text says why."""


class Worker:
    """A variant's process: told how many steps to make, it answers with the seconds they took."""

    def __init__(self, workload: str, variant: Variant, batch: int) -> None:
        self.errors = tempfile.TemporaryFile("w+")  # noqa: SIM115  # closed with the worker
        command = [sys.executable, __file__, "--worker", workload, *variant, str(batch)]
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            text=True,
            env={**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"},
        )

    def ask(self, steps: int) -> Any:
        """Returns the seconds that so many steps took or, for 0 steps, the facts."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            self.process.stdin.write(f"{steps}\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            pass  # the answer below will be missing
        line = self.process.stdout.readline()
        if line:
            return json.loads(line)
        self.process.wait()
        self.errors.seek(0)
        lines = self.errors.read().strip().splitlines()
        raise Failed(lines[-1] if lines else f"ended with exit code {self.process.returncode}")

    def close(self) -> None:
        """Ends the process."""
        self.process.kill()
        self.process.communicate()
        self.errors.close()


def work(workload: str, way: str, precision: str, batch: str) -> None:
    """Answers a parent's requests, until it closes the pipe."""
    answers, sys.stdout = sys.stdout, sys.stderr  # libraries print as they like
    job = WORKLOADS[workload].job(Variant(way, precision), int(batch))
    for line in sys.stdin:
        steps = int(line)
        print(json.dumps(job.steps(steps) if steps else job.facts()), file=answers, flush=True)


def variants() -> list[Variant]:
    """Returns ours and, where torch is installed, torch's."""
    ways = ["jmp_train"]
    if find_spec("torch") is not None:
        ways += ["torch eager", "torch compile"]
    else:
        print("torch is not installed here: jmp_train runs alone")
    return [Variant(way, precision) for way in ways for precision in PRECISIONS]


def measure(name: str, batch: int, rounds: int, deadline: float) -> dict[str, dict[str, Any]]:
    """Returns the facts and step times of all variants of a workload, or why they failed.

    Args:
      name: of the workload.
      batch: rows a step.
      rounds: how often each variant is measured.
      deadline: in the time of `time.monotonic`; what does not fit is left out, and said so.
    """
    results: dict[str, dict[str, Any]] = {}
    workers: dict[str, Worker] = {}
    counts: dict[str, int] = {}

    def attempt(variant: str, steps: int) -> Any:
        try:
            return workers[variant].ask(steps)
        except Failed as failure:
            workers.pop(variant).close()
            results[variant] = {"failed": str(failure)}
            print(f"{variant}: {failure}", flush=True)
            return None

    try:
        for variant in variants():
            label = " ".join(variant)
            if time.monotonic() > deadline - 2 * ROUND_SECONDS * rounds:
                results[label] = {"failed": "left out for lack of time"}
                print(f"{label}: left out for lack of time", flush=True)
                continue
            workers[label] = Worker(name, variant, batch)
            if (seconds := attempt(label, 3)) is not None:
                counts[label] = max(1, round(3 * ROUND_SECONDS / seconds))
                results[label] = {"step_ms": []}
        for _ in range(rounds):
            if time.monotonic() > deadline:
                break
            for label in list(workers):
                if (seconds := attempt(label, counts[label])) is not None:
                    results[label]["step_ms"].append(1e3 * seconds / counts[label])
        for label in list(workers):
            if (facts := attempt(label, 0)) is not None:
                results[label] |= facts
    finally:
        for worker in workers.values():
            worker.close()
    return results


def add_ratios(results: dict[str, dict[str, Any]]) -> None:
    """Adds each variant's median, and its speed and memory beside the same way in float32."""
    for name, result in results.items():
        if result.get("step_ms"):
            result["median_ms"] = statistics.median(result["step_ms"])
            first = results[f"{name.rpartition(' ')[0]} float32"]
            if first.get("step_ms"):
                rounds = zip(first["step_ms"], result["step_ms"], strict=False)
                result["times_as_fast"] = statistics.median(a / b for a, b in rounds)
                result["of_the_memory"] = result["memory_mb"] / first["memory_mb"]


def print_results(name: str, batch: int, results: dict[str, dict[str, Any]]) -> None:
    """Prints a table of a workload's variants."""
    done = {name: result for name, result in results.items() if "median_ms" in result}
    facts = next(iter(done.values()), {"device": "nothing", "memory_of": "device"})
    print(f"\n{name}, batch {batch}, on {facts['device']}")
    print(
        f"{'':<24}{'ms/step':>9}{'peak MB':>9}{'program MB':>12}{'compile s':>11}"
        f"{'speed':>8}{'memory':>8}"
    )
    for variant, result in done.items():
        program = "" if result["program_mb"] is None else f"{result['program_mb']:.0f}"
        print(
            f"{variant:<24}{result['median_ms']:>9.2f}{result['memory_mb']:>9.0f}{program:>12}"
            f"{result['compile_seconds']:>11.1f}{result.get('times_as_fast', 0):>8.2f}"
            f"{result.get('of_the_memory', 0):>8.2f}"
        )
    print(f"peak: of the {facts['memory_of']}; speed and memory: beside the same way in float32")
    print(NOTEBOOK)


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--minutes", type=float, default=8.0, help="in all; default: 8")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"default: {ROUNDS}")
    parser.add_argument("--tiny", action="store_true", help="small batches")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    parser.add_argument("--worker", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker is not None:
        return work(*args.worker)

    deadline = time.monotonic() + 60 * args.minutes
    report = {}
    for name in args.workloads:
        workload = WORKLOADS[name]
        batch = workload.tiny_batch if args.tiny else workload.batch
        results = measure(name, batch, args.rounds, deadline)
        add_ratios(results)
        print_results(name, batch, results)
        report[name] = {"batch": batch, "variants": results}
    if args.json is not None:
        beside = args.json.with_suffix(".part")
        beside.write_text(json.dumps({"notebook": NOTEBOOK, "workloads": report}, indent=2) + "\n")
        beside.replace(args.json)
    return None


if __name__ == "__main__":
    main()
