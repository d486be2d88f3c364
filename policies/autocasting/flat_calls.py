"""Flattens calls: turns a function of pytrees into a function of arrays, to trace it without values."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jmp_train.policies.autocasting.python_values import python_values_explained
from jmp_train.policies.autocasting.values import chosen, replaced
from jmp_train.policies.pytrees import Carried


class FlatCall:
    """The arguments of a call, flattened: arrays are inputs, everything else is constant.

    Args:
      args: pytrees; `jax.ShapeDtypeStruct` works in place of arrays.
      kwargs: keyword arguments, likewise.

    Attributes:
      avals: the types of the arrays, in the order of the leaves.
      are_arrays: one boolean per leaf, True for arrays.
    """

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._leaves, self._tree = jax.tree.flatten((args, kwargs))
        self.are_arrays = [_is_abstract(leaf) for leaf in self._leaves]
        self.avals = [
            x if isinstance(x, jax.ShapeDtypeStruct) else jax.typeof(x) for x in chosen(self._leaves, self.are_arrays)
        ]

    def of_arrays(self, run: Callable[..., Any]) -> Callable[..., list[Any]]:
        """Returns a function that calls `run` with the given arrays and returns a list of arrays.

        The call leaves nnx objects that `run` closes over unchanged.
        """
        reachable = Carried((), run)

        def call(*arrays: object) -> list[Any]:
            leaves = replaced(self._leaves, self.are_arrays, arrays)
            args, kwargs = jax.tree.unflatten(self._tree, leaves)
            with reachable.at_home(), python_values_explained():
                results = jax.tree.leaves(run(*args, **kwargs))
            return [x for x in results if isinstance(x, jax.Array)]

        return call


def _is_abstract(leaf: object) -> bool:
    return isinstance(leaf, jax.Array | np.ndarray | np.generic | jax.ShapeDtypeStruct)
