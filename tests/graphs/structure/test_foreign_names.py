"""Names of DGL and PyTorch Geometric on a graph: the error says which does it here, and nothing else changes."""

import copy
import dataclasses
import pickle
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from pytrees import assert_bitwise_equal

from jmp_train import graphs
from jmp_train.graphs.structure.graph import GRAPH_NAMES, HETERO_NAMES

pytestmark = pytest.mark.quick

GRAPH = graphs.from_edges([0, 1, 2], [1, 2, 2], 3, nodes={"h": jnp.ones((3, 2))})
HETERO = graphs.hetero_from_edges({("user", "plays", "game"): ([0, 1], [0, 0])}, {"user": 2, "game": 1})
TABLES = pytest.mark.parametrize(("graph", "names"), [(GRAPH, GRAPH_NAMES), (HETERO, HETERO_NAMES)])


@pytest.mark.parametrize(
    ("graph", "name", "here"),
    [
        (GRAPH, "ndata", r"graph\.with_nodes\(h=h\) to write"),
        (GRAPH, "edge_index", r"graph\.senders and graph\.receivers"),
        (GRAPH, "update_all", r"jmp_train\.graphs\.update_all\(graph, \.\.\.\)"),
        (HETERO, "ndata", r'graph\.with_nodes\("user", h=h\) to write'),
        (HETERO, "canonical_etypes", r"graph\.edge_types"),
    ],
)
def test_the_error_says_what_does_it_here(graph: Any, name: str, here: str) -> None:
    with pytest.raises(AttributeError, match=f"a {type(graph).__name__} has no '{name}', which is .* use .*{here}"):
        getattr(graph, name)
    assert not hasattr(graph, name)


@TABLES
def test_no_name_of_the_table_hides_one_of_ours(graph: Any, names: Any) -> None:
    assert not set(names) & {name for name in dir(graph) if not name.startswith("_")}
    functions = [here for here in names.values() if here.startswith("jmp_train.graphs.")]
    assert functions
    for here in functions:
        assert callable(getattr(graphs, here.removeprefix("jmp_train.graphs.").partition("(")[0]))


@TABLES
def test_other_names_are_pythons_own_errors(graph: Any, names: Any) -> None:
    del names
    with pytest.raises(AttributeError, match=f"^'{type(graph).__name__}' object has no attribute 'nodez'$"):
        _ = graph.nodez
    assert getattr(graph, "nodez", 3) == 3


def test_what_a_property_raises_is_raised() -> None:
    hollow = dataclasses.replace(GRAPH, connections=None)  # as a tree of specs could be
    with pytest.raises(AttributeError, match="'NoneType' object has no attribute 'in_degrees'"):
        _ = hollow.in_degrees


@TABLES
def test_copies_pickles_and_trees_are_what_they_were(graph: Any, names: Any) -> None:
    del names
    for other in (copy.copy(graph), copy.deepcopy(graph), pickle.loads(pickle.dumps(graph))):
        assert jax.tree.structure(other) == jax.tree.structure(graph)
        assert_bitwise_equal(other, graph)
    assert_bitwise_equal(jax.jit(lambda graph: graph)(graph), graph)
