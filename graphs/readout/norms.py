"""Norms over the real nodes of a batch: their float32 statistics ignore padding."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.typing import DTypeLike

from jmp_train.graphs.array_types import Floats
from jmp_train.graphs.readout.graph_features import graph_segments, rows_of
from jmp_train.graphs.structure import AnyBatch, accumulation_dtype, batch_of, in_float32, incidence_of, upcast
from jmp_train.policies import autocast_as


def masked_moments(
    rows: Floats, mask: Floats | None = None, *, axis_name: str | None = None
) -> tuple[jax.Array, jax.Array]:
    """Returns the mean and the variance of the rows of a mask, in float32.

    Args:
      rows: floating [rows, ...].
      mask: bool [rows], True for rows that count; None for all.
      axis_name: the mesh axis over whose devices rows are counted together, each row once; None for this device's rows.

    Returns:
      Two arrays [...], float32 or higher precision; 0 if no row counts.

    Example:
      >>> mean, variance = masked_moments(jnp.array([1.0, 3.0, 99.0]), jnp.array([True, True, False]))
      >>> mean.item(), variance.item()
      (2.0, 1.0)

    Reference: Ioffe and Szegedy, Batch Normalization, https://arxiv.org/abs/1502.03167.
    """
    rows = jnp.asarray(rows)
    mask = jnp.ones(len(rows), bool) if mask is None else jnp.asarray(mask)
    if mask.dtype != jnp.bool_ or mask.shape != rows.shape[:1]:
        raise ValueError(f"mask must be bool [{len(rows)}], got {mask.dtype} {mask.shape}")
    segments = incidence_of(jnp.where(mask, 0, 1), 1)

    def total(x: jax.Array) -> jax.Array:
        return x if axis_name is None else lax.psum(x, axis_name)

    @autocast_as("float32")
    def moments(rows: jax.Array) -> tuple[jax.Array, jax.Array]:
        rows = upcast(rows)
        count = jnp.maximum(total(mask.sum()), 1).astype(rows.dtype)
        mean = total(segments.sum(rows)[0]) / count
        rest = rows - mean
        return mean, total(segments.sum(rest * rest)[0]) / count

    return moments(rows)


class BatchNorm(nnx.BatchNorm):
    """flax's batch norm with a mask that may leave out a different number of rows on each device.

    Statistics are those of the rows in the mask, over all devices of `axis_name`, each row counted once. They are
    computed in two passes in float32, and stored in float32. If no row counts at all, the running statistics stay. The
    output has the dtype of the input, or `dtype`. Parameters and options are those of `flax.nnx.BatchNorm`.

    Args:
      num_features: the width of the rows.
      **options: see `flax.nnx.BatchNorm`; `axis_name` for several devices.

    Example:
      >>> from jmp_train.graphs import from_edges, node_mask, pad
      >>> padded = pad(from_edges([0], [1], 2), 4, 4)
      >>> norm = BatchNorm(1, rngs=nnx.Rngs(0))
      >>> h = jnp.array([[1.0], [3.0], [99.0], [99.0]], jnp.float16)
      >>> norm(h, mask=node_mask(padded))[:2].tolist(), norm.mean[...].round(3)
      ([[-1.0], [1.0]], Array([0.02], dtype=float32))
    """

    def __call__(self, x: Any, use_running_average: bool | None = None, *, mask: jax.Array | None = None) -> jax.Array:
        """Returns the normalized rows.

        Args:
          x: floating [rows, num_features].
          use_running_average: True to use the running statistics; None for the layer's own choice.
          mask: bool [rows], True for rows that count; None for all. The outputs of other rows have no meaning.
        """
        x = jnp.asarray(x)
        if x.ndim != 2:
            raise ValueError(f"x must be [rows, {self.num_features}], got shape {x.shape}")
        if use_running_average is None:
            use_running_average = bool(self.use_running_average)
        if use_running_average:
            mean, variance = self.mean[...], self.var[...]
        else:
            mean, variance = masked_moments(x, mask, axis_name=self.axis_name)
            has_rows = True if mask is None else _any(mask, self.axis_name)
            for running, new in ((self.mean, mean), (self.var, variance)):
                old = running[...]
                moved = self.momentum * old + (1 - self.momentum) * lax.stop_gradient(new).astype(old.dtype)
                running[...] = jnp.where(has_rows, moved, old)
        scale, bias = (None if x is None else x[...] for x in (self.scale, self.bias))

        @autocast_as("float32")
        def normalized(x: jax.Array) -> jax.Array:
            factor = lax.rsqrt(upcast(variance) + self.epsilon)
            factor = factor if scale is None else factor * scale.astype(factor.dtype)
            result = (upcast(x) - upcast(mean).astype(accumulation_dtype(x.dtype))) * factor
            return result if bias is None else result + bias.astype(result.dtype)

        return normalized(x).astype(self.dtype or x.dtype)


def _any(mask: jax.Array, axis_name: str | None) -> jax.Array:
    found = mask.any()
    return found if axis_name is None else lax.pmax(found.astype(jnp.int32), axis_name) > 0


def graph_norm(
    graph: AnyBatch,
    features: Floats,
    scale: Floats | None = None,
    bias: Floats | None = None,
    mean_scale: Floats | None = None,
    *,
    eps: float = 1e-5,
) -> jax.Array:
    """Returns features normalized over the nodes of each graph of a batch, with a fraction of the mean subtracted.

    Args:
      graph: a graph or a batch of ours or jraph's, padded or not.
      features: floating [nodes, width].
      scale: floating [width], factor of the result; None for 1.
      bias: floating [width], added to the result; None for 0.
      mean_scale: floating [width], the fraction of the mean to subtract; None for 1.
      eps: added to the variance, in float32.

    Returns:
      [nodes, width] in the features' dtype; the outputs for padding have no meaning.

    Raises:
      ValueError: shapes do not fit.
      TypeError: `graph` is not a graph.

    Example:
      >>> from jmp_train.graphs import batch, from_edges
      >>> pair = batch([from_edges([], [], 2), from_edges([], [], 1)])
      >>> graph_norm(pair, jnp.array([[300.0], [-300.0], [7.0]], jnp.float16)).tolist()
      [[1.0], [-1.0], [0.0]]

    Reference: Cai et al., GraphNorm, https://arxiv.org/abs/2009.03294; PyTorch Geometric's GraphNorm.
    """
    graph = batch_of(graph)
    rows = rows_of(graph, "nodes", features)
    if rows.ndim != 2:
        raise ValueError(f"features must be [nodes, width], got shape {rows.shape}")
    width = rows.shape[1]
    arrays = {"scale": scale, "bias": bias, "mean_scale": mean_scale}
    for name, array in arrays.items():
        if array is not None and jnp.shape(array) != (width,):
            raise ValueError(f"{name} must be [{width}], got shape {jnp.shape(array)}")
    segments = graph_segments(graph, "nodes")
    options = [None if array is None else jnp.asarray(array) for array in arrays.values()]

    @jax.checkpoint
    def normalized(rows: jax.Array) -> jax.Array:
        rows = upcast(rows)
        scale, bias, share = (None if x is None else x.astype(rows.dtype) for x in options)
        mean = segments.mean(rows)
        rest = rows - segments.read(mean if share is None else mean * share)
        variance = segments.mean(rest * rest)
        result = rest * segments.read(lax.rsqrt(variance + eps))
        result = result if scale is None else result * scale
        return result if bias is None else result + bias

    return in_float32(normalized, rows)


class GraphNorm(nnx.Module):
    """The layer of `graph_norm`: `layer(graph, features)`, as in PyTorch Geometric.

    Args:
      num_features: the width of the features.
      eps: see `graph_norm`.
      param_dtype: the dtype of the parameters.

    Example:
      >>> from jmp_train.graphs import from_edges
      >>> GraphNorm(1)(from_edges([], [], 2), jnp.array([[1.0], [3.0]])).round(2).tolist()
      [[-1.0], [1.0]]
    """

    def __init__(self, num_features: int, *, eps: float = 1e-5, param_dtype: DTypeLike = jnp.float32) -> None:
        self.eps = eps
        self.scale = nnx.Param(jnp.ones(num_features, param_dtype))
        self.bias = nnx.Param(jnp.zeros(num_features, param_dtype))
        self.mean_scale = nnx.Param(jnp.ones(num_features, param_dtype))

    def __call__(self, graph: AnyBatch, features: jax.Array) -> jax.Array:
        """Returns the normalized features, [nodes, num_features].

        Args:
          graph: see `graph_norm`.
          features: floating [nodes, num_features].
        """
        return graph_norm(graph, features, self.scale[...], self.bias[...], self.mean_scale[...], eps=self.eps)
