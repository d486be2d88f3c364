"""Runs DGL for `graphs.py` in a process of another Python; see `dgl_server.py`."""

import json
import os
import subprocess
import tempfile
from pathlib import Path

import numpy as np
from graph_cases import LEARNING_RATE, Case, Form, Row, gat_params

PYTHON = Path(__file__).parents[1] / ".venv-dgl" / "bin" / "python"
NAME = "DGL"
INSTALL = "make .venv-dgl/.dgl"


class DGL:
    """DGL's process with the graph of a case.

    Args:
      case: the graph.
      python: of an environment that has DGL.
    """

    def __init__(self, case: Case, python: Path) -> None:
        self._folder = tempfile.TemporaryDirectory()
        file = Path(self._folder.name) / "case.npz"
        params = {f"{name}{i}": x for i, layer in enumerate(gat_params()) for name, x in layer.items()}
        ends = {"senders": case.senders, "receivers": case.receivers}
        arrays = case.arrays | ends | params | {"learning_rate": np.array(LEARNING_RATE)}
        np.savez(file, **arrays)  # pyright: ignore[reportArgumentType]
        command = [str(python), str(Path(__file__).with_name("dgl_server.py")), str(file)]
        environment = {**os.environ, "DGLBACKEND": "pytorch"}  # or it prints a question at its first import
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        self._wait()

    def form(self, row: Row, dtype: str) -> Form | None:
        """Returns the form of a row, or None in half precision, which DGL has not on CPUs."""
        if dtype != "float32":
            return None
        request = {"op": row.op, "inputs": row.inputs, "cotangent": row.cotangent}
        self._tell("make " + json.dumps(request))
        return Form(lambda: self._tell("run"), lambda _: self._results())

    def close(self) -> None:
        """Ends the process."""
        self._process.communicate()
        self._folder.cleanup()

    def _results(self) -> list[np.ndarray]:
        file = Path(self._folder.name) / "results.npz"
        self._tell(f"results {file}")
        with np.load(file) as arrays:
            return list(arrays.values())

    def _tell(self, command: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(command + "\n")
        self._process.stdin.flush()
        self._wait()

    def _wait(self) -> None:
        assert self._process.stdout is not None
        if self._process.stdout.readline() != "ok\n":
            raise RuntimeError("DGL's process ended, see what it printed")
