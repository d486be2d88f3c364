"""Functions of one edge: what they read and make, their traced programs, and where to cut these.

Values of an edge of a few numbers, such as logits and weights, are computed for all places of a block at once, and
wide ones place by place, so that their sums stay in registers. Without a cut, either the few numbers are computed
again for each number of a row that they multiply, or the rows of all places are stored.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np

from jmp_train.graphs.kernels.chunks import pvary_alike, sum_of_rows, upcast_at
from jmp_train.graphs.structure import CSR, CSRAndCSC, accumulation_dtype, upcast
from jmp_train.policies.programs import walk


class Ends(NamedTuple):
    """What is read or added at the ends of edges: trees of arrays, `()` for none.

    Attributes:
      senders: [senders, ...]; a function gets or returns a row.
      receivers: [receivers, ...].
      edge: [edges, ...].
      shared: arrays that all edges share.
    """

    senders: Any = ()
    receivers: Any = ()
    edge: Any = ()
    shared: Any = ()


class EdgeIds(NamedTuple):
    """Int32, the ends of an edge and its id; None if edges have no own places."""

    senders: jax.Array
    receivers: jax.Array
    edges: jax.Array | None


Edges = CSRAndCSC | CSR  # of these, only by the nodes that they enter
# Makes terms of rows without and with gradients, upcast, and of the ids of one edge; hashable.
Function = Callable[[Ends, Ends, EdgeIds], Ends]
PRODUCTS = ("dot_general", "conv_general_dilated")
NARROW = 8  # numbers of an edge that are computed for all places of a block at once


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
    """A traced function of one edge.

    Attributes:
      closed: the program, with its constants.
      ends: for each argument, the end of an edge at which it is read.
    """

    closed: Any
    ends: tuple[str, ...]

    @property
    def arguments(self) -> list[Any]:
        """The program's arguments, as variables."""
        return self.closed.jaxpr.invars

    def end_of(self, argument: Any) -> str:
        """Returns the end at which an argument is read."""
        return self.ends[self.arguments.index(argument)]

    def read(
        self, arguments: Sequence[Any], ends: tuple[Ends, Ends], where: Mapping[str, jax.Array]
    ) -> list[jax.Array]:
        """Returns the upcast rows of some arguments.

        Args:
          arguments: which.
          ends: the arrays of which rows are read.
          where: the rows to read at each end.
        """
        leaves, found = jax.tree.leaves(ends), []
        for x in arguments:
            place, end = self.arguments.index(x), self.end_of(x)
            if place >= len(leaves):
                found.append(where[end])  # an id
            else:
                found.append(upcast(leaves[place]) if end == "shared" else upcast_at(leaves[place], where[end]))
        return found

    @property
    def multiplies(self) -> bool:
        """Whether it has a matrix product: then it runs for all edges of a chunk at once."""
        return any(place.equation.primitive.name in PRODUCTS for place in walk(self.closed))

    def levels(self, here: str) -> dict[Any, int]:
        """Returns for each variable 0 if all edges share it, 1 if those of a node do, and 2 if it is an edge's own."""
        of_ends = {"shared": 0, here: 1}
        levels = {x: of_ends.get(end, 2) for x, end in zip(self.arguments, self.ends, strict=True)}
        levels |= dict.fromkeys(self.closed.jaxpr.constvars, 0)
        for equation in self.closed.jaxpr.eqns:
            level = max((levels[x] for x in equation.invars if not isinstance(x, jex.Literal)), default=0)
            levels |= dict.fromkeys(equation.outvars, level)
        return levels

    def cut(self, wide: Iterable[Any], levels: Mapping[Any, int]) -> list[Any]:
        """Returns the narrow variables of single edges from which wide results are made."""
        makers = {x: equation for equation in self.closed.jaxpr.eqns for x in equation.outvars}
        found, seen, left = [], set(), list(wide)
        while left:
            x = left.pop()
            if isinstance(x, jex.Literal) or x in seen:
                continue
            seen.add(x)
            if levels[x] == 2 and size_of(x) <= NARROW:
                found.append(x)
            elif x in makers:
                left += makers[x].invars
        return found

    def part(self, results: Sequence[Any], given: Iterable[Any] = ()) -> "Part":
        """Returns the part of the program that makes some variables of given ones, and the arguments that it reads."""
        given, equations = set(given), []
        needed = {x for x in results if not isinstance(x, jex.Literal)} - given
        for equation in reversed(self.closed.jaxpr.eqns):
            if needed & set(equation.outvars):
                equations.append(equation)
                needed |= {x for x in equation.invars if not isinstance(x, jex.Literal)} - given
        constants = dict(zip(self.closed.jaxpr.constvars, self.closed.consts, strict=True))
        return Part(equations[::-1], list(results), constants, [x for x in self.arguments if x in needed])


@dataclasses.dataclass(frozen=True, eq=False)
class Part:
    """A part of a program: its equations, its results, its constants, and the arguments that it reads."""

    equations: list[Any]
    results: list[Any]
    constants: dict[Any, Any]
    arguments: list[Any]

    @property
    def widest(self) -> int:
        """The largest number of elements of a value of one edge that it reads or makes."""
        made = [x for equation in self.equations for x in equation.outvars]
        return max(map(size_of, [*self.arguments, *made, *self.results]), default=1)

    def __call__(self, variables: Sequence[Any], given: Sequence[Any]) -> list[Any]:
        """Returns its results, given the values of variables."""
        values = {**self.constants, **dict(zip(variables, given, strict=True))}

        def read(atom: Any) -> Any:
            aval = atom.aval
            return np.asarray(atom.val, aval.dtype) if isinstance(atom, jex.Literal) else values[atom]

        for equation in self.equations:
            inputs, primitive = list(map(read, equation.invars)), equation.primitive
            if _adds_rows(equation):
                found = [sum_of_rows(inputs[0].reshape(*equation.outvars[0].aval.shape, -1))]
            else:
                found = primitive.bind(*inputs, **primitive.get_bind_params(equation.params))
                found = found if primitive.multiple_results else [found]
            values |= zip(equation.outvars, found, strict=True)
        return [jnp.asarray(read(x)) for x in self.results]


def _adds_rows(equation: Any) -> bool:
    """Returns whether an equation adds the last axes of floats, which XLA does not vectorize on CPUs."""
    if equation.primitive.name != "reduce_sum":
        return False
    aval: Any = equation.invars[0].aval
    is_last = tuple(equation.params["axes"]) == tuple(range(equation.outvars[0].aval.ndim, aval.ndim))
    return is_last and jnp.issubdtype(aval.dtype, jnp.floating) and size_of(equation.invars[0]) > NARROW


def size_of(atom: Any) -> int:
    """Returns the number of elements of a variable or literal."""
    return math.prod(atom.aval.shape)


def traced(function: Function, edges: Edges, fixed: Ends, inputs: Ends) -> tuple[Program, Ends]:
    """Returns the program of a function of one edge, whose last arguments are the ids, and its results as variables."""
    arrays, structure = jax.tree.flatten((fixed, inputs))
    ends = jax.tree.leaves((_labels(fixed), _labels(inputs)))
    names = Ends._fields[: 2 if into(edges).edges is None else 3]
    trees: list[Any] = []

    def run(*leaves: Any) -> list[Any]:
        rows, ids = jax.tree.unflatten(structure, leaves[: len(arrays)]), leaves[len(arrays) :]
        found, tree = jax.tree.flatten(function(rows[0], rows[1], EdgeIds(ids[0], ids[1], ids[2] if ids[2:] else None)))
        trees.append(tree)
        return found

    def example(x: jax.Array, *, is_row: bool = True) -> jax.Array:  # which varies as the array does
        return pvary_alike((jnp.zeros(x.shape[is_row:], accumulation_dtype(x.dtype)), x))[0]

    rows = [example(x, is_row=end != "shared") for x, end in zip(arrays, ends, strict=True)]
    place = example(into(edges).degrees)
    closed = jax.make_jaxpr(run)(*rows, *[place] * len(names))
    return Program(closed, (*ends, *names)), jax.tree.unflatten(trees[-1], closed.jaxpr.outvars)


def _labels(ends: Ends) -> Ends:
    """Returns the names of the ends in place of arrays."""
    return Ends(*(jax.tree.map(lambda _, name=name: name, x) for name, x in zip(Ends._fields, ends, strict=True)))


def into(edges: Edges) -> CSR:
    """Returns the edges by the nodes that they enter."""
    return edges if isinstance(edges, CSR) else edges.by_target
