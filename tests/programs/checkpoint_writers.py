"""Writers of checkpoints that stop at a chosen call to the file system, or train until they are killed.

The server imports once, and forks a writer for each line that it reads: `at NUMBER DIRECTORY LOG` or `train DIRECTORY
LOG SEED`. It answers with the writer's process id and, when that has stopped, died or ended, with how.
"""

import os
import random
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import jmp_train as jt

CALLS = {"open", "os.rename", "os.remove", "fcntl.flock"}


def numbered(value: float) -> dict[str, Any]:
    """Returns a state that a value fills."""
    return {"w": np.full(5, value), "v": np.full((2, 3), value), "value": value}


def value_of(state: dict[str, Any]) -> float:
    """Returns what fills a state, whose every part has to agree."""
    for x in (state["w"], state["v"]):
        np.testing.assert_array_equal(x, state["value"])
    return state["value"]


def stop_at(number: int, directory: str) -> None:
    """Has this process stop before its nth change of something in a directory."""
    count = 0

    def look(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal count
        if event not in CALLS or not is_change(event, arguments, directory):
            return
        count += 1
        if count == number:
            signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)  # here, not soon after

    sys.addaudithook(look)


def is_change(event: str, arguments: tuple[Any, ...], directory: str) -> bool:
    if event == "fcntl.flock":  # of a writer's lock; its path is not told
        return os.readlink(f"/proc/self/fd/{arguments[0]}").startswith(directory)
    path = str(arguments[0])
    if event == "open" and not arguments[2] & (os.O_WRONLY | os.O_RDWR):
        return False
    parent, _ = os.path.split(path)
    return parent == directory


def stop_and_save(number: str, directory: str, log: str) -> None:
    """Replaces step 5, then saves step 6 and has step 5 removed; stops at a call."""
    stop_at(int(number), directory)
    with jt.CheckpointStore(directory, max_to_keep=1) as store:
        for step, value in ((5, 2.0), (6, 3.0)):
            store.save(step, numbered(value))
            store.wait()
            note(log, value)


def train(directory: str, log: str, seed: str) -> None:
    """Goes on from the last checkpoint; now and then saves a step again, and waits or does not."""
    random.seed(int(seed))
    with jt.CheckpointStore(directory, max_to_keep=random.choice((1, 2))) as store:
        try:
            start, state = store.restore(numbered(0.0))
            value = value_of(state)
        except FileNotFoundError:
            start, value = 0, 0.0
        note(log, value)
        for step in range(start + 1, start + 10_000):
            time.sleep(random.uniform(0, 0.02))  # trains
            for _ in range(random.choice((1, 1, 2))):
                value += 1
                store.save(step, numbered(value))
            if random.random() < 0.7:
                store.wait()
                note(log, value)


def note(log: str, value: float) -> None:
    """Writes down which value is saved for certain."""
    temporary = Path(f"{log}.new")
    temporary.write_text(str(value))
    temporary.rename(log)


def start(task: Callable[..., None], *arguments: Any) -> int:
    """Returns the process id of a child that does a task, and nothing else."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        task(*arguments)
        code = 0
    finally:
        if code:
            traceback.print_exc()
        os._exit(code)


def how(status: int) -> str:
    if os.WIFSTOPPED(status):
        return "stopped"
    return f"ended {os.waitstatus_to_exitcode(status)}"


def serve() -> None:
    print("ready", flush=True)
    for line in sys.stdin:
        task, *arguments = line.split()
        child = start({"at": stop_and_save, "train": train}[task], *arguments)
        print(child, flush=True)
        while True:
            said = how(os.waitpid(child, os.WUNTRACED)[1])
            print(said, flush=True)
            if said != "stopped":
                break


if __name__ == "__main__":
    serve()
