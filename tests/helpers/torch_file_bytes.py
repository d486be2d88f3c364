"""Writes files as `torch.save` does, old and new, without torch: dictionaries of arrays and of tensors."""

import io
import pickle
import struct
import zipfile
from collections.abc import Mapping
from typing import Any

import numpy as np

Arrays = Mapping[str, np.ndarray]
STORAGES = {"int64": b"Long", "int32": b"Int", "float32": b"Float", "float64": b"Double"}


def zipped(value: Any, storages: Mapping[str, bytes] | None = None, method: int = zipfile.ZIP_STORED) -> bytes:
    """Returns what torch 1.6 and later write of a value; of bytes, these are its pickle."""
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", method) as archive:
        pickled = value if isinstance(value, bytes) else pickle.dumps(value, protocol=2)
        archive.writestr("train/data.pkl", pickled)
        archive.writestr("train/byteorder", b"little")
        for name, content in (storages or {}).items():
            archive.writestr(f"train/data/{name}", content)
        archive.writestr("train/version", b"3\n")
    return made.getvalue()


def in_a_row(value: Any, storages: Any = (), magic: int = 0x1950A86A20F9469CFC6C) -> bytes:
    """Returns what torch wrote of a value before 1.6."""
    system = {"protocol_version": 1001, "little_endian": True, "type_sizes": {"short": 2, "int": 4, "long": 4}}
    return b"".join(pickle.dumps(part, protocol=2) for part in (magic, 1001, system, value, list(storages)))


def with_tensors(arrays: Arrays) -> bytes:
    """Returns what torch 1.6 and later write of a dictionary of tensors."""
    items = b"".join(_string(name) + tensor(str(place), array) for place, (name, array) in enumerate(arrays.items()))
    storages = {str(place): array.tobytes() for place, array in enumerate(arrays.values())}
    return zipped(b"\x80\x02}(" + items + b"u.", storages)


def tensor(
    key: str, array: np.ndarray, *, count: int | None = None, first: int = 0, strides: tuple[int, ...] | None = None
) -> bytes:
    """Returns the instructions that make a tensor."""
    own = tuple(stride // array.itemsize for stride in array.strides)
    kind = b"ctorch\n" + STORAGES[array.dtype.name] + b"Storage\n"
    size = _number(array.size if count is None else count)
    storage = b"(" + _string("storage") + kind + _string(key) + _string("cpu") + size + b"tQ"
    shape, steps = (b"(" + b"".join(map(_number, each)) + b"t" for each in (array.shape, strides or own))
    rest = _number(first) + shape + steps + b"\x89ccollections\nOrderedDict\n)R"
    return b"ctorch._utils\n_rebuild_tensor_v2\n(" + storage + rest + b"tR"


def _string(text: str) -> bytes:
    return b"X" + struct.pack("<I", len(text)) + text.encode()


def _number(number: int) -> bytes:
    return b"J" + struct.pack("<i", number)
