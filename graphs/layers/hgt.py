"""The layer of heterogeneous graph transformers (HGT): attention over the edges of all types that enter a node."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from jmp_train.graphs.array_types import Floats
from jmp_train.graphs.kernels import ATTENTION, AttentionInputs, DotAttention, edge_dropout
from jmp_train.graphs.layers.dense import activated, check_dropout, dense
from jmp_train.graphs.layers.hetero import (
    Blocks,
    block_of,
    checked_typed_edges,
    num_rows,
    of_edge_types,
    parameter_names,
)
from jmp_train.graphs.layers.layer import Drawing, DropoutKeys, Layer
from jmp_train.graphs.layers.layer_inputs import as_floats, as_optional, promoted
from jmp_train.graphs.structure import EdgeType, HeteroGraph, finite_or_zero, graph_storage, upcast
from jmp_train.policies import autocast_as


class HGTNodeWeights(NamedTuple):
    """The weights of `hgt_conv` for the nodes of a type.

    Attributes:
      key: floating [in, out].
      query: floating [in, out].
      value: floating [in, out].
      result: floating [out, out].
      key_bias: floating [out].
      query_bias: floating [out].
      value_bias: floating [out].
      result_bias: floating [out].
      skip: floating [1]: its sigmoid is the weight of the result, and the rest is that of the node itself; only if
        widths are equal.

    Example:
      >>> import jax.numpy as jnp
      >>> weight = jnp.ones((4, 8))
      >>> HGTNodeWeights(weight, weight, weight, jnp.ones((8, 8))).skip is None
      True
    """

    key: Floats
    query: Floats
    value: Floats
    result: Floats
    key_bias: Floats | None = None
    query_bias: Floats | None = None
    value_bias: Floats | None = None
    result_bias: Floats | None = None
    skip: Floats | None = None


class HGTEdgeWeights(NamedTuple):
    """The weights of `hgt_conv` for the edges of a type.

    Attributes:
      key: floating [heads, width, width], matrices for the senders' keys.
      value: floating [heads, width, width], matrices for the senders' values.
      prior: floating [heads], factors of the logits.

    Example:
      >>> import jax.numpy as jnp
      >>> matrices = jnp.ones((2, 4, 4))  # of two heads
      >>> HGTEdgeWeights(matrices, matrices, jnp.ones(2)).prior.shape
      (2,)
    """

    key: Floats
    value: Floats
    prior: Floats


def hgt_conv(
    graph: HeteroGraph | Blocks,
    features: Mapping[str, Floats],
    node_weights: Mapping[str, HGTNodeWeights],
    edge_weights: Mapping[str, HGTEdgeWeights] | Mapping[EdgeType, HGTEdgeWeights],
    *,
    attention_dropout: float = 0.0,
    dropout_key: jax.Array | None = None,
    implementation: str | None = None,
) -> dict[str, jax.Array]:
    """Returns attention over the edges of all types together, with separate keys and values for each type.

    An edge of type r from u to v has the logit `prior_r query_v . (key_u key_r) / sqrt(width)` and the message
    `value_u value_r` in each head. The softmax is over all edges that enter v. The result is `gelu(sum) result +
    result_bias`, combined with v's features by its type's `skip`. Logits, softmax and sums are float32, and no array
    except the indices is as long as the edges.

    Args:
      graph: a graph of several types; or one layer's entry of a mini-batch's `blocks`, with a block by edge type.
      features: by node type, floating [nodes, in]; for blocks [sources, in], with the targets first.
      node_weights: by node type, the weights of its nodes.
      edge_weights: by edge type, the weights of its edges; types without weights are left out.
      edge_weights: by edge type, the weights of its edges; types that are missing are left out.
      attention_dropout: the fraction of the attention weights to drop.
      dropout_key: for dropout; required if the rate is not 0.
      implementation: see `gat_attention`.

    Returns:
      By type of the nodes that edges enter, [nodes, out] in the promoted dtype of features and weights; half under
      autocast.

    Raises:
      ValueError: a shape does not fit, a type is missing, the rate is not in [0, 1), the key is missing, or the
        graph does not support the implementation.
      TypeError: an array is not floating, the graph has one type, or the layer gets all blocks of a mini-batch.

    Example:
      >>> import jax.numpy as jnp
      >>> from jmp_train.graphs import hetero_from_edges
      >>> plays, makes = ("user", "plays", "game"), ("firm", "makes", "game")
      >>> graph = hetero_from_edges({plays: ([0, 1], [0, 0]), makes: ([0], [0])}, {"user": 2, "firm": 1, "game": 1})
      >>> one = jnp.ones((1, 1))
      >>> nodes = dict.fromkeys(("user", "firm", "game"), HGTNodeWeights(one, 0 * one, one, one))
      >>> edges = dict.fromkeys(("plays", "makes"), HGTEdgeWeights(one[None], one[None], one[0]))
      >>> features = {"user": jnp.array([[10.0], [20.0]]), "firm": jnp.array([[60.0]]), "game": one}
      >>> hgt_conv(graph, features, nodes, edges)["game"].tolist()
      [[30.0]]

    Reference: Hu et al., Heterogeneous Graph Transformer, https://arxiv.org/abs/2003.01332; PyTorch Geometric's
    HGTConv.
    """
    check_dropout("attention_dropout", attention_dropout, dropout_key)
    checked_typed_edges(graph)
    of_edges = of_edge_types(graph, edge_weights)
    kinds = sorted(of_edges)
    heads = _heads(of_edges)
    counts = {name: num_rows(graph, name, kinds) for kind in kinds for name in (kind[0], kind[2])}
    tables = {name: _tables(name, counts[name], features, node_weights, heads) for name in sorted(counts)}
    keys = [None] * len(kinds) if dropout_key is None else list(jax.random.split(dropout_key, len(kinds)))
    attended: dict[str, list[_Attended]] = {}
    for kind, key in zip(kinds, keys, strict=True):
        of_kind = _checked_edge_weights(kind, of_edges[kind], tables[kind[0]])
        dropout = edge_dropout(attention_dropout, key, heads)
        block = block_of(graph, kind)
        inputs = _dot_inputs(tables[kind[0]], _targets(kind[2], tables[kind[2]], block.num_targets), of_kind)
        found = ATTENTION(implementation, block.connections, DotAttention(1.0), dropout, inputs)
        attended.setdefault(kind[2], []).append(_Attended(found.totals[0], found.log_sum, block.in_degrees > 0))
    return {
        name: _result(_targets(name, tables[name], len(results[0].is_entered)), results)
        for name, results in attended.items()
    }


class _Tables(NamedTuple):
    """The tables of the nodes of a type: features, three times [nodes, heads, width], and weights of the result."""

    rows: jax.Array
    key: jax.Array
    query: jax.Array
    value: jax.Array
    result: jax.Array
    result_bias: jax.Array | None
    skip: jax.Array | None


class _Attended(NamedTuple):
    """The attention over the edges of one type, see `Attended`, and the nodes that they enter, bool [nodes]."""

    total: jax.Array
    log_sum: jax.Array
    is_entered: jax.Array


def _heads(edge_weights: Mapping[EdgeType, HGTEdgeWeights]) -> int:
    if not edge_weights:
        raise ValueError("edge_weights is empty: at least one edge type is needed")
    counts = {kind: jnp.asarray(weights.prior).size for kind, weights in edge_weights.items()}
    if len(set(counts.values())) > 1:
        raise ValueError(f"all priors in edge_weights must have the same number of heads, got {counts}")
    return next(iter(counts.values()))


def _tables(
    name: str,
    count: int | str,
    features: Mapping[str, Floats],
    node_weights: Mapping[str, HGTNodeWeights],
    heads: int,
) -> _Tables:
    for of, given in (("features", features), ("node_weights", node_weights)):
        if name not in given:
            known = ", ".join(map(repr, given)) or "none"
            raise ValueError(f"{of} of {name!r} are missing; there are: {known}")
    where, given = f"node_weights[{name!r}]", node_weights[name]
    key = as_floats(f"{where}.key", given.key, "in", "out")
    width, out = key.shape
    if out % heads:
        raise ValueError(f"{heads} heads must divide the width of {where}.key, {out}")
    rows = as_floats(f"features[{name!r}]", features[name], count, width)
    skip = as_optional(f"{where}.skip", given.skip, 1)
    if skip is not None and width != out:
        raise ValueError(f"{where}.skip needs features as wide as the results, {out}, got width {width}")
    others = [as_floats(f"{where}.{end}", getattr(given, end), width, out) for end in ("query", "value")]
    others.append(as_floats(f"{where}.result", given.result, out, out))
    biases = [as_optional(f"{where}.{end}_bias", getattr(given, f"{end}_bias"), out) for end in ENDS]
    rows, *arrays = promoted(rows, key, *others, *biases, skip)

    def table(weight: jax.Array, bias: jax.Array | None) -> jax.Array:
        return dense(rows, weight, bias).reshape(-1, heads, out // heads)

    key, query, value = (table(*pair) for pair in zip(arrays[:3], arrays[4:7], strict=True))
    return _Tables(rows, key, query, value, arrays[3], *arrays[7:])


ENDS = ("key", "query", "value", "result")


def _targets(name: str, tables: _Tables, count: int) -> _Tables:
    """Returns the tables of the first nodes of a type."""
    rows = len(tables.rows)
    if rows < count:
        raise ValueError(f"features[{name!r}] has {rows} rows, but the block has {count} targets")
    return tables if rows == count else tables._replace(rows=tables.rows[:count], query=tables.query[:count])


def _checked_edge_weights(kind: EdgeType, weights: HGTEdgeWeights, tables: _Tables) -> list[jax.Array]:
    _, heads, width = tables.key.shape
    where = f"edge_weights[{kind}]"
    return [
        as_floats(f"{where}.key", weights.key, heads, width, width),
        as_floats(f"{where}.value", weights.value, heads, width, width),
        as_floats(f"{where}.prior", weights.prior, heads),
    ]


def _dot_inputs(senders: _Tables, receivers: _Tables, weights: Sequence[jax.Array]) -> AttentionInputs:
    """Returns queries, and keys and values times the edge type's matrices, with priors and scale in the keys'."""
    key_weight, value_weight, prior = weights
    scaled = autocast_as("float32")(_scaled_keys)(key_weight, prior)
    key, value, key_weight, value_weight = promoted(senders.key, senders.value, scaled, value_weight)
    weighted = ((key, key_weight), (value, value_weight))
    sent = tuple(graph_storage(jnp.einsum("nhd,hde->nhe", rows, weight)) for rows, weight in weighted)
    return AttentionInputs(sent, (graph_storage(receivers.query), None))


def _scaled_keys(weight: jax.Array, prior: jax.Array) -> jax.Array:
    factor = upcast(prior) * weight.shape[1] ** -0.5
    return (upcast(weight) * factor.astype(upcast(weight).dtype)[:, None, None]).astype(weight.dtype)


def _result(tables: _Tables, attended: Sequence[_Attended]) -> jax.Array:
    """Returns the nodes' results of the attention over the edges of each type."""
    dtype = tables.rows.dtype
    total = graph_storage(autocast_as("float32")(_joined)(attended).astype(dtype))
    result = dense(total, tables.result, tables.result_bias)
    if tables.skip is not None:
        result = autocast_as("float32")(_skipped)(graph_storage(result), tables.rows, tables.skip).astype(result.dtype)
    return activated(result)


def _joined(attended: Sequence[_Attended]) -> jax.Array:
    """Returns gelu of the attention over the edges of all types, [nodes, out], combining softmaxes by their sums."""
    is_entered = jnp.stack([each.is_entered for each in attended])[..., None]
    log_sums = jnp.where(is_entered, jnp.stack([each.log_sum for each in attended]), -jnp.inf)
    most = finite_or_zero(jax.lax.stop_gradient(log_sums.max(0)))
    powers = jnp.exp(log_sums - most)
    sizes = powers.sum(0)
    shares = powers / jnp.where(sizes > 0, sizes, jnp.ones_like(sizes))
    total = sum(share[..., None] * each.total for share, each in zip(shares, attended, strict=True))
    assert isinstance(total, jax.Array)
    _, heads, width = total.shape
    return jax.nn.gelu(total.reshape(-1, heads * width), approximate=False)


def _skipped(result: jax.Array, rows: jax.Array, skip: jax.Array) -> jax.Array:
    share = jax.nn.sigmoid(upcast(skip))
    return share * upcast(result) + (1 - share) * upcast(rows)


class HGTConv(Layer, of=hgt_conv):
    """The layer of `hgt_conv`: `layer(graph, features)`.

    Weights have a Glorot uniform initializer; biases are 0, priors and skips 1.

    Args:
      in_features: the width of the features, of all node types or by type.
      out_features: the width of the results, over all heads.
      node_types: the types of nodes, as `graph.node_types`.
      edge_types: the types of edges, as `graph.edge_types`.
      num_heads: number of heads.
      attention_dropout: see `hgt_conv`; `train` and `eval` switch it on and off.
      dtype: dtype to which features and parameters are cast; None for their promoted dtype.
      param_dtype: the parameters' dtype.
      rngs: flax's random streams "params" and, for dropout, "dropout".

    Raises:
      ValueError: heads do not divide the width, the rate is not in [0, 1), or two edge types have the same name, their
        three parts joined by "/".

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from jmp_train.graphs import hetero_from_edges
      >>> plays, follows = ("user", "plays", "game"), ("user", "follows", "user")
      >>> graph = hetero_from_edges({plays: ([0, 1], [0, 0]), follows: ([0], [1])}, {"user": 2, "game": 1})
      >>> layer = HGTConv(4, 8, graph.node_types, graph.edge_types, 2, rngs=nnx.Rngs(0))
      >>> found = layer(graph, {"user": jnp.ones((2, 4)), "game": jnp.ones((1, 4))})
      >>> found["user"].shape, found["game"].shape
      ((2, 8), (1, 8))
    """

    def __init__(
        self,
        in_features: int | Mapping[str, int],
        out_features: int,
        node_types: Sequence[str],
        edge_types: Sequence[EdgeType],
        num_heads: int = 1,
        *,
        attention_dropout: float = 0.0,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ) -> None:
        if num_heads < 1 or out_features % num_heads:
            raise ValueError(f"num_heads={num_heads} must divide out_features={out_features}")
        self.dtype = dtype
        self.attention_dropout = attention_dropout
        self.dropout_keys = DropoutKeys(rngs, attention_dropout=attention_dropout)
        self.edge_types = tuple(edge_types)
        width = out_features // num_heads
        draw = Drawing(rngs, param_dtype)
        glorot = nnx.initializers.glorot_uniform()
        of_heads = nnx.initializers.variance_scaling(1.0, "fan_avg", "uniform", batch_axis=0)

        nodes, edges = {}, {}
        for name in node_types:
            into = in_features if isinstance(in_features, int) else in_features[name]
            nodes[name] = nnx.Dict(
                {end: draw(glorot, out_features if end == "result" else into, out_features) for end in ENDS}
            )
            for end in ENDS:
                nodes[name][f"{end}_bias"] = draw(nnx.initializers.zeros, out_features)
            if into == out_features:
                nodes[name]["skip"] = draw(nnx.initializers.ones, 1)
        for name in parameter_names(self.edge_types).values():
            matrices = {end: draw(of_heads, num_heads, width, width) for end in ("key", "value")}
            edges[name] = nnx.Dict(matrices | {"prior": draw(nnx.initializers.ones, num_heads)})
        self.node_weights, self.edge_weights = nnx.Dict(nodes), nnx.Dict(edges)

    def __call__(
        self,
        graph: HeteroGraph | Blocks,
        features: Mapping[str, Floats],
        *,
        deterministic: bool | None = None,
        rngs: nnx.Rngs | None = None,
    ) -> dict[str, jax.Array]:
        """Returns the results by node type, see `hgt_conv`.

        Args:
          graph: see `hgt_conv`.
          features: see `hgt_conv`.
          deterministic: True to turn dropout off; None for the last choice of `train` or `eval`.
          rngs: random streams for dropout, in place of the layer's own.
        """

        def cast(arrays: Mapping[str, Any]) -> dict[str, jax.Array]:
            return {name: self.cast(array) for name, array in arrays.items()}

        names = parameter_names(self.edge_types)
        node_weights = {name: HGTNodeWeights(**cast(weights)) for name, weights in self.node_weights.items()}
        edge_weights = {kind: HGTEdgeWeights(**cast(self.edge_weights[name])) for kind, name in names.items()}
        given = {"node_weights": node_weights, "edge_weights": edge_weights}
        return self.call(graph, cast(features), **given, **self.dropout_keys(deterministic, rngs))
