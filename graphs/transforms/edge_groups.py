"""Reductions of edge features over groups of parallel edges; on the host, in float64, rounded once."""

import dataclasses
import itertools
import math
from collections.abc import Iterable
from typing import Any

import jax.numpy as jnp
import numpy as np

REDUCTIONS = ("sum", "mean", "max", "min")
_UFUNCS = {"sum": np.add, "mean": np.add, "max": np.maximum, "min": np.minimum}
CHUNK = 2**18  # elements upcast at a time, which fit into caches


@dataclasses.dataclass(frozen=True)
class Groups:
    """Edges in nonempty groups.

    Attributes:
      rows: int [members], the row of each edge's features, group after group.
      bounds: int [groups + 1], the start of each group in `rows`, and the end of the last one.
    """

    rows: np.ndarray
    bounds: np.ndarray

    @property
    def firsts(self) -> np.ndarray:
        """Int [groups], the row of each group's first edge."""
        return self.rows[self.bounds[:-1]]

    @property
    def sizes(self) -> np.ndarray:
        """Int [groups], number of edges of each group."""
        return np.diff(self.bounds)

    def reduce(self, name: str, features: np.ndarray, reduction: str) -> np.ndarray:
        """Returns one row for each group [groups, ...], in the dtype of the features.

        Args:
          name: name of the features, for messages.
          features: [edges, ...].
          reduction: "first", or one of `REDUCTIONS`.

        Raises:
          TypeError: sums of booleans, or means of values that are not floating.
          ValueError: a sum of integers goes beyond their dtype.
        """
        if reduction == "first":
            return features[self.firsts]
        _check_can_reduce(name, features.dtype, reduction)
        table = features.reshape(len(features), math.prod(features.shape[1:]))
        reduced = table[self.firsts]
        several = np.flatnonzero(self.sizes > 1)
        groups = self._some(several)
        for first, last in groups._chunks(table.shape[1]):
            results = groups._reduce_chunk(table, reduction, groups.bounds[first : last + 1])
            what = f"the {reduction} of edges[{name!r}]"
            reduced[several[first:last]] = rounded(what, results, features.dtype)
        return reduced.reshape(len(reduced), *features.shape[1:])

    def _reduce_chunk(self, table: np.ndarray, reduction: str, bounds: np.ndarray) -> np.ndarray:
        """Returns one row for each of some groups [some groups, width], upcast."""
        values = table[self.rows[bounds[0] : bounds[-1]]].astype(_upcast(table.dtype))
        with np.errstate(all="ignore"):  # inf - inf
            results = _UFUNCS[reduction].reduceat(values, bounds[:-1] - bounds[0], axis=0)
            return results / np.diff(bounds)[:, None] if reduction == "mean" else results

    def _chunks(self, width: int) -> Iterable[tuple[int, int]]:
        """Yields the first group of each chunk, and the end of the chunk, so that chunks fit into caches."""
        places = np.arange(0, len(self.rows), max(1, CHUNK // max(1, width)))
        boundaries = np.searchsorted(self.bounds, places)
        return itertools.pairwise(np.unique([*boundaries, len(self.bounds) - 1]))

    def _some(self, groups: np.ndarray) -> "Groups":
        """Returns some of the groups, int [some groups], ascending."""
        sizes = np.zeros_like(self.bounds[1:])
        sizes[groups] = self.sizes[groups]
        rows = self.rows[np.repeat(sizes > 0, self.sizes)]
        return Groups(rows, np.append(0, np.cumsum(sizes[groups])))


def groups_of(ids: np.ndarray) -> Groups:
    """Returns edges grouped by an id, in the order of the ids; edges of a group keep their order.

    Args:
      ids: int [edges].
    """
    rows = np.argsort(ids, kind="stable")
    ids = ids[rows]
    is_bound = np.ones(len(ids) + 1, bool)
    is_bound[1:-1] = ids[1:] != ids[:-1]
    return Groups(rows, np.flatnonzero(is_bound))


def rounded(what: str, values: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Returns upcast values in a dtype: floats are rounded once, possibly to infinity; integers are checked.

    Args:
      what: description of the values, for the message.
      values: float64, complex128, or 64-bit integers.
      dtype: dtype of the result.

    Raises:
      ValueError: the dtype is an integer one, and cannot represent the values.
    """
    with np.errstate(all="ignore"):
        if jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 4:
            return _to_odd(np.asarray(values, np.float64)).astype(dtype)
        results = np.asarray(values).astype(dtype)
    if not jnp.issubdtype(dtype, jnp.inexact) and (results != values).any():
        wrong = np.extract(results != values, values)[0]
        raise ValueError(f"{what} is {wrong}, which does not fit into {dtype}")
    return results


def _to_odd(values: np.ndarray) -> np.ndarray:
    """Returns float64 as the float32 below it in magnitude, with its last bit set if the two differ.

    Rounding that to half precision equals rounding float64 once. NumPy's bfloat16 is rounded by way of float32, and
    so rounds 1 + 2**-8 + 2**-30 down.

    Reference: Boldo and Melquiond, Emulation of FMA and correctly rounded sums, 2008.
    """
    near = values.astype(np.float32)
    bits = near.view(np.int32)
    bits = bits - (np.abs(near.astype(np.float64)) > np.abs(values))
    return (bits | (near != values)).astype(np.int32).view(np.float32)


def _upcast(dtype: Any) -> Any:
    """Returns the dtype of the same kind with the highest precision."""
    kinds = (
        (jnp.floating, np.float64),
        (jnp.complexfloating, np.complex128),
        (jnp.unsignedinteger, np.uint64),
        (jnp.signedinteger, np.int64),
    )
    return next((upcast for kind, upcast in kinds if jnp.issubdtype(dtype, kind)), dtype)


def _check_can_reduce(name: str, dtype: np.dtype, reduction: str) -> None:
    if reduction == "mean" and not jnp.issubdtype(dtype, jnp.inexact):
        raise TypeError(f"edges[{name!r}] must be floating to have a mean, got {dtype}")
    if reduction == "sum" and dtype == np.bool_:
        raise TypeError(f"edges[{name!r}] must be numbers to have a sum, got {dtype}")
