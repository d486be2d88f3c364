"""Selects the implementation of an operation over edges: whole-edge arrays (XLA) or chunks.

Every operation with a choice is an `EdgeOperation`, called in the same form. To add an implementation, such as a kernel
for one kind of device, add its name to `IMPLEMENTATIONS`, and its kernels to the operations; the contract tests run
over these names.
"""

import dataclasses
import warnings
from collections.abc import Callable, Mapping
from typing import Concatenate, Generic, Literal, ParamSpec, TypeVar

from jmp_train.graphs.kernels.native_calls import are_native_kernels_wanted
from jmp_train.graphs.structure import Adjacency

Implementation = Literal["xla", "chunked"]
IMPLEMENTATIONS: tuple[Implementation, ...] = ("xla", "chunked")
WITH_SORTED_EDGES = 'formats=("coo", "csr"), outside of jit; of a GraphsTuple by from_jraph'
CHUNKED_ELEMENTS = 2**20  # messages of 4 MiB no longer fit into the caches

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


@dataclasses.dataclass(frozen=True)
class EdgeOperation(Generic[Arguments, Result]):
    """An operation over edges with one kernel for each implementation.

    "xla" computes with arrays of all edges, which XLA may or may not fuse. It takes all arguments and supports every
    transform. "chunked" iterates over chunks of sorted edges, stores no message, and has custom gradients: reverse mode
    of every order, no forward mode.

    Attributes:
      kernels: functions of the adjacency and the arguments, by name of the implementation.
      elements_per_edge: returns the number of elements of a message for these arguments; None for arguments that the
        chunked kernel does not take.
      chunked_takes: description of the arguments that it takes, for errors.
    """

    kernels: Mapping[Implementation, Callable[Concatenate[Adjacency, Arguments], Result]]
    elements_per_edge: Callable[Arguments, int | None]
    chunked_takes: str = ""

    def __call__(
        self,
        implementation: str | None,
        adjacency: Adjacency,
        *args: Arguments.args,
        **kwargs: Arguments.kwargs,
    ) -> Result:
        """Returns the result of the implementation's kernel for the arguments.

        Args:
          implementation: the caller's choice; None for "chunked" if the edges are sorted and messages are large,
            otherwise "xla".
          adjacency: the edges.
          *args: arguments of the operation.
          **kwargs: keyword arguments of the operation.

        Raises:
          ValueError: there is no such implementation, it does not take the arguments, or the edges are
            not sorted.
        """
        name = self.choose(implementation, adjacency, *args, **kwargs)
        return self.kernels[name](adjacency, *args, **kwargs)

    def choose(
        self,
        implementation: str | None,
        adjacency: Adjacency,
        *args: Arguments.args,
        **kwargs: Arguments.kwargs,
    ) -> Implementation:
        """Returns the implementation that computes this; see `__call__`.

        Args:
          implementation: the caller's choice.
          adjacency: the edges.
          *args: arguments of the operation.
          **kwargs: keyword arguments of the operation.
        """
        if implementation is None:
            if adjacency.neighbors is None:
                if are_native_kernels_wanted() and self.elements_per_edge(*args, **kwargs) is not None:
                    wanted = f"native_kernels() need sorted edges: make the graph with {WITH_SORTED_EDGES}"
                    warnings.warn(wanted, stacklevel=2)
                return "xla"
            elements = self.elements_per_edge(*args, **kwargs)
            if elements is None:
                return "xla"
            is_large = adjacency.ends is None or (adjacency.num_edges * elements >= CHUNKED_ELEMENTS)
            return "chunked" if is_large else "xla"
        if implementation == "chunked":
            if self.elements_per_edge(*args, **kwargs) is None:
                raise ValueError(f'implementation="chunked" {self.chunked_takes}')
            if adjacency.neighbors is None:
                raise ValueError(
                    f'implementation="chunked" needs sorted edges: make the graph with {WITH_SORTED_EDGES}'
                )
        for name in IMPLEMENTATIONS:
            if name == implementation:
                return name
        known = ", ".join(map(repr, IMPLEMENTATIONS))
        raise ValueError(f"implementation={implementation!r} must be None or one of {known}")
