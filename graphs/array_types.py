"""Type aliases of arguments: ids, arrays of any library, features of both ends."""

from collections.abc import Sequence
from typing import Protocol

import jax
from flax import nnx
from jax.typing import ArrayLike


class SparseRows(Protocol):
    """Features by rows of which only some entries are kept; `SparseFeatures` is that."""

    @property
    def shape(self) -> tuple[int, int]:
        """How many rows and columns there are."""
        ...

    @property
    def num_entries(self) -> int:
        """How many entries are kept."""
        ...


Ids = ArrayLike | Sequence[int]
Floats = ArrayLike | nnx.Variable[jax.Array]
# Of all nodes, or of those that send and those that receive.
EndFeatures = Floats | SparseRows | tuple[Floats, Floats]
