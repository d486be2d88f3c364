"""The kernels of graph attention, of GAT and of GATv2, by implementation."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jmp_train.graphs.kernels.attention_xla import attention_by_xla, gat_logits, gatv2_logits
from jmp_train.graphs.kernels.chunks import run_chunked
from jmp_train.graphs.kernels.dropout import EdgeDropout
from jmp_train.graphs.kernels.gat import GATInputs, chunked_gat
from jmp_train.graphs.kernels.gatv2 import GATv2Inputs, chunked_gatv2
from jmp_train.graphs.kernels.implementations import EdgeOperation
from jmp_train.graphs.structure import Adjacency


def _by_chunks(
    kernel: Callable[..., Any],
    adjacency: Adjacency,
    negative_slope: float,
    dropout: EdgeDropout | None,
    inputs: GATInputs | GATv2Inputs,
) -> jax.Array:
    sent = inputs.sent
    if sent.size == 0:
        return jnp.zeros((adjacency.num_receivers, *sent.shape[1:]), sent.dtype)
    return run_chunked(functools.partial(kernel, negative_slope), adjacency.neighbors, dropout, inputs)


def _elements_per_edge(negative_slope: float, dropout: EdgeDropout | None, inputs: GATInputs | GATv2Inputs) -> int:
    del negative_slope, dropout
    _, heads, width = inputs.sent.shape
    return heads * width


GAT = EdgeOperation(
    {
        "xla": functools.partial(attention_by_xla, gat_logits),
        "chunked": functools.partial(_by_chunks, chunked_gat),
    },
    _elements_per_edge,
)
GATV2 = EdgeOperation(
    {
        "xla": functools.partial(attention_by_xla, gatv2_logits),
        "chunked": functools.partial(_by_chunks, chunked_gatv2),
    },
    _elements_per_edge,
)
