"""Readers of foreign files: csv, npz, and pickles of Python 2 and torch.

One rule holds for all: a file is data. No reader imports or calls an object that a file names, takes more memory than a
limit allows, or returns part of a damaged file; each fault is an error with the file's name.
"""

from jmp_train.graphs.file_formats.array_files import read_npz as read_npz
from jmp_train.graphs.file_formats.csv_tables import read_csv_table as read_csv_table
from jmp_train.graphs.file_formats.file_limits import check_bytes as check_bytes
from jmp_train.graphs.file_formats.file_limits import most_bytes as most_bytes
from jmp_train.graphs.file_formats.pickle_files import SparseRows as SparseRows
from jmp_train.graphs.file_formats.pickle_files import read_python2_pickle as read_python2_pickle
from jmp_train.graphs.file_formats.pickle_files import read_torch_arrays as read_torch_arrays
