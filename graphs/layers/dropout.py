"""Dropout of layers: checks of the rate, keys from flax's streams, inverted scaling."""

from typing import TypeVar

import jax
import jax.numpy as jnp
from flax import nnx

from jmp_train.graphs.structure import SparseFeatures


def check_dropout(name: str, rate: float, key: jax.Array | nnx.Rngs | None) -> None:
    """Raises ValueError if a rate is not in [0, 1), or has no key."""
    if not 0 <= rate < 1:
        raise ValueError(f"{name}={rate} must be in [0, 1)")
    if rate and key is None:
        raise ValueError(f"{name}={rate} needs a random key")


Data = TypeVar("Data", jax.Array, SparseFeatures)


def drop(data: Data, rate: float, key: jax.Array | None) -> Data:
    """Returns data with entries dropped, and the others scaled up."""
    if not rate or key is None:
        return data
    if isinstance(data, SparseFeatures):  # dropout leaves zeros at 0
        return data.map_values(lambda values: drop(values, rate, key))
    is_kept = jax.random.bernoulli(key, 1 - rate, data.shape)
    return jnp.where(is_kept, data / jnp.asarray(1 - rate, data.dtype), jnp.zeros_like(data))


def split_key(key: jax.Array | None) -> tuple[jax.Array | None, jax.Array | None]:
    """Returns two keys from one, or None twice without a key."""
    if key is None:
        return None, None
    first, second = jax.random.split(key)
    return first, second


class DropoutKeys(nnx.Module):
    """The keys of a layer's dropout, which `train` and `eval` switch on and off.

    Args:
      rates: rates by name of the argument, for messages.
      rngs: flax's streams; "dropout" is used unless all rates are 0. None is allowed then.

    Raises:
      ValueError: a rate is not in [0, 1), or has no streams.
    """

    def __init__(self, rates: dict[str, float], rngs: nnx.Rngs | None) -> None:
        for name, rate in rates.items():
            check_dropout(name, rate, rngs)
        self.deterministic: bool = False
        self.stream: nnx.RngStream | None = nnx.data(None)
        if rngs is not None and any(rates.values()):
            self.stream = rngs["dropout"].fork()

    def set_view(self, deterministic: bool | None = None) -> None:
        """Sets the mode; called by `nnx.view`.

        Args:
          deterministic: True to turn dropout off.
        """
        if deterministic is not None:
            self.deterministic = deterministic

    def __call__(self, deterministic: bool | None, rngs: nnx.Rngs | None) -> jax.Array | None:
        """Returns the next key; None if dropout is off.

        Args:
          deterministic: True to turn it off; None for the last choice of `train` or `eval`.
          rngs: streams, in place of the layer's own.
        """
        is_off = self.deterministic if deterministic is None else deterministic
        if is_off or self.stream is None:
            return None
        return self.stream() if rngs is None else rngs["dropout"]()
