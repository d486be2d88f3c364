"""What lies in a foreign file's place: no reader waits, fills the memory, or leaves out the file's name."""

import functools
import json
import os
import resource
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from example_tasks import FOLDER
from forged_json import every_forgery
from machine_limits import memory_limited_to
from pytrees import assert_bitwise_equal
from sealed_files import entry, forge

import jmp_train as jt
from jmp_train import aot
from jmp_train.app.cli.entry import main
from jmp_train.checkpoints.restoring import open_folder
from jmp_train.checkpoints.step_files import open_step
from jmp_train.graphs.file_formats import read_csv_table, read_npz, read_python2_pickle, read_torch_arrays
from jmp_train.policies.files import DamagedError, SafetensorsFile, open_plain, read_plain, write_safetensors

pytestmark = [pytest.mark.quick, pytest.mark.timeout(120)]


def load_capsule(path: Path) -> Any:
    return jt.load_capsule(path, _state())


@functools.cache
def _state() -> jt.TrainState:
    return jt.TrainState.create(jnp.ones(2), jt.with_loss_scale(optax.sgd(0.1), jt.torch_loss_scale()))


READERS: dict[str, Callable[[Path], Any]] = {  # by a name that the reader accepts
    "step_00000000.capsule": load_capsule,
    "weights.safetensors": lambda path: jt.load_weights(path, {"w": np.ones(2, np.float32)}),
    "graphs.safetensors": jt.graphs.load_graphs,
    "rules.toml": jt.AutocastRules.load,
    "gpus.toml": aot.read_gpus,
    "step_00000001.safetensors": lambda path: open_step(path, 1).__enter__(),
    "step_00000001/manifest.json": lambda path: open_folder(path.parent, 1).__enter__(),
    "table.csv": lambda path: read_csv_table(path, np.float32),
    "table.csv.gz": lambda path: read_csv_table(path, np.float32),
    "arrays.npz": lambda path: read_npz(path, ["x"]),
    "ind.cora.allx": read_python2_pickle,
    "train.pt": read_torch_arrays,
    "text": lambda path: read_plain(path, max_bytes=2**30),
}


WEIGHTS = {"w": np.arange(2, dtype=np.float32), "n": np.ones((), np.int32)}
Forged = tuple[Any, Callable[[bytes], Any], Callable[[], Any]]  # data, a writer of a text in their place, a reader


def placed(path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path.parent.mkdir(exist_ok=True)
    monkeypatch.chdir(path.parent)  # a socket's path has to be short
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(path.name)
    elif kind == "folder":
        path.mkdir()
    elif kind == "loop":
        path.symlink_to(path.name)
    elif kind == "sparse":
        path.touch()
        os.truncate(path, 2**30 + 1)
    elif kind == "empty":
        path.touch()
    elif kind.startswith("/"):
        path.symlink_to(kind)


KINDS = (
    "pipe",
    "socket",
    "folder",
    "loop",
    "missing",
    "sparse",
    "empty",
    "/dev/zero",
    "/dev/full",
    "/proc/self/mem",
)  # the last cannot be read


@pytest.mark.parametrize("kind", KINDS)
def test_no_reader_waits_and_each_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    _state()  # jax needs memory to start
    for number, (name, read) in enumerate(READERS.items()):
        path = tmp_path / str(number) / name
        path.parent.parent.mkdir(exist_ok=True)
        placed(path, kind, monkeypatch)
        if kind == "empty" and name.endswith((".csv", ".gz", "toml", "text")):
            read(path) if name != "rules.toml" else None  # nothing is a table without rows
            continue
        with memory_limited_to(2**29), pytest.raises((DamagedError, OSError)) as caught:
            read(path)
        assert str(path).removesuffix(".json") in str(caught.value)  # or its sum's
        assert "\n" not in str(caught.value)


def test_a_file_that_shrinks_or_grows_is_an_error_and_no_signal(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_safetensors(path, {"w": np.zeros(2**16)}, {})
    with SafetensorsFile(path) as file:
        os.truncate(path, 2**12)
        with pytest.raises(DamagedError, match=rf"{path}: the array 'w' is truncated"):
            file.read("w")
    path.write_bytes(b"abc")
    assert read_plain(path, max_bytes=3) == b"abc"
    with pytest.raises(DamagedError, match=rf"{path} is too large: it has 3 bytes, more than the limit of 2$"):
        read_plain(path, max_bytes=2)
    with pytest.raises(DamagedError, match="/proc/self/status changed while it was read"):  # it has no size
        read_plain("/proc/self/status", max_bytes=2**20)


def test_too_little_memory_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.touch()
    with pytest.raises(OSError, match=f"does not fit into memory: '{path}'"), open_plain(path):
        bytearray(2**62)


def test_a_link_is_followed_only_if_wanted(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"abc")
    (tmp_path / "link").symlink_to("file")
    assert read_plain(tmp_path / "link", max_bytes=3) == b"abc"
    with pytest.raises(DamagedError, match="link is not a regular file"):
        read_plain(tmp_path / "link", max_bytes=3, follow=False)


def safetensors(path: Path) -> tuple[Any, Callable[[bytes], Any]]:
    content = path.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    return json.loads(content[8:end]), lambda text: path.write_bytes(
        len(text).to_bytes(8, "little") + text + content[end:]
    )


def forged_weights(path: Path) -> Forged:
    jt.save_weights(path, WEIGHTS)
    return *safetensors(path), lambda: jt.load_weights(path, WEIGHTS)


def forged_graphs(path: Path) -> Forged:
    jt.graphs.save_graphs(path, jt.graphs.from_edges([0, 1], [1, 0], 2, nodes={"x": np.ones(2)}), {"y": np.ones(1)})
    return *safetensors(path), lambda: jt.graphs.load_graphs(path)


def forged_descriptions_of_graphs(path: Path) -> Forged:
    *_, load = forged_graphs(path)
    header, seal = safetensors(path)
    about = header["__metadata__"]

    def seal_description(text: bytes) -> None:
        seal(json.dumps({**header, "__metadata__": {**about, "graphs": text.decode()}}).encode())

    return json.loads(about["graphs"]), seal_description, load


def forged_manifest(path: Path) -> Forged:
    with jt.CheckpointStore(path) as store:
        store.save(1, WEIGHTS)
    file = path / "step_00000001.safetensors"

    def seal(text: bytes) -> None:
        forge(file, "jmp_train.checkpoint", text.decode())

    def load() -> Any:
        with jt.CheckpointStore(path, read_only=True) as store:
            return store.restore(WEIGHTS)

    return entry(file, "jmp_train.checkpoint"), seal, load


@pytest.mark.parametrize("part", [10, pytest.param(1, marks=pytest.mark.full)])
@pytest.mark.parametrize("forged", [forged_weights, forged_graphs, forged_descriptions_of_graphs, forged_manifest])
def test_a_node_of_the_header_is_replaced(tmp_path: Path, forged: Callable[[Path], Forged], part: int) -> None:
    path = tmp_path / "forged"
    data, seal, load = forged(path)
    wanted, refused = load(), 0
    texts = every_forgery(data, part)
    for text in texts:
        seal(text)
        try:
            found = load()
        except ValueError as error:
            refused += 1
            assert str(path) in str(error)
            assert all(line.isprintable() for line in str(error).split("\n  ")), error
            assert len(str(error)) < 3000
        else:
            if forged is forged_descriptions_of_graphs:  # which have no sum, so another one may fit
                continue
            assert_bitwise_equal(*(list(map(np.asarray, jax.tree.leaves(tree))) for tree in (found, wanted)))
    assert refused > 0.5 * len(texts)


COMMANDS = {
    "step_00000000.capsule": ("diagnose", "digits", "--capsule"),
    "rules": ("train", "digits", "--rules"),
    "compared_rules": ("compare", "digits", "--rules"),
    "gpus": ("plan", "digits", "--gpu-file"),
    "ind.cora.graph": ("train", f"{FOLDER}/cora.py", "--data-dir"),
    "job.py": ("train",),
}


@pytest.mark.full
@pytest.mark.parametrize("kind", ["pipe", "/dev/zero", "sparse", "folder"])
@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_ends_with_exit_code_2_and_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str, kind: str
) -> None:
    path = tmp_path / "in" / name
    placed(path, kind, monkeypatch)
    *command, last = COMMANDS[name] if len(COMMANDS[name]) > 1 else (*COMMANDS[name], "")
    value = {"--data-dir": str(path.parent), "": f"{path}:task"}.get(last, str(path))
    if name == "job.py" and kind == "sparse":
        return  # it is code, of zeros
    assert main([*command, *filter(None, [last]), value]) == 2
    error = capsys.readouterr().err
    assert error.startswith("jmp-train: error: ")
    assert error.count("\n") == 1
    assert ("ind.cora" if "cora" in name else name) in error


@pytest.mark.full
def test_a_pipe_in_the_place_of_a_capsule_ends_the_command(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "step_00000000.capsule")
    command = [sys.executable, "-m", "jmp_train", "diagnose", "digits", "--capsule", "step_00000000.capsule"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False)
    assert (done.returncode, done.stderr) == (2, "jmp-train: error: step_00000000.capsule is not a regular file\n")
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss < 2**21
