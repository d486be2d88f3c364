"""Processes with little memory, and small disks."""

import resource
import shutil
import subprocess
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
