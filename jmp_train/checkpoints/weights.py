"""Writes weights to safetensors files, which other programs read too, and reads them back.

A leaf's name in the file is its path as in rules and errors, such as "encoder/0/kernel". The
file's metadata has `format`, `format_version` and, as JSON, `dtypes`: the dtype of each leaf before
it was cast for the file. Casts are made on the host, where subnormal numbers survive.
"""

import contextlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.tree_util import keystr
from jax.typing import DTypeLike

from jmp_train.distributed import is_divided, placement, to_leaf
from jmp_train.policies import PyTree
from jmp_train.policies.files import DTYPES, SafetensorsFile, printable, write_safetensors
from jmp_train.policies.pytrees import checked_path, is_key, path_name

_FORMAT, _VERSION = "jmp_train.weights", "1"
_METADATA = "__metadata__"  # the format's own entry among the names


def save_weights(path: str | os.PathLike[str], params: PyTree, *, dtype: DTypeLike | None = None) -> None:
    """Writes the arrays of a pytree to a safetensors file.

    The file is written atomically, so a partial file never has its name. With several
    processes, let the main one save.

    Args:
      path: the file, in a folder that exists. An existing file is replaced.
      params: pytree of arrays: linen's and haiku's dicts, an nnx state, an equinox module's arrays
        (`eqx.filter(model, eqx.is_array)`). Arrays may be on several devices of this process, or
        replicated over those of many.
      dtype: float16, bfloat16 or float32 for all floating leaves; None keeps their dtypes.
        Integers, bools and complex numbers keep theirs. Small numbers become subnormal or
        zero in float16; inf and NaN stay.

    Raises:
      TypeError: leaves are not arrays, such as Python scalars and random keys, or have a dtype that
        the file cannot hold.
      ValueError: finite values overflow in `dtype`, two leaves have the same name, or an array is
        not here: deleted, or divided between processes. The message lists every such leaf.

    Example:
      >>> import tempfile, jax.numpy as jnp
      >>> file = tempfile.mkdtemp() + "/weights.safetensors"
      >>> params = {"dense": {"kernel": jnp.full((2, 3), 0.1)}}
      >>> save_weights(file, params, dtype=jnp.float16)
      >>> load_weights(file, params)["dense"]["kernel"][0, 0]  # float32 again, rounded once
      Array(0.09997559, dtype=float32)

    Reference: https://huggingface.co/docs/safetensors, the format.
    """
    path = checked_path("path", path)
    target = None if dtype is None else _target(dtype)
    leaves = _named("params", params)
    _check_present(leaves)
    arrays, overflows = {}, []
    for name, x in leaves.items():
        host = np.asarray(x, x.dtype.newbyteorder("="), order="C")
        if target is not None and _is_floating(x.dtype):
            host = _cast(name, host, target, overflows)
        arrays[name] = host
    if overflows:
        raise ValueError(_listing(f"params do not fit into {target}", overflows))
    metadata = {
        "format": _FORMAT,
        "format_version": _VERSION,
        "dtypes": json.dumps({name: x.dtype.name for name, x in leaves.items()}),
    }
    write_safetensors(path, arrays, metadata)


def load_weights(path: str | os.PathLike[str], like: PyTree) -> Any:
    """Returns the arrays of a safetensors file as a pytree.

    Floating leaves are cast to the dtypes of `like`; all other leaves must already have them. Files of
    other programs are read too if they use the same names.

    Args:
      path: the file.
      like: pytree of arrays or `jax.ShapeDtypeStruct`; only its structure, shapes, dtypes and placement
        are used.

    Returns:
      A pytree like `like`: NumPy arrays where it has NumPy arrays, otherwise jax arrays on the devices of
      its committed arrays or of structs with a sharding.

    Raises:
      TypeError: leaves of `like` are not arrays.
      DamagedError: the file is damaged, or not one of this format. It is a ValueError.
      ValueError: the file is of a later version; names are missing or unknown;
        shapes or dtypes differ; values overflow in `like`'s dtype. The message names the file and
        lists every leaf.
      OSError: the file cannot be read.

    Example:
      >>> import tempfile, jax, jax.numpy as jnp
      >>> file = tempfile.mkdtemp() + "/weights.safetensors"
      >>> save_weights(file, {"w": jnp.arange(3.0)})
      >>> load_weights(file, jax.eval_shape(lambda: {"w": jnp.zeros(3, jnp.bfloat16)}))["w"]
      Array([0, 1, 2], dtype=bfloat16)
    """
    path = checked_path("path", path)
    leaves = _named("like", like)
    with SafetensorsFile(path) as file:
        _check_version(path, file.metadata)
        _check_fit(path, file.types, leaves)
        arrays, misfits = [], []
        for name, x in leaves.items():
            array = _cast(name, file.read(name), x.dtype, misfits)
            array = to_leaf(array, x, placement(x))
            if array.dtype != x.dtype:
                misfits.append(f"{name!r}: {x.dtype} wants jax_enable_x64")
            arrays.append(array)
    if misfits:
        raise ValueError(_listing(f"{path} does not fit into like's dtypes", misfits))
    return jax.tree_util.tree_unflatten(jax.tree_util.tree_structure(like), arrays)


def _target(dtype: DTypeLike) -> np.dtype:
    for target in (jnp.float16, jnp.bfloat16, jnp.float32):
        with contextlib.suppress(TypeError):  # raised by NumPy if it is no dtype
            if jnp.dtype(dtype) == target:
                return jnp.dtype(target)
    raise ValueError(f"dtype={dtype!r} must be float16, bfloat16, float32 or None")


def _named(argument: str, tree: PyTree) -> dict[str, Any]:
    """Returns the leaves by their names in a file, in tree order; raises an error if one is not an array."""
    leaves, paths = {}, {}
    wrong, collisions = [], []
    for path, x in jax.tree_util.tree_leaves_with_path(tree):
        name, spelled = path_name(path), keystr(path)
        if reason := _why_not_stored(x):
            wrong.append(f"{name!r}: {reason}")
        if name in paths:
            collisions.append(f"{name!r}: of {paths[name]} and of {spelled}")
        elif name == _METADATA:
            collisions.append(f"{name!r}: of {spelled} and of safetensors itself")
        leaves[name], paths[name] = x, spelled
    if wrong:
        raise TypeError(_listing(f"{argument} must contain only arrays", wrong))
    if collisions:
        raise ValueError(_listing(f"{argument} must give each leaf its own name", collisions))
    return leaves


def _why_not_stored(x: object) -> str | None:
    if not isinstance(x, jax.Array | np.ndarray | np.generic | jax.ShapeDtypeStruct) or isinstance(x, Tracer):
        return f"{x!r} is not an array"
    if is_key(x):
        return "a random key; pass jax.random.key_data(key), or leave it out"
    if isinstance(x, np.ma.MaskedArray):
        return "a masked array, whose mask would be lost; pass its data, and its mask if needed"
    if x.dtype.name not in DTYPES.values():
        return f"safetensors files cannot store {x.dtype}"
    return None


def _check_present(leaves: Mapping[str, Any]) -> None:
    absent = []
    for name, x in leaves.items():
        if isinstance(x, jax.ShapeDtypeStruct):
            absent.append(f"{name!r}: a shape without values")
        elif isinstance(x, jax.Array) and x.is_deleted():
            absent.append(f"{name!r}: deleted, usually by donation; save the state that the step returned")
        elif is_divided(x):
            absent.append(
                f"{name!r}: divided between processes; gather it with "
                "jax.experimental.multihost_utils.process_allgather(x, tiled=True)"
            )
    if absent:
        raise ValueError(_listing("params must be arrays with values in this process", absent))


def _cast(name: str, x: np.ndarray, dtype: np.dtype, overflows: list[str]) -> np.ndarray:
    """Returns a copy in another dtype, and records finite values that became infinite."""
    with np.errstate(all="ignore"):  # NumPy warns of overflows, and ml_dtypes of signaling NaNs
        y = x.astype(dtype)
        lost = np.isinf(y) & np.isfinite(x) if dtype != x.dtype else None
    if lost is not None and lost.any():
        count, largest = f"{lost.sum()} of {x.size}", float(np.abs(x[lost]).max())
        overflows.append(f"{name!r}: {count} values overflow, the largest {largest:g}")
    return y


def _check_version(path: Path, metadata: Mapping[str, str]) -> None:
    version = metadata.get("format_version")
    if metadata.get("format") == _FORMAT and version != _VERSION:
        found = f"format_version {printable(version)}"
        raise ValueError(f"{path} has {found}, but this version of jmp_train reads {_VERSION}")


def _check_fit(path: Path, types: Mapping[str, tuple[str, tuple[int, ...]]], leaves: Mapping[str, Any]) -> None:
    """Raises one error for all names, shapes and dtypes that differ, before anything is read."""
    problems = [f"{name!r}: missing in the file" for name in leaves if name not in types]
    problems += [f"{printable(repr(name))}: not in like" for name in sorted(types) if name not in leaves]
    for name, x in leaves.items():
        if name not in types:
            continue
        of_file, shape = types[name]
        if shape != tuple(x.shape):
            problems.append(f"{name!r}: shape {shape} in the file, {tuple(x.shape)} in like")
        floats = _is_floating(of_file) and _is_floating(x.dtype)
        if of_file != x.dtype.name and not floats:
            problems.append(f"{name!r}: {of_file} in the file, {x.dtype} in like")
    if problems:
        raise ValueError(_listing(f"{path} does not fit like", problems))


def _is_floating(dtype: DTypeLike) -> bool:
    return jnp.issubdtype(dtype, jnp.floating)


def _listing(what: str, lines: list[str]) -> str:
    return f"{what}:\n  " + "\n  ".join(lines)
