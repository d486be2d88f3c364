"""Packages of the extra `train`, imported where they are needed; the error says what to install."""

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def extra_packages() -> Iterator[None]:
    """Has the error of a missing package say how to install it.

    Raises:
      ModuleNotFoundError: an import within found no package; its `name` is the module's.

    Example:
      >>> with extra_packages():
      ...     import no_such_package
      Traceback (most recent call last):
      ...
      ModuleNotFoundError: this needs the package no_such_package: pip install 'jmp_train[train]'
    """
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        raise ModuleNotFoundError(remedy(package), name=error.name) from error


def remedy(package: str | None) -> str:
    """Returns what to do about a missing package.

    Args:
      package: its name, or a module's within it.
    """
    return f"this needs the package {package}: pip install 'jmp_train[train]'"
