"""Measures compile time, run time and memory of `jmp_train.diagnose`, compared with the examined step.

    python benchmarks/diagnose.py [--rounds 1] [--policy mixed_float16] [--json FILE]
    python benchmarks/diagnose.py --cases vit-tiny --reports 30
    python benchmarks/diagnose.py --tiny --rounds 1     # in a small size, to see that it runs

The script measures three steps with a loss scale, each in its own process: the network of `examples/tasks/mnist.py`, a
small vision transformer (ViT-tiny's width, depth and heads, on images of 32 pixels), and a graph attention network on a
synthetic graph like Reddit's. Compile time includes tracing, and is also given in CPU seconds; for the diagnosis, it is
the first call minus one run. The run is the time of each further step of a diagnosis, and the first report is the time
that a user waits; on a busy machine, compare CPU seconds. Memory of the step is XLA's plan for arguments, results and
temporaries. Memory of the diagnosis is the maximum over its arrays, sampled every 20 milliseconds, without temporaries
inside of its programs.

Then one process makes `--reports` reports of a small vision transformer, and prints the growth of its memory.
"""

import argparse
import gc
import json
import os
import resource
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import optax
from example_tasks import load_task, models, vit
from result_files import write_results

import jmp_train as jt
from jmp_train import Task
from jmp_train.app.runs import setup_of, train_batches

GOAL, MEMORY_GOAL, GROWTH_GOAL = 3.0, 5.0, 200
CASES = ("mnist", "vit-tiny", "gat")
COLUMNS = (
    ("compile_seconds", 1, "s"),
    ("compile_cpu_seconds", 1, "s"),
    ("run_seconds", 2, "s"),
    ("megabytes", 0, "MB"),
)
Call = tuple[Callable[..., Any], tuple[Any, ...]]


def main() -> None:
    """Prints a table of the cases."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--policy", default="mixed_float16")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--cases", nargs="*", choices=CASES, default=CASES)
    parser.add_argument("--reports", type=int, default=30)
    parser.add_argument("--case", choices=(*CASES, "growth"), help="measure this one here, and print it as JSON")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.case == "growth":
        print(json.dumps(growth(*case("vit-tiny", args.policy, True), args.reports)))
        return
    if args.case:
        print(json.dumps(measured(*case(args.case, args.policy, args.tiny), args.rounds)))
        return
    results: dict[str, Any] = {}
    print(f"diagnosis / step; goal at most {GOAL:g} in compile time, {MEMORY_GOAL:g} in memory")
    print(f"{'':<10}{'operations':>11}{'':>4}{'compile':>18}{'compile, CPU':>20}{'run':>22}{'memory':>24}", flush=True)
    for name in args.cases:
        found = results[name] = in_a_process(name, args)
        step, diagnosis = found["step"], found["diagnosis"]
        cells = [
            f"{diagnosis[key]:.{digits}f} / {step[key]:.{digits}f} {unit} = {diagnosis[key] / step[key]:.1f}"
            for key, digits, unit in COLUMNS
        ]
        print(f"{name:<10}{found['operations']:>11}    " + "  ".join(f"{cell:>20}" for cell in cells))
        kept = f"of which the process keeps {found['kept_megabytes']:.0f} MB"
        seconds = f"{found['first_report_seconds']:.1f} s ({found['first_report_cpu_seconds']:.1f} s of CPU)"
        times = found["first_report_cpu_seconds"] / step["compile_cpu_seconds"]
        print(f"{'':<10}the first report after {seconds}, {times:.1f} times as much CPU as the step, {kept}")
        print(f"{'':<10}load of the machine: {found['load']:.1f}", flush=True)
        save(args.json, results)
    if args.reports:
        found = results["growth"] = in_a_process("growth", args)
        first, last = found["megabytes"][0], found["megabytes"][-1]
        print(f"{args.reports} reports in one process: {first:.0f} MB after the first, {last:.0f} MB after the last")
        print(f"grown by {last - first:.0f} MB; goal at most {GROWTH_GOAL}")
        save(args.json, results)


def save(path: Path | None, results: dict[str, Any]) -> None:
    """Writes what was measured so far, so that nothing is lost if the rest takes too long."""
    if path is not None:
        write_results(path, results)


def in_a_process(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """Returns what a fresh process measures, so that no case has another's programs."""
    command = [sys.executable, __file__, "--case", name, "--policy", args.policy]
    command += ["--rounds", str(args.rounds), "--reports", str(args.reports)]
    result = subprocess.run(
        [*command, *(["--tiny"] if args.tiny else [])], check=True, stdout=subprocess.PIPE, text=True
    )
    return json.loads(result.stdout.splitlines()[-1])


def case(name: str, policy: str, tiny: bool) -> Call:
    """Returns a training step with its arguments."""
    if name == "gat":
        task = load_task("reddit", synthetic=True, scale=0.001 if tiny else 0.02)
        return of_task(task, policy, len(task.train["label"]))
    if name == "mnist":
        return of_task(load_task("mnist", synthetic=True), policy, 8 if tiny else 32)
    model = models.VisionTransformer(classes=10, patch=4, width=192, depth=12, mlp=768, heads=3)
    if tiny:
        model = models.VisionTransformer(classes=10, patch=4, width=32, depth=2, mlp=64, heads=2)
    classifier = vit.classifier(model, 32)
    params, model_state = classifier.init(jax.random.key(0))
    optimizer = jt.with_loss_scale(optax.adamw(1e-3), jt.torch_loss_scale())
    step = jt.train_step(classifier.loss_fn, optimizer, policy=policy)
    state = jt.TrainState.create(params, optimizer, model_state=model_state, rng=jax.random.key(1))
    return step, (state, vit.synthetic_data(4 if tiny else 64, 32, 0))


def of_task(task: Task, policy: str, batch_size: int) -> Call:
    """Returns a task's step in a policy with its first state and batch."""
    setup = setup_of(task, policy)
    params, model_state = task.init(jax.random.key(0))
    state = setup.create_state(params, model_state, jax.random.key(1))
    batch = next(iter(train_batches(task, batch_size, 0, 1)))
    return setup.step, (state, jax.device_put(batch | setup.cast_shared(task.shared())))


def measured(step: Callable[..., Any], args: tuple[Any, ...], rounds: int) -> dict[str, Any]:
    """Returns seconds and megabytes of a step and of its diagnosis."""
    wall, cpu = time.perf_counter(), time.process_time()
    compiled = jax.jit(step).trace(*args).lower().compile()
    compile_times = time.perf_counter() - wall, time.process_time() - cpu
    planned = planned_bytes(compiled)
    resident = resident_megabytes()
    first, _ = timed(lambda: jt.diagnose(step, *args))
    kept = resident_megabytes() - resident
    # Programs are compiled anew in each call, but not in each of its steps.
    (more, report), peak = watched(lambda: timed(lambda: jt.diagnose(step, *args, steps=1 + rounds)))
    run_wall, run_cpu = ((after - before) / rounds for before, after in zip(first, more, strict=True))
    plain = [timed(lambda: jax.block_until_ready(compiled(*args)))[0] for _ in range(rounds + 1)][1:]
    return {
        "operations": len(report.rows),
        "load": os.getloadavg()[0],
        "first_report_seconds": first[0],
        "first_report_cpu_seconds": first[1],
        "kept_megabytes": kept,
        "step": {
            "compile_seconds": compile_times[0],
            "compile_cpu_seconds": compile_times[1],
            "run_seconds": statistics.median(wall for wall, _ in plain),
            "megabytes": planned / 1e6,
        },
        "diagnosis": {
            "compile_seconds": first[0] - run_wall,
            "compile_cpu_seconds": first[1] - run_cpu,
            "run_seconds": run_wall,
            "megabytes": peak / 1e6,
        },
    }


def resident_megabytes() -> float:
    """Returns the memory that this process has in use, on Linux."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 1e6


def planned_bytes(compiled: Any) -> int:
    """Returns the bytes of a program's arguments, results and temporaries."""
    memory = compiled.memory_analysis()
    return memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes


def timed(run: Callable[[], Any]) -> tuple[tuple[float, float], Any]:
    """Returns the seconds that a call takes, and those of CPU; and its result."""
    wall, cpu = time.perf_counter(), time.process_time()
    result = run()
    return (time.perf_counter() - wall, time.process_time() - cpu), result


def growth(step: Callable[..., Any], args: tuple[Any, ...], reports: int) -> dict[str, Any]:
    """Returns the megabytes that a process has in use after each report."""
    megabytes = []
    for number in range(reports):
        jt.diagnose(step, *args)
        gc.collect()
        megabytes.append(resident_megabytes())
        print(f"  report {number + 1}: {megabytes[-1]:.0f} MB", file=sys.stderr, flush=True)
    return {"megabytes": megabytes}


def watched(run: Callable[[], Any]) -> tuple[Any, int]:
    """Returns a call's result and the most bytes that arrays took while it ran."""
    peak, done = 0, threading.Event()

    def look() -> None:
        nonlocal peak
        while not done.wait(0.02):
            peak = max(peak, sum(array.nbytes for array in jax.live_arrays()))

    thread = threading.Thread(target=look)
    thread.start()
    try:
        return run(), peak
    finally:
        done.set()
        thread.join()


if __name__ == "__main__":
    main()
