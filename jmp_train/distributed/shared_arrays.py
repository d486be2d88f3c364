"""Moves arrays between devices, the host and processes, and checks that all processes have the same."""

import hashlib
import json
import re
from collections import Counter, defaultdict
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec, Sharding
from jax.typing import ArrayLike

from jmp_train.policies import PyTree
from jmp_train.policies.pytrees import is_key, named_leaves
from jmp_train.types import Batch

_SHOWN = 5  # differences that an error lists
_IMPLEMENTATIONS = {
    "key<fry>": "threefry2x32",
    "key<rbg>": "rbg",
    "key<urbg>": "unsafe_rbg",
}


def is_divided(x: object) -> bool:
    """Returns whether a leaf is divided between processes, so that none has all of it."""
    return isinstance(x, jax.Array) and not (x.is_fully_addressable or x.is_fully_replicated)


def local_data(x: ArrayLike) -> np.ndarray:
    """Returns an undivided leaf as a NumPy array; for a random key, its data."""
    if is_key(x):
        x = jax.random.key_data(x)
    if isinstance(x, jax.Array) and not x.is_fully_addressable:
        x = x.addressable_data(0)
    return np.asarray(x)


def to_host(x: ArrayLike) -> np.ndarray:
    """Returns a leaf as a NumPy array that owns its memory; all processes gather one that is divided between them."""
    if is_divided(x):
        from jax.experimental import multihost_utils

        return multihost_utils.process_allgather(x, tiled=True)
    array = local_data(x)
    if not array.dtype.isnative:
        return array.astype(array.dtype.newbyteorder("="))
    # On a CPU it would be the device's memory, which the next step may reuse; a NumPy array may be changed by its
    # owner.
    mine = array.flags.owndata and array is not x
    return array if mine else array.copy()


def as_bytes(array: np.ndarray) -> np.ndarray:
    """Returns the bytes of an array, uint8 [bytes]."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def placement(like: object) -> Sharding | None:
    """Returns the sharding of a leaf; None if it is on no particular device."""
    fixed = isinstance(like, jax.ShapeDtypeStruct) or getattr(like, "committed", False)
    sharding = getattr(like, "sharding", None) if fixed else None
    if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, AbstractMesh):
        return None  # eval_shape under jax.set_mesh gives meshes without devices
    return sharding


def key_implementation(key: Any) -> str:
    """Returns jax's name for the implementation of a key, or of the shape of a key."""
    return _IMPLEMENTATIONS.get(str(key.dtype)) or str(jax.random.key_impl(key))


def to_leaf(array: np.ndarray, like: Any, sharding: Sharding | None) -> Any:
    """Returns an array converted to the kind of another leaf: a jax array, a key, a NumPy array or a number.

    Args:
      array: the array; for a key, its data.
      like: the other leaf.
      sharding: sharding of the result, or of the key; None for no particular device.
    """
    if not hasattr(like, "dtype"):
        return type(like)(array.item())
    if isinstance(like, np.ndarray | np.generic):
        array = array.astype(like.dtype, copy=False)  # in its byte order
        return array if isinstance(like, np.ndarray) else array[()]
    if is_key(like):
        return jax.random.wrap_key_data(_placed(array, sharding), impl=key_implementation(like))
    return _placed(array, sharding)


def _placed(array: np.ndarray, sharding: Sharding | None) -> jax.Array:
    if sharding is None or sharding.is_fully_addressable:
        return jax.device_put(array, sharding)
    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])


def check_agreement(state: PyTree = None, batch: Batch = None, **values: object) -> None:
    """Raises an error in all processes if their values differ; every process must call it.

    Args:
      state: tree whose leaves must be bitwise equal, such as a `TrainState` or parameters. For leaves that are
        divided between processes, only shapes and dtypes are compared.
      batch: tree of arrays whose shapes and dtypes must be equal; their values may differ.
      **values: other values that must be equal, such as `policy` and `seed`: numbers, texts, policies. Their
        printed forms are compared.

    Raises:
      ValueError: processes differ; the message lists the differences and the processes in the minority.

    Example:
      >>> import numpy as np
      >>> from jmp_train import distributed
      >>> distributed.check_agreement(batch={"x": np.ones((8, 2))}, seed=0, policy="mixed_float16")
    """
    if jax.process_count() == 1:
        return
    _check_device_counts()
    facts = {"jax": jax.__version__, "x64": str(jax.dtypes.canonicalize_dtype(float))}
    facts |= {name: _printed(value) for name, value in values.items()}
    facts |= {f"batch {path!r}": _kind(x) for path, x in named_leaves(batch)}
    facts |= {f"state {path!r}": f"{_kind(x)} {_digest(x)}" for path, x in named_leaves(state)}
    _check_same(_gather(facts))


def broadcast_state(state: PyTree, mesh: Mesh | None = None, *, shardings: PyTree = None) -> Any:
    """Returns the state of process 0, bitwise, in all processes; every process must call it.

    Args:
      state: tree of arrays and numbers, such as a `TrainState`, with the same shapes and dtypes everywhere.
      mesh: mesh on which every device gets a copy, as for `data_parallel` and `sharded_step`.
        None puts the result on the first device of each process, as for `pmap_step`. NumPy arrays stay NumPy arrays.
      shardings: shardings in place of a mesh, a tree like `state`, for example from `fsdp_shardings`.

    Raises:
      ValueError: `mesh` and `shardings` are both given, the processes' states differ in structure, shapes or
        dtypes, or a leaf is divided between them.
      TypeError: `mesh` is not a mesh.

    Example:
      >>> import jax, jax.numpy as jnp, optax
      >>> import jmp_train as jt
      >>> mesh = jax.sharding.Mesh(jax.devices(), ("data",))
      >>> state = jt.distributed.broadcast_state(jt.TrainState.create(jnp.ones(2), optax.sgd(0.1)), mesh)
      >>> state.params.sharding.is_fully_replicated
      True
    """
    if mesh is not None and shardings is not None:
        raise ValueError("mesh and shardings exclude each other, because shardings contain a mesh")
    if not isinstance(mesh, Mesh | None):
        raise TypeError(f"mesh must be a jax.sharding.Mesh, got {type(mesh).__name__}")
    divided = [path for path, x in named_leaves(state) if is_divided(x)]
    if divided:
        raise ValueError(f"state {divided[0]!r} must be whole on each process, but is divided between processes")
    if jax.process_count() > 1:
        _check_device_counts()
        _check_same(_gather({f"state {path!r}": _kind(x) for path, x in named_leaves(state)}))
    host = broadcast_arrays(jax.tree.map(local_data, state))
    if shardings is not None:
        return jax.tree.map(lambda x, data, where: to_leaf(data, x, where), state, host, shardings)
    sharding = None if mesh is None else NamedSharding(mesh, PartitionSpec())
    return jax.tree.map(lambda x, data: to_leaf(data, x, sharding), state, host)


def broadcast_arrays(arrays: PyTree) -> Any:
    """Returns process 0's NumPy arrays in all processes, with the same shapes and dtypes everywhere.

    Args:
      arrays: tree of NumPy arrays.
    """
    if jax.process_count() == 1:
        return arrays
    from jax.experimental import multihost_utils

    # As bytes, because jax broadcasts by a sum with zeros, in which -0.0 loses its sign.
    sent = multihost_utils.broadcast_one_to_all(jax.tree.map(as_bytes, arrays))
    return jax.tree.map(lambda x, data: data.view(x.dtype).reshape(x.shape), arrays, sent)


def gather_texts(text: str) -> list[str]:
    """Returns the texts of all processes, in all processes.

    Args:
      text: the text of this process.
    """
    if jax.process_count() == 1:
        return [text]
    from jax.experimental import multihost_utils

    data = np.frombuffer(text.encode(), np.uint8)
    sizes = multihost_utils.process_allgather(np.int32(len(data)))
    padded = np.zeros(max(1, sizes.max()), np.uint8)
    padded[: len(data)] = data
    rows = multihost_utils.process_allgather(padded)
    return [row[:size].tobytes().decode() for row, size in zip(rows, sizes, strict=True)]


def _check_device_counts() -> None:
    counts = Counter(device.process_index for device in jax.devices())
    _check_same([{"number of devices": str(count)} for _, count in sorted(counts.items())])


def _printed(value: object) -> str:
    return re.sub(r" at 0x[0-9a-f]+", "", str(value))  # removes the addresses of functions, which differ


def _kind(x: object) -> str:
    if isinstance(x, jax.Array | np.ndarray | np.generic | jax.ShapeDtypeStruct):
        return f"{x.dtype.name}{list(x.shape)}"
    return type(x).__name__


def _digest(x: ArrayLike) -> str:
    if is_divided(x):
        return "divided"  # each process has another part of it
    return hashlib.blake2b(as_bytes(local_data(x)).data, digest_size=8).hexdigest()


def _gather(facts: dict[str, str]) -> list[dict[str, str]]:
    """Returns the facts of all processes, or only this process's if all are equal."""
    from jax.experimental import multihost_utils

    text = json.dumps(facts)
    digest = np.frombuffer(hashlib.blake2b(text.encode(), digest_size=16).digest(), np.uint8)
    if not np.ptp(multihost_utils.process_allgather(digest), axis=0).any():
        return [facts]
    return [json.loads(other) for other in gather_texts(text)]


def _check_same(facts: list[dict[str, str]]) -> None:
    """Raises ValueError if the facts of the processes differ."""
    lines = _differences(facts)
    if len(lines) > _SHOWN:
        lines[_SHOWN:] = [f"and {len(lines) - _SHOWN} more"]
    if lines:
        raise ValueError("the processes do not agree:\n  " + "\n  ".join(lines))


def _differences(facts: list[dict[str, str]]) -> list[str]:
    """Returns a line for each name with different values in different processes."""
    names = dict.fromkeys(name for those in facts for name in those)
    lines = []
    for name in names:
        holders = defaultdict(list)
        for process, those in enumerate(facts):
            holders[those.get(name, "nothing")].append(process)
        if len(holders) > 1:
            rarest_first = sorted(holders.items(), key=lambda item: (len(item[1]), -item[1][0]))
            parts = [f"{_processes(who)} {value}" for value, who in rarest_first]
            lines.append(f"{name}: " + "; ".join(parts))
    return lines


def _processes(indices: list[int]) -> str:
    if len(indices) == 1:
        return f"process {indices[0]} has"
    *first, last = map(str, indices)
    return f"processes {', '.join(first)} and {last} have"
