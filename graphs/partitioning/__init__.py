"""One graph over many devices: its nodes cut into parts, each with the edges that enter them."""

from jmp_train.graphs.partitioning.node_parts import partition_nodes as partition_nodes
from jmp_train.graphs.partitioning.partitioned_graph import PartitionedGraph as PartitionedGraph
from jmp_train.graphs.partitioning.partitioned_graph import partition as partition
