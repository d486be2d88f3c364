"""Base class of the layers: a layer passes its attributes to its function by the names of the arguments."""

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from jmp_train.graphs.layers.dense import check_dropout
from jmp_train.graphs.layers.layer_inputs import in_dtype
from jmp_train.graphs.structure import accumulation_dtype

Result = TypeVar("Result")


class Layer(nnx.Module):
    """A layer whose attributes are parameters and options of a function."""

    dtype: DTypeLike | None

    def cast(self, arrays: Any) -> Any:
        """Returns an array, or a pair of arrays, in the layer's dtype, or unchanged without one; None stays None."""
        return in_dtype(self.dtype, arrays)[0]

    def call(self, function: Callable[..., Result], *args: Any, **given: Any) -> Result:
        """Returns the result of a function, for the given arguments and those that the layer holds.

        Args:
          function: the layer's function.
          *args: its first arguments, unchanged.
          **given: further arguments, unchanged. For every other argument that is an attribute of the layer,
            the attribute is passed; parameters are cast to `dtype`.
        """
        held = {name: value for name, value in vars(self).items() if name in _arguments(function) and name not in given}
        for name, value in held.items():
            if isinstance(value, nnx.List):
                held[name] = in_dtype(self.dtype, *value)
            elif isinstance(value, nnx.Variable):
                held[name] = self.cast(value)
        return function(*args, **held, **given)


@functools.cache
def _arguments(function: Callable[..., Any]) -> frozenset[str]:
    return frozenset(inspect.signature(function).parameters)


def drawn(rngs: nnx.Rngs, init: nnx.Initializer, shape: tuple[int, ...], dtype: DTypeLike) -> nnx.Param[jax.Array]:
    """Returns a parameter with values from an initializer; "params" is used of the random streams.

    They are drawn in at least float32 and rounded: jax draws 128 different numbers in bfloat16.
    """
    return nnx.Param(init(rngs.params(), shape, accumulation_dtype(dtype)).astype(dtype))


def zero_bias(is_there: bool, shape: int | tuple[int, ...], dtype: DTypeLike) -> nnx.Param[jax.Array] | None:
    """Returns a parameter of zeros, or None, as an attribute of a layer."""
    return nnx.data(nnx.Param(jnp.zeros(shape, dtype)) if is_there else None)


def uniform_between(bound: float) -> nnx.Initializer:
    """Returns an initializer that draws uniformly between -bound and bound, as in torch's layers."""
    return lambda key, shape, dtype, *_: jax.random.uniform(key, shape, dtype, -bound, bound)


def uniform_param(rngs: nnx.Rngs, shape: tuple[int, ...], fan_in: int, dtype: DTypeLike) -> nnx.Param[jax.Array]:
    """Returns a parameter as in `torch.nn.Linear`, uniform between -1 and 1 over the square root of `fan_in`."""
    return drawn(rngs, uniform_between(max(fan_in, 1) ** -0.5), shape, dtype)


def glorot_param(rngs: nnx.Rngs, shape: tuple[int, ...], dtype: DTypeLike) -> nnx.Param[jax.Array]:
    """Returns a parameter with a Glorot normal initializer with gain sqrt(2) and torch's fans.

    Args:
      rngs: flax's random streams; "params" is used.
      shape: [in, out] of a weight, [1, heads, out] of a vector for each head.
      dtype: dtype of the parameter.
    """
    if min(shape) < 1:
        raise ValueError(f"features and heads must be at least 1, got a parameter of shape {list(shape)}")
    fans = sum(shape) if len(shape) == 2 else shape[2] * (shape[0] + shape[1])
    return drawn(rngs, nnx.initializers.normal((4 / fans) ** 0.5), shape, dtype)


class DropoutKeys(nnx.Module):
    """The rates of a layer's dropout and the keys for it, which `train` and `eval` switch on and off.

    Args:
      rngs: flax's streams; "dropout" is used unless all rates are 0. None is allowed then.
      **rates: the rates, by name of the function's argument.

    Raises:
      ValueError: a rate is not in [0, 1), or has no streams.
    """

    def __init__(self, rngs: nnx.Rngs | None, **rates: float) -> None:
        for name, rate in rates.items():
            check_dropout(name, rate, rngs)
        self.rates = tuple(rates.items())
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

    def __call__(self, deterministic: bool | None, rngs: nnx.Rngs | None) -> dict[str, Any]:
        """Returns the function's arguments for dropout: rates and a fresh `dropout_key`, or 0 and None if it is off.

        Args:
          deterministic: True to turn it off; None for the last choice of `train` or `eval`.
          rngs: streams, in place of the layer's own.
        """
        is_off = self.deterministic if deterministic is None else deterministic
        if is_off or self.stream is None:
            return {"dropout_key": None} | {name: 0.0 for name, _ in self.rates}
        return {"dropout_key": self.stream() if rngs is None else rngs["dropout"](), **dict(self.rates)}
