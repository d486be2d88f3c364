"""Capsules' files: all kinds of batches come back, and damaged files are refused by name."""

import collections
import dataclasses
import random
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jraph
import ml_dtypes
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from process_programs import damage_file
from pytrees import assert_bitwise_equal

import jmp_train as jt
from jmp_train.checkpoints import DamagedError
from jmp_train.tools.capsules.state_parts import parts_of, snapshot

pytestmark = pytest.mark.quick


class Pair(NamedTuple):
    first: Any
    second: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Tagged:
    value: Any
    tag: Any = dataclasses.field(default="", metadata={"static": True})


def recorded(directory: Path, batch: Any, **options: Any) -> tuple[Path, jt.TrainState]:
    """Returns the capsule of a step that is skipped with a batch of any kind, and the state after it."""
    optimizer = jt.with_loss_scale(optax.sgd(0.1), jt.torch_loss_scale(256.0))
    state = jt.TrainState.create({"w": jnp.ones(3)}, optimizer, rng=jax.random.key(0))
    flag = {"grads_finite": jnp.array(False)}
    with jt.SkipRecorder(directory, **options) as recorder:
        state, _ = recorder.watch(lambda state, batch: (state, flag))(state, batch)
        path = recorder.last_capsule()
    assert path is not None
    return path, state


def test_all_kinds_of_leaves_come_back(tmp_path: Path) -> None:
    batch = {
        "float8": jnp.asarray(np.array([0.5, -448], ml_dtypes.float8_e4m3fn)),
        "bfloat16": jnp.full((2, 0), 1, jnp.bfloat16),
        "nan": np.array([np.nan, -0.0, np.inf], np.float16),
        "order": np.arange(3, dtype=">i4"),
        "int64": np.array([2**40]),
        "flags": np.array(True),
        "complex": jnp.ones(2, jnp.complex64),
        "int4": jnp.arange(3, dtype=jnp.int4),
        "keys": jax.random.split(jax.random.key(1, impl="rbg"), 2),
        "old_key": jax.random.PRNGKey(3),
        "weak": jnp.asarray(0.1),
        "weak_rows": jnp.full((2, 2), 0.1),
        "numbers": (True, 3, 0.1, 1j),
        "scalar": np.float32(2.5),
    }
    path, state = recorded(tmp_path, batch)
    _, found = jt.load_capsule(path, state)
    assert jax.tree.structure(found) == jax.tree.structure(batch)
    for name, x in batch.items():
        y = found[name]
        if name == "numbers":
            assert (y, [*map(type, y)]) == (x, [bool, int, float, complex])
        elif name == "keys":
            assert y.dtype == x.dtype
            np.testing.assert_array_equal(jax.random.key_data(y), jax.random.key_data(x))
        else:
            assert isinstance(y, jax.Array) == isinstance(x, jax.Array), name
            assert y.dtype == np.dtype(x.dtype).newbyteorder("="), name
            assert np.asarray(y).tobytes() == np.asarray(x).astype(y.dtype).tobytes(), name
        if isinstance(x, jax.Array):
            assert jax.typeof(y).weak_type == jax.typeof(x).weak_type, name


def test_containers_come_back_without_like(tmp_path: Path) -> None:
    graph = jt.graphs.rand_graph(5, 9).with_nodes(x=np.ones((5, 2), np.float32))
    batch = [
        {"b": None, "a": (np.ones(1), [])},
        collections.OrderedDict(z=np.ones(2), y=np.zeros(2)),
        Pair(np.ones(3), Pair(np.zeros(1), None)),
        Tagged(np.ones(2), tag=("train", 3)),
        graph,
        jt.graphs.stack([graph, graph]),
        jt.graphs.to_jraph(graph),
    ]
    path, state = recorded(tmp_path, batch)
    _, found = jt.load_capsule(path, state)
    assert_bitwise_equal(found, batch)
    assert isinstance(found[6], jraph.GraphsTuple)
    assert list(found[1]) == ["z", "y"]


def test_a_container_of_other_fields_wants_like(tmp_path: Path) -> None:
    batch = {"x": Tagged(np.ones(2), tag=np.dtype(np.float16))}
    path, state = recorded(tmp_path, batch)
    with pytest.raises(ValueError, match=rf"{path} has a batch with .*Tagged.*pass like="):
        jt.load_capsule(path, state)
    like = {"x": Tagged(jax.ShapeDtypeStruct((), np.float32), tag=np.dtype(np.float16))}
    assert_bitwise_equal(jt.load_capsule(path, state, like=like)[1], batch)
    with pytest.raises(ValueError, match=rf"{path} has a batch with other leaves than like"):
        jt.load_capsule(path, state, like={"y": 1})


@pytest.mark.full
@pytest.mark.timeout(100)
def test_a_graph_is_loaded_where_graphs_are_not_imported_yet(tmp_path: Path) -> None:
    graph = jt.graphs.rand_graph(5, 9)
    path, _ = recorded(tmp_path, (graph, jt.graphs.to_jraph(graph)))
    code = """
import sys, jax, jax.numpy as jnp, optax, jmp_train as jt
assert "jmp_train.graphs" not in sys.modules
optimizer = jt.with_loss_scale(optax.sgd(0.1), jt.torch_loss_scale(256.0))
state = jt.TrainState.create({"w": jnp.ones(3)}, optimizer, rng=jax.random.key(0))
_, batch = jt.load_capsule(sys.argv[1], state)
print(*(type(x).__name__ for x in batch), batch[0].num_edges)
"""
    done = subprocess.run((sys.executable, "-c", code, str(path)), capture_output=True, text=True, check=False)
    assert done.stdout == "Graph GraphsTuple 9\n", done.stderr


def test_a_class_that_is_not_loaded_is_named_and_not_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, state = recorded(tmp_path, Pair(np.ones(1), None))
    monkeypatch.delattr(f"{__name__}.Pair")
    with pytest.raises(ValueError, match=rf"{path}: the class {__name__}:Pair is not loaded"):
        jt.load_capsule(path, state)
    monkeypatch.setitem(globals(), "Pair", Path)  # a class, but no node
    with pytest.raises(ValueError, match=rf"{path}: jax knows no node {__name__}:Pair"):
        jt.load_capsule(path, state)


def test_arrays_on_a_mesh_are_there_again(tmp_path: Path) -> None:
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(4, 2), ("data", "model"))
    sharding = NamedSharding(mesh, P(("data", "model"), None))
    batch = {"x": jax.device_put(np.arange(32, dtype=np.float32).reshape(8, 4), sharding)}
    path, state = recorded(tmp_path, batch)
    found = jt.load_capsule(path, state)[1]
    assert_bitwise_equal(found, batch)
    assert found["x"].sharding == sharding


def test_a_damaged_capsule_is_refused_by_its_name(tmp_path: Path) -> None:
    path, state = recorded(tmp_path, {"x": np.ones(4, np.float32)})
    whole, generator = path.read_bytes(), random.Random(0)
    damages = [lambda length=length: path.write_bytes(whole[:length]) for length in range(0, len(whole), 37)]
    damages += [lambda: damage_file(path, "flipped", generator)] * 50
    for damage in damages:
        path.write_bytes(whole)
        damage()
        with pytest.raises(DamagedError, match=re.escape(str(path))):
            jt.load_capsule(path, state)
    path.unlink()
    with pytest.raises(FileNotFoundError, match=re.escape(str(path))):
        jt.load_capsule(path, state)
    with pytest.raises(ValueError, match="does not have the name of a capsule"):
        jt.load_capsule(tmp_path / "weights.capsule", state)


def fingerprints(params: Any) -> list[int]:
    optimizer = jt.with_loss_scale(optax.sgd(0.1), jt.torch_loss_scale())
    opt_state = optimizer.init(jnp.ones(1))
    state = jt.TrainState(params, opt_state, None, None, jnp.zeros((), jnp.int32))
    return snapshot(jax.tree.leaves(state), kept=parts_of(state).kept).fingerprints.tolist()


def test_fingerprints_tell_every_bit_and_place_and_no_sharding() -> None:
    x = np.random.default_rng(0).normal(0, 1, (8, 6)).astype(np.float32)
    swapped, signed, flipped = x.copy(), x.copy(), x.copy()
    swapped[[0, 1]] = x[[1, 0]]
    signed[2, 3] *= -1
    flipped.view(np.uint32)[7, 5] ^= 1
    seen = [fingerprints(y) for y in (x, swapped, signed, flipped, x.T.copy(), x.reshape(-1))]
    assert len({str(found) for found in seen[:-1]}) == 5
    devices = np.array(jax.devices()[:8]).reshape(4, 2)
    for types in (AxisType.Auto, AxisType.Explicit):
        mesh = Mesh(devices, ("data", "model"), axis_types=(types, types))
        for spec in (P("data", "model"), P(None, "model"), P(("data", "model"))):
            assert fingerprints(jax.device_put(x, NamedSharding(mesh, spec))) == seen[0]


def test_fingerprints_of_all_dtypes() -> None:
    for dtype in ("bool", "int4", "uint8", "int32", "float8_e5m2", "bfloat16", "float16", "float32", "complex64"):
        x = np.arange(6).reshape(2, 3).astype(jnp.dtype(dtype))
        other = x.copy()
        other[1, 2] = x[0, 0]
        assert fingerprints(jnp.asarray(x)) == fingerprints(jnp.asarray(x)) != fingerprints(jnp.asarray(other)), dtype
