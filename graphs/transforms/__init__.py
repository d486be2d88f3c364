"""Transforms of a graph's edges and features, on the host."""

from jmp_train.graphs.transforms.edges import add_self_loop as add_self_loop
from jmp_train.graphs.transforms.edges import remove_self_loop as remove_self_loop
from jmp_train.graphs.transforms.edges import reverse as reverse
from jmp_train.graphs.transforms.edges import to_bidirected as to_bidirected
from jmp_train.graphs.transforms.edges import to_simple as to_simple
from jmp_train.graphs.transforms.reordering import reorder as reorder
from jmp_train.graphs.transforms.row_normalization import normalize_rows as normalize_rows
