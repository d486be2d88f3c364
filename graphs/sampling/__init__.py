"""Mini-batches of graphs that are larger than the device."""

from jmp_train.graphs.sampling.host_edge_index import HostEdges as HostEdges
from jmp_train.graphs.sampling.host_edge_index import host_edges as host_edges
from jmp_train.graphs.sampling.host_rows import take_rows as take_rows
from jmp_train.graphs.sampling.inference import layerwise_inference as layerwise_inference
from jmp_train.graphs.sampling.sampler import MiniBatch as MiniBatch
from jmp_train.graphs.sampling.sampler import NeighborSampler as NeighborSampler
from jmp_train.graphs.sampling.sampler import neighbor_sampler as neighbor_sampler
