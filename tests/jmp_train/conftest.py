"""Working directories for commands, and for files of users, that run in the process of the tests."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import jax
import pytest
from example_tasks import FOLDER
from image_files import write_mnist


@pytest.fixture(autouse=True, scope="session")
def fixture_examples() -> Iterator[None]:
    """Lets commands find the modules of `examples/tasks`, such as `karate:task`, in processes of their own too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(FOLDER), prepend=os.pathsep)
        yield


@pytest.fixture(name="folder")
def fixture_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Yields an empty working directory. Takes back what commands change in their process: paths, flags, modules."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "argv", [*sys.argv])
    monkeypatch.setenv("XLA_FLAGS", os.environ.get("XLA_FLAGS", ""))
    before = set(sys.modules)
    with jax.numpy_dtype_promotion("standard"):  # as in a user's process
        yield tmp_path
    for name in set(sys.modules) - before:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


@pytest.fixture(name="files")
def fixture_files(folder: Path) -> None:
    """A file, an empty folder, files of MNIST's format, and a script that leaves a trace if it runs."""
    (folder / "file").touch()
    (folder / "empty").mkdir()
    (folder / "mnist").mkdir()
    write_mnist(folder / "mnist", train=32, test=16)
    (folder / "script.py").write_text("open('ran', 'w')")
