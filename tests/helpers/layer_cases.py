"""The layers with their options, and what they compute, written in float64 with dense incidences.

The formulas are those of DGL's documentation, by matrices [edges, nodes] of zeros and ones; `xp` is
numpy, or jax.numpy for gradients. A reference with all magnitudes for its inputs, and with the exact
attention, gives the sum of the magnitudes of the terms.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jmp_train import graphs

Params = dict[str, Any]
Call = Callable[[Any, jax.Array, Any], jax.Array]


@dataclasses.dataclass(frozen=True)
class Edges:
    """Edges as dense matrices [edges, nodes]: where each begins, and where it ends."""

    senders: np.ndarray
    receivers: np.ndarray

    @property
    def out_degrees(self) -> np.ndarray:
        return self.senders.sum(0)

    @property
    def in_degrees(self) -> np.ndarray:
        return self.receivers.sum(0)


def small_graph() -> tuple[graphs.Graph, Edges, int]:
    """A graph with self-loops, multiple edges and a node that no edge enters, ready for mailboxes."""
    senders, receivers = [0, 1, 1, 3, 4, 5, 3, 3, 2, 4, 5, 0], [0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 4, 4]
    return _graph(np.array(senders), np.array(receivers), 6)


def hub_graph() -> tuple[graphs.Graph, Edges, int]:
    """A graph whose first node is entered by 2,600 edges and whose second sends as many.

    It has self-loops and multiple edges too, and no edge enters the last node.
    """
    random = np.random.default_rng(1)
    others = random.integers(0, 12, 2_600)
    zeros = np.zeros(2_600, int)
    rest = random.integers(2, 11, (2, 30))
    return _graph(np.concatenate([others, zeros + 1, rest[0]]), np.concatenate([zeros, others, rest[1]]), 13)


def _graph(senders: np.ndarray, receivers: np.ndarray, count: int) -> Any:
    graph = graphs.from_edges(senders, receivers, count, formats=("coo", "mailbox"))
    eye = np.eye(count)
    return graph, Edges(eye[senders], eye[receivers]), count


def total(edges: Edges, messages: Any) -> Any:
    return (edges.receivers.T @ messages.reshape(len(messages), -1)).reshape(-1, *messages.shape[1:])


def mean(edges: Edges, messages: Any) -> Any:
    return total(edges, messages) / np.maximum(edges.in_degrees, 1)[:, None]


def largest(xp: Any, edges: Edges, messages: Any) -> Any:
    is_mine = edges.receivers.T[:, :, None] > 0
    found = xp.where(is_mine, messages[None], -np.inf).max(1)
    return xp.where(edges.in_degrees[:, None] > 0, found, 0)


def edge_softmax(xp: Any, edges: Edges, logits: Any) -> Any:
    tops = largest(xp, edges, logits)
    weights = xp.exp(logits - edges.receivers @ tops)
    return weights / (edges.receivers @ total(edges, weights))


def leaky(xp: Any, x: Any) -> Any:
    return xp.where(x > 0, x, 0.2 * x)


def relu(xp: Any, x: Any) -> Any:
    return xp.where(x > 0, x, 0)


def graph_conv(xp: Any, p: Params, edges: Edges, x: Any, w: Any, norm: str, **_: Any) -> Any:
    out, into = np.maximum(edges.out_degrees, 1), np.maximum(edges.in_degrees, 1)
    before = {"both": out**-0.5, "left": 1 / out}.get(norm, np.ones_like(out))
    after = {"both": into**-0.5, "right": 1 / into}.get(norm, np.ones_like(into))
    sent = (edges.senders @ (x * before[:, None])) * w[:, None]
    result = total(edges, sent) * after[:, None]
    return result @ p["weight"] + p["bias"] if "weight" in p else result


def sage_conv(xp: Any, p: Params, edges: Edges, x: Any, w: Any, kind: str, is_size: bool = False, **_: Any) -> Any:
    sent = (edges.senders @ x) * w[:, None]
    if kind == "gcn":
        own = (total(edges, sent) + x) / (edges.in_degrees + 1)[:, None]
        return own @ p["weight"] + p["bias"]
    if kind == "mean":
        found = mean(edges, sent)
    elif kind == "pool":
        inner = relu(xp, x @ p["aggregator_weights/0"] + p["aggregator_weights/1"])
        found = largest(xp, edges, (edges.senders @ inner) * w[:, None])
    elif is_size:
        found = np.ones_like(x)
    else:
        weights = [p[f"aggregator_weights/{i}"] for i in range(4)]
        found = xp.stack([_lstm(xp, sent[column > 0], *weights) for column in edges.receivers.T])
    return x @ p["self_weight"] + p["bias"] + found @ p["weight"]


def _lstm(xp: Any, rows: Any, of_input: Any, of_hidden: Any, b: Any, c: Any) -> Any:
    hidden = cell = np.zeros(of_input.shape[0])
    for row in rows:
        gates = row @ of_input + b + hidden @ of_hidden + c
        i, f, g, o = (gates[k : k + len(hidden)] for k in range(0, len(gates), len(hidden)))
        cell = cell / (1 + xp.exp(-f)) + xp.tanh(g) / (1 + xp.exp(-i))
        hidden = xp.tanh(cell) / (1 + xp.exp(-o))
    return hidden


def gat_attention_of(xp: Any, p: Params, edges: Edges, x: Any) -> Any:
    z = (x @ p["weight"]).reshape(len(x), *p["left"].shape[1:])
    left, right = (z * p["left"]).sum(-1), (z * p["right"]).sum(-1)
    return edge_softmax(xp, edges, leaky(xp, edges.senders @ left + edges.receivers @ right))


def gat_conv(xp: Any, p: Params, edges: Edges, x: Any, w: Any, attention: Any, residual: bool = False) -> Any:
    z = (x @ p["weight"]).reshape(len(x), *p["left"].shape[1:])
    sent = xp.einsum("en,nhd->ehd", edges.senders, z) * attention[..., None] * w[:, None, None]
    result = total(edges, sent).reshape(len(x), -1) + p["bias"]
    if residual:
        result = result + (x @ p["residual_weight"] if "residual_weight" in p else x)
    return result.reshape(z.shape)


def gatv2_attention_of(xp: Any, p: Params, edges: Edges, x: Any) -> Any:
    left, right = _gatv2_ends(p, x)
    both = xp.einsum("en,nhd->ehd", edges.senders, left)
    both = both + xp.einsum("en,nhd->ehd", edges.receivers, right)
    return edge_softmax(xp, edges, (leaky(xp, both) * p["attention"]).sum(-1))


def _gatv2_ends(p: Params, x: Any) -> list[Any]:
    ends = []
    for name in ("left", "right" if "right_weight" in p else "left"):
        end = x @ p[f"{name}_weight"] + p.get(f"{name}_bias", 0)
        ends.append(end.reshape(len(x), *p["attention"].shape[1:]))
    return ends


def gatv2_conv(xp: Any, p: Params, edges: Edges, x: Any, w: Any, attention: Any, residual: bool = False) -> Any:
    left, _ = _gatv2_ends(p, x)
    sent = xp.einsum("en,nhd->ehd", edges.senders, left) * attention[..., None] * w[:, None, None]
    result = total(edges, sent)
    if residual:
        own = x
        if "residual_weight" in p:
            own = x @ p["residual_weight"] + p["residual_bias"]
        result = result + own.reshape(left.shape)
    return result


def gin_conv(xp: Any, p: Params, edges: Edges, x: Any, w: Any, kind: str, **_: Any) -> Any:
    sent = (edges.senders @ x) * w[:, None]
    found = largest(xp, edges, sent) if kind == "max" else total(edges, sent)
    found = mean(edges, sent) if kind == "mean" else found
    result = (1 + p.get("eps", 0.5)) * x + found
    return result @ p["apply/kernel"] + p["apply/bias"] if "apply/kernel" in p else result


def hop(edges: Edges, x: Any, w: Any) -> Any:
    out, into = np.maximum(edges.out_degrees, 1), np.maximum(edges.in_degrees, 1)
    sent = (edges.senders @ (x * (out**-0.5)[:, None])) * w[:, None]
    return total(edges, sent) * (into**-0.5)[:, None]


def appnp_conv(xp: Any, p: Params, edges: Edges, x: Any, w: Any, k: int, alpha: float) -> Any:
    rows = x
    for _ in range(k):
        rows = (1 - alpha) * hop(edges, rows, w) + alpha * x
    return rows


def sg_conv(xp: Any, p: Params, edges: Edges, x: Any, w: Any, k: int) -> Any:
    return appnp_conv(xp, p, edges, x, w, k, 0) @ p["weight"] + p["bias"]


def tag_conv(xp: Any, p: Params, edges: Edges, x: Any, w: Any) -> Any:
    return p["bias"] + sum(appnp_conv(xp, p, edges, x, w, k, 0) @ weight for k, weight in enumerate(p["weight"]))


def cheb_conv(xp: Any, p: Params, edges: Edges, x: Any, w: Any, lambda_max: float, is_size: bool = False) -> Any:
    sign, ratio = (1 if is_size else -1), 2 / lambda_max
    terms = [x]
    for _ in p["weight"][1:]:
        scaled = abs(ratio - 1) * terms[-1] + sign * ratio * hop(edges, terms[-1], w)
        terms.append(scaled if len(terms) == 1 else 2 * scaled + sign * terms[-2])
    return p["bias"] + sum(term @ weight for term, weight in zip(terms, p["weight"], strict=True))


def edge_types(count: int) -> np.ndarray:
    """Returns a type of three for each of so many edges, the same for the first ones of more."""
    return np.arange(count) * 7 % 5 % 3


def edge_features(count: int) -> np.ndarray:
    """Returns two features for each of so many edges, numbers that float16 and bfloat16 hold."""
    return np.stack([np.arange(count) % 7 - 3, np.arange(count) % 5 - 1.5], 1) / 4


class OfEdges(nnx.Module):
    """A layer of edges' types or features, called as those without."""

    def __init__(self, layer: Any, of_edges: Callable[[int], np.ndarray]) -> None:
        self.layer, self.of_edges = layer, of_edges

    def __call__(self, graph: Any, x: Any, w: Any = None) -> jax.Array:
        """Returns the layer's result, for edge features in the dtype of x."""
        found = self.of_edges(len(graph.senders))
        rest = () if w is None else (w,)
        return self.layer(graph, x, found if found.ndim == 1 else jnp.asarray(found, x.dtype), *rest)


def rel_graph_conv(xp: Any, p: Params, edges: Edges, x: Any, w: Any, kind: str, **_: Any) -> Any:
    weight = p["layer/weight"]
    if kind == "basis":
        weight = xp.einsum("rb,bio->rio", p["layer/coefficients"], weight)
    if kind == "bdd":
        columns = []
        for block in range(weight.shape[1]):
            place = np.zeros((weight.shape[1], 1, 1))
            place[block] = 1
            columns.append((place * weight[:, block, None]).reshape(len(weight), -1, weight.shape[3]))
        weight = xp.concatenate(columns, 2)
    matrices = weight[edge_types(len(edges.senders))]
    sent = xp.einsum("ei,eio->eo", edges.senders @ x, matrices) * w[:, None]
    return total(edges, sent) + x @ p["layer/self_weight"] + p["layer/bias"]


def nn_conv(xp: Any, p: Params, edges: Edges, x: Any, w: Any, kind: str, is_size: bool = False) -> Any:
    of_edges = edge_features(len(edges.senders))
    inner = (np.abs(of_edges) if is_size else of_edges) @ p["layer/network/layers/0/kernel"]
    inner = relu(xp, inner + p["layer/network/layers/0/bias"])
    matrices = inner @ p["layer/network/layers/2/kernel"] + p["layer/network/layers/2/bias"]
    matrices = matrices.reshape(len(of_edges), x.shape[1], -1)
    sent = xp.einsum("ei,eio->eo", edges.senders @ x, matrices) * w[:, None]
    found = mean(edges, sent) if kind == "mean" else total(edges, sent)
    return found + x @ p["layer/self_weight"] + p["layer/bias"]


def _without_prefix(p: Params) -> Params:
    return {name.removeprefix("layer/"): array for name, array in p.items()}


def _edges_part(p: Params, count: int, heads: int, is_size: bool = False) -> Any:
    """Returns what edges' features add to keys and values, [edges, heads, out]."""
    if "edge_feature_weight" not in p:
        return 0
    found = edge_features(count)
    return ((np.abs(found) if is_size else found) @ p["edge_feature_weight"]).reshape(count, heads, -1)


def transformer_attention_of(heads: int, xp: Any, p: Params, edges: Edges, x: Any) -> Any:
    p = _without_prefix(p)
    query, key = ((x @ p[f"{n}_weight"] + p[f"{n}_bias"]).reshape(len(x), heads, -1) for n in ("query", "key"))
    key = xp.einsum("en,nhd->ehd", edges.senders, key) + _edges_part(p, len(edges.senders), heads)
    query = xp.einsum("en,nhd->ehd", edges.receivers, query)
    return edge_softmax(xp, edges, (query * key).sum(-1) / query.shape[-1] ** 0.5)


def transformer_conv(
    xp: Any, p: Params, edges: Edges, x: Any, w: Any, attention: Any, heads: int, concat: bool, is_size: bool = False
) -> Any:
    del w
    p = _without_prefix(p)
    value = (x @ p["value_weight"] + p["value_bias"]).reshape(len(x), heads, -1)
    value = xp.einsum("en,nhd->ehd", edges.senders, value) + _edges_part(p, len(edges.senders), heads, is_size)
    result = total(edges, attention[..., None] * value)
    result = result.reshape(len(x), -1) if concat else result.mean(1)
    own = x @ p["self_weight"] + p["self_bias"]
    if "gate_weight" not in p:
        return result + own
    if is_size:  # what the gate weights, and what its own rounding moves
        return 4 * (result + own)
    gate = 1 / (1 + xp.exp(-xp.concatenate([result, own, result - own], 1) @ p["gate_weight"]))
    return gate * own + (1 - gate) * result


def gated_graph_conv(xp: Any, p: Params, edges: Edges, x: Any, w: Any, is_size: bool = False) -> Any:
    of_input, of_hidden, b, c = (p[f"layer/gru_weights/{i}"] for i in range(4))
    width = of_input.shape[0]
    state = xp.concatenate([x, np.zeros((len(x), width - x.shape[1]))], 1)
    if is_size:
        return 1 + state
    types = edge_types(len(edges.senders))
    for _ in range(2):
        sent = xp.einsum("ei,eio->eo", edges.senders @ state, p["layer/weight"][types]) + p["layer/message_bias"][types]
        gates = total(edges, sent * w[:, None]) @ of_input + b
        own = state @ of_hidden + c
        r, z = (1 / (1 + xp.exp(-gates[:, k : k + width] - own[:, k : k + width])) for k in (0, width))
        new = xp.tanh(gates[:, 2 * width :] + r * own[:, 2 * width :])
        state = (1 - z) * new + z * state
    return state


def gine_conv(xp: Any, p: Params, edges: Edges, x: Any, w: Any) -> Any:
    result = (1 + p["eps"]) * x + total(edges, relu(xp, edges.senders @ x + w))
    return result @ p["apply/kernel"] + p["apply/bias"]


def edge_conv(xp: Any, p: Params, edges: Edges, x: Any, w: Any, kind: str, is_size: bool = False) -> Any:
    here, there = edges.receivers @ x, edges.senders @ x
    ends = xp.concatenate([here, there + here if is_size else there - here], -1)
    rows = ends @ p["weight"] + p["bias"]
    if "apply/layers/1/kernel" in p:
        rows = relu(xp, rows) @ p["apply/layers/1/kernel"] + p["apply/layers/1/bias"]
    return largest(xp, edges, rows) if kind == "max" else mean(edges, rows)


def pna_conv(
    xp: Any, p: Params, edges: Edges, x: Any, w: Any, delta: float, has_edges: bool = False, is_size: bool = False
) -> Any:
    ends = [edges.receivers @ x, edges.senders @ x] + [w] * has_edges
    logs = np.log1p(np.maximum(edges.in_degrees, 1))[:, None]
    towers = []
    names = ("pre_weight", "pre_bias", "post_weight", "post_bias")
    for pre, offset, post, further in zip(*(p[name] for name in names), strict=True):
        rows = xp.concatenate(ends, -1) @ pre + offset
        middle = mean(edges, rows)
        squares = mean(edges, rows * rows if is_size else (rows - edges.receivers @ middle) ** 2)
        spread = xp.where(squares > 0, xp.sqrt(xp.where(squares > 0, squares, 1)), 0)
        least = largest(xp, edges, rows) if is_size else -largest(xp, edges, -rows)
        found = xp.concatenate([middle, largest(xp, edges, rows), least, spread], -1)
        found = xp.concatenate([x, found, found * logs / delta, found * delta / logs], -1)
        towers.append(found @ post + further)
    return xp.concatenate(towers, -1) @ p["mix_weight"] + p["mix_bias"]


@dataclasses.dataclass(frozen=True)
class Case:
    """A layer with options.

    Attributes:
      make: a function of `rngs`, and of `dtype` and `param_dtype`, to the layer.
      reference: a function of `xp`, parameters, edges, features and edge weights.
      width: of the features.
      options: of the reference.
      attention: the reference's attention, of layers that have one.
      is_weighted: whether there are edge weights.
      edge_width: of features that edges have in place of weights; None for weights.
      has_sizes: whether the reference is told by `is_size` to add what else it subtracts.
      has_edge_features: whether edges have features, which the gradient keeps.
    """

    make: Callable[..., Any]
    reference: Callable[..., Any]
    width: int = 5
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    attention: Callable[..., Any] | None = None
    is_weighted: bool = False
    is_recurrent: bool = False
    edge_width: int | None = None
    has_sizes: bool = False
    has_edge_features: bool = False

    def exact(self, xp: Any, p: Params, edges: Edges, x: Any, w: Any) -> Any:
        """Returns the layer's result."""
        extra = {} if self.attention is None else {"attention": self.attention(xp, p, edges, x)}
        return self.reference(xp, p, edges, x, w, **extra, **self.options)

    def sizes(self, p: Params, edges: Edges, x: np.ndarray, w: np.ndarray) -> np.ndarray:
        """Returns the sums of magnitudes."""
        extra: dict[str, Any] = {"is_size": True} if self.is_recurrent or self.has_sizes else {}
        if self.attention is not None:
            extra["attention"] = self.attention(np, p, edges, x)
        big = {name: np.abs(array) for name, array in p.items()}
        return self.reference(np, big, edges, np.abs(x), np.abs(w), **extra, **self.options)


def _conv(norm: str, width: int = 5, **options: Any) -> Case:
    make = functools.partial(graphs.GraphConv, width, 4, norm=norm, allow_zero_in_degree=True)
    return Case(make, graph_conv, width, {"norm": norm}, **options)


def _sage(kind: str, width: int = 5, **options: Any) -> Case:
    make = functools.partial(graphs.SAGEConv, width, 4, aggregator=kind)
    return Case(make, sage_conv, width, {"kind": kind}, is_recurrent=kind == "lstm", **options)


def _gat(heads: int, residual: bool = False, **options: Any) -> Case:
    make = functools.partial(graphs.GATConv, 6, 3, heads, residual=residual, allow_zero_in_degree=True)
    return Case(make, gat_conv, 6, {"residual": residual}, gat_attention_of, **options)


def _gatv2(heads: int, residual: bool = False, weighted: bool = False, **own: Any) -> Case:
    make = functools.partial(graphs.GATv2Conv, 6, 3, heads, residual=residual, allow_zero_in_degree=True, **own)
    return Case(make, gatv2_conv, 6, {"residual": residual}, gatv2_attention_of, is_weighted=weighted)


def _gin(kind: str, is_network: bool, **options: Any) -> Case:
    def make(rngs: nnx.Rngs, **dtypes: Any) -> Any:
        network = nnx.Linear(5, 4, rngs=rngs, **dtypes) if is_network else None
        return graphs.GINConv(network, aggregator=kind, init_eps=0.5, learn_eps=is_network, **dtypes)

    return Case(make, gin_conv, 5, {"kind": kind}, **options)


def _rel(kind: str, num_bases: int | None = None, **options: Any) -> Case:
    def make(**dtypes: Any) -> Any:
        return OfEdges(graphs.RelGraphConv(6, 4, 3, regularizer=kind, num_bases=num_bases, **dtypes), edge_types)

    return Case(make, rel_graph_conv, 6, {"kind": kind}, **options)


def _nn(kind: str, **options: Any) -> Case:
    def make(rngs: nnx.Rngs, **dtypes: Any) -> Any:
        network = nnx.Sequential(
            nnx.Linear(2, 6, rngs=rngs, **dtypes), nnx.relu, nnx.Linear(6, 5 * 4, rngs=rngs, **dtypes)
        )
        return OfEdges(graphs.NNConv(5, 4, network, aggregator=kind, rngs=rngs, **dtypes), edge_features)

    return Case(make, nn_conv, 5, {"kind": kind}, has_edge_features=True, has_sizes=True, **options)


def _transformer(heads: int, with_edges: bool = False, **own: Any) -> Case:
    def make(**dtypes: Any) -> Any:
        layer = graphs.TransformerConv(6, 3, heads, edge_width=2 if with_edges else None, **own, **dtypes)
        return OfEdges(layer, edge_features) if with_edges else layer

    attention = functools.partial(transformer_attention_of, heads)
    options = {"heads": heads, "concat": own.get("concat", True)}
    return Case(make, transformer_conv, 6, options, attention, has_edge_features=with_edges)


def _gated(**dtypes: Any) -> Any:
    return OfEdges(graphs.GatedGraphConv(3, 4, 2, num_types=3, **dtypes), edge_types)


def _appnp(rngs: nnx.Rngs, param_dtype: Any = None, **dtypes: Any) -> Any:
    del rngs, param_dtype
    return graphs.APPNPConv(3, 0.2, **dtypes)


def _sg(width: int, **options: Any) -> Case:
    make = functools.partial(graphs.SGConv, width, 4, k=2, allow_zero_in_degree=True)
    return Case(make, sg_conv, width, {"k": 2}, **options)


def _tag(width: int, **options: Any) -> Case:
    return Case(functools.partial(graphs.TAGConv, width, 4, 2), tag_conv, width, **options)


def _cheb(width: int, lambda_max: float, **options: Any) -> Case:
    make = functools.partial(graphs.ChebConv, width, 4, 3, lambda_max=lambda_max)
    return Case(make, cheb_conv, width, {"lambda_max": lambda_max}, has_sizes=True, **options)


def _gine(rngs: nnx.Rngs, **dtypes: Any) -> Any:
    return graphs.GINEConv(nnx.Linear(5, 4, rngs=rngs, **dtypes), init_eps=0.5, learn_eps=True, **dtypes)


def _edge(kind: str, is_network: bool) -> Case:
    def make(rngs: nnx.Rngs, **dtypes: Any) -> Any:
        network = nnx.Sequential(nnx.relu, nnx.Linear(4, 3, rngs=rngs, **dtypes)) if is_network else None
        return graphs.EdgeConv(5, 4, network, aggregator=kind, rngs=rngs, **dtypes)

    return Case(make, edge_conv, 5, {"kind": kind}, has_sizes=True)


def _pna(edge_width: int) -> Case:
    make = functools.partial(graphs.PNAConv, 5, 4, delta=1.5, towers=2, edge_features=edge_width)
    own = {"delta": 1.5, "has_edges": edge_width > 0}
    return Case(make, pna_conv, 5, own, is_weighted=edge_width > 0, edge_width=edge_width, has_sizes=True)


_bare = functools.partial(graphs.GraphConv, 5, 5, use_weight=False, use_bias=False, allow_zero_in_degree=True)
CASES = {
    "graph both": _conv("both"),
    "graph both expanding, weighted": _conv("both", 3, is_weighted=True),
    "graph left": _conv("left"),
    "graph right": _conv("right", 3),
    "graph none, weighted": _conv("none", is_weighted=True),
    "graph without weight": Case(_bare, graph_conv, 5, {"norm": "both"}),
    "sage mean": _sage("mean"),
    "sage mean expanding, weighted": _sage("mean", 3, is_weighted=True),
    "sage gcn": _sage("gcn"),
    "sage gcn expanding, weighted": _sage("gcn", 3, is_weighted=True),
    "sage pool, weighted": _sage("pool", is_weighted=True),
    "sage lstm, weighted": _sage("lstm", 3, is_weighted=True),
    "gat": _gat(1),
    "gat residual, weighted": _gat(3, residual=True, is_weighted=True),
    "gat identity": _gat(2, residual=True),
    "gatv2": _gatv2(1),
    "gatv2 residual, weighted": _gatv2(3, residual=True, weighted=True),
    "gatv2 identity, shared": _gatv2(2, residual=True, share_weights=True),
    "gatv2 without bias": _gatv2(2, use_bias=False),
    "gin sum": _gin("sum", True),
    "gin max": _gin("max", False),
    "gin mean, weighted": _gin("mean", True, is_weighted=True),
    "appnp, weighted": Case(_appnp, appnp_conv, options={"k": 3, "alpha": 0.2}, is_weighted=True),
    "sg": _sg(5),
    "sg expanding, weighted": _sg(3, is_weighted=True),
    "tag, weighted": _tag(5, is_weighted=True),
    "tag expanding": _tag(3),
    "cheb": _cheb(5, 1.5),
    "cheb expanding, weighted": _cheb(3, 2.0, is_weighted=True),
    "relational": _rel("none"),
    "relational basis, weighted": _rel("basis", 2, is_weighted=True),
    "relational bdd, weighted": _rel("bdd", 2, is_weighted=True),
    "nn": _nn("sum"),
    "nn mean, weighted": _nn("mean", is_weighted=True),
    "gated graph": Case(_gated, gated_graph_conv, 3, is_recurrent=True),
    "transformer": _transformer(1),
    "transformer gated, mean of heads": _transformer(3, False, use_gate=True, concat=False),
    "transformer with edge features": _transformer(2, True),
    "gine": Case(_gine, gine_conv, is_weighted=True, edge_width=5),
    "edge": _edge("max", False),
    "edge mean": _edge("mean", False),
    "edge network": _edge("max", True),
    "edge network, mean": _edge("mean", True),
    "pna": _pna(0),
    "pna with edges": _pna(3),
}


def parameters(layer: Any) -> tuple[Any, Any]:
    """Returns what `nnx.merge` takes: the definition and the parameters, those at 0 drawn."""
    definition, state = nnx.split(layer)
    random = np.random.default_rng(3)

    def filled(x: jax.Array) -> jax.Array:
        return x if x.any() else jnp.asarray(random.normal(size=x.shape) / 2, x.dtype)

    return definition, jax.tree.map(filled, state)


def layer_call(case: Case, graph: graphs.Graph, **options: Any) -> Call:
    """Returns the layer as a function of its parameters, features and edge weights."""
    definition, _ = nnx.split(case.make(rngs=nnx.Rngs(0), **options))
    return lambda state, x, w: nnx.merge(definition, state)(graph, x, *given(w))


def given(w: Any) -> tuple[Any, ...]:
    """Returns what a layer takes after the features: edge weights or features, or nothing."""
    return () if w is None else (w,)


def in_float64(state: Any) -> Params:
    """Returns parameters by path, in float64."""
    return {"/".join(map(str, path)): np.asarray(leaf[...], np.float64) for path, leaf in nnx.to_flat_state(state)}


def draw_inputs(case: Case, count: int, edges: Edges, dtype: Any) -> tuple[jax.Array, Any]:
    """Returns features and edge weights that the dtype can hold."""
    random = np.random.default_rng(5)
    x = jnp.asarray(random.normal(size=(count, case.width)), dtype)
    count = len(edges.senders)
    w = random.uniform(0.2, 1, count) if case.edge_width is None else random.normal(size=(count, case.edge_width))
    return x, jnp.asarray(w, dtype) if case.is_weighted else None


def weights_of(w: Any, edges: Edges) -> np.ndarray:
    """Returns edge weights in float64, 1 where there are none."""
    return np.ones(len(edges.senders)) if w is None else np.asarray(w, np.float64)
