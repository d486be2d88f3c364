"""Reductions of a function's terms to one per block of edges: narrow values for the whole block, wide ones by place."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jmp_train.graphs.kernels.chunks import Chunk, Sums, add_up, at, upcast_at
from jmp_train.graphs.kernels.edge_programs import NARROW, Edges, Ends, Part, Program, into, size_of
from jmp_train.graphs.structure import CSR, accumulation_dtype, rows_like, upcast


@dataclasses.dataclass(frozen=True, eq=False)
class BlockReduction:
    """The reductions of terms to one per block, for the nodes at one end of edges.

    Attributes:
      program: the function.
      neighbors: the edges, sorted by these nodes.
      here: "receivers" or "senders", the nodes of the blocks.
      ends: the arrays of which the program reads rows.
      wanted: a tree of results of the program.
      narrow: those that are computed for whole blocks.
      wide: the others.
      crossing: the narrow variables from which wide results are made.
      first: the part of the program that makes narrow results and variables.
      then: the parts that make wide results.
    """

    program: Program
    neighbors: CSR
    here: str
    ends: tuple[Ends, Ends]
    wanted: Any
    narrow: list[Any]
    wide: list[Any]
    crossing: list[Any]
    first: Part
    then: list[Part]

    @classmethod
    def of(cls, program: Program, edges: Edges, here: str, ends: tuple[Ends, Ends], wanted: Any) -> "BlockReduction":
        """Returns the reductions of some results of a program."""
        neighbors = into(edges) if here == "receivers" or isinstance(edges, CSR) else edges.by_source
        leaves = jax.tree.leaves(wanted)
        narrow = [x for x in leaves if program.multiplies or size_of(x) <= NARROW]
        wide = [x for x in leaves if not any(x is y for y in narrow)]
        crossing = program.cut(wide, program.levels(here))
        first, then = program.part([*narrow, *crossing]), [program.part([x], crossing) for x in wide]
        return cls(program, neighbors, here, ends, wanted, narrow, wide, crossing, first, then)

    @property
    def elements(self) -> int:
        """Number of elements per block: those of narrow values in all places, and of the rows that are added."""
        width, narrow = self.neighbors.width, sum(map(size_of, self.first.results))
        before = self.first.widest * width // 2 if self.first.widest > NARROW else width * narrow
        return max(1, before, *(part.widest for part in self.then), sum(map(size_of, self.wide)))

    def sums(self, finish: Callable[..., Any] | None, after: Any) -> tuple[Any, Any]:
        """Returns the sums at the nodes and over all edges, of a pair of trees of results.

        Args:
          finish: see `sums_without_gradient`.
          after: see `add_up`.
        """
        own = [getattr(x, self.here) for x in self.ends]
        structure = jax.tree.structure(self.wanted)

        def of_blocks(terms: list[Any], *rows: Any) -> tuple[Any, Any]:
            end, whole = jax.tree.unflatten(structure, terms)
            return end if finish is None else finish(self.here, end, *rows), whole

        def compute(chunk: Chunk) -> Sums:
            rows = jax.tree.map(lambda x: upcast_at(x, chunk.nodes), own)
            end, whole = jax.vmap(of_blocks)(self.reduced(chunk), *rows)
            totals = [
                jnp.where(rows_like(chunk.is_new, x), x, jnp.zeros_like(x)).sum(0) for x in jax.tree.leaves(whole)
            ]
            return Sums(jax.tree.leaves(end), totals)

        terms = [
            jax.ShapeDtypeStruct(x.aval.shape, accumulation_dtype(x.aval.dtype)) for x in jax.tree.leaves(self.wanted)
        ]
        rows = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], accumulation_dtype(x.dtype)), own)
        like = jax.eval_shape(of_blocks, terms, *rows)
        found = add_up(self.neighbors, compute, Sums(*map(jax.tree.leaves, like)), self.elements, after)
        end, whole = (jax.tree.unflatten(jax.tree.structure(x), y) for x, y in zip(like, found, strict=True))
        return end, whole

    def before(self, chunk: Chunk) -> tuple[list[jax.Array], list[jax.Array]]:
        """Returns narrow results and the variables at the cut, all [blocks, width, ...]."""
        if not self.first.results:
            return [], []
        here, there = self._split(self.first)
        where = self._where(chunk)
        rows, own = (self.program.read(some, self.ends, where) for some in (there, here))
        of_places = jax.vmap(self._run(self.first, there, here), (0, None), axis_size=self.neighbors.width)
        found = jax.vmap(of_places, axis_size=len(chunk.nodes))(rows, own)
        narrow, crossing = found[: len(self.narrow)], found[len(self.narrow) :]
        # Or XLA would compute them for each number of a row again.
        return narrow, jax.lax.optimization_barrier(crossing) if crossing else []

    def reduced(self, chunk: Chunk, *, is_max: bool = False) -> list[jax.Array]:
        """Returns the sums of terms, [blocks, ...]; or the largest, and the least number without edges."""
        narrow, crossing = self.before(chunk)
        join, found = jnp.maximum if is_max else jnp.add, {}

        def neutral(dtype: Any) -> Any:
            return least_of(dtype) if is_max else 0

        for x, terms in zip(self.narrow, map(upcast, narrow), strict=True):
            terms = chunk.where_edge(terms, neutral(terms.dtype))
            found[id(x)] = terms.max(1) if is_max else terms.sum(1)
        for x, part in zip(self.wide, self.then, strict=True):
            total: Any = None
            for term, is_edge in self._by_place(part, chunk, crossing):
                term = jnp.where(is_edge, term, jnp.asarray(neutral(term.dtype), term.dtype))
                total = term if total is None else join(total, term)
            found[id(x)] = total
        return [found[id(x)] for x in jax.tree.leaves(self.wanted)]

    def _by_place(self, part: Part, chunk: Chunk, crossing: list[jax.Array]) -> Any:
        """Yields a wide term [blocks, ...] of one edge of each block after the other, and which are edges."""
        # Each sum reads its rows anew: XLA would store those that two of them share.
        where = jax.lax.optimization_barrier(self._where(chunk))
        here, there = self._split(part)
        own = self.program.read(here, self.ends, where)
        run = jax.vmap(self._run(part, [*there, *self.crossing], here), axis_size=len(chunk.nodes))
        for place in range(self.neighbors.width):
            at_place = {end: x if end == self.here else x[:, place] for end, x in where.items()}
            rows = self.program.read(there, self.ends, at_place)
            (term,) = run([*rows, *(x[:, place] for x in crossing)], own)
            yield upcast(term), rows_like(chunk.is_edge[:, place], term)

    def _run(self, part: Part, there: list[Any], here: list[Any]) -> Callable[..., list[jax.Array]]:
        """Returns a part as a function of the values of variables of one edge, and of its node."""
        shared = [x for x in part.arguments if self.program.end_of(x) == "shared"]
        values = self.program.read(shared, self.ends, {})
        return lambda of_there, of_here: part([*shared, *there, *here], [*values, *of_there, *of_here])

    def _split(self, part: Part) -> tuple[list[Any], list[Any]]:
        """Returns the arguments that the edges of a block share, and those that they do not."""
        ends = [(x, self.program.end_of(x)) for x in part.arguments]
        return [x for x, end in ends if end == self.here], [x for x, end in ends if end not in (self.here, "shared")]

    def _where(self, chunk: Chunk) -> dict[str, jax.Array]:
        """Returns the rows to read at each end."""
        there = "senders" if self.here == "receivers" else "receivers"
        where = {self.here: chunk.nodes, there: chunk.others}
        if self.neighbors.edges is not None:
            where["edge"] = at(self.neighbors.edges, chunk.positions)
        return where


def least_of(dtype: Any) -> Any:
    """Returns the number that no other is less than."""
    return -jnp.inf if jnp.issubdtype(dtype, jnp.floating) else jnp.iinfo(dtype).min
