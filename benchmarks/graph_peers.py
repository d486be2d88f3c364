"""PyTorch Geometric's documented forms of the rows that `graphs.py` measures."""

import importlib
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
from graph_cases import (
    HEADS,
    LAYERS,
    LEARNING_RATE,
    SLOPE,
    WIDTH,
    Case,
    Form,
    Row,
    gat_params,
)

INSTALL = "pip install torch==2.13 torch_geometric"


class Torch:
    """torch, PyTorch Geometric and the graph of a case in the containers that they know.

    Args:
      case: the graph; its edges are sorted by receiver.
      device: where the scatter forms and their inputs live; all others are the CPU's.
    """

    def __init__(self, case: Case, device: str = "cpu") -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.torch: Any = importlib.import_module("torch")
            self.pyg: Any = importlib.import_module("torch_geometric")
            self.utils: Any = importlib.import_module("torch_geometric.utils")
            self.layers: Any = importlib.import_module("torch_geometric.nn")
        torch, self.case, self.num_nodes = self.torch, case, case.num_nodes
        ends = np.stack([case.senders, case.receivers]).astype(np.int64)
        self.device = device
        self.edge_index = torch.from_numpy(ends).to(device)
        self.senders, self.receivers = self.edge_index
        self.starts = torch.from_numpy(case.starts.astype(np.int64))
        self.starts32 = torch.from_numpy(case.starts)
        self.senders32 = torch.from_numpy(case.senders)
        self.sparse_size = (case.num_nodes, case.num_nodes)
        self.sorted_index = self.pyg.EdgeIndex(
            torch.from_numpy(ends.copy()), sparse_size=self.sparse_size, sort_order="col"
        ).fill_cache_()

    def csr(self, values: Any, *, is_int64: bool = False) -> Any:
        """Returns the adjacency, receivers by senders, as a sparse tensor in CSR.

        Args:
          values: of the edges.
          is_int64: whether indices are int64. MKL takes int32 without a copy at each product; with those,
            torch's own gradient is wrong from 46,341 nodes on, whose square int32 does not hold.
        """
        starts, senders = self.starts32, self.senders32
        if is_int64:
            starts, senders = self.starts, self.senders
        return self.torch.sparse_csr_tensor(starts, senders, values, self.sparse_size)

    def forget(self) -> None:
        """Drops what was compiled: with too much of it, torch would run eagerly and not say so."""
        self.torch.compiler.reset()

    # The operations; each takes what the rows name.

    def scatter_copy_sum(self, x: Any) -> Any:
        """Gathers and scatters, as `MessagePassing` does with an `edge_index`."""
        return self.utils.scatter(x.index_select(0, self.senders), self.receivers, 0, self.num_nodes)

    def scatter_weighted_sum(self, x: Any, w: Any) -> Any:
        """Gathers, multiplies and scatters."""
        messages = x.index_select(0, self.senders) * w.unsqueeze(-1)
        return self.utils.scatter(messages, self.receivers, 0, self.num_nodes)

    def segment_copy_sum(self, x: Any) -> Any:
        """Gathers and reduces segments."""
        return self.utils.segment(x.index_select(0, self.senders), self.starts)

    def segment_weighted_sum(self, x: Any, w: Any) -> Any:
        """Gathers, multiplies and reduces segments."""
        return self.utils.segment(x.index_select(0, self.senders) * w.unsqueeze(-1), self.starts)

    def edge_index_copy_sum(self, x: Any) -> Any:
        """Multiplies by an `EdgeIndex`."""
        ones = None if x.dtype == self.torch.float32 else self.ones(x)
        return self.sorted_index.matmul(x, ones, transpose=True)

    def edge_index_weighted_sum(self, x: Any, w: Any) -> Any:
        """Multiplies by an `EdgeIndex` with weights."""
        return self.sorted_index.matmul(x, w, transpose=True)

    def mkl_copy_sum(self, x: Any) -> Any:
        """Multiplies by a sparse tensor in CSR, which is MKL's product."""
        return self.csr(self.ones(x)) @ x

    def mkl_weighted_sum(self, x: Any, w: Any) -> Any:
        """Multiplies by a sparse tensor in CSR, which is MKL's product."""
        return self.csr(w) @ x

    def csr_copy_sum(self, x: Any) -> Any:
        """Multiplies by a sparse tensor in CSR, by torch's own product with a reduction."""
        return self.torch.sparse.mm(self.csr(self.ones(x)), x, "sum")

    def csr_weighted_sum(self, x: Any, w: Any) -> Any:
        """Multiplies by a sparse tensor in CSR, by torch's own product with a reduction."""
        return self.torch.sparse.mm(self.csr(w, is_int64=w.requires_grad), x, "sum")

    def ones(self, x: Any) -> Any:
        """Returns the weights of edges without weights, made once a dtype."""
        name = f"_ones_{x.dtype}"
        if not hasattr(self, name):
            setattr(self, name, self.torch.ones(self.case.num_edges, dtype=x.dtype))
        return getattr(self, name)

    def scatter_softmax(self, logits: Any) -> Any:
        """Scatters maxima and sums."""
        return self.utils.softmax(logits, self.receivers, num_nodes=self.num_nodes)

    def segment_softmax(self, logits: Any) -> Any:
        """Reduces segments."""
        return self.utils.softmax(logits, ptr=self.starts)

    def scatter_dot(self, x: Any) -> Any:
        """Gathers both ends."""
        return (x.index_select(0, self.senders) * x.index_select(0, self.receivers)).sum(-1)

    def scatter_gat(self, x: Any, left: Any, right: Any) -> Any:
        """Gathers logits and features and scatters, as `GATConv` does."""
        logits = left.index_select(0, self.senders) + right.index_select(0, self.receivers)
        weights = self.scatter_softmax(self.torch.nn.functional.leaky_relu(logits, SLOPE))
        messages = x.view(-1, HEADS, WIDTH).index_select(0, self.senders) * weights.unsqueeze(-1)
        return self.utils.scatter(messages, self.receivers, 0, self.num_nodes).flatten(1)

    def csr_dot(self, x: Any) -> Any:
        """Computes the sampled product of two matrices per head."""
        zeros = self.csr(self.torch.zeros(self.case.num_edges, dtype=x.dtype))
        heads = x.transpose(0, 1).contiguous()
        products = (self.torch.sparse.sampled_addmm(zeros, head, head.t()) for head in heads)
        return self.torch.stack([product.values() for product in products], -1)

    def form(self, op: Callable[..., Any], row: Row, dtype: str) -> Form:
        """Returns the form of an operation, which torch runs as it comes."""
        torch_dtype = getattr(self.torch, dtype)
        where = {"device": self.device, "dtype": torch_dtype}
        inputs = [self.torch.from_numpy(x).to(**where) for x in self.case.inputs(row)]
        cotangent: Any = None
        if row.cotangent is not None:
            cotangent = self.torch.from_numpy(self.case.arrays[row.cotangent]).to(**where)
            inputs = [x.requires_grad_() for x in inputs]

        def run() -> Any:
            if cotangent is None:
                with self.torch.no_grad():
                    return [op(*inputs)]
            result = op(*inputs)
            return [result, *self.torch.autograd.grad(result, inputs, cotangent)]

        return Form(run, lambda results: [x.detach().float().cpu().numpy() for x in results])

    def step_form(self, graph: Any, dtype: str, compiles: bool) -> Form:
        """Returns the training step of three `GATConv`, in half by `torch.autocast`."""
        torch = self.torch
        net = gat_net(self)
        first = flat(net)
        labels = torch.from_numpy(self.case.arrays["labels"].astype(np.int64))
        features = torch.from_numpy(self.case.arrays["features"].reshape(self.num_nodes, -1))
        optimizer = torch.optim.SGD(net.parameters(), LEARNING_RATE, fused=True)
        scaler = torch.amp.GradScaler("cpu", enabled=dtype == "float16")
        half = None if dtype == "float32" else getattr(torch, dtype)
        model = torch.compile(net, dynamic=False) if compiles else net

        def run() -> Any:
            optimizer.zero_grad(set_to_none=True)
            with torch.autocast("cpu", dtype=half, enabled=half is not None):
                logits = model(features, graph)
                loss = torch.nn.functional.cross_entropy(logits.float(), labels)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            return loss

        def check(loss: Any) -> list[np.ndarray]:
            return [loss.detach().numpy(), flat(net) - first]

        return Form(run, check)


def gat_net(peer: Torch) -> Any:
    """Returns the layers with ELU between them, and our parameters."""
    torch = peer.torch

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            width, layers = HEADS * WIDTH, []
            for heads, out in LAYERS:
                layers.append(peer.layers.GATConv(width, out, heads, add_self_loops=False))
                width = heads * out
            self.layers = torch.nn.ModuleList(layers)

        def forward(self, x: Any, graph: Any) -> Any:
            for i, layer in enumerate(self.layers):
                x = layer(torch.nn.functional.elu(x) if i else x, graph)
            return x

    net = Net()
    for layer, params in zip(net.layers, gat_params(), strict=True):
        state = {
            "lin.weight": params["weight"].T,
            "att_src": params["left"],
            "att_dst": params["right"],
            "bias": params["bias"],
        }
        layer.load_state_dict({name: torch.tensor(x) for name, x in state.items()})
    return net


def flat(net: Any) -> np.ndarray:
    """Returns a copy of all parameters, in the order of our leaves."""
    leaves = []
    for layer in net.layers:
        params = dict(layer.named_parameters())
        weight = params["lin.weight"].t()
        leaves += [params["bias"], params["att_src"], params["att_dst"], weight]
    return np.concatenate([x.detach().numpy().ravel() for x in leaves])


# Each form's name and, by row, what it calls.
FORMS = {
    "PyG scatter": ("scatter", False),
    "PyG scatter, compiled": ("scatter", True),
    "PyG segment": ("segment", False),
    "PyG segment, compiled": ("segment", True),
    "PyG EdgeIndex": ("edge_index", False),
    "PyG CSR, MKL": ("mkl", False),
    "PyG CSR, torch": ("csr", False),
}
CSR_FORMS = ("PyG EdgeIndex", "PyG CSR, MKL", "PyG CSR, torch")


def torch_form(peer: Torch, name: str, row: Row, dtype: str) -> Form | None:
    """Returns a form of PyTorch Geometric by its name, or None if the row has no such form."""
    way, compiles = FORMS[name]
    if row.op == "step":
        graphs = {"scatter": peer.edge_index, "edge_index": peer.sorted_index}
        if way == "csr":
            graphs["csr"] = peer.csr(peer.torch.ones(peer.case.num_edges), is_int64=True)
        if way not in graphs:
            return None
        return peer.step_form(graphs[way], dtype, compiles)
    op = getattr(peer, f"{way}_{row.op}", None)
    if op is None:
        return None
    return peer.form(peer.torch.compile(op, dynamic=False) if compiles else op, row, dtype)
