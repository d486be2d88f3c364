"""Measures what a step costs on 1, 2, 4 and 8 devices, by three routes and written by hand.

    python benchmarks/scaling.py [--devices 1 2 4 8] [--rounds 100] [--steps 5] [--json FILE]

One model (the digits CNN: BatchNorm, dropout, Adam, float16 computation) runs with a fixed number of rows per device,
by `data_parallel`, `sharded_step` and `pmap_step`, and by a `jax.shard_map` written by hand that does the same:
dynamic loss scale, gradients averaged in float32, an overflow check on which all devices agree, skipping by selection,
averaged batch statistics, the same metrics and counters. The devices are virtual CPU devices, each number of them in
its own process, where the ways take turns and every step is awaited; all donate the state.

The devices share the cores, so the ideal time is that of one device or, if longer, its CPU time for each device,
spread over the cores. The step by hand takes part twice: the ratio of the two ("noise") should be 1, and shows how
reliable the other ratios are. The routes have an eighth of the rounds.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jmp
import numpy as np
import optax
from example_tasks import load_task
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from result_files import write_results
from step_overhead import (
    LEARNING_RATE,
    count_instructions,
    hand_state,
    metrics_of,
    next_hand_state,
    with_train_step,
)

import jmp_train as jt
from jmp_train import Task

TARGET = 1.03
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
ROUTES = ("data_parallel", "sharded_step", "pmap_step")
OURS, BY_HAND, AGAIN = "data_parallel", "by hand", "by hand again"

Way = Callable[[Any, Any], tuple[Any, dict[str, Any]]]


def by_hand(task: Task, mesh: Mesh) -> Way:
    """Returns the step that a user of jmp and `jax.shard_map` writes."""
    policy = jmp.get_policy("params=float32,compute=float16,output=float32")
    optimizer = optax.adam(LEARNING_RATE)

    def step(state: Any, batch: Any) -> tuple[Any, dict[str, Any]]:
        rng = jax.random.fold_in(jax.random.split(state.rng)[1], lax.axis_index("data"))
        loss_scale = jmp.DynamicLossScale(*state.loss_scale)

        def scaled_loss(params: Any) -> Any:
            compute_params, compute_batch = policy.cast_to_compute((params, batch))
            loss, (batch_stats, aux) = task.loss_fn(compute_params, state.batch_stats, compute_batch, rng)
            return loss_scale.scale(loss), (loss, batch_stats, policy.cast_to_output(aux))

        # All of it is float32 already: gradients have the dtype of the parameters.
        grads, (loss, batch_stats, aux) = lax.pmean(jax.grad(scaled_loss, has_aux=True)(state.params), "data")
        grads = loss_scale.unscale(grads)
        finite = lax.pmin(jmp.all_finite(grads), "data")
        scale = loss_scale.adjust(finite)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        new = (optax.apply_updates(state.params, updates), opt_state, batch_stats)
        old = (state.params, state.opt_state, state.batch_stats)
        chosen = jmp.select_tree(finite, new, old)
        state = next_hand_state(state, finite, chosen, (scale.loss_scale, scale.counter))
        return state, metrics_of(state, loss, aux, grads, finite, scale.loss_scale)

    return jax.shard_map(step, mesh=mesh, in_specs=(P(), P("data")), out_specs=P(), check_vma=False)


def measure_here(rounds: int, steps: int) -> dict[str, Any]:
    """Returns what each way costs on all devices of this process."""
    task = load_task("digits")
    mesh = Mesh(np.array(jax.devices()), ("data",))
    rows = (task.batch_size or 1) * mesh.size
    batch = {name: np.resize(x, (rows, *x.shape[1:])) for name, x in task.train.items()}
    batch = jax.device_put(batch, NamedSharding(mesh, P("data")))

    variables = task.init(jax.random.key(1))
    ours, state = with_train_step(task, *variables)
    hand = by_hand(task, mesh), hand_state(task, *variables, (np.float32(2**16), np.int32(0)))
    plain: dict[str, tuple[Way, Any]] = {
        "data_parallel": (jt.data_parallel(ours, mesh), state),
        "sharded_step": (jt.sharded_step(ours, mesh), state),
        BY_HAND: hand,
        AGAIN: hand,
    }
    everywhere = NamedSharding(mesh, P())
    copy = jax.jit(lambda tree: tree, out_shardings=everywhere)
    ways: dict[str, Way] = {"pmap_step": jt.pmap_step(ours, donate_argnums=0)}
    states, instructions = {"pmap_step": copy(state)}, {}
    for name, (step, first) in plain.items():
        states[name] = copy(first)  # which will be donated
        ways[name] = jax.jit(step, donate_argnums=0).lower(states[name], batch).compile()
        instructions[name] = count_instructions(ways[name])

    losses = {}  # of the third step, which all ways have to agree on
    for name, way in ways.items():
        for _ in range(2):
            states[name], _ = way(states[name], batch)
        states[name], metrics = way(states[name], batch)
        losses[name] = float(metrics["loss"])

    beside = time_in_turn(ways, states, batch, (OURS, BY_HAND, AGAIN), rounds, steps)
    routes = time_in_turn(ways, states, batch, ROUTES, max(1, rounds // 8), steps)
    return {
        "beside": beside,
        "routes": routes,
        "losses": losses,
        "instructions": instructions,
    }


def time_in_turn(
    ways: dict[str, Way],
    states: dict[str, Any],
    batch: Any,
    names: Sequence[str],
    rounds: int,
    steps: int,
) -> dict[str, dict[str, list[float]]]:
    """Returns wall and CPU seconds per step, [round], of some ways, and continues their states."""
    times = {"wall": {name: [] for name in names}, "cpu": {name: [] for name in names}}
    order, shuffle = list(names), random.Random(0).shuffle
    for round_index in range(-2, rounds):  # two rounds to warm up
        shuffle(order)  # none may always come after the one that heats the caches
        for name in order:
            step, state = ways[name], states[name]
            start, cpu_start = time.perf_counter(), time.process_time()
            for _ in range(steps):
                state, _ = step(state, batch)
                jax.block_until_ready(state)
            elapsed, cpu_elapsed = time.perf_counter() - start, time.process_time() - cpu_start
            states[name] = state
            if round_index >= 0:
                times["wall"][name].append(elapsed / steps)
                times["cpu"][name].append(cpu_elapsed / steps)
    return times


def measure(devices: int, rounds: int, steps: int) -> dict[str, Any]:
    """Returns the costs of each way on a number of virtual devices, measured in its own process."""
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": str(devices),
        "NPROC": "32",  # threads; with fewer, devices that wait for each other may wait forever
    }
    command = (sys.executable, __file__, "--here", "--rounds", str(rounds), "--steps", str(steps))
    result = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(result.stdout)


def median_ratio(seconds: dict[str, list[float]], name: str) -> float:
    """Returns the median of the rounds' ratios of a way to the step by hand."""
    pairs = zip(seconds[name], seconds[BY_HAND], strict=True)
    return statistics.median(a / b for a, b in pairs)


def print_report(report: dict[str, Any]) -> None:
    """Prints the tables of weak scaling and of the step by hand."""
    results = report["devices"]
    fewest = min(results)
    print(f"{'devices':<9}{'route':<15}{'ms/step':>9}{'/devices':>10}{'ideal':>9}{'/ideal':>8}")
    for route in ROUTES:
        alone = {kind: 1e3 * statistics.median(times[route]) for kind, times in results[fewest]["routes"].items()}
        for devices, result in results.items():
            spread = alone["cpu"] * devices / fewest / report["cores"]
            ideal = max(alone["wall"], spread)
            ms = 1e3 * statistics.median(result["routes"]["wall"][route])
            print(f"{devices:<9}{route:<15}{ms:9.2f}{ms / devices:10.2f}{ideal:9.2f}{ms / ideal:8.2f}")
    print(f"\n{OURS} beside the same step by hand: target at most {TARGET} of it")
    print(f"{'':<18}  ratio of time  of CPU time   HLO instructions")
    print("devices  ms by hand  ours   noise  ours   noise  ours  by hand")
    for devices, result in results.items():
        wall, cpu = result["beside"]["wall"], result["beside"]["cpu"]
        ratios = [median_ratio(seconds, name) for seconds in (wall, cpu) for name in (OURS, AGAIN)]
        counts = result["instructions"]
        print(
            f"{devices:<9}{1e3 * statistics.median(wall[BY_HAND]):10.2f}"
            + "".join(f"{ratio:7.3f}" for ratio in ratios)
            + f"{counts[OURS]:6d}{counts[BY_HAND]:9d}"
            f"  {'within' if ratios[0] <= TARGET else 'ABOVE'}"
        )


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--devices", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.here:
        print(json.dumps(measure_here(args.rounds, args.steps)))
        return

    report = {
        "jax": jax.__version__,
        "cores": CORES,
        "rounds": args.rounds,
        "steps": args.steps,
        "devices": {n: measure(n, args.rounds, args.steps) for n in args.devices},
    }
    print(
        f"virtual devices on {CORES} cores, jax {jax.__version__}, {args.rounds} rounds of {args.steps} steps in turn"
    )
    print_report(report)
    if args.json:
        write_results(args.json, report)


if __name__ == "__main__":
    main()
