"""Type aliases: pytrees, parameters, gradients and optimizer states, as optax names them."""

from typing import TypeAlias

import optax

PyTree: TypeAlias = object  # any tree: jax looks at its leaves, and the functions that take one at no more
Params: TypeAlias = optax.Params  # what is trained: arrays, in any nesting
Grads: TypeAlias = optax.Updates  # like the parameters
OptState: TypeAlias = optax.OptState  # of an optimizer, wrappers and all
