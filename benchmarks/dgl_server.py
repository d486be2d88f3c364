"""Runs DGL's versions of the rows of `graphs.py` in a separate process, for `graph_dgl.py`.

It runs on the Python of `make .venv-dgl/.dgl`, with DGL 2.1.0 and torch 2.2.1, the last releases that work together on
a CPU. Arrays come in a file. Each line of standard input is a command, and "ok" is printed when it is done.
"""

import importlib
import json
import sys
from collections.abc import Callable
from typing import Any

import numpy as np


class Server:
    """The graph, and the row that is to be run.

    Args:
      file: an .npz of the graph, of what it carries, and of the parameters of the GAT.
    """

    def __init__(self, file: str) -> None:
        self.torch: Any = importlib.import_module("torch")
        self.dgl: Any = importlib.import_module("dgl")
        self.fn: Any = importlib.import_module("dgl.function")
        self.arrays = dict(np.load(file))
        num_nodes = len(self.arrays["features"])
        ends = (self.torch.from_numpy(self.arrays[x]) for x in ("senders", "receivers"))
        self.graph = self.dgl.graph(tuple(ends), num_nodes=num_nodes, idtype=self.torch.int32)
        self.graph.create_formats_()
        self.run: Callable[[], list[Any]] = list

    def copy_sum(self, x: Any) -> Any:
        """Returns the sum over each node's senders."""
        return self.dgl.ops.copy_u_sum(self.graph, x)

    def weighted_sum(self, x: Any, w: Any) -> Any:
        """Returns the weighted sum over each node's senders, with one weight per edge."""
        return self.dgl.ops.u_mul_e_sum(self.graph, x, w[:, None])

    def softmax(self, logits: Any) -> Any:
        """Returns the softmax over the edges that enter a node."""
        return self.dgl.ops.edge_softmax(self.graph, logits)

    def dot(self, x: Any) -> Any:
        """Returns the scalar products of both ends of each edge, one per head."""
        return self.dgl.ops.u_dot_v(self.graph, x, x)[..., 0]

    def make(self, op: str, inputs: list[str], cotangent: str | None) -> None:
        """Makes a row ready to run; sums see features in one axis."""
        if op == "step":
            self.run = self.step()
            return
        torch, tensors = self.torch, []
        for name in inputs:
            array = self.arrays[name]
            array = array.reshape(len(array), -1) if array.ndim == 3 and op != "dot" else array
            tensors.append(torch.from_numpy(array))
        function = getattr(self, op)
        if cotangent is None:

            def forward() -> list[Any]:
                with torch.no_grad():
                    return [function(*tensors)]

            self.run = forward
            return
        given = torch.from_numpy(self.arrays[cotangent])
        tensors = [x.requires_grad_() for x in tensors]

        def gradient() -> list[Any]:
            result = function(*tensors)
            return [result, *torch.autograd.grad(result, tensors, given)]

        self.run = gradient

    def step(self) -> Callable[[], list[Any]]:
        """Returns a training step of three `GATConv` of our parameters; it returns loss and update."""
        torch, functional = self.torch, self.torch.nn.functional
        layers = torch.nn.ModuleList()
        for i in range(3):
            params = {n: torch.from_numpy(self.arrays[f"{n}{i}"]) for n in ("weight", "left", "right", "bias")}
            width, (_, heads, out) = len(params["weight"]), params["left"].shape
            layer = self.dgl.nn.GATConv(width, out, heads)
            state = {"fc.weight": params["weight"].T, "attn_l": params["left"], "attn_r": params["right"]}
            layer.load_state_dict(state | {"bias": params["bias"].flatten()})
            layers.append(layer)
        features = torch.from_numpy(self.arrays["features"]).flatten(1)
        labels = torch.from_numpy(self.arrays["labels"]).long()
        optimizer = torch.optim.SGD(layers.parameters(), float(self.arrays["learning_rate"]))

        def flat() -> Any:
            names = ("bias", "attn_l", "attn_r")
            leaves = [[*(getattr(x, n).ravel() for n in names), x.fc.weight.t().ravel()] for x in layers]
            return torch.cat([x for leaf in leaves for x in leaf]).detach().clone()

        first = flat()

        def run() -> list[Any]:
            optimizer.zero_grad(set_to_none=True)
            x = features
            for i, layer in enumerate(layers):
                x = layer(self.graph, functional.elu(x) if i else x).flatten(1)
            loss = functional.cross_entropy(x, labels)
            loss.backward()
            optimizer.step()
            return [loss, flat() - first]

        return run


def main() -> None:
    """Obeys the commands: make ROW, run, results FILE."""
    server, results = Server(sys.argv[1]), []
    print("ok", flush=True)
    for line in sys.stdin:
        command, _, rest = line.strip().partition(" ")
        if command == "make":
            server.make(**json.loads(rest))
        elif command == "run":
            results = server.run()
        elif command == "results":
            np.savez(rest, *(x.detach().numpy() for x in results))
        print("ok", flush=True)


if __name__ == "__main__":
    main()
