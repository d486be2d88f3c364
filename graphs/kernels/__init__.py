"""Sums over edges and attention, computed chunk by chunk or on whole arrays of edges."""

from jmp_train.graphs.kernels.attention import GAT as GAT
from jmp_train.graphs.kernels.attention import GATV2 as GATV2
from jmp_train.graphs.kernels.chunks import run_chunked as run_chunked
from jmp_train.graphs.kernels.dot_product import DOT_ATTENTION as DOT_ATTENTION
from jmp_train.graphs.kernels.dot_product import DotInputs as DotInputs
from jmp_train.graphs.kernels.dot_product import DotResult as DotResult
from jmp_train.graphs.kernels.dropout import edge_dropout as edge_dropout
from jmp_train.graphs.kernels.edge_matrices import DiagonalBlocks as DiagonalBlocks
from jmp_train.graphs.kernels.edge_matrices import MixedMatrices as MixedMatrices
from jmp_train.graphs.kernels.edge_matrices import NetworkMatrices as NetworkMatrices
from jmp_train.graphs.kernels.edge_matrices import OfEdges as OfEdges
from jmp_train.graphs.kernels.gat import GATInputs as GATInputs
from jmp_train.graphs.kernels.gatv2 import GATv2Inputs as GATv2Inputs
from jmp_train.graphs.kernels.implementations import EdgeOperation as EdgeOperation
from jmp_train.graphs.kernels.mapped_sum import MAPPED_SUM as MAPPED_SUM
from jmp_train.graphs.kernels.mapped_sum import MappedInputs as MappedInputs
from jmp_train.graphs.kernels.messages_xla import REDUCTIONS as REDUCTIONS
from jmp_train.graphs.kernels.messages_xla import Reductions as Reductions
from jmp_train.graphs.kernels.messages_xla import messages_by_xla as messages_by_xla
from jmp_train.graphs.kernels.messages_xla import reduce_rows as reduce_rows
from jmp_train.graphs.kernels.messages_xla import reductions_by_xla as reductions_by_xla
from jmp_train.graphs.kernels.moments import chunked_moments as chunked_moments
from jmp_train.graphs.kernels.moments import chunked_softmax_sum as chunked_softmax_sum
from jmp_train.graphs.kernels.spmm_sddmm import Scales as Scales
from jmp_train.graphs.kernels.spmm_sddmm import edge_dot as edge_dot
from jmp_train.graphs.kernels.spmm_sddmm import weighted_sum as weighted_sum
