"""Prints the memory of a training step on an A100-40GB in every AMP mode, compared with the tutorials' figures.

    python benchmarks/amp_memory.py [--tasks vit-b16 cifar10 mnist gpt2-small] [--modes float32 torch] [--json FILE]

No GPU is needed: the whole step of a task (model, loss, optimizer, loss scale, at the task's batch size) is compiled
ahead of time for a target GPU, and the compiler reports its allocations. All data on the device are arguments of the
step, and so they are counted: parameters, master weights, optimizer state, statistics, batch. The tutorials' figures
are their authors': ColossalAI's page on AMP for ViT-B/16, a PyTorch user's notebook for MNIST.

The last column is the array with the most elements that the program stores. For gpt2-small, with 8 windows of 1,024
tokens, all attention scores of a layer would have 100,663,296 elements and all logits 411,705,344. Its attention works
on blocks of queries; cuDNN's attention, which a process with such a GPU uses, is not compiled without a GPU.
"""

import argparse
import math
import sys
from pathlib import Path
from typing import Any

import jax
from example_tasks import load_task
from gpu_builders import compile_for_gpu, stored_arrays
from result_files import write_results

from jmp_train.aot import CompiledProgram
from jmp_train.app.runs import setup_of

SYNTHETIC = {"synthetic": True}
TASKS: dict[str, tuple[str, dict[str, Any]]] = {
    "vit-b16": ("vit-b16", SYNTHETIC),
    "cifar10": ("cifar10", SYNTHETIC),
    "mnist": ("mnist", SYNTHETIC),
    "gpt2-small": ("lm", {"model": "gpt2-small"}),
}
MODES = ("float32", "torch", "apex-O1", "apex-O2", "apex-O3", "naive")
# Of the peak in float32; of float32 itself GB.
TUTORIALS = {
    "vit-b16": {"float32": 27.2, "torch": 0.75, "naive": 0.63, "apex-O1": 0.74},
    "mnist": {"torch": 0.63},
}
GOALS = {
    "vit-b16": {
        "float32": 25.6,
        "torch": 0.56,
        "apex-O1": 0.56,
        "apex-O2": 0.53,
        "naive": 0.53,
    },
    "cifar10": dict.fromkeys(("torch", "apex-O1", "apex-O2", "naive"), 0.6),
    "mnist": dict.fromkeys(("torch", "apex-O1", "apex-O2", "naive"), 0.6),
}


def train_step(task_name: str, mode: str) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Returns the whole step, the shapes of its arguments, and that the state is donated."""
    name, options = TASKS[task_name]
    task = load_task(name, **options)
    setup = setup_of(task, mode)

    def create(key: jax.Array) -> Any:
        init_key, step_key = jax.random.split(key)
        return setup.create_state(*task.init(init_key), step_key)

    rows = {name: array[: task.batch_size] for name, array in task.train.items()}
    batch = jax.eval_shape(lambda: task.prepare(rows))
    return setup.step, (jax.eval_shape(create, jax.random.key(0)), batch), {"donate_argnums": 0}


def compiled(task: str, mode: str, gpu: str, python: str) -> CompiledProgram:
    """Returns what the step of a task needs in a mode."""
    target = f"{Path(__file__).resolve()}:train_step"
    return compile_for_gpu(target, task, mode, gpu=gpu, python=python, timeout=1800)


def largest_array(step: CompiledProgram) -> tuple[str, tuple[int, ...]]:
    """Returns dtype and shape of the array with the most elements that the step stores."""
    array = max(stored_arrays(step.hlo), key=lambda array: math.prod(array.shape))
    return array.dtype, array.shape


def main() -> None:
    """Prints one table per task."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--python", default=_plan_python(), help="with jmp_train[plan]")
    parser.add_argument("--gpu", default="A100-40GB")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--modes", nargs="+", default=MODES, help="the first is compared with")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()

    print(f"peak memory of a training step on an {args.gpu}; jax {jax.__version__}")
    results = []
    for task in args.tasks:
        print(f"\n{task:16}{'GB':>8}{'arguments':>11}{'ratio':>8}{'goal':>7}  tutorial, largest array")
        first = None
        for mode in args.modes:
            sizes = compiled(task, mode, args.gpu, args.python)
            first = sizes.peak_bytes if first is None else first
            peak, arguments = sizes.peak_bytes / 1e9, sizes.argument_bytes / 1e9
            dtype, shape = largest_array(sizes)
            goal, tutorial = (table.get(task, {}).get(mode, "") for table in (GOALS, TUTORIALS))
            print(
                f"{mode:16}{peak:8.3f}{arguments:11.3f}{sizes.peak_bytes / first:8.3f}{goal:>7}"
                f"  {tutorial:8}  {dtype} {shape}",
                flush=True,
            )
            results.append(
                {
                    "task": task,
                    "mode": mode,
                    "gpu": args.gpu,
                    "peak_bytes": sizes.peak_bytes,
                    "argument_bytes": sizes.argument_bytes,
                    "temp_bytes": sizes.temp_bytes,
                    "ratio": round(sizes.peak_bytes / first, 4),
                    "tutorial": tutorial or None,
                    "largest_array": [dtype, *shape],
                }
            )
    if args.json is not None:
        write_results(args.json, {"steps": results}, device=f"{args.gpu}, compiled for, not run")


def _plan_python() -> str:
    """Returns the interpreter that `make .venv-plan/.plan` makes, or this one."""
    path = Path(__file__).resolve().parents[1] / ".venv-plan/bin/python"
    return str(path) if path.exists() else sys.executable


if __name__ == "__main__":
    main()
