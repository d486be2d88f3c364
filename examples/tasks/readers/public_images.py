"""Readers of MNIST's IDX files, big-endian arrays behind a magic number, and of CIFAR-10's binary files."""

import gzip
import math
from pathlib import Path

import numpy as np

from jmp_train.graphs.datasets import describe_files, find_files

_MNIST_ADDRESS = "https://storage.googleapis.com/cvdf-datasets/mnist/"
_MNIST_FILES = {  # name, bytes and sha256 of each public file
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
_TRAIN_FILES = tuple(f"data_batch_{number}.bin" for number in range(1, 6))
_TEST_FILE = "test_batch.bin"
_ROW_BYTES = 1 + 3 * CIFAR10_SIZE**2
_CIFAR10_PUBLIC = (
    "CIFAR-10's are in cifar-10-binary.tar.gz of https://www.cs.toronto.edu/~kriz/cifar.html "
    "(md5 c32a1d4ab5d03f1284b67883e8d87530)"
)
_CIFAR10_NAMES = {name: (name, f"cifar-10-batches-bin/{name}") for name in (*_TRAIN_FILES, _TEST_FILE)}
_CIFAR10_FACTS = dict.fromkeys(_CIFAR10_NAMES, f"{10_000 * _ROW_BYTES} bytes")
CIFAR10_FILES = f"; {_CIFAR10_PUBLIC}:{describe_files(_CIFAR10_NAMES, _CIFAR10_FACTS)}"  # a line for each

Images = dict[str, np.ndarray]


def read_idx(path: Path, axes: int) -> np.ndarray:
    """Reads an IDX file of unsigned bytes, gzipped or not.

    Args:
      path: the file.
      axes: number of axes of the array: 3 for images, 1 for labels.

    Raises:
      ValueError: the file is not such an IDX file, or is incomplete; the message names it.
    """
    content = path.read_bytes()
    if content.startswith(b"\x1f\x8b"):
        try:
            content = gzip.decompress(content)
        except Exception as error:  # of several classes, for different kinds of damage
            raise ValueError(f"{path} is a damaged gzip file: {error}") from error
    start = 4 + 4 * axes
    shape = [int.from_bytes(content[place : place + 4]) for place in range(4, start, 4)]
    if content[:4] != bytes([0, 0, 8, axes]) or len(content) != start + math.prod(shape):
        raise ValueError(f"{path} is not an IDX file of bytes with {axes} axes, or is incomplete")
    return np.frombuffer(content, np.uint8, offset=start).reshape(shape)


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
        if images.shape != (len(labels), 28, 28):
            raise ValueError(f"{image_path} has images {images.shape} for {len(labels)} labels in {label_path}")
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
      ValueError: a file is empty or ends within a row; the message names it.

    Reference: https://www.cs.toronto.edu/~kriz/cifar.html, "Binary version".
    """
    paths = find_files(Path(data_dir), _CIFAR10_NAMES, _CIFAR10_PUBLIC, _CIFAR10_FACTS)
    train = [_read_batch(paths[name]) for name in _TRAIN_FILES]
    train_arrays = {name: np.concatenate([part[name] for part in train]) for name in ("image", "label")}
    return train_arrays, _read_batch(paths[_TEST_FILE])


def _read_batch(path: Path) -> Images:
    content = np.fromfile(path, np.uint8)
    if not content.size or content.size % _ROW_BYTES:
        raise ValueError(f"{path} has {content.size} bytes; it needs rows of {_ROW_BYTES}")
    rows = content.reshape(-1, _ROW_BYTES)
    planes = rows[:, 1:].reshape(-1, 3, CIFAR10_SIZE, CIFAR10_SIZE)
    return {"image": np.ascontiguousarray(planes.transpose(0, 2, 3, 1)), "label": rows[:, 0].copy()}
