"""A checkpoint's arrays: a folder that orbax can read, with a folder for each array.

tensorstore, on which orbax is built, writes and reads them without orbax. Orbax uses executors, which Python closes
as soon as a script ends, even if the last checkpoint is still being written. On a full disk it prints pages of
tracebacks from its threads.

Reference: https://orbax.readthedocs.io (a dictionary of arrays without OCDBT) and
https://zarr-specs.readthedocs.io/en/latest/v2/v2.0.html (the files of each array).
"""

import json
import os
import re
import time
from pathlib import Path
from typing import Any

import numpy as np

from jmp_train.extras import extra_packages
from jmp_train.policies.files import DamagedError, printable

_HANDLER = "orbax.checkpoint._src.handlers.pytree_checkpoint_handler.PyTreeCheckpointHandler"
# Small dtypes unknown to tensorstore: stored as the byte in which NumPy keeps each value.
_AS_BYTES = {"int1", "uint1", "uint2", "uint4", "float6_e2m3fn", "float6_e3m2fn", "float8_e4m3"}
_LOCK = ".__lock"  # tensorstore's own


def check_path(directory: Path) -> None:
    """Raises ValueError if tensorstore would read a folder's path as another one, or refuse it at the first save."""
    real = os.path.realpath(directory)
    found = next((c for c in real if c == "\\" != os.sep or "\ud800" <= c <= "\udfff"), "")
    if found:
        shown = repr(found) if found.isascii() else f"the byte 0x{os.fsencode(found).hex()}, which is not UTF-8"
    elif any(part.endswith(_LOCK) for part in real.split(os.sep)):
        shown = f"{_LOCK!r} at the end of a name"
    else:
        return
    raise ValueError(f"directory={str(directory)!r} has {shown}; no checkpoint can be stored there: use another folder")


def write_arrays(folder: Path, arrays: dict[str, np.ndarray]) -> None:
    """Writes arrays into a new folder, without waiting until they are safe on the disk.

    Args:
      folder: a path that does not exist yet.
      arrays: arrays by name, the name of a folder; none may be empty.

    Raises:
      OSError: something could not be written; its `filename` names it.
    """
    with extra_packages():
        import tensorstore

    folder.mkdir()
    real = folder.resolve()  # because tensorstore refuses ".."
    begin = time.time_ns()
    stored = {name: array.view(_stored(array.dtype.name)) for name, array in arrays.items()}
    opened = [
        tensorstore.open(
            _specification(real / name, array.shape),
            create=True,
            dtype=tensorstore.dtype(array.dtype),
            shape=array.shape,
        )
        for name, array in stored.items()
    ]
    writes = [
        store.write(array, can_reference_source_data_indefinitely=True)
        for store, array in zip(_finished(opened), stored.values(), strict=True)
    ]
    _finished(writes)
    (folder / "_METADATA").write_text(json.dumps(_tree_metadata(list(arrays))))
    about = {"item_handlers": _HANDLER, "metrics": {}, "performance_metrics": {}}
    times = {"init_timestamp_nsecs": begin, "commit_timestamp_nsecs": time.time_ns()}
    text = json.dumps({**about, **times, "custom_metadata": {}})
    (folder / "_CHECKPOINT_METADATA").write_text(text)


def open_arrays(folder: Path, leaves: list[dict[str, Any]]) -> list[Any]:
    """Returns tensorstore's array for each leaf, before its data are read; None for an empty one.

    Args:
      folder: a folder written by `write_arrays` or orbax.
      leaves: the manifest's entries.

    Raises:
      DamagedError: the files have another shape or dtype than the manifest.
    """
    with extra_packages():
        import tensorstore

    real, opened = folder.resolve(), []
    for x in leaves:
        shape, dtype = tuple(x["shape"]), _stored(x["dtype"])
        if 0 in shape:
            opened.append(None)
            continue
        path = folder / x["folder"]
        try:
            future = tensorstore.open(
                _specification(real / x["folder"], shape), open=True, dtype=tensorstore.dtype(dtype), shape=shape
            )
            opened.append(future.result())
        except Exception as error:  # noqa: BLE001 - tensorstore's errors are of many classes
            raise DamagedError(f"{path} is not {dtype.name}{list(shape)}: {_message(error)}") from None
    return opened


def read_arrays(opened: list[Any], leaves: list[dict[str, Any]]) -> list[np.ndarray]:
    """Returns the data of arrays from `open_arrays`; raises DamagedError if one cannot be read."""
    reads = [None if store is None else store.read() for store in opened]  # all at once
    arrays = []
    for read, x in zip(reads, leaves, strict=True):
        if read is None:
            arrays.append(np.zeros(x["shape"], x["dtype"]))
            continue
        try:
            arrays.append(np.asarray(read.result()).view(x["dtype"]))
        except Exception as error:  # noqa: BLE001
            raise DamagedError(f"leaf {printable(x['path'])} cannot be read: {_message(error)}") from None
    return arrays


def _stored(dtype: str) -> np.dtype:
    return np.dtype(np.uint8 if dtype in _AS_BYTES else dtype)


def _specification(path: Path, shape: tuple[int, ...]) -> dict[str, Any]:
    """Returns the format in which tensorstore writes, and which it requires when it reads: one chunk, as in orbax."""
    return {
        "driver": "zarr",
        "kvstore": {"driver": "file", "path": str(path)},
        "metadata": {
            "chunks": list(shape),
            "compressor": {"id": "zstd", "level": 1},
            "dimension_separator": ".",
            "order": "C",
        },
        "context": {"file_io_sync": False},  # done later, for all files
    }


def _finished(futures: list[Any]) -> list[Any]:
    """Returns the results, or raises OSError for the first failure after all writes have ended."""
    results, failures = [], []
    for future in futures:
        try:
            results.append(future.result())
        except Exception as error:  # noqa: BLE001 - tensorstore's errors are of many classes
            failures.append(_os_error(error))
    if failures:
        raise failures[0]
    return results


def _message(error: Exception) -> str:
    """Returns the message of tensorstore's error without its details in brackets, whose order varies."""
    return re.split(r" \[(?:tensorstore_spec|source locations|os_error_code)=", str(error))[0]


def _os_error(error: Exception) -> OSError:
    """Returns tensorstore's error about a file as the OSError that Python would raise."""
    code = re.search(r"os_error_code='(\d+)'", str(error))
    path = re.search(r'local file "([^"]+)"', str(error))
    if code is None:
        return OSError(_message(error))
    return OSError(int(code[1]), os.strerror(int(code[1])), path and path[1])


def _tree_metadata(names: list[str]) -> dict[str, Any]:
    """Returns orbax's metadata for a dictionary of NumPy arrays."""
    value = {"value_type": "np.ndarray", "skip_deserialize": False}
    entries = {
        str((name,)): {"key_metadata": [{"key": name, "key_type": 2}], "value_metadata": value} for name in names
    }
    return {
        "tree_metadata": entries,
        "use_ocdbt": False,
        "use_zarr3": False,
        "store_array_data_equal_to_fill_value": True,
        "custom_metadata": None,
    }
