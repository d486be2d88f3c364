"""Mini-batches of graphs that are larger than the device's memory."""

from jmp_train.graphs.sampling.host_edge_index import HostEdges as HostEdges
from jmp_train.graphs.sampling.host_edge_index import host_edges as host_edges
from jmp_train.graphs.sampling.inference import take_rows as take_rows
from jmp_train.graphs.sampling.link_prediction import global_negatives as global_negatives
from jmp_train.graphs.sampling.link_prediction import reverse_edge_ids as reverse_edge_ids
