"""What exported programs take on the devices that are here, each measured in a process of its own."""

import json
import os
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jmp_train.aot import measure_process
from jmp_train.aot.compiling import run_process
from jmp_train.aot.exported import ExportedProgram


@dataclass(frozen=True)
class Devices:
    """The devices that a new process of jax finds.

    Attributes:
      device: the kind of the first one, such as "NVIDIA H100 80GB HBM3".
      platform: "gpu", "cpu", ...
      devices: how many.
    """

    device: str
    platform: str
    devices: int


@dataclass(frozen=True)
class Measured(Devices):
    """What a run of a program took.

    Attributes:
      seconds: the median of several runs.
      peak_bytes: the most that was in use in the device's pool; None where the device does not say.
      argument_bytes: of the arguments, by the program that was compiled here.
      output_bytes: of the results.
      alias_bytes: of the results that take the place of donated arguments.
      temp_bytes: of everything else.
    """

    seconds: float
    peak_bytes: int | None
    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    temp_bytes: int


def devices_here(*, timeout: float = 120) -> Devices:
    """Returns the devices that a new process finds; this process may be told to use the CPU.

    Args:
      timeout: seconds.

    Raises:
      RuntimeError: jax does not start.
      TimeoutError: it took longer than `timeout`.
    """
    return Devices(**_run(None, 0, timeout))


def measure_program(program: ExportedProgram, *, runs: int = 10, timeout: float = 1800) -> Measured:
    """Runs an exported program on the devices that are here, with zeros as arguments.

    This process should not hold the GPU: set JAX_PLATFORMS=cpu for it, which is not passed on.

    Args:
      program: exported for the platform that is here, whose donated arguments come back as its first results.
      runs: how many are timed, after a first one.
      timeout: seconds.

    Raises:
      RuntimeError: it failed, for example since memory did not suffice; the text has the traceback.
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
        command = (sys.executable, measure_process.__file__, scratch)
        run_process("measuring", command, folder / "log", environment, timeout)
        return json.loads((folder / "measured.json").read_text())
