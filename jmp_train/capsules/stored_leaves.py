"""Leaves and structures of batches and states as bytes and JSON, and back: kinds, shardings, parts, pytree nodes.

A class of a node is looked up among the loaded ones, or in packages with common containers of batches. jax must know it
as a pytree node. Nothing else is imported, no pickle is read, and no code of the file runs.
"""

import ast
import contextlib
import importlib
import math
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, Sharding
from jax.sharding import PartitionSpec as P
from jax.tree_util import PyTreeDef, default_registry

from jmp_train.checkpoints import STORED, is_count, shown
from jmp_train.distributed import is_divided, key_implementation, local_data, to_leaf
from jmp_train.policies.files import printable
from jmp_train.policies.pytrees import is_key

_NUMBERS = {kind.__name__: kind for kind in (bool, int, float, complex)}


class StoredLeaf(NamedTuple):
    """The metadata of a leaf in a capsule.

    Attributes:
      kind: "array" of jax, "weak" for one of a weak type, "numpy", "key", or the Python type of a number.
      key: the implementation of a random key; otherwise "".
      dtype: NumPy's name of the dtype; for a random key, that of its data.
      shape: the shape of the whole array, or of the key's data.
      sharding: its mesh and partition spec; None if that is not known.
      parts: for each stored part its [start, stop] along each axis.
    """

    kind: str
    key: str
    dtype: str
    shape: list[int]
    sharding: dict[str, Any] | None
    parts: list[list[list[int]]]


def stored(x: Any) -> tuple[StoredLeaf, list[np.ndarray]]:
    """Returns a leaf's metadata, and the parts of it that this process has.

    Raises:
      TypeError: the leaf is neither an array nor a number.
      ValueError: the array was deleted.
    """
    if isinstance(x, jax.Array):
        return _stored_array(x)
    if not isinstance(x, np.ndarray | np.generic | bool | int | float | complex):
        raise TypeError(f"a leaf must be an array or a number, got {type(x).__name__}")
    array = np.asarray(x)
    kind = "numpy" if isinstance(x, np.ndarray | np.generic) else type(x).__name__
    return StoredLeaf(kind, "", array.dtype.name, list(array.shape), None, [_all_of(array)]), [array]


def _stored_array(x: jax.Array) -> tuple[StoredLeaf, list[np.ndarray]]:
    if x.is_deleted():
        raise ValueError("an array was deleted, usually by donation")
    sharding, kind, key = _described(x.sharding), "weak" if jax.typeof(x).weak_type else "array", ""
    if is_key(x):
        x, kind, key = jax.random.key_data(x), "key", key_implementation(x)
    parts = {}
    if is_divided(x):
        for shard in x.addressable_shards:
            bounds = tuple(part.indices(size)[:2] for part, size in zip(shard.index, x.shape, strict=True))
            parts[bounds] = np.asarray(shard.data)
    else:
        array = local_data(x)
        parts[tuple(map(tuple, _all_of(array)))] = array
    indices = [[list(pair) for pair in bounds] for bounds in parts]
    return StoredLeaf(kind, key, x.dtype.name, list(x.shape), sharding, indices), list(parts.values())


def _all_of(array: np.ndarray) -> list[list[int]]:
    return [[0, size] for size in array.shape]


def what_is_wrong(leaf: StoredLeaf, parts: Sequence[np.ndarray]) -> str:
    """Returns why the metadata in a file are invalid, or do not fit the arrays of the parts; otherwise ""."""
    if leaf.kind not in {*_NUMBERS, "array", "weak", "numpy", "key"} or (leaf.kind == "key") != bool(leaf.key):
        return f"kind {shown(leaf.kind)} and key {shown(leaf.key)}"
    if leaf.kind in _NUMBERS and leaf.shape:
        return f"shape {shown(leaf.shape)}"
    if leaf.dtype not in STORED or not all(is_count(size) for size in leaf.shape):
        return f"dtype {shown(leaf.dtype)} and shape {shown(leaf.shape)}"
    for index, part in zip(leaf.parts, parts, strict=True):
        inside = [0 <= start <= stop <= size for (start, stop), size in zip(index, leaf.shape, strict=True)]
        if (
            not all(inside)
            or part.shape != tuple(stop - start for start, stop in index)
            or part.dtype.name != leaf.dtype
        ):
            return f"the part {shown(index)}"
    return ""


def restored(leaf: StoredLeaf, array: np.ndarray) -> Any:
    """Returns a leaf of the stored kind, on the devices of its mesh if these are present.

    Raises:
      ValueError: the leaf has 64 bits, which are disabled in jax.
    """
    if leaf.kind in _NUMBERS:
        return _NUMBERS[leaf.kind](array.item())
    if leaf.kind == "numpy":
        return array
    try:
        like = jax.random.key(0, impl=leaf.key) if leaf.key else jax.ShapeDtypeStruct(array.shape, array.dtype)
        x = to_leaf(array, like, _sharding(leaf.sharding))
    except (RuntimeError, MemoryError):  # of the device
        raise
    except Exception as error:  # noqa: BLE001 - of any kind, because jax's errors about shardings are of many
        raise ValueError(
            f"the key {shown(leaf.key)} or sharding {shown(leaf.sharding)} does not fit: {error}"
        ) from None
    if not leaf.key and x.dtype.name != leaf.dtype:
        raise ValueError(f"a leaf is {leaf.dtype}, which needs JAX_ENABLE_X64=1")
    if leaf.kind == "weak":  # an update of a weak array stays weak
        return jnp.broadcast_to(jnp.asarray(x.dtype.type(0).item()), x.shape).at[...].set(x)
    return x


def short_type(x: Any) -> str:
    """Returns dtype and shape, for example "float32[3, 4]"; for a key, its implementation and the shape of its data."""
    if is_key(x):
        shape = jax.eval_shape(jax.random.key_data, x).shape
        return f"{key_implementation(x)}{list(shape)}"
    return f"{jnp.result_type(x).name}{list(jnp.shape(x))}"


def whole(leaves: Sequence[StoredLeaf], parts: Sequence[Sequence[np.ndarray]], own: int | None) -> np.ndarray:
    """Returns a whole leaf, assembled from the parts of all processes.

    Args:
      leaves: the leaf's metadata in each process.
      parts: the leaf's parts in each process.
      own: index of this process if the number of processes is the same; otherwise None.

    Raises:
      ValueError: parts are missing, or each process had a different leaf.
    """
    first = leaves[0]
    if any((leaf.dtype, leaf.shape, leaf.kind) != (first.dtype, first.shape, first.kind) for leaf in leaves):
        raise ValueError("it is another leaf in each process")
    if all(leaf.parts and leaf.parts[0] == [[0, size] for size in leaf.shape] for leaf in leaves):
        mine = parts[own or 0][0]
        if own is None and any(part[0].tobytes() != mine.tobytes() for part in parts):
            raise ValueError(f"each of {len(leaves)} processes had a different one; load it with as many processes")
        return mine
    bounds = {
        tuple(map(tuple, index)): part
        for leaf, arrays in zip(leaves, parts, strict=True)
        for index, part in zip(leaf.parts, arrays, strict=True)
    }
    if sum(part.size for part in bounds.values()) != math.prod(first.shape):
        raise ValueError("parts of it are missing")
    array, known = np.empty(first.shape, first.dtype), np.zeros(first.shape, bool)
    for index, part in bounds.items():
        place = tuple(slice(*pair) for pair in index)
        array[place], known[place] = part, True
    if not known.all():
        raise ValueError("parts of it overlap")
    return array


def _described(sharding: Sharding) -> dict[str, Any] | None:
    if not isinstance(sharding, NamedSharding) or not isinstance(sharding.mesh, Mesh):
        return None
    mesh = sharding.mesh
    return {
        "axes": dict(zip(mesh.axis_names, mesh.devices.shape, strict=True)),
        "types": [kind.name for kind in mesh.axis_types],
        "devices": [device.id for device in mesh.devices.flat],
        "spec": [list(entry) if isinstance(entry, tuple) else entry for entry in sharding.spec],
    }


def _sharding(described: dict[str, Any] | None) -> Sharding | None:
    """Returns the sharding over the devices with the same ids; None if one of them does not exist."""
    devices = {device.id: device for device in jax.devices()}
    if described is None or not devices.keys() >= set(described["devices"]):
        return None
    axes = described["axes"]
    placed = np.array([devices[number] for number in described["devices"]]).reshape(tuple(axes.values()))
    mesh = Mesh(placed, tuple(axes), axis_types=tuple(AxisType[name] for name in described["types"]))
    spec = P(*(tuple(entry) if isinstance(entry, list) else entry for entry in described["spec"]))
    return NamedSharding(mesh, spec)


_IMPORTED = ("jmp_train.graphs.", "jraph.", "flax.core.")
_LEAF = "*"


def structure_to_json(structure: Any) -> Any:
    """Returns a structure as JSON data; None if it has a node whose fields are not literals.

    Example:
      >>> import jax
      >>> structure_to_json(jax.tree.structure({"x": (1, None)}))
      ['builtins:dict', "['x']", [['builtins:tuple', 'None', ['*', ['builtins:NoneType', 'None', []]]]]]
    """
    node = structure.node_data()
    if node is None:
        return _LEAF
    kind, static = node
    children = [structure_to_json(child) for child in structure.children()]
    if None in children or not _is_literal(static):
        return None
    return [f"{kind.__module__}:{kind.__qualname__}", repr(static), children]


def structure_from_json(described: Any) -> Any:
    """Returns the structure described by `structure_to_json`.

    Raises:
      ValueError: a class is not loaded, or is no pytree node.
    """
    make = PyTreeDef.from_node_data_and_children  # pyright: ignore[reportAttributeAccessIssue]
    if described == _LEAF:
        return make(default_registry, None, [])
    name, static, children = described
    kind, rest = _class_of(name), [structure_from_json(child) for child in children]
    try:
        data = ast.literal_eval(static)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        raise ValueError(f"a node {printable(name)} has fields that are no literals") from None
    if kind is dict and (not isinstance(data, list) or not len({*data}) == len(data) == len(rest)):
        raise ValueError("a dictionary does not have its own key for each value")
    try:
        return make(default_registry, (kind, data), rest)
    except (RuntimeError, ValueError, TypeError) as error:
        raise ValueError(f"jax knows no node {printable(name)}: {error}") from None


def _is_literal(x: object) -> bool:
    try:
        found = ast.literal_eval(repr(x))
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return False
    return type(found) is type(x) and found == x


def _class_of(name: str) -> type[Any]:
    module, _, path = name.partition(":")
    if name == "builtins:NoneType":
        return type(None)
    if module not in sys.modules and f"{module}.".startswith(_IMPORTED):
        with contextlib.suppress(ImportError):
            importlib.import_module(module)
    found: Any = sys.modules.get(module)
    for part in path.split("."):
        found = getattr(found, part, None)
    if not isinstance(found, type):
        raise ValueError(
            f"the class {printable(name)} is not loaded: import its module, or pass like=a batch of that structure"
        )
    return found
