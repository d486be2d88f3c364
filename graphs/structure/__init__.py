"""Graphs as values: features, edges, and the indices that sums over edges need."""

from jmp_train.graphs.structure.adjacency import Adjacency as Adjacency
from jmp_train.graphs.structure.adjacency import check_formats as check_formats
from jmp_train.graphs.structure.adjacency import checked_ends as checked_ends
from jmp_train.graphs.structure.adjacency import make_adjacency_checked as make_adjacency_checked
from jmp_train.graphs.structure.adjacency import make_adjacency_traced as make_adjacency_traced
from jmp_train.graphs.structure.adjacency import make_mailboxes as make_mailboxes
from jmp_train.graphs.structure.batching import batch as batch
from jmp_train.graphs.structure.batching import edge_mask as edge_mask
from jmp_train.graphs.structure.batching import graph_mask as graph_mask
from jmp_train.graphs.structure.batching import node_mask as node_mask
from jmp_train.graphs.structure.batching import pad as pad
from jmp_train.graphs.structure.batching import unbatch as unbatch
from jmp_train.graphs.structure.batching import unpad as unpad
from jmp_train.graphs.structure.block import Block as Block
from jmp_train.graphs.structure.block import padded_block as padded_block
from jmp_train.graphs.structure.counts import LARGEST_COUNT as LARGEST_COUNT
from jmp_train.graphs.structure.counts import as_count as as_count
from jmp_train.graphs.structure.csr import CSR as CSR
from jmp_train.graphs.structure.csr import CSRAndCSC as CSRAndCSC
from jmp_train.graphs.structure.csr import from_degrees as from_degrees
from jmp_train.graphs.structure.graph import Graph as Graph
from jmp_train.graphs.structure.graph import checked_features as checked_features
from jmp_train.graphs.structure.graph import from_edges as from_edges
from jmp_train.graphs.structure.graph import rand_graph as rand_graph
from jmp_train.graphs.structure.hetero_graph import EdgeType as EdgeType
from jmp_train.graphs.structure.hetero_graph import HeteroGraph as HeteroGraph
from jmp_train.graphs.structure.hetero_graph import hetero_from_edges as hetero_from_edges
from jmp_train.graphs.structure.host_ids import ascends as ascends
from jmp_train.graphs.structure.host_ids import filled as filled
from jmp_train.graphs.structure.incidence import BLOCK as BLOCK
from jmp_train.graphs.structure.incidence import Incidence as Incidence
from jmp_train.graphs.structure.incidence_building import incidence_of as incidence_of
from jmp_train.graphs.structure.incidence_building import (
    most_in_as_many_levels as most_in_as_many_levels,
)
from jmp_train.graphs.structure.jraph_conversion import AnyGraph as AnyGraph
from jmp_train.graphs.structure.jraph_conversion import OurGraph as OurGraph
from jmp_train.graphs.structure.jraph_conversion import accepts_jraph as accepts_jraph
from jmp_train.graphs.structure.jraph_conversion import from_jraph as from_jraph
from jmp_train.graphs.structure.jraph_conversion import to_jraph as to_jraph
from jmp_train.graphs.structure.row_arrays import finite_or_zero as finite_or_zero
from jmp_train.graphs.structure.row_arrays import first_rows as first_rows
from jmp_train.graphs.structure.row_arrays import inverse_degrees as inverse_degrees
from jmp_train.graphs.structure.row_arrays import reciprocal as reciprocal
from jmp_train.graphs.structure.row_arrays import rows_like as rows_like
from jmp_train.graphs.structure.stacking import GraphStack as GraphStack
from jmp_train.graphs.structure.stacking import stack as stack
from jmp_train.graphs.structure.stacking import unstack as unstack
from jmp_train.graphs.structure.storage import accumulation_dtype as accumulation_dtype
from jmp_train.graphs.structure.storage import as_inexact as as_inexact
from jmp_train.graphs.structure.storage import common_dtype as common_dtype
from jmp_train.graphs.structure.storage import graph_storage as graph_storage
from jmp_train.graphs.structure.storage import in_float32 as in_float32
from jmp_train.graphs.structure.storage import is_one_precision as is_one_precision
from jmp_train.graphs.structure.storage import upcast as upcast
from jmp_train.graphs.structure.storage import upcast_integers as upcast_integers
