"""Imports packages of the extra `train` when they are needed; an error names the package to install."""

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def extra_packages() -> Iterator[None]:
    """Adds the installation command to the error of a missing package.

    Raises:
      ModuleNotFoundError: a package is missing; `name` is that of the module.

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
    """Returns how to install a missing package.

    Args:
      package: its name, or that of a module in it.
    """
    return f"this needs the package {package}: pip install 'jmp_train[train]'"
