"""One graph over many devices: its nodes in parts with the edges that enter them, or only its features."""

from jmp_train.graphs.partitioning.node_parts import partition_nodes as partition_nodes
from jmp_train.graphs.partitioning.partitioned_graph import PartitionedGraph as PartitionedGraph
from jmp_train.graphs.partitioning.partitioned_graph import partition as partition
from jmp_train.graphs.partitioning.sharded_features import ShardedFeatures as ShardedFeatures
from jmp_train.graphs.partitioning.sharded_features import shard_features as shard_features
