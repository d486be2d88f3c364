"""What several test modules share."""

from typing import Any

import jax
import optax


def relaxed(optimizer: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Lets optax's own code promote dtypes (adam raises a float to an int32), ours stays strict."""
    inner = optax.with_extra_args_support(optimizer)

    def init(params: Any) -> Any:
        with jax.numpy_dtype_promotion("standard"):
            return inner.init(params)

    def update(updates: Any, state: Any, params: Any = None, **extra_args: Any) -> Any:
        with jax.numpy_dtype_promotion("standard"):
            return inner.update(updates, state, params, **extra_args)

    return optax.GradientTransformationExtraArgs(init, update)
