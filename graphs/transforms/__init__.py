"""Transforms of a graph's edges and features, on the host."""

from jmp_train.graphs.transforms.derived_graphs import add_virtual_node as add_virtual_node
from jmp_train.graphs.transforms.derived_graphs import line_graph as line_graph
from jmp_train.graphs.transforms.edge_lists import edges_on_host as edges_on_host
from jmp_train.graphs.transforms.edge_lists import ends_on_host as ends_on_host
from jmp_train.graphs.transforms.edges import add_self_loop as add_self_loop
from jmp_train.graphs.transforms.edges import remove_self_loop as remove_self_loop
from jmp_train.graphs.transforms.edges import reverse as reverse
from jmp_train.graphs.transforms.edges import to_bidirected as to_bidirected
from jmp_train.graphs.transforms.edges import to_simple as to_simple
from jmp_train.graphs.transforms.editing import add_edges as add_edges
from jmp_train.graphs.transforms.editing import remove_edges as remove_edges
from jmp_train.graphs.transforms.encodings import laplacian_pe as laplacian_pe
from jmp_train.graphs.transforms.encodings import random_walk_pe as random_walk_pe
from jmp_train.graphs.transforms.encodings import shortest_path_distances as shortest_path_distances
from jmp_train.graphs.transforms.homogeneous import to_heterogeneous as to_heterogeneous
from jmp_train.graphs.transforms.homogeneous import to_homogeneous as to_homogeneous
from jmp_train.graphs.transforms.point_clouds import knn_graph as knn_graph
from jmp_train.graphs.transforms.point_clouds import radius_graph as radius_graph
from jmp_train.graphs.transforms.reordering import reorder as reorder
from jmp_train.graphs.transforms.row_normalization import normalize_rows as normalize_rows
from jmp_train.graphs.transforms.subgraphs import edge_subgraph as edge_subgraph
from jmp_train.graphs.transforms.subgraphs import in_subgraph as in_subgraph
from jmp_train.graphs.transforms.subgraphs import khop_in_subgraph as khop_in_subgraph
from jmp_train.graphs.transforms.subgraphs import khop_out_subgraph as khop_out_subgraph
from jmp_train.graphs.transforms.subgraphs import node_subgraph as node_subgraph
from jmp_train.graphs.transforms.subgraphs import out_subgraph as out_subgraph
