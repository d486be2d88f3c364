"""Closes iterators of grain that still exist when the interpreter ends, such as those with a global name."""

import atexit
import weakref
from typing import Any

_OPEN: weakref.WeakSet[Any] = weakref.WeakSet()


def closed_at_exit(iterator: Any) -> Any:
    """Returns grain's iterator after registering it to be closed when the interpreter ends.

    Its own `__del__` would close it too late: the names of grain's modules are gone by then, and Python prints
    "Exception ignored". Its threads would also still move arrays to devices that are being shut down.

    Args:
      iterator: a `grain.DatasetIterator`.
    """
    _OPEN.add(iterator)
    return iterator


@atexit.register
def _close_all() -> None:
    for iterator in list(_OPEN):
        iterator.close()
        vars(iterator).clear()  # also ends the iterators that it reads from
        iterator.close = _nothing  # for its `__del__`


def _nothing() -> None:
    pass
