"""Files in MNIST's and CIFAR-10's formats: read as they were written, and damage is named with the file."""

import gzip
from pathlib import Path

import numpy as np
import pytest
from image_files import cifar_bytes, idx_bytes, write_cifar, write_mnist
from readers.public_images import read_cifar10, read_idx, read_mnist

pytestmark = pytest.mark.quick

IMAGES = np.arange(24, dtype=np.uint8).reshape(2, 3, 4)
IDX = idx_bytes(IMAGES)
ZIPPED_IDX = gzip.compress(IDX, mtime=0)  # without the time, by which tests would have other names


@pytest.mark.parametrize("content", [IDX, ZIPPED_IDX], ids=["plain", "gzip"])
def test_images_are_read_gzipped_or_not(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "images").write_bytes(content)
    np.testing.assert_array_equal(read_idx(tmp_path / "images", axes=3), IMAGES)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (ZIPPED_IDX[:-9], "is a damaged gzip file: "),
        (ZIPPED_IDX[:-8] + b"12345678", "is a damaged gzip file: CRC"),
        *((content, "is not an IDX file") for content in (IDX[:-1], IDX + b"x", IDX[:10], b"", idx_bytes(IMAGES[0]))),
    ],
)
def test_damage_is_named_with_the_file(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "images.gz"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=f"^{path} {message}"):
        read_idx(path, axes=3)


def test_missing_files_of_mnist_are_named_with_address_size_and_sha256(tmp_path: Path) -> None:
    write_mnist(tmp_path, train=40, test=10)
    train, test = read_mnist(tmp_path)
    assert (train["image"].shape, test["label"].tolist()) == ((40, 28, 28), list(range(10)))
    labels = tmp_path / "train-labels-idx1-ubyte"
    labels.write_bytes(idx_bytes(np.zeros(39, np.uint8)))
    with pytest.raises(ValueError, match=r"train-images.*gz has images \(40, 28, 28\) for 39 labels in .*train-labels"):
        read_mnist(tmp_path)
    labels.unlink()
    with pytest.raises(FileNotFoundError) as caught:
        read_mnist(tmp_path)
    first, *lines = str(caught.value).splitlines()
    address = "https://storage.googleapis.com/cvdf-datasets/mnist/"
    assert first == f"data_dir {tmp_path} lacks files; MNIST's are public in {address}:"
    (line,) = lines
    assert line.startswith(
        f"  train-labels-idx1-ubyte.gz or train-labels-idx1-ubyte ({address}train-labels-idx1-ubyte.gz"
    )
    assert ", 28881 bytes, sha256 3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c)" in line


@pytest.mark.parametrize("folder", [".", "cifar-10-batches-bin"])
def test_cifar10_is_read_as_it_was_written(tmp_path: Path, folder: str) -> None:
    (tmp_path / folder).mkdir(exist_ok=True)
    written = write_cifar(tmp_path / folder, examples=7)
    train, test = read_cifar10(tmp_path)
    for read, names in ((train, list(written)[:5]), (test, ["test_batch.bin"])):
        assert (read["image"].dtype, read["label"].dtype) == (np.uint8, np.uint8)
        np.testing.assert_array_equal(read["image"], np.concatenate([written[name][0] for name in names]))
        np.testing.assert_array_equal(read["label"], np.concatenate([written[name][1] for name in names]))


@pytest.mark.parametrize("content", [cifar_bytes(np.zeros((2, 32, 32, 3), np.uint8), np.array([9, 0]))[:-1], b""])
def test_rows_that_are_cut_are_named_with_the_file(tmp_path: Path, content: bytes) -> None:
    write_cifar(tmp_path, examples=1)
    path = tmp_path / "data_batch_2.bin"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=f"^{path} has {len(content)} bytes; it needs rows of 3073"):
        read_cifar10(tmp_path)
