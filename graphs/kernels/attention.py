"""The kernels of graph attention, of GAT and of GATv2, by implementation."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from jmp_train.graphs.kernels.attention_xla import gat_by_xla, gatv2_by_xla
from jmp_train.graphs.kernels.chunks import run_chunked
from jmp_train.graphs.kernels.dropout import EdgeDropout
from jmp_train.graphs.kernels.gat import GATInputs, chunked_gat
from jmp_train.graphs.kernels.gatv2 import GATv2Inputs, chunked_gatv2
from jmp_train.graphs.kernels.implementations import EdgeOperation
from jmp_train.graphs.structure import Adjacency


def _gat_by_chunks(
    adjacency: Adjacency,
    negative_slope: float,
    dropout: EdgeDropout | None,
    inputs: GATInputs,
) -> jax.Array:
    kernel = functools.partial(chunked_gat, negative_slope)
    return _by_chunks(kernel, adjacency, dropout, inputs)


def _gatv2_by_chunks(
    adjacency: Adjacency,
    negative_slope: float,
    dropout: EdgeDropout | None,
    inputs: GATv2Inputs,
) -> jax.Array:
    kernel = functools.partial(chunked_gatv2, negative_slope)
    return _by_chunks(kernel, adjacency, dropout, inputs)


def _by_chunks(
    kernel: Callable[..., jax.Array],
    adjacency: Adjacency,
    dropout: EdgeDropout | None,
    inputs: GATInputs | GATv2Inputs,
) -> jax.Array:
    sent = inputs.sent
    if sent.size == 0:
        return jnp.zeros((adjacency.num_targets, *sent.shape[1:]), sent.dtype)
    return run_chunked(kernel, adjacency.neighbors, dropout, inputs)


def _elements_per_edge(negative_slope: float, dropout: EdgeDropout | None, inputs: GATInputs | GATv2Inputs) -> int:
    del negative_slope, dropout
    _, heads, width = inputs.sent.shape
    return heads * width


GAT = EdgeOperation({"xla": gat_by_xla, "chunked": _gat_by_chunks}, _elements_per_edge)
GATV2 = EdgeOperation({"xla": gatv2_by_xla, "chunked": _gatv2_by_chunks}, _elements_per_edge)
