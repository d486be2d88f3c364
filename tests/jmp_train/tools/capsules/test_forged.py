"""Forged capsules: the sums are right, any node of the header is replaced. Each is refused, or harmless."""

import json
import random
import tracemalloc
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from forged_json import CONTROL, every_forgery, places, replaced
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from pytrees import assert_bitwise_equal
from sealed_files import entry, forge

import jmp_train as jt

pytestmark = pytest.mark.quick

ABOUT = "jmp_train.capsule"


def recorded(folder: Path) -> tuple[Path, jt.TrainState, Any]:
    """Returns a capsule, the state after it, and its batch, of which one leaf is divided between devices."""
    optimizer = jt.with_loss_scale(optax.sgd(0.1), jt.torch_loss_scale(256.0))
    state = jt.TrainState.create({"w": jnp.ones(3)}, optimizer, rng=jax.random.key(0))
    mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2])
    split = jax.device_put(np.arange(4, dtype=np.float32), NamedSharding(mesh, P("data")))
    batch = {"a": (split, None), "b": [jax.random.key(1), 0.5], "c": np.arange(3, dtype=np.int32)}
    with jt.SkipRecorder(folder, wait=True) as recorder:
        state, _ = recorder.watch(lambda state, batch: (state, {"grads_finite": jnp.array(False)}))(state, batch)
        path = recorder.last_capsule()
    assert path is not None
    return path, state, batch


def same(state: Any, other: Any) -> None:
    for x, y in zip(jax.tree.leaves(state), jax.tree.leaves(other), strict=True):
        if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            x, y = jax.random.key_data(x), jax.random.key_data(y)
        assert type(x) is type(y)
        assert_bitwise_equal(np.asarray(x), np.asarray(y))


def is_refused(path: Path, state: jt.TrainState, wanted: Any) -> bool:
    """Returns whether a capsule is refused in the documented way; otherwise it must give what was recorded."""
    try:
        found = jt.load_capsule(path, state)
    except ValueError as error:
        assert str(error).startswith(str(path)), error
        assert all(line.isprintable() for line in str(error).split("\n  ")), error
        assert len(str(error)) < 3000
        return True
    if wanted is not None:
        same(found, wanted)
    return False


@pytest.mark.timeout(300)
@pytest.mark.parametrize("part", [24, pytest.param(1, marks=pytest.mark.full)])
def test_a_node_of_the_header_is_replaced(tmp_path: Path, part: int) -> None:
    path, state, _ = recorded(tmp_path)
    header = entry(path, ABOUT)
    wanted, refused = jt.load_capsule(path, state), 0
    texts = every_forgery(header, part)
    for text in texts:
        forge(path, ABOUT, text.decode())
        refused += is_refused(path, state, wanted)
    assert refused > 0.8 * len(texts)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("count", [60, pytest.param(1500, marks=pytest.mark.full)])
def test_values_of_the_header_are_exchanged_or_its_bytes_changed(tmp_path: Path, count: int) -> None:
    path, state, _ = recorded(tmp_path)
    header = entry(path, ABOUT)
    generator = random.Random(3)
    every = [*places(header)]

    def at(place: tuple[Any, ...]) -> Any:
        node = header
        for key in place:
            node = node[key]
        return node

    for number in range(count):
        text = bytearray(replaced(header, generator.choice(every), at(generator.choice(every))))
        if number % 2:
            text = bytearray(json.dumps(header).encode())
            text[generator.randrange(len(text))] = generator.choice([*range(32, 127), 0, 10, 255])
        forge(path, ABOUT, text.decode("latin-1"))
        is_refused(path, state, None)  # an exchange may make another capsule that is whole


STRUCTURES = {
    "a key twice": ("builtins:dict", "['a', 'a', 'b']"),
    "few keys": ("builtins:dict", "['a']"),
    "no keys": ("builtins:dict", "None"),
    "mixed keys": ("builtins:dict", "['a', 3, [4]]"),
    "no literal": ("builtins:dict", "__import__('os').system('x')"),
    "parentheses": ("builtins:dict", 9999 * "("),
    "minus": ("builtins:dict", 99999 * "-" + "1"),
    "none with values": ("builtins:NoneType", "None"),
    "other keys": ("builtins:dict", "['x', 'y', 'z']"),
    "a tuple of other paths": ("builtins:tuple", "None"),
    "a function": ("os:system", "None"),
    "no module": ("jraph.nosuch:Graph", "None"),
    "control characters": (f"{CONTROL}:{CONTROL}", "None"),
    "another node": ("jraph.graph:GraphsTuple", "None"),
}


@pytest.mark.parametrize("kind", STRUCTURES)
def test_a_structure_is_not_trusted(tmp_path: Path, kind: str) -> None:
    path, state, _ = recorded(tmp_path)
    header = entry(path, ABOUT)
    header["structure"][:2] = STRUCTURES[kind]
    forge(path, ABOUT, json.dumps(header))
    assert is_refused(path, state, None)
    deep = json.loads(json.dumps(header["structure"]))
    for _ in range(150):
        deep = ["builtins:list", "None", [deep]]
    header["structure"] = deep
    forge(path, ABOUT, json.dumps(header))
    assert is_refused(path, state, None)


@pytest.mark.timeout(30)
def test_a_name_that_promises_many_files_costs_nothing(tmp_path: Path) -> None:
    path, state, _ = recorded(tmp_path)
    many = path.rename(tmp_path / "step_00000000.process_0_of_60000000.capsule")
    tracemalloc.start()
    for name in (many, path):  # the second stands for the files of all processes
        with pytest.raises(FileNotFoundError, match=r"there is no capsule .*step_00000000\.process_1_of_60000000"):
            jt.load_capsule(name, state)
    assert tracemalloc.get_traced_memory()[1] < 2**24
    tracemalloc.stop()
    for name in ("step_\u0660\u0660\u0660\u0660\u0660\u0660\u0660\u0660.capsule", f"step_{'9' * 200}.capsule"):
        with pytest.raises(ValueError, match="does not have the name of a capsule"):
            jt.load_capsule(tmp_path / name, state)


def test_a_file_belongs_to_its_name(tmp_path: Path) -> None:
    path, state, _ = recorded(tmp_path)
    content = path.read_bytes()
    for name in ("step_00000001.capsule", "step_00000000.process_0_of_1.capsule"):
        other = tmp_path / name
        other.write_bytes(content)
        if name.startswith("step_00000001"):
            with pytest.raises(jt.checkpoints.DamagedError, match=r"number of processes \[0, 0, 1\], which its name"):
                jt.load_capsule(other, state)
        else:
            same(jt.load_capsule(other, state)[1], jt.load_capsule(path, state)[1])
