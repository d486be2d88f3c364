"""The layers beside PyTorch Geometric's own, with the same weights; where that is not installed, skipped."""

import functools
import importlib.util
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jmp_train import graphs

pytestmark = [pytest.mark.quick, pytest.mark.newest]

if not all(map(importlib.util.find_spec, ("torch", "torch_geometric"))):
    pytest.skip("torch_geometric is not there: install it to compare", allow_module_level=True)

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import torch  # pyright: ignore[reportMissingImports]
    import torch_geometric.nn as pyg  # pyright: ignore[reportMissingImports]

NODES, IN, OUT, HEADS = 30, 6, 4, 3


def edges(name: str) -> tuple[np.ndarray, np.ndarray]:
    """Returns 200 edges and all self-loops, with a hub and multiple edges, by receiver.

    PyTorch Geometric scales by in-degrees at both ends, and its LSTM runs on over padding.
    """
    random = np.random.default_rng(0)
    senders, receivers = random.integers(0, NODES, (2, 210))
    receivers[:60] = 3
    if name == "sage lstm":
        receivers = np.arange(210) % NODES
    if name in SYMMETRIC:
        senders, receivers = np.append(senders, receivers), np.append(receivers, senders)
    self_loops = np.arange(NODES)
    senders, receivers = np.append(senders, self_loops), np.append(receivers, self_loops)
    order = np.argsort(receivers, kind="stable")
    if name.startswith("cheb"):  # which takes no account of self-loops there
        order = order[senders[order] != receivers[order]]
    return senders[order], receivers[order]


Names = Mapping[str, str | list[str]]  # of our parameters, and of theirs; of one for each part of ours


def gcn(rngs: nnx.Rngs) -> tuple[Any, Any, Names]:
    names: Names = {"weight": "lin.weight", "bias": "bias"}
    return graphs.GraphConv(IN, OUT, rngs=rngs), pyg.GCNConv(IN, OUT, add_self_loops=False), names


def sage(aggregator: str, rngs: nnx.Rngs) -> tuple[Any, Any, Names]:
    names = {"weight": "lin_l.weight", "self_weight": "lin_r.weight", "bias": "lin_l.bias"}
    options: dict[str, Any] = {"aggr": aggregator}
    inner: tuple[str, ...] = ()
    if aggregator == "pool":
        options, inner = {"aggr": "max", "project": True}, ("lin.weight", "lin.bias")
    if aggregator == "lstm":
        inner = ("weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0")
        inner = tuple(f"aggr_module.lstm.{name}" for name in inner)
    names |= {f"aggregator_weights/{i}": name for i, name in enumerate(inner)}
    layer = graphs.SAGEConv(IN, OUT, aggregator=aggregator, rngs=rngs)
    return layer, pyg.SAGEConv(IN, OUT, **options), names


def gat(residual: bool, rngs: nnx.Rngs) -> tuple[Any, Any, Names]:
    names = {"weight": "lin.weight", "left": "att_src", "right": "att_dst", "bias": "bias"}
    names |= {"residual_weight": "res.weight"} if residual else {}
    layer = graphs.GATConv(IN, OUT, HEADS, residual=residual, rngs=rngs)
    theirs = pyg.GATConv(IN, OUT, HEADS, residual=residual, add_self_loops=False)
    return layer, theirs, names


def gatv2(share: bool, rngs: nnx.Rngs) -> tuple[Any, Any, Names]:
    names = {"attention": "att", "left_weight": "lin_l.weight", "left_bias": "lin_l.bias"}
    names |= {} if share else {"right_weight": "lin_r.weight", "right_bias": "lin_r.bias"}
    layer = graphs.GATv2Conv(IN, OUT, HEADS, share_weights=share, rngs=rngs)
    theirs = pyg.GATv2Conv(IN, OUT, HEADS, share_weights=share, add_self_loops=False)
    return layer, theirs, names


def gin(rngs: nnx.Rngs) -> tuple[Any, Any, Names]:
    names = {"apply/kernel": "nn.weight", "apply/bias": "nn.bias", "eps": "eps"}
    layer = graphs.GINConv(nnx.Linear(IN, OUT, rngs=rngs), init_eps=0.3, learn_eps=True)
    return layer, pyg.GINConv(torch.nn.Linear(IN, OUT), train_eps=True), names


def appnp(rngs: nnx.Rngs) -> tuple[Any, Any, Names]:
    del rngs
    return graphs.APPNPConv(4, 0.2), pyg.APPNP(4, 0.2, add_self_loops=False), {}


def sg(rngs: nnx.Rngs) -> tuple[Any, Any, Names]:
    names: Names = {"weight": "lin.weight", "bias": "lin.bias"}
    return graphs.SGConv(IN, OUT, 3, rngs=rngs), pyg.SGConv(IN, OUT, 3, add_self_loops=False), names


def tag(out: int, rngs: nnx.Rngs) -> tuple[Any, Any, Names]:
    names: Names = {"weight": [f"lins.{i}.weight" for i in range(4)], "bias": "bias"}
    return graphs.TAGConv(IN, out, 3, rngs=rngs), pyg.TAGConv(IN, out, 3), names


def cheb(out: int, rngs: nnx.Rngs) -> tuple[Any, Any, Names]:
    names: Names = {"weight": [f"lins.{i}.weight" for i in range(4)], "bias": "bias"}
    return graphs.ChebConv(IN, out, 4, rngs=rngs), pyg.ChebConv(IN, out, 4), names


def types_of(count: int) -> np.ndarray:
    return np.arange(count) * 7 % 5 % 3


def relational(kind: str, rngs: nnx.Rngs) -> tuple[Any, Any, Names]:
    names = {"weight": "weight", "self_weight": "root", "bias": "bias"}
    names |= {"coefficients": "comp"} if kind == "basis" else {}
    options: dict[str, Any] = {"basis": {"num_bases": 2}, "bdd": {"num_blocks": 2}, "none": {}}[kind]
    layer = graphs.RelGraphConv(IN, OUT, 3, regularizer=kind, num_bases=2, rngs=rngs)
    return layer, pyg.RGCNConv(IN, OUT, 3, **options), names


def nn_conv(aggregator: str, rngs: nnx.Rngs) -> tuple[Any, Any, Names]:
    names = {"network/kernel": "nn.weight", "network/bias": "nn.bias", "self_weight": "lin.weight", "bias": "bias"}
    layer = graphs.NNConv(IN, OUT, nnx.Linear(2, IN * OUT, rngs=rngs), aggregator=aggregator, rngs=rngs)
    return layer, pyg.NNConv(IN, OUT, torch.nn.Linear(2, IN * OUT), aggr=aggregator), names


def gated_graph(rngs: nnx.Rngs) -> tuple[Any, Any, Names]:
    names = {"weight": "weight"}
    names |= {f"gru_weights/{i}": f"rnn.{name}_{end}" for i, (name, end) in enumerate(GRU)}
    layer = graphs.GatedGraphConv(IN, IN + 1, 2, use_bias=False, rngs=rngs)
    layer.weight = nnx.Param(jnp.zeros((2, 1, IN + 1, IN + 1)))  # theirs are others in each round
    return layer, pyg.GatedGraphConv(IN + 1, 2), names


GRU = (("weight", "ih"), ("weight", "hh"), ("bias", "ih"), ("bias", "hh"))


def transformer(rngs: nnx.Rngs, edge_width: int | None = None, gated: bool = False, concat: bool = True) -> Any:
    layer = graphs.TransformerConv(IN, OUT, HEADS, edge_width=edge_width, use_gate=gated, concat=concat, rngs=rngs)
    theirs = pyg.TransformerConv(IN, OUT, HEADS, edge_dim=edge_width, beta=gated, concat=concat)
    names = {
        f"{mine}_{kind}": f"lin_{other}.{kind}"
        for mine, other in (("query", "query"), ("key", "key"), ("value", "value"), ("self", "skip"))
        for kind in ("weight", "bias")
    }
    names |= {} if edge_width is None else {"edge_feature_weight": "lin_edge.weight"}
    return layer, theirs, names | ({"gate_weight": "lin_beta.weight"} if gated else {})


# What edges have, beside both ends: for our layer, and for theirs.
def extras(name: str, graph: graphs.Graph) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    if name.startswith("relational"):
        types = types_of(graph.num_edges)
        return (types, graphs.relation_norm(graph, types)), (torch.tensor(types),)
    if name.startswith("nn") or "edge features" in name or name == "gine":
        width = IN if name == "gine" else 2
        features = np.random.default_rng(2).normal(size=(graph.num_edges, width)).astype(np.float32)
        return (jnp.asarray(features),), (torch.tensor(features),)
    return (), ()


def gine(rngs: nnx.Rngs) -> tuple[Any, Any, Names]:
    names: Names = {"apply/kernel": "nn.weight", "apply/bias": "nn.bias", "eps": "eps"}
    layer = graphs.GINEConv(nnx.Linear(IN, OUT, rngs=rngs), learn_eps=True)
    return layer, pyg.GINEConv(torch.nn.Linear(IN, OUT), train_eps=True), names


def edge(rngs: nnx.Rngs) -> tuple[Any, Any, Names]:
    names: Names = {"weight": "nn.0.weight", "bias": "nn.0.bias"}
    names |= {"apply/layers/1/kernel": "nn.2.weight", "apply/layers/1/bias": "nn.2.bias"}
    layer = graphs.EdgeConv(IN, 8, nnx.Sequential(nnx.relu, nnx.Linear(8, OUT, rngs=rngs)), rngs=rngs)
    network = torch.nn.Sequential(torch.nn.Linear(2 * IN, 8), torch.nn.ReLU(), torch.nn.Linear(8, OUT))
    return layer, pyg.EdgeConv(network), names


def pna(towers: int, rngs: nnx.Rngs) -> tuple[Any, Any, Names]:
    names: Names = {"mix_weight": "lin.weight", "mix_bias": "lin.bias"}
    for place in ("pre", "post"):
        for kind in ("weight", "bias"):
            names |= {f"{place}_{kind}": [f"{place}_nns.{i}.0.{kind}" for i in range(towers)]}
    degrees = np.bincount(edges("pna")[1])
    options = {"aggregators": ["mean", "max", "min", "std"], "towers": towers}
    options["scalers"] = ["identity", "amplification", "attenuation"]
    layer = graphs.PNAConv(IN, OUT, delta=float(np.log1p(degrees).mean()), rngs=rngs, **options)
    return layer, pyg.PNAConv(IN, OUT, deg=torch.tensor(np.bincount(degrees)), **options), names


PAIRS: dict[str, Callable[..., Any]] = {
    "gcn": gcn,
    **{f"sage {name}": functools.partial(sage, name) for name in ("mean", "pool", "lstm")},
    "gat": functools.partial(gat, False),
    "gat residual": functools.partial(gat, True),
    "gatv2": functools.partial(gatv2, False),
    "gatv2 shared": functools.partial(gatv2, True),
    "gin": gin,
    "appnp": appnp,
    "sg": sg,
    "tag": functools.partial(tag, OUT),
    "tag expanding": functools.partial(tag, 2 * IN),
    "cheb": functools.partial(cheb, OUT),
    "cheb expanding": functools.partial(cheb, 2 * IN),
    **{f"relational {kind}": functools.partial(relational, kind) for kind in ("none", "basis", "bdd")},
    "nn sum": functools.partial(nn_conv, "sum"),
    "nn mean": functools.partial(nn_conv, "mean"),
    "nn max": functools.partial(nn_conv, "max"),
    "gated graph": gated_graph,
    "transformer": transformer,
    "transformer gated, mean of heads": functools.partial(transformer, gated=True, concat=False),
    "transformer with edge features": functools.partial(transformer, edge_width=2),
    "gine": gine,
    "edge": edge,
    "pna": functools.partial(pna, 1),
    "pna towers": functools.partial(pna, 2),
}
ATTENTION = {"weight": "attention", "bias": "attention_bias"}
SYMMETRIC = ("gcn", "appnp", "sg", "tag", "tag expanding", "cheb", "cheb expanding")
AS_THEY_ARE = ("weight", "root", "comp")  # matrices that are no torch.nn.Linear's


def with_random_weights(layer: Any, theirs: Any, their_names: Names) -> Any:
    """Returns the layer with random parameters, and gives the same ones to theirs."""
    names = dict(their_names)
    definition, state = nnx.split(layer)
    random = np.random.default_rng(1)
    flat = nnx.to_flat_state(state)
    for _, leaf in flat:
        leaf[...] = jnp.asarray(random.normal(size=leaf.shape) / 2, leaf.dtype)
    their_state = theirs.state_dict()
    for path, leaf in flat:
        keys, array = names.pop("/".join(map(str, path))), np.array(leaf[...])
        parts = [(keys, array)] if isinstance(keys, str) else zip(keys, array, strict=True)
        for key, part in parts:
            part = part.T if part.ndim == 2 and key not in AS_THEY_ARE else part
            their_state[key] = torch.tensor(part.reshape(their_state[key].shape))
    theirs.load_state_dict(their_state)
    assert not names
    return nnx.merge(definition, nnx.from_flat_state(flat))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", PAIRS)
def test_equal_to_pytorch_geometric(name: str) -> None:
    layer, theirs, their_names = PAIRS[name](rngs=nnx.Rngs(0))
    layer = with_random_weights(layer, theirs, their_names)
    senders, receivers = edges(name)
    features = np.random.default_rng(3).normal(size=(NODES, IN)).astype(np.float32)
    graph = graphs.from_edges(senders, receivers, NODES)
    of_edges, their_edges = extras(name, graph)
    mine = layer(graph, jnp.asarray(features), *of_edges)
    with torch.no_grad():
        wanted = theirs(torch.tensor(features), torch.tensor(np.stack([senders, receivers])), *their_edges)
    if name.startswith("gatv2"):
        wanted = wanted - theirs.bias
    wanted, found = wanted.detach().numpy(), np.asarray(mine).reshape(NODES, -1)
    difference = np.abs(found - wanted).max() / np.abs(wanted).max()
    print(f"{name}: {difference:.2g}")
    assert difference < 1e-5


LINEAR: Names = {"weight": "lin.weight", "bias": "lin.bias"}
# Our layer without norm, theirs by default, the names, our norm of weights, and what becomes of self-loops.
BY_DEFAULT: dict[str, Callable[[nnx.Rngs], tuple[Any, Any, Names, str, Callable[..., Any]]]] = {
    "gcn": lambda rngs: (
        graphs.GraphConv(IN, OUT, norm="none", rngs=rngs),
        pyg.GCNConv(IN, OUT),
        {"weight": "lin.weight", "bias": "bias"},
        "in",
        ONLY_MISSING,
    ),
    "sg": lambda rngs: (
        graphs.SGConv(IN, OUT, 2, norm="none", rngs=rngs),
        pyg.SGConv(IN, OUT, 2),
        LINEAR,
        "in",
        ONLY_MISSING,
    ),
    "appnp": lambda rngs: (graphs.APPNPConv(4, 0.2, norm="none"), pyg.APPNP(4, 0.2), {}, "in", ONLY_MISSING),
    "tag": lambda rngs: (
        graphs.TAGConv(IN, OUT, 3, norm="none", rngs=rngs),
        pyg.TAGConv(IN, OUT, 3),
        {"weight": [f"lins.{i}.weight" for i in range(4)], "bias": "bias"},
        "in",
        lambda graph: graph,
    ),
    "cheb, symmetric": lambda rngs: (
        graphs.ChebConv(IN, OUT, 3, norm="none", rngs=rngs),
        pyg.ChebConv(IN, OUT, 3),
        {"weight": [f"lins.{i}.weight" for i in range(3)], "bias": "bias"},
        "both",
        graphs.remove_self_loop,
    ),
}
ONLY_MISSING = functools.partial(graphs.add_self_loop, only_missing=True)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", BY_DEFAULT)
def test_their_defaults_with_edge_weights(name: str) -> None:
    """The graph is directed, has one self-loop with a weight and a node without edges."""
    layer, theirs, names, norm, prepare = BY_DEFAULT[name](nnx.Rngs(0))
    layer = with_random_weights(layer, theirs, names)
    random = np.random.default_rng(0)
    senders, receivers = random.integers(0, NODES - 1, (2, 200))
    is_kept = senders != receivers
    senders, receivers = np.append(senders[is_kept], 4), np.append(receivers[is_kept], 4)
    weights = random.uniform(0.5, 2, len(senders)).astype(np.float32)
    if "symmetric" in name:
        senders, receivers = np.append(senders, receivers), np.append(receivers, senders)
        weights = np.append(weights, weights)
    graph = prepare(graphs.from_edges(senders, receivers, NODES, edges={"w": weights}))
    features = random.normal(size=(NODES, IN)).astype(np.float32)
    mine = layer(graph, jnp.asarray(features), graphs.edge_weight_norm(graph, graph.edges["w"], norm=norm))
    with torch.no_grad():
        edge_index = torch.tensor(np.stack([senders, receivers]))
        wanted = theirs(torch.tensor(features), edge_index, torch.tensor(weights))
    np.testing.assert_allclose(mine, wanted.numpy(), rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore")
def test_jumping_knowledge_is_that_of_pytorch_geometric() -> None:
    layer = graphs.JumpingKnowledge("lstm", IN, 3, rngs=nnx.Rngs(0))
    theirs = pyg.JumpingKnowledge("lstm", IN, 3)
    assert layer.weights is not None
    kinds = {"of_input": "weight_ih", "of_hidden": "weight_hh", "input_bias": "bias_ih", "hidden_bias": "bias_hh"}
    state = {f"lstm.{kinds[name]}_l0{end}": (name, way) for name in kinds for way, end in enumerate(("", "_reverse"))}
    arrays = {key: np.array(layer.weights[name][way]) for key, (name, way) in state.items()}
    arrays |= {f"att.{end}": np.array(layer.weights[name][...]) for end, name in ATTENTION.items()}
    theirs.load_state_dict({key: torch.tensor(array.T) for key, array in arrays.items()})
    layers = list(np.random.default_rng(0).normal(size=(3, NODES, IN)).astype(np.float32))
    wanted = theirs(list(map(torch.tensor, layers))).detach().numpy()
    np.testing.assert_allclose(layer(list(map(jnp.asarray, layers))), wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.filterwarnings("ignore")
def test_attention_over_several_edge_types_is_equal_too() -> None:
    follows, plays, makes = ("user", "follows", "user"), ("user", "plays", "game"), ("firm", "makes", "game")
    counts, random = {"user": 9, "game": 7, "firm": 3}, np.random.default_rng(1)
    ends = {
        kind: tuple(random.integers(0, counts[kind[i]], size) for i in (0, 2))
        for kind, size in ((follows, 30), (plays, 60), (makes, 9))
    }
    graph = graphs.hetero_from_edges({kind: (one, other) for kind, (one, other) in ends.items()}, counts)
    layer = graphs.HGTConv(IN, IN, graph.node_types, graph.edge_types, HEADS, rngs=nnx.Rngs(0))
    theirs = pyg.HGTConv(IN, IN, (list(counts), list(graph.edge_types)), HEADS)
    draw = lambda shape: random.normal(size=shape).astype(np.float32) / 2
    for leaf in jax.tree.leaves(nnx.state(layer), is_leaf=lambda x: isinstance(x, nnx.Variable)):
        leaf[...] = jnp.asarray(draw(leaf.shape))
    state, numbers = theirs.state_dict(), dict[str, Any]()
    for name, weights in layer.node_weights.items():
        w = {end: np.array(x[...]) for end, x in weights.items()}
        numbers[f"kqv_lin.lins.{name}.weight"] = np.concatenate([w[end].T for end in ("key", "query", "value")])
        numbers[f"kqv_lin.lins.{name}.bias"] = np.concatenate([w[f"{end}_bias"] for end in ("key", "query", "value")])
        numbers[f"out_lin.lins.{name}.weight"], numbers[f"out_lin.lins.{name}.bias"] = w["result"].T, w["result_bias"]
        numbers[f"skip.{name}"] = w["skip"]
    of_edges = [layer.edge_weights["/".join(kind)] for kind in graph.edge_types]
    for end in ("key", "value"):  # theirs are all heads of a type after those of another
        parts = np.stack([np.array(each[end][...]) for each in of_edges], 1)
        numbers[f"{end[0]}_rel.weight"] = parts.reshape(-1, *parts.shape[2:])
    for kind, each in zip(graph.edge_types, of_edges, strict=True):
        numbers[f"p_rel.{'__'.join(kind)}"] = np.array(each["prior"][...])
    theirs.load_state_dict({key: torch.tensor(numbers[key].reshape(x.shape)) for key, x in state.items()})
    features = {name: draw((count, IN)) for name, count in counts.items()}
    mine = jax.jit(layer)(graph, {name: jnp.asarray(x) for name, x in features.items()})
    with torch.no_grad():
        edge_index = {kind: torch.tensor(np.stack(ends[kind])) for kind in graph.edge_types}  # theirs need their order
        wanted = theirs({name: torch.tensor(x) for name, x in features.items()}, edge_index)
    for name, found in mine.items():
        np.testing.assert_allclose(found, wanted[name].numpy(), rtol=1e-4, atol=1e-5)
