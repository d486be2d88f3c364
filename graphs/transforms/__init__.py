"""Transforms of a graph's edges and features, on the host."""

from jmp_train.graphs.transforms.edge_lists import edges_on_host as edges_on_host
from jmp_train.graphs.transforms.edge_lists import ends_on_host as ends_on_host
