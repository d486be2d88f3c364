"""Base of the layers of graph attention: options, dropout, residuals and initialization of weights."""

from typing import TypedDict

import jax
from flax import nnx
from jax.typing import DTypeLike

from jmp_train.graphs.array_types import Floats
from jmp_train.graphs.layers.dense import Activation
from jmp_train.graphs.layers.dropout import DropoutKeys
from jmp_train.graphs.layers.layer_inputs import as_optional


class AttentionOptions(TypedDict):
    """The common arguments of `gat_conv` and `gatv2_conv`."""

    residual: bool
    negative_slope: float
    feature_dropout: float
    attention_dropout: float
    dropout_key: jax.Array | None
    activation: Activation | None
    allow_zero_in_degree: bool


class AttentionLayer(nnx.Module):
    """The options of a layer of graph attention, and the keys of its dropout.

    Args:
      feature_dropout: see `gat_conv`; `train` and `eval` switch it on and off.
      attention_dropout: see `gat_conv`; `train` and `eval` switch it on and off.
      negative_slope: see `gat_conv`.
      residual: see `gat_conv`.
      activation: see `gat_conv`.
      allow_zero_in_degree: see `gat_conv`.
      dtype: dtype to which features and weights are cast; None for their promoted dtype.
      rngs: flax's random streams; "dropout" is used if there is any.

    Raises:
      ValueError: a rate is not in [0, 1).
    """

    def __init__(
        self,
        *,
        feature_dropout: float,
        attention_dropout: float,
        negative_slope: float,
        residual: bool,
        activation: Activation | None,
        allow_zero_in_degree: bool,
        dtype: DTypeLike | None,
        rngs: nnx.Rngs,
    ) -> None:
        self.feature_dropout = feature_dropout
        self.attention_dropout = attention_dropout
        self.negative_slope = negative_slope
        self.residual = residual
        self.activation = activation
        self.allow_zero_in_degree = allow_zero_in_degree
        self.dtype = dtype
        rates = {"feature_dropout": feature_dropout, "attention_dropout": attention_dropout}
        self.dropout_keys = DropoutKeys(rates, rngs)

    def options(self, deterministic: bool | None, rngs: nnx.Rngs | None) -> AttentionOptions:
        """Returns the options of the next call.

        Args:
          deterministic: True to turn dropout off; None for the last choice of `train` or `eval`.
          rngs: random streams for dropout, in place of the layer's own.
        """
        key = self.dropout_keys(deterministic, rngs)
        return {
            "residual": self.residual,
            "negative_slope": self.negative_slope,
            "feature_dropout": 0.0 if key is None else self.feature_dropout,
            "attention_dropout": 0.0 if key is None else self.attention_dropout,
            "dropout_key": key,
            "activation": self.activation,
            "allow_zero_in_degree": self.allow_zero_in_degree,
        }


def checked_residual(residual: bool, weight: Floats | None, width: int, out: int) -> jax.Array | None:
    """Returns the weight of a layer's residual, or None.

    Args:
      residual: whether there is a residual.
      weight: floating [width, out]; None if both are equal.
      width: width of the features.
      out: width of the result.

    Raises:
      ValueError: the shape does not fit, or there is a weight without a residual.
      TypeError: it is not floating.
    """
    if weight is not None and not residual:
        raise ValueError("residual_weight needs residual=True")
    if residual and weight is None and width != out:
        raise ValueError(
            f"residual=True adds features of width {width} to {out}: residual_weight [{width}, {out}] is needed"
        )
    return as_optional("residual_weight", weight, width, out)


def glorot_param(rngs: nnx.Rngs, shape: tuple[int, ...], dtype: DTypeLike) -> nnx.Param[jax.Array]:
    """Returns a parameter with a Glorot normal initializer with gain sqrt(2) and torch's fans.

    Args:
      rngs: flax's random streams.
      shape: [in, out] of a weight, [1, heads, out] of a vector for each head.
      dtype: dtype of the parameter.
    """
    if min(shape) < 1:
        raise ValueError(f"features and heads must be at least 1, got a parameter of shape {list(shape)}")
    fans = sum(shape) if len(shape) == 2 else shape[2] * (shape[0] + shape[1])
    return nnx.Param(nnx.initializers.normal((4 / fans) ** 0.5)(rngs.params(), shape, dtype))
