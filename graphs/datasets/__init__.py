"""Public data sets of graphs: readers of their files, and synthetic ones of the same shapes."""

from jmp_train.graphs.datasets.data_files import describe_files as describe_files
from jmp_train.graphs.datasets.data_files import find_files as find_files
from jmp_train.graphs.datasets.graph_data import GraphData as GraphData
from jmp_train.graphs.datasets.graph_file_reading import load_graphs as load_graphs
from jmp_train.graphs.datasets.graph_files import save_graphs as save_graphs
from jmp_train.graphs.datasets.node_data import NodeData as NodeData
from jmp_train.graphs.datasets.ogb import read_ogb as read_ogb
from jmp_train.graphs.datasets.padded_batches import PaddedSize as PaddedSize
from jmp_train.graphs.datasets.padded_batches import padded_batch as padded_batch
from jmp_train.graphs.datasets.padded_batches import padded_sizes as padded_sizes
from jmp_train.graphs.datasets.planetoid import PLANETOID as PLANETOID
from jmp_train.graphs.datasets.planetoid import PLANETOID_ADDRESS as PLANETOID_ADDRESS
from jmp_train.graphs.datasets.planetoid import read_planetoid as read_planetoid
from jmp_train.graphs.datasets.protein_graphs import synthetic_proteins as synthetic_proteins
from jmp_train.graphs.datasets.reddit import REDDIT_CLASSES as REDDIT_CLASSES
from jmp_train.graphs.datasets.reddit import REDDIT_DATA_FILE as REDDIT_DATA_FILE
from jmp_train.graphs.datasets.reddit import REDDIT_FEATURES as REDDIT_FEATURES
from jmp_train.graphs.datasets.reddit import REDDIT_GRAPH_FILES as REDDIT_GRAPH_FILES
from jmp_train.graphs.datasets.reddit import REDDIT_SOURCE as REDDIT_SOURCE
from jmp_train.graphs.datasets.reddit import read_reddit as read_reddit
from jmp_train.graphs.datasets.reddit import sorted_ends as sorted_ends
from jmp_train.graphs.datasets.synthetic_papers import synthetic_cora as synthetic_cora
from jmp_train.graphs.datasets.synthetic_posts import heavy_tailed as heavy_tailed
from jmp_train.graphs.datasets.synthetic_posts import synthetic_reddit as synthetic_reddit
from jmp_train.graphs.datasets.tu import TU_ADDRESS as TU_ADDRESS
from jmp_train.graphs.datasets.tu import read_tu as read_tu
