"""Type aliases of arguments: ids, and arrays of any library."""

from collections.abc import Sequence

import jax
from flax import nnx
from jax.typing import ArrayLike

Ids = ArrayLike | Sequence[int]
Floats = ArrayLike | nnx.Variable[jax.Array]
