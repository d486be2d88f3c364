"""The layers beside PyTorch Geometric's own, with the same weights; where that is not installed, skipped."""

import functools
import importlib.util
import warnings
from collections.abc import Callable, Mapping
from typing import Any

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
}
SYMMETRIC = ("gcn", "appnp", "sg", "tag", "tag expanding", "cheb", "cheb expanding")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", PAIRS)
def test_equal_to_pytorch_geometric(name: str) -> None:
    layer, theirs, their_names = PAIRS[name](rngs=nnx.Rngs(0))
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
            part = part.T if part.ndim == 2 else part
            their_state[key] = torch.tensor(part.reshape(their_state[key].shape))
    theirs.load_state_dict(their_state)
    assert not names
    senders, receivers = edges(name)
    features = random.normal(size=(NODES, IN)).astype(np.float32)
    graph = graphs.from_edges(senders, receivers, NODES)
    mine = nnx.merge(definition, nnx.from_flat_state(flat))(graph, jnp.asarray(features))
    with torch.no_grad():
        wanted = theirs(torch.tensor(features), torch.tensor(np.stack([senders, receivers])))
    if name.startswith("gatv2"):
        wanted = wanted - theirs.bias
    wanted, found = wanted.detach().numpy(), np.asarray(mine).reshape(NODES, -1)
    difference = np.abs(found - wanted).max() / np.abs(wanted).max()
    print(f"{name}: {difference:.2g}")
    assert difference < 1e-5
