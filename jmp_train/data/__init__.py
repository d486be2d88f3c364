"""Batches of arrays and graphs for training loops."""

from jmp_train.data.array_loading import array_batches as array_batches
from jmp_train.data.array_loading import check_seed as check_seed
from jmp_train.data.graph_batching import graph_batches as graph_batches
from jmp_train.data.graph_batching import neighbor_batches as neighbor_batches
