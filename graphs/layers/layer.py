"""Base classes of the layers: a layer passes its fields to its function by the names of the arguments."""

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any, ClassVar, dataclass_transform

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from jmp_train.graphs.array_types import Floats
from jmp_train.graphs.layers.dense import check_dropout
from jmp_train.graphs.layers.layer_inputs import AnyEdges, EndFeatures, in_dtype
from jmp_train.graphs.structure import accumulation_dtype


@dataclass_transform(eq_default=False)
class _Declared(nnx.Module):
    """A module that declares the arguments of its constructor as fields, as a dataclass does."""

    _function: ClassVar[Callable[..., Any]]
    uncast: ClassVar[tuple[str, ...]] = ()  # parameters that keep their dtype
    dropout_keys: "DropoutKeys"  # of layers with dropout

    def __init_subclass__(cls, of: Callable[..., Any] | None = None, **options: Any) -> None:
        """Makes a dataclass of a layer unless it has its own constructor.

        Args:
          of: the layer's function; None for base classes, whose fields follow those of the layers.
          **options: flax's.
        """
        super().__init_subclass__(**options)
        if of is not None:
            cls._function = staticmethod(of)
        if of is not None and "__init__" not in vars(cls):
            bases = [base for base in reversed(cls.__mro__[1:]) if issubclass(base, Layer)]
            cls.__annotations__ = functools.reduce(dict.__or__, map(inspect.get_annotations, [cls, *bases]))
            dataclasses.dataclass(eq=False, repr=False)(cls)
            types = cls.__init__.__annotations__
            types |= {name: kind.type for name, kind in types.items() if isinstance(kind, dataclasses.InitVar)}


class Layer(_Declared):
    """A layer whose attributes are parameters and options of a function."""

    _: dataclasses.KW_ONLY
    dtype: DTypeLike | None = None
    param_dtype: DTypeLike = jnp.float32

    def cast(self, arrays: Any) -> Any:
        """Returns an array, or a pair of arrays, in the layer's dtype, or unchanged without one; None stays None."""
        return in_dtype(self.dtype, arrays)[0]

    def call(self, *args: Any, **given: Any) -> Any:
        """Returns the result of the layer's function, for the given arguments and those that the layer holds.

        Args:
          *args: its first arguments, unchanged.
          **given: further arguments, unchanged. For every other argument that is an attribute of the layer,
            the attribute is passed; parameters are cast to `dtype`.
        """
        names = _arguments(self._function) - given.keys()
        held = {name: value for name, value in vars(self).items() if name in names}
        for name, value in held.items():
            if isinstance(value, nnx.List):
                held[name] = in_dtype(self.dtype, *value)
            elif isinstance(value, nnx.Variable) and name not in self.uncast:
                held[name] = self.cast(value)
        return self._function(*args, **held, **given)


@functools.cache
def _arguments(function: Callable[..., Any]) -> frozenset[str]:
    return frozenset(inspect.signature(function).parameters)


class DrawnLayer(Layer):
    """A layer whose parameters are drawn from flax's random streams."""

    _: dataclasses.KW_ONLY
    rngs: dataclasses.InitVar[nnx.Rngs]


class DropoutConvolution(DrawnLayer):
    """A layer with dropout that is called with a graph, features and, if there are any, edge weights."""

    def __call__(
        self,
        graph: AnyEdges,
        features: EndFeatures,
        edge_weight: Floats | None = None,
        *,
        deterministic: bool | None = None,
        rngs: nnx.Rngs | None = None,
    ) -> jax.Array:
        """Returns the result of the layer's function, [nodes, ...].

        Args:
          graph: a graph of ours or jraph's, or a block.
          features: floating [nodes, in]; for a block those of its sources, or a pair, see `Block`.
          edge_weight: floating [edges], factors of the messages.
          deterministic: True to turn dropout off; None for the last choice of `train` or `eval`.
          rngs: random streams for dropout, in place of the layer's own.
        """
        dropout = self.dropout_keys(deterministic, rngs)
        return self.call(graph, self.cast(features), edge_weight=edge_weight, **dropout)


def uniform_between(bound: float) -> nnx.Initializer:
    """Returns an initializer that draws uniformly between -bound and bound, as in torch's layers."""
    return lambda key, shape, dtype, *_: jax.random.uniform(key, shape, dtype, -bound, bound)


@dataclasses.dataclass(frozen=True)
class Drawing:
    """Draws parameters of one dtype; "params" is used of flax's random streams.

    They are drawn in at least float32 and rounded: jax draws 128 different numbers in bfloat16.
    """

    rngs: nnx.Rngs
    dtype: DTypeLike

    def __call__(self, init: nnx.Initializer, *shape: int) -> nnx.Param[jax.Array]:
        """Returns a parameter with values from an initializer."""
        return nnx.Param(init(self.rngs.params(), shape, accumulation_dtype(self.dtype)).astype(self.dtype))

    def zeros(self, *shape: int) -> nnx.Param[jax.Array]:
        """Returns a parameter of zeros, without drawing."""
        return nnx.Param(jnp.zeros(shape, self.dtype))

    def linear(self, fan_in: int, *shape: int) -> nnx.Param[jax.Array]:
        """Returns a parameter as in `torch.nn.Linear`, uniform between -1 and 1 over the square root of `fan_in`."""
        return self(uniform_between(max(fan_in, 1) ** -0.5), *shape)

    def glorot(self, *shape: int) -> nnx.Param[jax.Array]:
        """Returns a parameter with a Glorot normal initializer with gain sqrt(2) and torch's fans.

        Args:
          *shape: [in, out] of a weight, [1, heads, out] of a vector for each head.
        """
        if min(shape) < 1:
            raise ValueError(f"features and heads must be at least 1, got a parameter of shape {list(shape)}")
        fans = sum(shape) if len(shape) == 2 else shape[2] * (shape[0] + shape[1])
        return self(nnx.initializers.normal((4 / fans) ** 0.5), *shape)


class DropoutKeys(nnx.Module):
    """The keys for a layer's dropout, which `train` and `eval` switch on and off.

    Args:
      rngs: flax's streams; "dropout" is used unless all rates are 0. None is allowed then.
      **rates: the layer's rates, by name of the function's argument.

    Raises:
      ValueError: a rate is not in [0, 1), or has no streams.
    """

    def __init__(self, rngs: nnx.Rngs | None, **rates: float) -> None:
        for name, rate in rates.items():
            check_dropout(name, rate, rngs)
        self.rates = tuple(rates)
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
        """Returns arguments for the layer's function: a fresh `dropout_key`, or None and rates of 0 if it is off.

        Args:
          deterministic: True to turn it off; None for the last choice of `train` or `eval`.
          rngs: streams, in place of the layer's own.
        """
        is_off = self.deterministic if deterministic is None else deterministic
        if is_off or self.stream is None:
            return {"dropout_key": None, **dict.fromkeys(self.rates, 0.0)}
        return {"dropout_key": self.stream() if rngs is None else rngs["dropout"]()}
