"""Numbers in a line of code that change in lower precision: an epsilon that becomes 0, a decay that becomes 1."""

import functools
import linecache
import re

import jax.numpy as jnp
import numpy as np

_NUMBER = re.compile(r"(?<![\w.])(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?(?![\w.])")
_ZERO_BY_DEFAULT = "eps_root"  # of optax's optimizers, under a root
_EPSILON = re.compile(r"(?:self\.)?\b\w*(?:eps|tiny)\w*\b", re.IGNORECASE)
_WITH_NUMBER = re.compile(r"\w+ *= *[\d.]+(?:[eE][-+]?\d+)?")


@functools.lru_cache(maxsize=4096)
def number_in_code(line: str, value: float, dtype: str) -> str | None:
    """Returns the number in a line of code that equals a value in a dtype, but not in float32; None if there is none.

    Args:
      line: the text "file:number".
      value: the value in the dtype.
      dtype: name of the dtype.
    """
    for text in _NUMBER.findall(_code(line)):
        with np.errstate(over="ignore"):
            if float(text) != value and float(np.asarray(float(text), jnp.dtype(dtype))) == value:
                return text
    return None


def is_zero_by_default(line: str) -> bool:
    """Returns whether a line of code has a number that may be 0 in float32 too.

    Args:
      line: the text "file:number".
    """
    return _ZERO_BY_DEFAULT in _code(line)


@functools.lru_cache(maxsize=4096)
def epsilon_in_code(line: str, dtype: str) -> str | None:
    """Returns the number in a line of code that is 0 in a dtype, otherwise the name of an epsilon without a number.

    Args:
      line: the text "file:number".
      dtype: name of the dtype.
    """
    names = [name for name in _EPSILON.findall(_WITH_NUMBER.sub("", _code(line))) if name != _ZERO_BY_DEFAULT]
    return number_in_code(line, 0.0, dtype) or (names[0] if names else None)


def _code(line: str) -> str:
    file, _, number = line.rpartition(":")
    return linecache.getline(file, int(number or 0)).partition("#")[0]
