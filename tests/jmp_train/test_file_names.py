"""Every byte in a name: a folder or file has exactly that name."""

import os
from collections.abc import Callable
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from pytrees import assert_bitwise_equal

import jmp_train as jt
from jmp_train.app.cli.entry import main
from jmp_train.policies.files import write_atomically

pytestmark = pytest.mark.quick

STATE = {"w": np.arange(3.0, dtype=np.float32)}
BYTES = [b"a" + bytes([byte]) + b"z" for byte in range(1, 256) if byte != ord("/")]
ODD = [b"-x", b" x ", b"~", b"%s", b"{0}", b"s3:", b"[a]", b"..a", b"\n", b"x" * 200, "\u202eé".encode(), b"x.__lock"]


def checkpoint(path: str) -> None:
    with jt.CheckpointStore(path) as store:
        store.save(1, STATE)
        store.wait()
        assert_bitwise_equal(store.restore(STATE)[1], STATE)


def capsule(path: str) -> None:
    state = jt.TrainState.create(jnp.ones(2), jt.with_loss_scale(optax.sgd(0.1), jt.torch_loss_scale()))
    with jt.SkipRecorder(path) as recorder:
        recorder.watch(lambda state, batch: (state, {"grads_finite": jnp.array(False)}))(state, STATE)
        found = recorder.last_capsule()
    assert found is not None
    assert_bitwise_equal(jt.load_capsule(found, state)[1], STATE)


def weights(path: str) -> None:
    jt.save_weights(path, STATE)
    assert_bitwise_equal(jt.load_weights(path, STATE), STATE)


def graph_file(path: str) -> None:
    jt.graphs.save_graphs(path, jt.graphs.from_edges([0], [1], 2))
    assert len(jt.graphs.load_graphs(path)[0]) == 1


def rules(path: str) -> None:
    jt.TORCH_CUDA.save(path)
    assert dict(jt.AutocastRules.load(path).primitives) == dict(jt.TORCH_CUDA.primitives)


WRITERS: list[tuple[Callable[[str], None], bool]] = [  # each with whether it makes a folder
    (checkpoint, True),
    (capsule, True),
    (weights, False),
    (graph_file, False),
    (rules, False),
]


def entries(folder: Path) -> set[bytes]:
    return set(os.listdir(os.fsencode(folder)))


def check(folder: Path, name: bytes, place: str, write: Callable[[str], None], makes_folder: bool) -> None:
    path = os.path.join(os.fsencode(folder), name)
    if place == "middle":
        if not makes_folder:
            os.mkdir(path)
        path = os.path.join(path, b"in")
    before = entries(folder)
    write(os.fsdecode(path))
    assert entries(folder) == before | {name}


@pytest.mark.quick_cases(8)
@pytest.mark.parametrize("place", ["last", "middle"])
@pytest.mark.parametrize(("write", "makes_folder"), WRITERS, ids=[row[0].__name__ for row in WRITERS])
@pytest.mark.parametrize("names", ["few", pytest.param("all", marks=pytest.mark.full)])
def test_every_byte_in_a_name(
    tmp_path: Path, write: Callable[[str], None], makes_folder: bool, names: str, place: str
) -> None:
    few = [name for name in BYTES if name[1] in b'\n \\?#%|"\x01\xff\x80:*']
    for name in ODD + (BYTES if names == "all" else few):
        check(tmp_path, name, place, write, makes_folder)


def test_a_folder_above_or_behind_a_link_is_written_where_the_system_finds_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inner = tmp_path / "real" / "inner"
    inner.mkdir(parents=True)
    (tmp_path / "link").symlink_to(inner)
    checkpoint(str(tmp_path / "link" / ".." / "run"))
    assert (tmp_path / "real" / "run" / "step_00000001.safetensors").is_file()
    monkeypatch.chdir(inner)
    checkpoint("../own/")
    assert (tmp_path / "real" / "own" / "step_00000001.safetensors").is_file()


def test_the_longest_name_can_be_written(tmp_path: Path) -> None:
    for name in ("x" * 255, "é" * 127, os.fsdecode(b"\xff" * 255)):
        assert write_atomically(tmp_path / name, b"abc").read_bytes() == b"abc"
        assert entries(tmp_path) == {os.fsencode(name)}
        (tmp_path / name).unlink()


@pytest.mark.full
@pytest.mark.timeout(300)
def test_a_report_is_written_under_odd_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "a\n[b]\\z?#%|" / os.fsdecode(b"a\xffz")
    task = ["digits", "--train-size", "64", "--batch-size", "32", "--epochs", "1", "--policies", "float32"]
    assert main(["compare", *task, "--out", str(out), "--logdir", str(out / "logs")]) == 0
    assert {*os.listdir(out)} == {"report.json", "report.svg", "report.html", "logs"}
    assert "wrote " + str(tmp_path) + "/a\\n[b]" in capsys.readouterr().out
