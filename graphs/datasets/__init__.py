"""Public data sets of graphs: readers of their files, and synthetic ones of the same shapes."""

from jmp_train.graphs.datasets.data_files import describe_files as describe_files
from jmp_train.graphs.datasets.data_files import find_files as find_files
from jmp_train.graphs.datasets.padded_batches import first_that_holds as first_that_holds
from jmp_train.graphs.datasets.planetoid import PLANETOID as PLANETOID
from jmp_train.graphs.datasets.planetoid import PLANETOID_ADDRESS as PLANETOID_ADDRESS
from jmp_train.graphs.datasets.reddit import REDDIT_CLASSES as REDDIT_CLASSES
from jmp_train.graphs.datasets.reddit import REDDIT_DATA_FILE as REDDIT_DATA_FILE
from jmp_train.graphs.datasets.reddit import REDDIT_FEATURES as REDDIT_FEATURES
from jmp_train.graphs.datasets.reddit import REDDIT_GRAPH_FILES as REDDIT_GRAPH_FILES
from jmp_train.graphs.datasets.reddit import REDDIT_SOURCE as REDDIT_SOURCE
from jmp_train.graphs.datasets.reddit import sorted_ends as sorted_ends
from jmp_train.graphs.datasets.synthetic_graphs import heavy_tailed as heavy_tailed
from jmp_train.graphs.datasets.synthetic_graphs import synthetic_cora as synthetic_cora
from jmp_train.graphs.datasets.synthetic_graphs import synthetic_reddit as synthetic_reddit
from jmp_train.graphs.datasets.tu import TU_ADDRESS as TU_ADDRESS
