"""Parameters of linear layers, drawn as torch draws those of `torch.nn.Linear`."""

import jax
from flax import nnx
from jax.typing import DTypeLike


def uniform_param(rngs: nnx.Rngs, shape: tuple[int, ...], fan_in: int, dtype: DTypeLike) -> nnx.Param[jax.Array]:
    """Returns a parameter drawn uniformly between -1 and 1 over the square root of `fan_in`.

    Args:
      rngs: flax's random streams, of which "params" is used.
      shape: of a weight or a bias.
      fan_in: how many inputs the layer has.
      dtype: the parameter's.
    """
    bound = max(fan_in, 1) ** -0.5
    return nnx.Param(jax.random.uniform(rngs.params(), shape, dtype, -bound, bound))
