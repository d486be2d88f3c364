"""Reads MNIST's four files, gzipped or not."""

from pathlib import Path

import numpy as np

from jmp_train.data.idx import read_idx
from jmp_train.graphs.datasets import describe_files, find_files

Arrays = dict[str, np.ndarray]

_CLASSES = 10

_ADDRESS = "https://storage.googleapis.com/cvdf-datasets/mnist/"
# The public files: their names, sizes in bytes and sha256.
_FILES = {
    "train-images-idx3-ubyte.gz": (
        9912422,
        "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
    ),
    "train-labels-idx1-ubyte.gz": (
        28881,
        "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
    ),
    "t10k-images-idx3-ubyte.gz": (
        1648877,
        "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
    ),
    "t10k-labels-idx1-ubyte.gz": (
        4542,
        "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
    ),
}
_NAMES = {name: (name, name.removesuffix(".gz")) for name in _FILES}
_FACTS = {name: f"{_ADDRESS}{name}, {size} bytes, sha256 {sha256}" for name, (size, sha256) in _FILES.items()}
MNIST_FILES = describe_files(_NAMES, _FACTS)  # a line for each


def read_mnist(data_dir: Path | str) -> tuple[Arrays, Arrays]:
    """Reads training and test data from MNIST's four files, gzipped or not.

    Args:
      data_dir: their folder.

    Returns:
      Two dictionaries with `image`, uint8 [examples, 28, 28], and `label`, uint8 [examples].

    Raises:
      FileNotFoundError: files are missing; the message names each with its public address, size and sha256.
      ValueError: a file is damaged or does not fit the others; the message names it.
    """
    paths = find_files(Path(data_dir), _NAMES, f"MNIST's are public in {_ADDRESS}", _FACTS)
    parts = []
    for prefix in ("train", "t10k"):
        image_path = paths[f"{prefix}-images-idx3-ubyte.gz"]
        label_path = paths[f"{prefix}-labels-idx1-ubyte.gz"]
        images, labels = read_idx(image_path, axes=3), read_idx(label_path, axes=1)
        if images.shape[1:] != (28, 28):
            size = " x ".join(map(str, images.shape[1:]))
            raise ValueError(f"{image_path} has images of {size} pixels; MNIST's are 28 x 28")
        if len(images) != len(labels):
            raise ValueError(f"{label_path} has {len(labels)} labels for {len(images)} images in {image_path}")
        if not len(labels):
            raise ValueError(f"{image_path} has no images")
        if labels.max() >= _CLASSES:
            row = int(np.argmax(labels >= _CLASSES))
            raise ValueError(
                f"{label_path} has the label {labels[row]} at row {row}; labels must be from 0 to {_CLASSES - 1}"
            )
        parts.append({"image": images, "label": labels})
    return parts[0], parts[1]
