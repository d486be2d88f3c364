"""The workload `graph-ops` of `gpu.py`: operations on a power-law graph, compared with PyTorch Geometric and jraph."""

import functools
import importlib
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from gpu_workloads import (
    OURS,
    PRECISIONS,
    Job,
    Variant,
    Workload,
    first_line,
    jax_version,
    read_prepared,
    write_prepared,
)
from graph_cases import HEADS, ROWS, WIDTH, Case, JraphOps, Row, jax_program
from graph_peers import Torch

from jmp_train.app.runs import peak_memory
from jmp_train.graphs import (
    Graph,
    apply_edges,
    edge_softmax,
    fn,
    from_edges,
    gat_attention,
    update_all,
)

NODE_SHARE = 40  # edges for each node
OPERATIONS = {
    **{title: ROWS[title] for title in ("copy+sum", "weighted sum, gradient", "edge softmax", "dot")},
    "attention, gradient": Row("gat", ("features", "left", "right"), "node_cotangent"),
}
Op = Callable[..., Any]
Started = tuple[Callable[[], Any], float | None]  # an operation, and the MB that it takes


class Operations:
    """Operations that are ready to be measured, each timed apart; a step is all of them, once.

    Args:
      make: makes an operation, of its row: how to start it, and the MB that it takes beside its inputs.
      wait: returns when a result is there.
      facts: what else the variant's facts have, called in the end.
    """

    def __init__(
        self,
        make: Callable[[Row], Started],
        wait: Callable[[Any], Any],
        facts: Callable[[], dict[str, Any]],
    ) -> None:
        self.wait, self.more_facts = wait, facts
        self.rows: dict[str, dict[str, Any]] = {}
        self.runs: dict[str, Callable[[], Any]] = {}
        start = time.perf_counter()
        for title, row in OPERATIONS.items():
            try:
                self.runs[title], megabytes = make(row)
            except Exception as error:  # noqa: BLE001  # each library has its own
                self.rows[title] = {"failed": first_line(error)}
                continue
            self.rows[title] = {"ms": [], "extra_mb": megabytes}
        if not self.runs:
            raise RuntimeError("; ".join(row["failed"] for row in self.rows.values()))
        self.compile_seconds = time.perf_counter() - start

    def steps(self, count: int) -> float:
        """Runs each operation a number of times and returns the seconds of all."""
        total = 0.0
        for title, run in self.runs.items():
            result = None
            start = time.perf_counter()
            for _ in range(count):
                result = run()
            self.wait(result)
            seconds = time.perf_counter() - start
            del result
            self.rows[title]["ms"].append(1e3 * seconds / count)
            total += seconds
        return total

    def facts(self) -> dict[str, Any]:
        """Returns medians and memory by operation, and the facts of the whole."""
        rows = {}
        for title, row in self.rows.items():
            rows[title] = dict(row)
            if "ms" in row:
                rows[title]["ms"] = statistics.median(row["ms"])
        extra = [row["extra_mb"] for row in rows.values() if row.get("extra_mb") is not None]
        return {
            "compile_seconds": self.compile_seconds,
            "program_mb": max(extra, default=None),
            "rows": rows,
            **self.more_facts(),
        }


def our_operations(implementation: str) -> dict[str, Op]:
    """Returns ours in an implementation; each takes the graph first."""

    def copy_sum(graph: Graph, x: jax.Array) -> jax.Array:
        graph = graph.with_nodes(x=x)
        message, total = fn.copy_u("x", "m"), fn.sum("m", "y")
        return update_all(graph, message, total, implementation=implementation).nodes["y"]

    def weighted_sum(graph: Graph, x: jax.Array, w: jax.Array) -> jax.Array:
        graph = graph.with_nodes(x=x).with_edges(w=w)
        message, total = fn.u_mul_e("x", "w", "m"), fn.sum("m", "y")
        return update_all(graph, message, total, implementation=implementation).nodes["y"]

    def dot(graph: Graph, x: jax.Array) -> jax.Array:
        graph, message = graph.with_nodes(x=x), fn.u_dot_v("x", "x", "y")
        return apply_edges(graph, message, implementation=implementation).edges["y"][..., 0]

    attend = functools.partial(gat_attention, implementation=implementation)
    return {
        "copy_sum": copy_sum,
        "weighted_sum": weighted_sum,
        "softmax": edge_softmax,
        "dot": dot,
        "gat": _on_rows(attend),
    }


def jraph_operations(case: Case) -> dict[str, Op]:
    """Returns the operations as users of jraph write them; each takes both ends first."""
    ops = JraphOps(case.num_nodes, is_sorted=False)
    names = ("copy_sum", "weighted_sum", "softmax", "dot")
    return {name: getattr(ops, name) for name in names} | {"gat": _on_rows(ops.attention)}


def _on_rows(attention: Op) -> Op:
    """Returns an attention of features [nodes, heads * width]."""

    def attend(graph: Any, x: jax.Array, left: jax.Array, right: jax.Array) -> jax.Array:
        result = attention(graph, x.reshape(-1, HEADS, WIDTH), left, right)
        return result.reshape(x.shape)

    return attend


def _prepare_operations(edges: float, folder: Path) -> None:
    case = Case(int(edges) // NODE_SHARE, int(edges))
    logits = case.arrays["logits"]
    case.arrays["left"], case.arrays["right"] = np.split(logits[: 2 * case.num_nodes], 2)
    write_prepared(folder, case)


def _operations_job(variant: Variant, edges: float, folder: Path) -> Job:
    del edges
    case: Case = read_prepared(folder)
    if variant.way.startswith("PyG"):
        return _pyg_operations(case, variant.precision)
    if variant.way == "jraph":
        graph: Any = (jnp.asarray(case.senders), jnp.asarray(case.receivers))
        ops = jraph_operations(case)
    else:
        graph = from_edges(case.senders, case.receivers, case.num_nodes)
        ops = our_operations(variant.way.split()[1])

    def make(row: Row) -> Started:
        program, arguments = jax_program(ops[row.op], graph, case, row, variant.precision)
        jax.block_until_ready(program(*arguments))
        sizes = program.memory_analysis()
        extra = (sizes.temp_size_in_bytes + sizes.output_size_in_bytes) / 1e6 if sizes else None
        return functools.partial(program, *arguments), extra

    def facts() -> dict[str, Any]:
        memory, memory_of = peak_memory()
        device = jax.local_devices()[0].device_kind
        where = {"device": device, "version": jax_version()}
        return where | {"memory_mb": memory, "memory_of": memory_of}

    return Operations(make, jax.block_until_ready, facts)


def _pyg_operations(case: Case, precision: str) -> Job:
    torch: Any = importlib.import_module("torch")
    is_cuda = torch.cuda.is_available()
    peer = Torch(case, "cuda" if is_cuda else "cpu")

    def wait(result: Any = None) -> None:
        del result
        if is_cuda:
            torch.cuda.synchronize()

    def make(row: Row) -> Started:
        if is_cuda:
            torch.cuda.empty_cache()
        run = peer.form(getattr(peer, f"scatter_{row.op}"), row, precision).run
        if not is_cuda:
            run()
            return run, None
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        wait()
        return run, (torch.cuda.max_memory_allocated() - before) / 1e6

    def facts() -> dict[str, Any]:
        memory, memory_of = peak_memory() if not is_cuda else (0.0, "device")
        if is_cuda:
            memory = torch.cuda.max_memory_allocated() / 1e6
        device = torch.cuda.get_device_name() if is_cuda else "cpu"
        where = {"device": device, "version": f"torch {torch.__version__}"}
        return where | {"memory_mb": memory, "memory_of": memory_of}

    return Operations(make, wait, facts)


GRAPH_OPERATIONS = Workload(
    unit="edges",
    size=20_000_000,
    tiny_size=4_000,
    variants=tuple(
        Variant(way, precision)
        for precision in PRECISIONS
        if precision != "tf32"  # which is a matter of products of matrices
        for way in (f"{OURS} chunked", f"{OURS} xla", "PyG scatter", "jraph")
    ),
    job=_operations_job,
    prepare=_prepare_operations,
    is_together=False,
    note="a step is all operations, once; program is the largest one's; peers add half in half",
)
