"""CIFAR-10's binary files: rows of a label's byte and an image's, one colour after another."""

import os
from pathlib import Path

import numpy as np

from jmp_train.regular_files import open_regular

CLASSES = 10
SIZE = 32  # pixels, of both sides
FOLDER = "cifar-10-batches-bin"  # what the archive unpacks to
TRAIN_FILES = tuple(f"data_batch_{number}.bin" for number in range(1, 6))
TEST_FILE = "test_batch.bin"
MAX_BYTES = 2**30  # that a file may have

_ROW_BYTES = 1 + 3 * SIZE**2
_FILE_BYTES = 10_000 * _ROW_BYTES  # of each published file
_SOURCE = (
    "they are in cifar-10-binary.tar.gz of https://www.cs.toronto.edu/~kriz/cifar.html "
    "(md5 c32a1d4ab5d03f1284b67883e8d87530), or --synthetic does without:"
)

Images = dict[str, np.ndarray]


def read_cifar10(data_dir: Path | None) -> tuple[Images, Images]:
    """Reads training and test data from CIFAR-10's six binary files.

    Args:
      data_dir: the folder they are in, or the one above their folder `cifar-10-batches-bin`.

    Returns:
      Two dictionaries with `image`, uint8 [examples, 32, 32, 3], and `label`, uint8 [examples], in the files'
      order. Files with fewer rows than the published ones are taken too.

    Raises:
      FileNotFoundError: files are missing; the message names each, its size, and where they are public.
      ValueError: a file is empty, ends within a row or has a label above 9; the message names file and row.

    Reference: https://www.cs.toronto.edu/~kriz/cifar.html, "Binary version".
    """
    paths = _find_files(data_dir)
    train = [read_batch(paths[name]) for name in TRAIN_FILES]
    joined = {name: np.concatenate([part[name] for part in train]) for name in ("image", "label")}
    return joined, read_batch(paths[TEST_FILE])


def read_batch(path: Path, *, max_bytes: int = MAX_BYTES) -> Images:
    """Reads one of the files.

    Args:
      path: the file.
      max_bytes: the largest file to take memory for.

    Returns:
      `image`, uint8 [rows, 32, 32, 3], and `label`, uint8 [rows].

    Raises:
      ValueError: see `read_cifar10`; or the file is larger than `max_bytes`.
      OSError: the file cannot be opened, or is no regular one.

    Example:
      >>> import tempfile
      >>> file = Path(tempfile.mkdtemp()) / "test_batch.bin"
      >>> _ = file.write_bytes(bytes([7]) + 1024 * b"R" + 1024 * b"G" + 1024 * b"B")
      >>> batch = read_batch(file)
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
            f"{path} has {content.size} bytes and ends within row {count}: rows are of {_ROW_BYTES} bytes, the "
            f"published file has {_FILE_BYTES}"
        )
    rows = content.reshape(count, _ROW_BYTES)
    labels = rows[:, 0].copy()
    if labels.max() >= CLASSES:
        row = int(np.argmax(labels >= CLASSES))
        raise ValueError(
            f"{path} has the label {labels[row]} at row {row}, labels lie between 0 and {CLASSES - 1}"
        )
    planes = rows[:, 1:].reshape(count, 3, SIZE, SIZE)
    return {"image": np.ascontiguousarray(planes.transpose(0, 2, 3, 1)), "label": labels}


def _find_files(data_dir: Path | None) -> dict[str, Path]:
    """Returns the path of each file by its name."""
    names = (*TRAIN_FILES, TEST_FILE)
    if data_dir is None:
        raise FileNotFoundError(
            f"CIFAR-10 wants --data-dir, the folder of these files; {_SOURCE}" + _listed(names)
        )
    if not data_dir.is_dir():
        raise FileNotFoundError(f"--data-dir {data_dir} is no folder")
    found = {}
    for name in names:
        for path in (data_dir / name, data_dir / FOLDER / name):
            if path.is_file():
                found[name] = path
                break
    missing = [name for name in names if name not in found]
    if missing:
        raise FileNotFoundError(
            f"--data-dir {data_dir} and its folder {FOLDER} lack these files of CIFAR-10; {_SOURCE}"
            + _listed(missing)
        )
    return found


def _listed(names: tuple[str, ...] | list[str]) -> str:
    return "".join(f"\n  {name} ({_FILE_BYTES} bytes)" for name in names)
