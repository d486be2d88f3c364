"""Iterators of grain that are still there when the interpreter ends, as those that a script holds by a global name."""

import atexit
import weakref
from typing import Any

_OPEN: weakref.WeakSet[Any] = weakref.WeakSet()


def closed_at_exit(iterator: Any) -> Any:
    """Returns grain's iterator, which is closed when the interpreter ends, if not before.

    Its own `__del__` closes it too late then: the names of grain's modules are gone, and Python prints "Exception
    ignored". And its threads would still put arrays on devices while these are taken down.

    Args:
      iterator: a `grain.DatasetIterator`.
    """
    _OPEN.add(iterator)
    return iterator


@atexit.register
def _close_all() -> None:
    for iterator in list(_OPEN):
        iterator.close()
        vars(iterator).clear()  # the iterators that it reads from end now, too
        iterator.close = _nothing  # for its `__del__`


def _nothing() -> None:
    pass
