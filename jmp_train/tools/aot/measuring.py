"""Measures exported programs on this machine's devices, each in a separate process."""

import json
import os
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jmp_train.tools.aot import exported_process
from jmp_train.tools.aot.compiling import run_process
from jmp_train.tools.aot.exported import ExportedProgram


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
        command = (sys.executable, exported_process.__file__, "measure", scratch)
        run_process("measuring", command, folder / "log", environment, timeout)
        return json.loads((folder / "measured.json").read_text())
