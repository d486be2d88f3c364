"""How the sum over a graph's edges runs: in chunks of blocks, forward by receivers and backward by senders."""

import numpy as np
from parts import LINE, arrow, box, box_height, diagram, frame, key, text

from jmp_train import graphs
from jmp_train.graphs.structure import CSR

RECEIVERS = (0,) * 11 + (1,) * 3 + (3,) * 7  # node 2 has no edge
SENDERS = (2, 3, 1) * 3 + (0, 0) + (0, 2, 3) + (1, 2, 0, 3, 1, 2, 0)
LEFT, WIDE, GAP = 20, 158, 16


def draw() -> str:
    """Returns the picture; blocks and their rows are those of a small graph."""
    graph = graphs.from_edges(SENDERS, RECEIVERS, 4, formats=("csr",))
    edges = graph.connections.neighbors
    assert edges is not None
    into = edges.by_target
    alt = (
        f"Blocks of at most {into.width} edges, each of one node. A chunk of blocks is read, its "
        "messages are computed and added per block, and the blocks' sums are added to the rows of their nodes. The "
        "gradient runs the same way over the edges sorted by their senders."
    )
    return diagram(720, 480, alt, _parts(into))


def _parts(into: CSR) -> list[str]:
    starts, counts, nodes = (np.asarray(x)[np.asarray(into.counts) > 0] for x in (into.starts, into.counts, into.nodes))
    others, lefts = np.asarray(into.others), [LEFT + (WIDE + GAP) * i for i in range(len(counts))]
    blocks, sums, middle = [], [], {}
    for left, start, count, node in zip(lefts, starts, counts, nodes, strict=True):
        blocks.append(box(left, 66, WIDE, [f"into node {node}", *_rows(others[start : start + count])]))
        sums.append(box(left, 240, WIDE, [f"sum of {count}", "float32"], "float32"))
        middle[left] = left + WIDE / 2
    high = box_height(["", "", ""])
    loop = [
        text(LEFT, 190, "read the rows at both ends, compute the message, add: nothing as long as the edges is stored"),
        text(LEFT, 190 + LINE, "the gradient reads again, and adds the gradient of the function of one edge", "soft"),
    ]
    rows = sorted(set(nodes.tolist()))
    of_rows = {node: LEFT + (WIDE + GAP) * i + WIDE / 2 for i, node in enumerate(rows)}
    arrows = [arrow((middle[left], 66 + high), (middle[left], 172)) for left in lefts]
    arrows += [arrow((middle[left], 216), (middle[left], 240)) for left in lefts]
    for left, node in zip(lefts, nodes.tolist(), strict=True):
        x, level = of_rows[node], 308 + 8 * rows.index(node)
        arrows.append(arrow((middle[left], 292), (middle[left], level), (x, level), (x, 344)))
    ends = [box(of_rows[node] - WIDE / 2, 344, WIDE, [f"node {node}", "rounded once"], "half") for node in rows]
    return [
        key(LEFT, 4, [("float32", "float32"), ("half", "as the features are stored")]),
        text(LEFT, 50, f"edges sorted by receiver, in blocks of at most {into.width}; a chunk is many blocks", "soft"),
        frame(LEFT - 12, 56, (WIDE + GAP) * len(counts) - GAP + 24, 244),
        *blocks,
        *loop,
        *sums,
        *arrows,
        *ends,
        text(
            LEFT,
            428,
            "The gradient of the senders' features is the same sum over the edges sorted by sender:",
            "strong",
        ),
        text(LEFT, 428 + LINE, "forward    out[v] = sum of message(h[u], h[v], e)   over the edges into v", "code"),
        text(
            LEFT, 428 + 2 * LINE, "backward   dh[u]  = sum of d message / d h[u]       over the edges out of u", "code"
        ),
    ]


def _rows(senders: np.ndarray) -> list[str]:
    """Returns the senders of a block, in two lines."""
    names = [str(x) for x in senders]
    half = (len(names) + 1) // 2
    return [("from " if half else "") + " ".join(names[:half]), " ".join(names[half:])]
