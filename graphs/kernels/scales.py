"""Scales of what is sent and of what is received."""

import dataclasses

import jax


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Scales:
    """What rows are multiplied by, without gradients of their own.

    Attributes:
      senders: floating [senders], before the rows are sent; None for 1.
      receivers: floating [receivers], after they were added; None for 1.
    """

    senders: jax.Array | None = None
    receivers: jax.Array | None = None
