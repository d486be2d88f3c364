import os
import socket
from pathlib import Path

import pytest

from jmp_train.data.image_files import read_image
from jmp_train.data.public_images import read_cifar10_batch, read_idx
from jmp_train.data.regular_files import open_regular, read_bytes

pytestmark = pytest.mark.quick

READERS = {
    "idx": lambda path: read_idx(path, axes=3),
    "cifar": read_cifar10_batch,
    "image": lambda path: read_image(str(path)),
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("kind", ["pipe", "device", "folder", "socket", "missing", "loop", "empty"])
def test_what_is_no_regular_file_is_named_and_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reader: str, kind: str
) -> None:
    monkeypatch.chdir(tmp_path)  # a socket's path has to be short
    path = tmp_path / "0.png"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "folder":
        path.mkdir()
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as server:
            server.bind("0.png")
    elif kind == "loop":
        path.symlink_to(path)
    elif kind == "empty":
        path.touch()
    faults = {
        "missing": r"No such file or directory: '.*/0\.png'",
        "loop": r"Too many levels of symbolic links: '.*/0\.png'",
        "empty": r"/0\.png (has|cannot be decoded)",
    }
    with pytest.raises((ValueError, OSError), match=faults.get(kind, r"/0\.png is not a regular file$")):
        READERS[reader](path)


def test_bytes_are_read_up_to_a_size(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_bytes(b"abc")
    assert read_bytes(path, max_bytes=3) == b"abc"
    with pytest.raises(ValueError, match=r"/text is too large: it has more than max_bytes=2$"):
        read_bytes(path, max_bytes=2)
    with pytest.raises(OSError, match="is not a regular file"):
        read_bytes(tmp_path)


def test_too_little_memory_is_one_line_that_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "images"
    path.touch()
    with pytest.raises(MemoryError) as caught, open_regular(path):
        bytearray(2**62)
    assert str(caught.value) == f"{path} needs more memory than is available"
