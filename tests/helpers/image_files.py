"""Small files in the formats of MNIST, CIFAR-10 and image folders."""

import gzip
import struct
from pathlib import Path

import numpy as np


def idx_bytes(array: np.ndarray) -> bytes:
    """Returns an array of bytes in IDX, written from the format's description."""
    magic = 0x0800 + array.ndim
    return struct.pack(f">I{array.ndim}I", magic, *array.shape) + array.tobytes()


def cifar_bytes(images: np.ndarray, labels: np.ndarray) -> bytes:
    """Returns images uint8 [n, 32, 32, 3] and labels as CIFAR-10's page describes its binary version."""
    rows = []
    for image, label in zip(images, labels, strict=True):
        planes = (image[..., color].tobytes() for color in range(3))
        rows.append(bytes([label]) + b"".join(planes))
    return b"".join(rows)


def write_cifar(directory: Path, examples: int) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Writes CIFAR-10's six files with that many examples each; returns (images, labels) by the files' names."""
    random = np.random.default_rng(0)
    names = [f"data_batch_{number}.bin" for number in range(1, 6)] + ["test_batch.bin"]
    contents = {}
    for name in names:
        images = random.integers(0, 256, (examples, 32, 32, 3), np.uint8)
        labels = random.integers(0, 10, examples, np.uint8)
        (directory / name).write_bytes(cifar_bytes(images, labels))
        contents[name] = images, labels
    return contents


def write_mnist(directory: Path, train: int, test: int) -> None:
    """Writes files of MNIST's format and sizes of image; each digit is a shade of gray."""
    for prefix, count in (("train", train), ("t10k", test)):
        labels = np.arange(count, dtype=np.uint8) % 10
        images = np.repeat(25 * labels, 28 * 28).reshape(count, 28, 28)
        (directory / f"{prefix}-images-idx3-ubyte.gz").write_bytes(gzip.compress(idx_bytes(images)))
        (directory / f"{prefix}-labels-idx1-ubyte").write_bytes(idx_bytes(labels))


def write_image_folder(directory: Path, train: int, val: int) -> None:
    """Writes an image folder of two classes, dark and light, with so many noisy images each."""
    from PIL import Image

    random = np.random.default_rng(0)
    for part, count in (("train", train), ("val", val)):
        for name, start in (("dark", 0), ("light", 128)):
            folder = directory / part / name
            folder.mkdir(parents=True)
            for number in range(count):
                pixels = random.integers(start, start + 128, (40, 50, 3), np.uint8)
                Image.fromarray(pixels).save(folder / f"{number}.png")
