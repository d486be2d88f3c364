"""Readers of MNIST's IDX files, big-endian arrays behind a magic number, and of CIFAR-10's binary files."""

import gzip
import math
import zlib
from io import BufferedIOBase
from pathlib import Path

import numpy as np

from jmp_train.graphs.datasets import describe_files, find_files
from jmp_train.policies.files import DamagedError, open_plain

MAX_BYTES = 2**30  # EMNIST's largest file has 547 MB

_UNSIGNED_BYTES = 0x08  # the third byte of the magic number; the fourth is the number of axes
_GZIP = b"\x1f\x8b"
_PIECE = 2**20  # bytes to decompress at once

_MNIST_ADDRESS = "https://storage.googleapis.com/cvdf-datasets/mnist/"
# The public files: their names, sizes in bytes and sha256.
_MNIST_FILES = {
    "train-images-idx3-ubyte.gz": (9912422, "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609"),
    "train-labels-idx1-ubyte.gz": (28881, "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c"),
    "t10k-images-idx3-ubyte.gz": (1648877, "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6"),
    "t10k-labels-idx1-ubyte.gz": (4542, "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6"),
}
_MNIST_NAMES = {name: (name, name.removesuffix(".gz")) for name in _MNIST_FILES}
_MNIST_FACTS = {
    name: f"{_MNIST_ADDRESS}{name}, {size} bytes, sha256 {sha256}" for name, (size, sha256) in _MNIST_FILES.items()
}
MNIST_FILES = describe_files(_MNIST_NAMES, _MNIST_FACTS)  # a line for each

CIFAR10_CLASSES = 10
CIFAR10_SIZE = 32  # pixels per side
_CIFAR10_FOLDER = "cifar-10-batches-bin"  # the folder in the archive
_TRAIN_FILES = tuple(f"data_batch_{number}.bin" for number in range(1, 6))
_TEST_FILE = "test_batch.bin"

_ROW_BYTES = 1 + 3 * CIFAR10_SIZE**2
_CIFAR10_BYTES = 10_000 * _ROW_BYTES  # of each published file
_CIFAR10_PUBLIC = (
    "CIFAR-10's are in cifar-10-binary.tar.gz of https://www.cs.toronto.edu/~kriz/cifar.html "
    "(md5 c32a1d4ab5d03f1284b67883e8d87530)"
)
_CIFAR10_NAMES = {name: (name, f"{_CIFAR10_FOLDER}/{name}") for name in (*_TRAIN_FILES, _TEST_FILE)}
_CIFAR10_FACTS = dict.fromkeys(_CIFAR10_NAMES, f"{_CIFAR10_BYTES} bytes")
# The public address, and a line for each file.
CIFAR10_FILES = f"; {_CIFAR10_PUBLIC}:{describe_files(_CIFAR10_NAMES, _CIFAR10_FACTS)}"

Images = dict[str, np.ndarray]


def read_idx(path: Path, axes: int, *, max_bytes: int = MAX_BYTES) -> np.ndarray:
    """Reads an IDX file of unsigned bytes.

    Args:
      path: the file, gzipped or not, whatever its name.
      axes: number of axes of the array: 3 for images, 1 for labels.
      max_bytes: the largest array to read. A megabyte of gzip can hold a gigabyte.

    Returns:
      A uint8 array.

    Raises:
      ValueError: the file is not such an IDX file, is incomplete, or has more than `max_bytes` by its header; the
        message names the file and the fault.
      OSError: the file cannot be read, or does not fit into memory.

    Example:
      >>> import tempfile
      >>> file = Path(tempfile.mkdtemp()) / "labels"
      >>> _ = file.write_bytes(bytes([0, 0, 8, 1, 0, 0, 0, 2, 7, 5]))
      >>> read_idx(file, axes=1)
      array([7, 5], dtype=uint8)

    Reference: http://yann.lecun.com/exdb/mnist (the format's description).
    """
    with open_plain(path) as file:
        start = file.read(len(_GZIP))
        file.seek(0)
        if start != _GZIP:
            return _read_array(path, file, axes, max_bytes)
        try:
            with gzip.GzipFile(fileobj=file) as content:
                return _read_array(path, content, axes, max_bytes)
        except (EOFError, OSError, zlib.error) as error:
            raise DamagedError(f"{path} is a damaged or truncated gzip file: {error}") from None


def _read_array(path: Path, content: BufferedIOBase, axes: int, max_bytes: int) -> np.ndarray:
    header = content.read(4 + 4 * axes)
    magic, wanted = header[:4], bytes([0, 0, _UNSIGNED_BYTES, axes])
    if magic != wanted:
        raise DamagedError(
            f"{path} has the magic number 0x{magic.hex()}; IDX bytes with {axes} "
            f"{'axis' if axes == 1 else 'axes'} have 0x{wanted.hex()}"
        )
    if len(header) < 4 + 4 * axes:
        raise DamagedError(f"{path} ends within its header, after {len(header)} bytes")
    shape = [int(n) for n in np.frombuffer(header, ">u4", axes, offset=4)]
    says, count = f"its header says {' x '.join(map(str, shape))}", math.prod(shape)
    if math.prod(n for n in shape if n) > max_bytes:  # NumPy also refuses 0 x 2**32 x 2**32
        raise DamagedError(f"{path} is too large: {says} bytes, more than max_bytes={max_bytes}")
    array = np.empty(count, np.uint8)  # takes no physical memory before it is written
    size = _read_into(array, content)
    if size < count:
        raise DamagedError(f"{path} has {size} bytes of data, but {says}")
    if content.read(1):  # at the end gzip compares the checksum
        raise DamagedError(f"{path} has more than {size} bytes of data, but {says}")
    return array.reshape(shape)


def _read_into(array: np.ndarray, content: BufferedIOBase) -> int:
    """Fills an array of bytes from a file, piece by piece; returns the number of bytes read."""
    view, done = array.data, 0
    while size := content.readinto(view[done : done + _PIECE]):
        done += size
    return done


def read_mnist(data_dir: Path | str) -> tuple[Images, Images]:
    """Reads training and test data from MNIST's four files, gzipped or not.

    Args:
      data_dir: their folder.

    Returns:
      Two dictionaries with `image`, uint8 [examples, 28, 28], and `label`, uint8 [examples].

    Raises:
      FileNotFoundError: files are missing; the message names each with its public address, size and sha256.
      ValueError: a file is damaged or does not fit the others; the message names it.
    """
    paths = find_files(Path(data_dir), _MNIST_NAMES, f"MNIST's are public in {_MNIST_ADDRESS}", _MNIST_FACTS)
    parts = []
    for prefix in ("train", "t10k"):
        image_path = paths[f"{prefix}-images-idx3-ubyte.gz"]
        label_path = paths[f"{prefix}-labels-idx1-ubyte.gz"]
        images, labels = read_idx(image_path, axes=3), read_idx(label_path, axes=1)
        if images.shape[1:] != (28, 28):
            size = " x ".join(map(str, images.shape[1:]))
            raise DamagedError(f"{image_path} has images of {size} pixels; MNIST's are 28 x 28")
        if len(images) != len(labels):
            raise DamagedError(f"{label_path} has {len(labels)} labels for {len(images)} images in {image_path}")
        if not len(labels):
            raise DamagedError(f"{image_path} has no images")
        _check_labels(label_path, labels)
        parts.append({"image": images, "label": labels})
    return parts[0], parts[1]


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
    paths = find_files(Path(data_dir), _CIFAR10_NAMES, _CIFAR10_PUBLIC, _CIFAR10_FACTS)
    train = [read_cifar10_batch(paths[name]) for name in _TRAIN_FILES]
    train_arrays = {name: np.concatenate([part[name] for part in train]) for name in ("image", "label")}
    return train_arrays, read_cifar10_batch(paths[_TEST_FILE])


def read_cifar10_batch(path: Path, *, max_bytes: int = MAX_BYTES) -> Images:
    """Reads one file.

    Args:
      path: the file.
      max_bytes: the largest size to read.

    Returns:
      `image`, uint8 [examples, 32, 32, 3], and `label`, uint8 [examples].

    Raises:
      ValueError: the file is damaged, see `read_cifar10`, or larger than `max_bytes`.
      OSError: the file cannot be read, or does not fit into memory.

    Example:
      >>> import tempfile
      >>> file = Path(tempfile.mkdtemp()) / "test_batch.bin"
      >>> _ = file.write_bytes(bytes([7]) + 1024 * b"R" + 1024 * b"G" + 1024 * b"B")
      >>> batch = read_cifar10_batch(file)
      >>> batch["image"].shape, bytes(batch["image"][0, 31, 31]), batch["label"]
      ((1, 32, 32, 3), b'RGB', array([7], dtype=uint8))
    """
    with open_plain(path, max_bytes=max_bytes) as file:
        return _images_of(path, np.fromfile(file, np.uint8))


def _images_of(path: Path, content: np.ndarray) -> Images:
    count, rest = divmod(content.size, _ROW_BYTES)
    if rest or not count:
        raise DamagedError(
            f"{path} has {content.size} bytes and ends within row {count}: rows have {_ROW_BYTES} bytes, and the "
            f"published file has {_CIFAR10_BYTES}"
        )
    rows = content.reshape(count, _ROW_BYTES)
    labels = rows[:, 0].copy()
    _check_labels(path, labels)
    planes = rows[:, 1:].reshape(count, 3, CIFAR10_SIZE, CIFAR10_SIZE)
    return {"image": np.ascontiguousarray(planes.transpose(0, 2, 3, 1)), "label": labels}


def _check_labels(path: Path, labels: np.ndarray) -> None:
    if labels.max() >= CIFAR10_CLASSES:  # as many as MNIST's
        row = int(np.argmax(labels >= CIFAR10_CLASSES))
        raise DamagedError(
            f"{path} has the label {labels[row]} at row {row}; labels must be from 0 to {CIFAR10_CLASSES - 1}"
        )
