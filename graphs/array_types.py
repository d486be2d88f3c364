"""The types of what callers pass: ids and arrays of every make, flax's parameters, features of both ends."""

from collections.abc import Sequence

import jax
from flax import nnx
from jax.typing import ArrayLike

Ids = ArrayLike | Sequence[int]
Floats = ArrayLike | nnx.Variable[jax.Array]
EndFeatures = Floats | tuple[Floats, Floats]  # of all nodes, or of those that send and those that receive
