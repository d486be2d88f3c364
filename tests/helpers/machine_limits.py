"""Processes with little memory or few rights, and small disks."""

import contextlib
import os
import resource
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def memory_limited_to(more: int) -> Iterator[None]:
    """Lets the process take so many bytes of memory more than it has, and no further ones."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + more, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


@contextmanager
def mounted_tmpfs(directory: Path, options: str) -> Iterator[Path]:
    """Makes a folder a disk of its own in memory; skips the test where it may not.

    Args:
      directory: the folder, which is made.
      options: of the mount, such as its size.
    """
    directory.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(directory)]
    mount = shutil.which("mount")
    if mount is None or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("a test may not mount a tmpfs here")
    try:
        yield directory
    finally:
        subprocess.run(["umount", str(directory)], check=True)


@contextmanager
def as_nobody() -> Iterator[None]:
    """Runs the block without root's rights to read and write everything."""
    user = os.geteuid()
    if user == 0:
        with contextlib.suppress(PermissionError):  # a root that may nothing, as in some containers
            os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(user)


@contextmanager
def everybodys_folder() -> Iterator[Path]:
    """Yields a folder that all users can reach, as pytest's own are not."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        yield Path(name)
