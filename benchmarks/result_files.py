"""Files of results: a script's measurements, and for each run its date, device and command.

The site shows `benchmarks/results/*.json` with these facts.
"""

import datetime
import json
import os
import platform
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from jmp_train.policies.files import write_atomically

RUNS = "runs"


def write_results(file: Path, results: Mapping[str, Any], device: str | None = None) -> None:
    """Writes results with the run that they are of, atomically.

    Args:
      file: JSON.
      results: by their names. Under "runs" they have those of an earlier file that they go on from, if any; a run by
        the same command takes its place.
      device: that was measured; default: jax's. What was only compiled says for what.
    """
    run = this_run(device)
    earlier = [one for one in results.get(RUNS, ()) if one["command"] != run["command"]]
    everything = {RUNS: [*earlier, run], **{name: value for name, value in results.items() if name != RUNS}}
    write_atomically(file, f"{json.dumps(everything, indent=1)}\n".encode())


def this_run(device: str | None = None) -> dict[str, str]:
    """Returns date, device, command and jax's version of this process.

    Args:
      device: as in `write_results`.
    """
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "device": this_device() if device is None else device,
        "command": this_command(sys.argv),
        "jax": jax.__version__,
    }


def this_device() -> str:
    """Returns what jax computes on, with the number of devices or, of a CPU, of cores."""
    devices = jax.local_devices()
    if devices[0].platform == "cpu":
        return f"CPU, {os.cpu_count()} cores, {_processor()}"
    return f"{len(devices)} x {devices[0].device_kind}"


def _processor() -> str:
    """Returns the processor's name, as Linux has it, or else its kind."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def this_command(arguments: list[str]) -> str:
    """Returns a script's command as it is typed in the repository's root, without the file of results.

    Args:
      arguments: of the command line, the script's file first.
    """
    script, *rest = arguments
    kept = []
    words = iter(rest)
    for word in words:
        if word == "--json":
            next(words, None)
        elif not word.startswith("--json="):
            kept.append(word)
    return shlex.join(["python", f"benchmarks/{Path(script).name}", *kept])
