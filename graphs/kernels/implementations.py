"""Which way sums and attention are computed: whole arrays of edges, or chunk after chunk.

Another one, such as a kernel for one kind of device, is one more name here and one more entry in the tables
of `attention` and `messages`; the contract tests run over `IMPLEMENTATIONS`.
"""

from jmp_train.graphs.connections import Connections

IMPLEMENTATIONS = ("xla", "streaming")
STREAMED_NUMBERS = 2**20  # messages of 4 MiB no longer fit into the caches


def chosen_implementation(
    implementation: str | None, connections: Connections, numbers_per_edge: int
) -> str:
    """Returns one of `IMPLEMENTATIONS`.

    "xla" computes with arrays of all edges, which XLA may or may not fuse, and goes through every
    transform. "streaming" goes over chunks of sorted edges, stores no message, and has custom gradients:
    reverse mode of every order, no forward mode.

    Args:
      implementation: what the caller asks for; None for "streaming" where the edges are sorted and
        messages are large, and "xla" elsewhere.
      connections: who sends to whom.
      numbers_per_edge: how many numbers a message has.

    Raises:
      ValueError: there is no such implementation, or the edges are not sorted.
    """
    if implementation is None:
        numbers = connections.num_edges * numbers_per_edge
        is_large = connections.ends is None or numbers >= STREAMED_NUMBERS
        return "streaming" if connections.neighbors is not None and is_large else "xla"
    if implementation not in IMPLEMENTATIONS:
        known = ", ".join(map(repr, IMPLEMENTATIONS))
        raise ValueError(f"implementation={implementation!r} must be None or one of {known}")
    if implementation == "streaming" and connections.neighbors is None:
        raise ValueError(
            'implementation="streaming" needs sorted edges: make the graph with formats=("coo", "csr")'
        )
    return implementation
