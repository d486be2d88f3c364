"""Batches cut into equal parts along their first axis: micro-batches, or what each device gets."""

from typing import Any

import jax
import jax.numpy as jnp

from jmp_train.policies.paths import named_leaves


def check_divides(batch: Any, count: int, what: str) -> None:
    """Raises ValueError where a batch does not fall into equal parts.

    Args:
      batch: arrays [rows, ...].
      count: how many parts there are to be.
      what: the beginning of the message, what gives that number.
    """
    for path, x in named_leaves(batch):
        if jnp.ndim(x) == 0 or jnp.shape(x)[0] % count:
            raise ValueError(
                f"{what} must divide the first axis of every leaf of the batch; "
                f"{path or '(root)'!r} has shape {jnp.shape(x)}"
            )


def in_parts(batch: Any, count: int) -> Any:
    """Returns arrays [count, rows / count, ...] of a batch that `check_divides` let pass."""
    return jax.tree.map(lambda x: x.reshape(count, x.shape[0] // count, *x.shape[1:]), batch)
