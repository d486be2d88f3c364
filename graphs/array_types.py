"""Type aliases of arguments: ids, arrays of any library, features of both ends."""

from collections.abc import Sequence

import jax
from flax import nnx
from jax.typing import ArrayLike

Ids = ArrayLike | Sequence[int]
Floats = ArrayLike | nnx.Variable[jax.Array]
EndFeatures = Floats | tuple[Floats, Floats]  # of all nodes, or of those that send and those that receive
