"""Measures exported programs on this machine's devices, each in a process of its own that works in a folder.

The folder has `program`, serialized by `jax.export`, and `request.json`: the donated arguments, the number of devices
and of timed runs. The process writes `measured.json`. Without a program, it lists the devices.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import export
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from jmp_train.aot import ExportedProgram

_KEYS = {"key<fry>": "threefry2x32", "key<rbg>": "rbg", "key<urbg>": "unsafe_rbg"}


@dataclass(frozen=True)
class Devices:
    """The devices found by a new process with jax.

    Attributes:
      device: the kind of the first one, such as "NVIDIA H100 80GB HBM3".
      platform: "gpu", "cpu", ...
      devices: number of devices.
    """

    device: str
    platform: str
    devices: int


@dataclass(frozen=True)
class Measured(Devices):
    """The measurements of a program.

    Attributes:
      seconds: the median time of several runs.
      peak_bytes: the peak of the device's memory pool; None if the device does not report it.
      argument_bytes: bytes of the arguments, in the program compiled here.
      output_bytes: bytes of the results.
      alias_bytes: bytes of the results that reuse the memory of donated arguments.
      temp_bytes: bytes of everything else.
    """

    seconds: float
    peak_bytes: int | None
    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    temp_bytes: int


def devices_here(*, timeout: float = 120) -> Devices:
    """Returns the devices found by a new process, even if this process is restricted to the CPU.

    Args:
      timeout: seconds.

    Raises:
      RuntimeError: jax does not start.
      TimeoutError: it took longer than `timeout`.
    """
    return Devices(**_run(None, 0, timeout))


def measure_program(program: ExportedProgram, *, runs: int = 10, timeout: float = 1800) -> Measured:
    """Runs an exported program on this machine's devices, with zeros as arguments.

    This process should not hold the GPU: set JAX_PLATFORMS=cpu for it, which is not passed on.

    Args:
      program: a program exported for this platform, with its donated arguments as first results.
      runs: number of timed runs, after a first one.
      timeout: seconds.

    Raises:
      RuntimeError: the program failed, for example because memory ran out; the message has the traceback.
      TimeoutError: it took longer than `timeout`.
    """
    return Measured(**_run(program, runs, timeout))


def _run(program: ExportedProgram | None, runs: int, timeout: float) -> dict[str, Any]:
    environment = {name: value for name, value in os.environ.items() if name != "JAX_PLATFORMS"}
    with tempfile.TemporaryDirectory(prefix="jmp_train_") as scratch:
        folder = Path(scratch)
        if program is not None:
            (folder / "program").write_bytes(program.serialized)
            request = {"donated": program.donated, "devices": program.devices, "runs": runs}
            (folder / "request.json").write_text(json.dumps(request))
        code = "import sys, measured_programs; measured_programs.measure_folder(sys.argv[1])"
        environment["PYTHONPATH"] = os.pathsep.join((str(Path(__file__).parent), environment.get("PYTHONPATH", "")))
        subprocess.run((sys.executable, "-c", code, scratch), env=environment, timeout=timeout, check=True)
        return json.loads((folder / "measured.json").read_text())


def measure_folder(directory: str) -> None:
    """Runs the program in a folder, and describes the devices."""
    folder = Path(directory)
    device = jax.devices()[0]
    found: dict[str, Any] = {
        "device": device.device_kind,
        "platform": device.platform,
        "devices": jax.device_count(),
    }
    if (folder / "program").exists():
        found |= _measured(
            export.deserialize(bytearray((folder / "program").read_bytes())),
            **json.loads((folder / "request.json").read_text()),
        )
    (folder / "measured.json").write_text(json.dumps(found))


def _measured(exported: export.Exported, donated: Sequence[int], devices: int, runs: int) -> dict[str, Any]:
    """Returns the time of a run and the memory."""
    mesh = Mesh(np.array(jax.devices()[:devices]), ("data",))
    replicated = NamedSharding(mesh, PartitionSpec())
    shardings = [sharding or replicated for sharding in exported.in_shardings_jax(mesh)]
    arguments = [_zeros(aval, sharding) for aval, sharding in zip(exported.in_avals, shardings, strict=True)]
    run = jax.jit(exported.call, donate_argnums=donated, keep_unused=True)
    compiled = run.lower(*arguments).compile()
    seconds = []
    for _ in range(runs + 1):  # the first is a warm-up
        start = time.perf_counter()
        results = jax.block_until_ready(compiled(*arguments))
        seconds.append(time.perf_counter() - start)
        for number, result in zip(donated, results, strict=False):  # the state comes first in both
            arguments[number] = result
    stats = jax.devices()[0].memory_stats() or {}
    peak_bytes = stats.get("peak_bytes_in_use")
    sizes: Any = compiled.memory_analysis()
    return {
        "argument_bytes": sizes.argument_size_in_bytes,
        "output_bytes": sizes.output_size_in_bytes,
        "alias_bytes": sizes.alias_size_in_bytes,
        "temp_bytes": sizes.temp_size_in_bytes,
        "peak_bytes": peak_bytes,
        "seconds": statistics.median(seconds[1:]),
    }


def _zeros(aval: Any, sharding: Sharding) -> jax.Array:
    if jnp.issubdtype(aval.dtype, jax.dtypes.prng_key):
        implementation = _KEYS.get(str(aval.dtype), "threefry2x32")
        return jax.device_put(jax.random.split(jax.random.key(0, impl=implementation), aval.shape), sharding)
    return jax.device_put(jnp.zeros(aval.shape, aval.dtype), sharding)


def _program(folder: Path) -> export.Exported:
    return export.deserialize(bytearray((folder / "program").read_bytes()))
