"""Principal neighborhood aggregation (PNA): several reductions of messages, scaled by functions of the degree."""

import dataclasses
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
from flax import nnx

from jmp_train.graphs.array_types import Floats
from jmp_train.graphs.fn import Reduce, copy_u, u_add_e
from jmp_train.graphs.layers.dense import Activation, activated, add_bias, dense
from jmp_train.graphs.layers.layer import Drawing, DrawnLayer
from jmp_train.graphs.layers.layer_inputs import (
    AnyEdges,
    EndFeatures,
    as_edge_features,
    as_floats,
    as_graph,
    as_optional,
    end_rows,
    promoted_with,
)
from jmp_train.graphs.messages import update_all
from jmp_train.graphs.structure import (
    Adjacency,
    Block,
    Graph,
    accumulation_dtype,
    checked_word,
    graph_storage,
    rows_like,
    upcast,
)
from jmp_train.policies import autocast_as
from jmp_train.policies.pytrees import check_number

AGGREGATORS = ("mean", "max", "min", "std", "var", "sum")
SCALERS = ("identity", "amplification", "attenuation")
DEFAULT_AGGREGATORS = AGGREGATORS[:4]


def pna_conv(
    graph: AnyEdges,
    features: EndFeatures,
    pre_weight: Floats,
    post_weight: Floats,
    mix_weight: Floats,
    pre_bias: Floats | None = None,
    post_bias: Floats | None = None,
    mix_bias: Floats | None = None,
    *,
    delta: float,
    aggregators: Sequence[str] = DEFAULT_AGGREGATORS,
    scalers: Sequence[str] = SCALERS,
    edge_features: Floats | None = None,
    activation: Activation | None = None,
) -> jax.Array:
    """Returns products of a node with several reductions of its messages, each scaled by functions of its in-degree.

    In each tower, an edge from u to v has the message `[x_v, x_u, edge] @ pre_weight + pre_bias`. Only u's part is
    sent; v's part is added to the reductions, which are computed in one pass over the edges. Let A be the concatenation
    of all reductions, and S(A) that of all scalers of them. The tower computes `[x_v, S(A)] @ post_weight + post_bias`,
    and the result is the product of all towers with `mix_weight`.

    Args:
      graph: a graph of ours or jraph's, whose own features are not used, or a block.
      features: floating [nodes, in]; for a block those of its sources, or a pair, see `Block`.
      pre_weight: floating [towers, 2 * in + edge_in, width].
      post_weight: floating [towers, in + scalers * aggregators * width, tower_out].
      mix_weight: floating [towers * tower_out, out].
      pre_bias: floating [towers, width].
      post_bias: floating [towers, tower_out].
      mix_bias: floating [out].
      delta: the mean of `log(in-degree + 1)` over the nodes of the training graphs, the unit of the scalers.
      aggregators: names among "mean", "max", "min", "std", "var" and "sum".
      scalers: names among "identity"; "amplification", the logarithm of the in-degree plus 1 over delta; and
        "attenuation", its inverse.
      edge_features: floating [edges, edge_in], or None.
      activation: a function of the result.

    Returns:
      [nodes, out] in the promoted dtype of features and weights; half under autocast.

    Raises:
      ValueError: a shape does not fit, a word is unknown, or delta is not positive.
      TypeError: an array is not floating.

    Example:
      >>> import jax.numpy as jnp
      >>> from jmp_train.graphs import from_edges
      >>> graph = from_edges([0, 1], [2, 2], 3)
      >>> pre = jnp.array([[[0.0], [1.0]]])  # of the sender only
      >>> post = jnp.array([[[0.0], [1.0], [10.0]]])  # of the reductions
      >>> options = dict(aggregators=["mean", "std"], scalers=["identity"], delta=1.0)
      >>> pna_conv(graph, jnp.array([[1.0], [3.0], [9.0]]), pre, post, jnp.ones((1, 1)), **options).ravel().tolist()
      [0.0, 0.0, 12.0]

    Reference: Corso et al., Principal Neighbourhood Aggregation for Graph Nets, https://arxiv.org/abs/2004.05718;
    PyTorch Geometric's PNAConv.
    """
    _check_words(aggregators, scalers)
    check_number("delta", delta, "positive: the mean of log(in-degree + 1)", above=0)
    graph = as_graph(graph, features)
    rows = end_rows(graph, features, "in")
    width_in = rows.senders.shape[1]
    edges = None if edge_features is None else as_edge_features(graph, edge_features, "edge_in")
    length = 2 * width_in + (0 if edges is None else edges.shape[1])
    pre = as_floats("pre_weight", pre_weight, "towers", length, "width")
    towers, _, width = pre.shape
    reduced_width = len(scalers) * len(aggregators) * width
    post = as_floats("post_weight", post_weight, towers, width_in + reduced_width, "tower_out")
    mix = as_floats("mix_weight", mix_weight, towers * post.shape[2], "out")
    rows, (edges, pre, post, mix, pre_offset, post_offset, mix_offset) = promoted_with(
        rows,
        edges,
        pre,
        post,
        mix,
        as_optional("pre_bias", pre_bias, towers, width),
        as_optional("post_bias", post_bias, towers, post.shape[2]),
        as_optional("mix_bias", mix_bias, mix.shape[1]),
    )
    here, there, of_edge = pre[:, :width_in], pre[:, width_in : 2 * width_in], pre[:, 2 * width_in :]
    own = _of_towers(rows.receivers, here)
    if pre_offset is not None:
        own = _with_bias(own, pre_offset)
    sent = _of_towers(rows.senders, there)
    if edges is None:
        reduced = _reduced(graph, sent, None, own, aggregators)
    else:  # the gradient recomputes the product with the edges' features

        @jax.checkpoint
        def with_edges(sent: jax.Array, edges: jax.Array, weight: jax.Array, own: jax.Array) -> jax.Array:
            return _reduced(graph, sent, _of_towers(edges, weight), own, aggregators)

        reduced = with_edges(sent, edges, of_edge, own)
    apart = post[:, width_in:].reshape(towers, len(scalers), -1, post.shape[2])
    result = _scaled(graph.connections, scalers, delta, jnp.einsum("nti,tsio->nsto", reduced, apart))
    result = _of_towers(rows.receivers, post[:, :width_in]) + result
    result = result if post_offset is None else _with_bias(result, post_offset)
    return activated(dense(result.reshape(len(result), -1), mix, mix_offset), activation)


def _check_words(aggregators: Sequence[str], scalers: Sequence[str]) -> None:
    for name, words, known in (("aggregators", aggregators, AGGREGATORS), ("scalers", scalers, SCALERS)):
        if isinstance(words, str) or not words:
            raise ValueError(f"{name} must be at least one of {', '.join(map(repr, known))}, got {words!r}")
        for place, word in enumerate(words):
            checked_word(f"{name}[{place}]", word, known)


def _of_towers(rows: jax.Array, weight: jax.Array) -> jax.Array:
    """Returns rows [rows, in] times weights [towers, in, width], [rows, towers, width]."""
    return jnp.einsum("ni,tio->nto", rows, weight)


def _with_bias(rows: jax.Array, bias: jax.Array) -> jax.Array:
    """Returns rows [rows, towers, width] plus a bias [towers, width]."""
    return add_bias(rows.reshape(len(rows), -1), bias.ravel()).reshape(rows.shape)


def _reduced(
    graph: Graph | Block,
    sent: jax.Array,
    brought: jax.Array | None,
    own: jax.Array,
    aggregators: Sequence[str],
) -> jax.Array:
    """Returns the reductions of messages [nodes, towers, aggregators * width].

    Args:
      graph: a graph or a block.
      sent: the sender's part of each message, [senders, towers, width].
      brought: the edge's part, [edges, towers, width], or None.
      own: the receiver's part, [receivers, towers, width].
      aggregators: names among `AGGREGATORS`.
    """
    message = copy_u("sent", "m") if brought is None else u_add_e("sent", "brought", "m")
    reductions = [
        Reduce(checked_word("aggregators", name, AGGREGATORS), "m", name) for name in dict.fromkeys(aggregators)
    ]
    edges = {} if brought is None else {"brought": brought}
    if isinstance(graph, Block):
        found = update_all(graph.graph({"sent": sent}, {}, edges), message, reductions).nodes["target"]
    else:
        found = update_all(dataclasses.replace(graph, nodes={"sent": sent}, edges=edges), message, reductions).nodes
    degrees = graph.connections.in_degrees

    @autocast_as("float32")
    def with_receivers(own: jax.Array, found: Mapping[str, jax.Array]) -> jax.Array:
        own = upcast(own)
        count = rows_like(degrees.astype(own.dtype), own)
        parts = []
        for name in aggregators:
            rows = upcast(found[name])
            if name not in ("std", "var"):  # these do not depend on a common part of all messages
                rows = rows + (count * own if name == "sum" else own)
            parts.append(jnp.where(count > 0, rows, jnp.zeros_like(rows)).astype(found[name].dtype))
        return jnp.concatenate(parts, -1)

    return graph_storage(with_receivers(own, found))


def _scaled(adjacency: Adjacency, scalers: Sequence[str], delta: float, parts: jax.Array) -> jax.Array:
    """Returns the sum over the scalers of scaled parts [nodes, scalers, towers, width], in their dtype."""
    logs = jnp.log1p(jnp.maximum(adjacency.in_degrees, 1).astype(accumulation_dtype(parts.dtype)))
    factors = {"identity": jnp.ones_like(logs), "amplification": logs / delta, "attenuation": delta / logs}
    scales = jnp.stack([factors[name] for name in scalers], 1)[:, :, None, None]
    total = autocast_as("float32")(lambda parts: (upcast(parts) * scales.astype(upcast(parts).dtype)).sum(1))
    return graph_storage(total(parts).astype(parts.dtype))


class PNAConv(DrawnLayer, of=pna_conv):
    """The layer of `pna_conv`: `layer(graph, features, edge_features=None)`.

    Weights and biases have torch's uniform initializer for linear layers.

    Args:
      in_features: the width of the features, and of the messages of each tower.
      out_features: the width of the result, a multiple of `towers`.
      delta: see `pna_conv`.
      aggregators: see `pna_conv`.
      scalers: see `pna_conv`.
      towers: number of towers, each of which gets all features.
      edge_features: the width of the edges' features; 0 for none.
      activation: see `pna_conv`.
      dtype: dtype to which features and parameters are cast; None for their promoted dtype.
      param_dtype: the parameters' dtype.
      rngs: flax's random streams; "params" is used.

    Raises:
      ValueError: a word is unknown, or towers do not divide `out_features`.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from jmp_train.graphs import from_edges
      >>> graph = from_edges([0, 1, 2], [1, 2, 0], 3)
      >>> delta = float(jnp.log1p(graph.in_degrees).mean())
      >>> layer = PNAConv(4, 8, delta=delta, towers=2, rngs=nnx.Rngs(0))
      >>> layer(graph, jnp.ones((3, 4))).shape
      (3, 8)
    """

    in_features: int
    out_features: int
    _: dataclasses.KW_ONLY
    delta: float
    aggregators: Sequence[str] = DEFAULT_AGGREGATORS
    scalers: Sequence[str] = SCALERS
    towers: int = 1
    edge_features: int = 0
    activation: Activation | None = None

    def __post_init__(self, rngs: nnx.Rngs) -> None:
        _check_words(self.aggregators, self.scalers)
        if self.towers < 1 or self.out_features % self.towers:
            raise ValueError(f"towers={self.towers} must divide out_features={self.out_features}")
        self.aggregators, self.scalers = tuple(self.aggregators), tuple(self.scalers)
        draw, towers, width, out = Drawing(rngs, self.param_dtype), self.towers, self.in_features, self.out_features
        sent = 2 * width + self.edge_features
        reduced = width + len(self.aggregators) * len(self.scalers) * width
        self.pre_weight = draw.linear(sent, towers, sent, width)
        self.pre_bias = draw.linear(sent, towers, width)
        self.post_weight = draw.linear(reduced, towers, reduced, out // towers)
        self.post_bias = draw.linear(reduced, towers, out // towers)
        self.mix_weight = draw.linear(out, out, out)
        self.mix_bias = draw.linear(out, out)

    def __call__(
        self,
        graph: AnyEdges,
        features: EndFeatures,
        edge_features: Floats | None = None,
    ) -> jax.Array:
        """Returns the layer's result [nodes, out], for the arguments of `pna_conv`."""
        return self.call(graph, self.cast(features), edge_features=self.cast(edge_features))
