"""Measures saving and restoring a state with `CheckpointStore`, compared with orbax's `CheckpointManager`.

    python benchmarks/checkpoint.py [--states 10x1 200x100 2000x20] [--rounds 3] [--json FILE]

A state is LEAVESxMEGABYTES of random float32. Each round runs every way in a process of its own, in turn: a first save
and restore that do not count, then one save, until the call returns (blocked) and until all is on the disk (save), and
one restore. The script prints the minima of the rounds, files and bytes of one step, and the peak memory of the
process, imports included. orbax's manager verifies no digests.
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from result_files import write_results

import jmp_train as jt

OURS, ORBAX = "CheckpointStore", "orbax"
COLUMNS = ("blocked_s", "save_s", "cpu_s", "restore_s", "files", "megabytes", "peak_memory_mb")
Way = tuple[Callable[[int, Any], object], Callable[[], object], Callable[[int, Any], Any]]  # save, wait, restore


def opened(way: str, directory: Path) -> Way:
    """Returns how a way saves a step, waits for it, and restores it."""
    if way == OURS:
        store = jt.CheckpointStore(directory, max_to_keep=1)
        return store.save, store.wait, lambda step, state: store.restore(state, step=step)[1]
    import orbax.checkpoint as ocp

    manager = ocp.CheckpointManager(directory, options=ocp.CheckpointManagerOptions(max_to_keep=1))
    return (
        lambda step, state: manager.save(step, args=ocp.args.StandardSave(state)),
        manager.wait_until_finished,
        lambda step, state: manager.restore(step, args=ocp.args.StandardRestore(state)),
    )


def measure(way: str, leaves: int, megabytes: int) -> dict[str, float]:
    """Returns what one save and one restore cost in this process."""
    random, size = np.random.default_rng(0), int(megabytes * 1e6 / 4 / leaves)
    state = {f"leaf_{number}": jax.device_put(random.random(size, np.float32)) for number in range(leaves)}
    with tempfile.TemporaryDirectory() as folder:
        save, wait, restore = opened(way, Path(folder))
        save(1, state)
        wait()
        restore(1, state)
        start, cpu = time.perf_counter(), time.process_time()
        save(2, state)
        blocked = time.perf_counter() - start
        wait()
        saved, cpu = time.perf_counter() - start, time.process_time() - cpu
        files = [path for path in Path(folder).glob("**/*") if path.is_file() and path.name != "lock"]
        start = time.perf_counter()
        found = jax.block_until_ready(restore(2, state))
        restored = time.perf_counter() - start
        assert all(np.array_equal(found[name], x) for name, x in state.items())
        disk = sum(path.stat().st_size for path in files) / 1e6
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
        return dict(zip(COLUMNS, (blocked, saved, cpu, restored, len(files), disk, peak), strict=True))


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--states", nargs="+", default=["10x1", "200x100", "2000x20"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--way", help=argparse.SUPPRESS)  # of a process that measures
    args = parser.parse_args()
    if args.way:
        print(json.dumps(measure(args.way, *map(int, args.states[0].split("x")))))
        return

    report: dict[str, Any] = {}
    print(f"{'leaves x MB':<12}{'way':<16}" + "".join(f"{name:>16}" for name in COLUMNS))
    for state in args.states:
        rows: dict[str, list[dict[str, float]]] = {OURS: [], ORBAX: []}
        for _ in range(args.rounds):
            for way, found in rows.items():
                command = [sys.executable, __file__, "--states", state, "--way", way]
                done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
                found.append(json.loads(done.stdout.splitlines()[-1]))
        report[state] = {}
        for way, found in rows.items():
            row = report[state][way] = {name: min(each[name] for each in found) for name in COLUMNS}
            print(f"{state:<12}{way:<16}" + "".join(f"{row[name]:>16.4g}" for name in COLUMNS), flush=True)
    if args.json:
        write_results(args.json, {"states": report})


if __name__ == "__main__":
    main()
