"""CIFAR-10's binary files: each row has a label's byte and an image's bytes, one color after another."""

import os
from pathlib import Path

import numpy as np

from jmp_train.data.regular_files import open_regular
from jmp_train.graphs.datasets import describe_files, find_files

CIFAR10_CLASSES = 10
CIFAR10_SIZE = 32  # pixels per side
FOLDER = "cifar-10-batches-bin"  # the folder in the archive
TRAIN_FILES = tuple(f"data_batch_{number}.bin" for number in range(1, 6))
TEST_FILE = "test_batch.bin"
MAX_BYTES = 2**30  # of a file

_ROW_BYTES = 1 + 3 * CIFAR10_SIZE**2
_FILE_BYTES = 10_000 * _ROW_BYTES  # of each published file
_PUBLIC = (
    "CIFAR-10's are in cifar-10-binary.tar.gz of https://www.cs.toronto.edu/~kriz/cifar.html "
    "(md5 c32a1d4ab5d03f1284b67883e8d87530)"
)
_NAMES = {name: (name, f"{FOLDER}/{name}") for name in (*TRAIN_FILES, TEST_FILE)}
_FACTS = dict.fromkeys(_NAMES, f"{_FILE_BYTES} bytes")
CIFAR10_FILES = f"; {_PUBLIC}:{describe_files(_NAMES, _FACTS)}"  # the public address, and a line for each file

Images = dict[str, np.ndarray]


def read_cifar10(data_dir: Path | str) -> tuple[Images, Images]:
    """Reads training and test data from CIFAR-10's six binary files.

    Args:
      data_dir: their folder, or the folder that holds their folder `cifar-10-batches-bin`.

    Returns:
      Two dictionaries with `image`, uint8 [examples, 32, 32, 3], and `label`, uint8 [examples], in the files'
      order. The files may have fewer examples than the published ones.

    Raises:
      FileNotFoundError: files are missing; the message names each with its size, and the public address.
      ValueError: a file is empty, ends within a row or has a label above 9; the message names file and row.

    Reference: https://www.cs.toronto.edu/~kriz/cifar.html, "Binary version".
    """
    paths = find_files(Path(data_dir), _NAMES, _PUBLIC, _FACTS)
    train = [read_cifar10_batch(paths[name]) for name in TRAIN_FILES]
    train_arrays = {name: np.concatenate([part[name] for part in train]) for name in ("image", "label")}
    return train_arrays, read_cifar10_batch(paths[TEST_FILE])


def read_cifar10_batch(path: Path, *, max_bytes: int = MAX_BYTES) -> Images:
    """Reads one file.

    Args:
      path: the file.
      max_bytes: the largest size to read.

    Returns:
      `image`, uint8 [examples, 32, 32, 3], and `label`, uint8 [examples].

    Raises:
      ValueError: the file is damaged, see `read_cifar10`, or larger than `max_bytes`.
      OSError: the file cannot be opened, or is not a regular one.

    Example:
      >>> import tempfile
      >>> file = Path(tempfile.mkdtemp()) / "test_batch.bin"
      >>> _ = file.write_bytes(bytes([7]) + 1024 * b"R" + 1024 * b"G" + 1024 * b"B")
      >>> batch = read_cifar10_batch(file)
      >>> batch["image"].shape, bytes(batch["image"][0, 31, 31]), batch["label"]
      ((1, 32, 32, 3), b'RGB', array([7], dtype=uint8))
    """
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > max_bytes:
            raise ValueError(
                f"{path} is too large: it has {size} bytes, more than max_bytes={max_bytes}; the published file has "
                f"{_FILE_BYTES}"
            )
        return _images_of(path, np.fromfile(file, np.uint8))


def _images_of(path: Path, content: np.ndarray) -> Images:
    count, rest = divmod(content.size, _ROW_BYTES)
    if rest or not count:
        raise ValueError(
            f"{path} has {content.size} bytes and ends within row {count}: rows have {_ROW_BYTES} bytes, and the "
            f"published file has {_FILE_BYTES}"
        )
    rows = content.reshape(count, _ROW_BYTES)
    labels = rows[:, 0].copy()
    if labels.max() >= CIFAR10_CLASSES:
        row = int(np.argmax(labels >= CIFAR10_CLASSES))
        raise ValueError(
            f"{path} has the label {labels[row]} at row {row}; labels must be from 0 to {CIFAR10_CLASSES - 1}"
        )
    planes = rows[:, 1:].reshape(count, 3, CIFAR10_SIZE, CIFAR10_SIZE)
    return {"image": np.ascontiguousarray(planes.transpose(0, 2, 3, 1)), "label": labels}
