"""Mini-batches of graphs that are larger than the device's memory."""

from jmp_train.graphs.sampling.edge_batches import EdgeMiniBatch as EdgeMiniBatch
from jmp_train.graphs.sampling.edge_batches import EdgeSampler as EdgeSampler
from jmp_train.graphs.sampling.edge_batches import edge_sampler as edge_sampler
from jmp_train.graphs.sampling.host_edge_index import HostEdges as HostEdges
from jmp_train.graphs.sampling.host_edge_index import host_edges as host_edges
from jmp_train.graphs.sampling.host_rows import take_rows as take_rows
from jmp_train.graphs.sampling.host_rows import take_sparse_rows as take_sparse_rows
from jmp_train.graphs.sampling.inference import layerwise_inference as layerwise_inference
from jmp_train.graphs.sampling.link_metrics import hits_at as hits_at
from jmp_train.graphs.sampling.link_metrics import mean_reciprocal_rank as mean_reciprocal_rank
from jmp_train.graphs.sampling.link_metrics import roc_auc as roc_auc
from jmp_train.graphs.sampling.negatives import global_negatives as global_negatives
from jmp_train.graphs.sampling.negatives import in_batch_negatives as in_batch_negatives
from jmp_train.graphs.sampling.negatives import reverse_edge_ids as reverse_edge_ids
from jmp_train.graphs.sampling.negatives import uniform_negatives as uniform_negatives
from jmp_train.graphs.sampling.sampler import MiniBatch as MiniBatch
from jmp_train.graphs.sampling.sampler import NeighborSampler as NeighborSampler
from jmp_train.graphs.sampling.sampler import neighbor_sampler as neighbor_sampler
