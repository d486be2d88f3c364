"""A campaign: runs of several processes that get signals at any moment or a full disk, and are resumed.

    python tests/programs/killed_runs.py RUNS SEED

Each run trains in 2 or 4 processes of the launcher. A random set of the processes and the launcher gets SIGTERM or
SIGKILL at a random moment; in every fourth run, the disk of process 0 is full from its second save on. The run is
resumed, disturbed again, and resumed to its end, whose bits must be those of an unbroken run. No process and no port
beyond this machine may be left open.

    rank.py ... killed_runs.py train DIRECTORY IS_FULL

is what the processes run: a script with the two lines of `StopSignals`.
"""

import contextlib
import hashlib
import os
import random
import re
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

STEPS, EVERY = 150, 10
SECONDS = 400  # of one launch, on a loaded machine
REPOSITORY = Path(__file__).resolve().parents[2]

# The launcher without the package's other imports, which take seconds.
LAUNCHER = """
import pathlib, sys, types
for name in ("jmp_train", "jmp_train.policies", "jmp_train.policies.files"):
    sys.modules[name] = package = types.ModuleType(name)
    package.__path__ = [str(pathlib.Path(sys.argv[1], *name.split(".")[1:]))]
from jmp_train.policies.files import plain_files
package.escaped = plain_files.escaped
from jmp_train.app.launch.launcher import LaunchError, launch
try:
    launch(sys.argv[3:], int(sys.argv[2]), grace=60)
except LaunchError as error:
    print("launcher:", error, flush=True)
    sys.exit(error.code)
"""


def train(directory: str, is_full: str) -> None:
    """Trains from the last checkpoint, and prints a line per step."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    import jmp_train as jt

    jt.distributed.initialize(shutdown_timeout=60, heartbeat_timeout=60)
    mesh = Mesh(np.array(jax.devices()), ("data",))
    sharding = NamedSharding(mesh, PartitionSpec("data"))
    tx = jt.with_loss_scale(optax.adam(1e-2), jt.torch_loss_scale(2.0**10, growth_interval=20))
    step = jt.train_step(
        jt.stateless(lambda w, x: ((x @ w).astype(jnp.float32) ** 2).mean()), tx, policy="mixed_float16"
    )
    run = jax.jit(jt.data_parallel(step, mesh))
    state = jt.distributed.broadcast_state(jt.TrainState.create(jnp.ones((64, 32)), tx), mesh)
    stop = jt.distributed.StopSignals()
    with jt.CheckpointStore(directory) as store:
        try:
            start, state = store.restore(state)
        except FileNotFoundError:
            start = 0
        print(f"process {os.getpid()} from {start}", flush=True)
        saves = 0
        for number in range(start + 1, STEPS + 1):
            x = np.random.default_rng(number).normal(size=(64, 64)).astype(np.float32)
            batch = jax.make_array_from_callback(x.shape, sharding, lambda index, x=x: x[index])
            state, metrics = run(state, batch)
            if stop.agreed():
                store.save(number, state)
                print(f"stops after {number}", flush=True)
                sys.exit(stop.finish())
            if number % EVERY == 0 or number == STEPS:
                saves += 1
                if is_full == "True" and saves == 2 and jt.distributed.is_main_process():
                    store.wait()
                    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, resource.RLIM_INFINITY))
                store.save(number, state)
            if number % 5 == 0:
                print(f"step {number} {float(metrics['loss'].addressable_data(0))}", flush=True)
    parts = [np.asarray(x).tobytes() for x in jax.tree.leaves(jax.device_get(state))]
    print(f"ends {hashlib.sha256(b''.join(parts)).hexdigest()}", flush=True)


def launched(
    directory: Path, count: int, generator: random.Random | None, is_full: bool = False
) -> tuple[int, str, str]:
    """Returns exit code, output and what was done to a launch; without a generator, it is left alone."""
    command = [sys.executable, "-c", LAUNCHER, str(REPOSITORY / "jmp_train"), str(count)]
    command += [str(Path(__file__)), "train", str(directory), str(is_full)]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "NPROC": "32", "JAX_PLATFORMS": "cpu"}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    ) as launcher:
        assert launcher.stdout is not None
        timer = threading.Timer(SECONDS, launcher.kill)
        timer.start()
        plan = None if generator is None else planned(generator, count)
        lines, pids, done, everyone = [], {}, "left alone", set[int]()
        for line in launcher.stdout:
            lines.append(line)
            if found := re.match(r"\[(\d)\] process (\d+) from", line):
                pids[int(found[1])] = int(found[2])
            if plan is None or len(pids) < count:
                continue
            found = re.match(r"\[\d\] step (\d+) ", line)
            if plan[0] and not (found and int(found[1]) >= plan[0]):
                continue
            number, delay, kind, targets = plan
            plan = None
            everyone = descendants(launcher.pid)
            check_ports(everyone)
            time.sleep(delay)  # the moment is random, so nothing depends on it
            done = f"{signal.Signals(kind).name} to {targets} {delay:.2f} s after step {number}"
            for target in targets:
                kill(launcher.pid if target == "launcher" else pids[int(target)], kind)
        code = launcher.wait()
        timer.cancel()
    check_gone(everyone | set(pids.values()), done)
    return code, "".join(lines), done


def planned(generator: random.Random, count: int) -> tuple[int, float, int, list[str]]:
    """Returns the step after which signals are sent, 0 for before the first; a delay, the signal, and to whom."""
    everybody = ["launcher", *map(str, range(count))]
    targets = generator.sample(everybody, generator.randint(1, len(everybody)))
    kind = generator.choice((signal.SIGTERM, signal.SIGTERM, signal.SIGKILL))
    return generator.choice((0, 5, 20, 60, 100)), generator.uniform(0, 0.3), kind, targets


def kill(pid: int, kind: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # it has ended
        os.kill(pid, kind)


def descendants(pid: int) -> set[int]:
    """Returns the ids of a process and all below it."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it has ended
        parents[int(stat.parent.name)] = int(fields[1])
    found = {pid}
    while more := {child for child, parent in parents.items() if parent in found} - found:
        found |= more
    return found


def check_ports(pids: set[int]) -> None:
    """Raises AssertionError if one of the processes listens on an address that other machines can reach."""
    own = set()
    for pid in pids:
        for file in Path(f"/proc/{pid}/fd").glob("*"):
            try:
                own.update(re.findall(r"socket:\[(\d+)\]", os.readlink(file)))
            except OSError:
                continue  # closed meanwhile
    for table in ("tcp", "tcp6"):
        for row in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *rest = row.split()
            if state == "0A" and rest[5] in own:
                address = bytes.fromhex(local.partition(":")[0])
                words = [address[i : i + 4][::-1] for i in range(0, len(address), 4)]
                name = socket.inet_ntop(socket.AF_INET if table == "tcp" else socket.AF_INET6, b"".join(words))
                assert name in ("127.0.0.1", "::1", "::ffff:127.0.0.1"), f"a port is open on {name}"


def check_gone(pids: set[int], done: str) -> None:
    """Raises AssertionError if one of the processes is still there after a minute."""
    deadline = time.monotonic() + 60
    while living := [pid for pid in pids if lives(pid)]:
        assert time.monotonic() < deadline, f"{living} still live: {done}"
        time.sleep(0.1)


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def last_line(text: str) -> str:
    """Returns the digest of the final state, which all processes have to print alike; empty if it did not end."""
    digests = set(re.findall(r"ends (\w{64})", text))
    assert len(digests) <= 1, text
    return next(iter(digests), "")


def check_end(code: int, text: str, done: str, count: int) -> None:
    """Raises AssertionError if a launch did not end as its signals ask."""
    told = f"{done}: code {code}\n{text}"
    stops = re.findall(r"\[(\d)\] stops after (\d+)", text)
    if last_line(text):
        return  # it was ready before
    assert code != 0, told
    if done.startswith("SIGTERM"):
        assert code in (143, -15), told
        assert len({step for _, step in stops}) == 1, told
        assert len(stops) == count, told
        assert "Traceback" not in text, told


def campaign(runs: int, seed: int) -> list[dict[str, Any]]:
    """Returns what was done in each run; raises AssertionError, with the seed, if one went wrong."""
    generator, rows = random.Random(seed), []
    with tempfile.TemporaryDirectory() as folder:
        unbroken = {}
        for number in range(runs):
            count, is_full = 2 + 2 * (number % 2), number % 4 >= 2
            if count not in unbroken:
                code, text, _ = launched(Path(folder, f"unbroken{count}"), count, None)
                assert code == 0, text
                unbroken[count] = last_line(text)
            directory, told, text = Path(folder, str(number)), [], ""
            try:
                if is_full:
                    code, text, done = launched(directory, count, None, is_full=True)
                    assert code == 1, text
                    assert re.search(r"OSError: .*step 20 could not be written", text), text
                    told.append("the disk was full")
                code, text, done = launched(directory, count, generator)
                told.append(f"{done}: code {code}")
                check_end(code, text, done, count)
                code, text, _ = launched(directory, count, None)
                assert code == 0, text
                assert last_line(text) == unbroken[count], text
            except AssertionError as error:
                raise AssertionError(f"seed {seed}, run {number}, {count} processes, {told}: {error}") from error
            start = re.search(r"from (\d+)", text)
            rows.append({"processes": count, "done": told, "resumed from": start and int(start[1])})
            print(rows[-1], flush=True)
    return rows


if __name__ == "__main__":
    if sys.argv[1] == "train":
        train(*sys.argv[2:])
    else:
        campaign(int(sys.argv[1]), int(sys.argv[2]))
