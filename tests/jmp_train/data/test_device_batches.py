"""A script that ends while it holds an iterator of batches by a global name ends without a word."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.full

SCRIPT = """
import numpy as np
from jmp_train import graphs
from jmp_train.data import array_batches, graph_batches

first = array_batches({"x": np.arange(64.0)}, 4)  # reads ahead by one thread
next(first)
second = array_batches({"x": np.arange(64.0)}, 4, epochs=None)  # nothing was read yet
third = graph_batches(graphs.synthetic_proteins(8), batch_size=2)  # and by two threads, one behind the other
next(third)
print("done")
"""


def test_a_script_that_holds_iterators_ends_silently() -> None:
    result = subprocess.run((sys.executable, "-c", SCRIPT), capture_output=True, text=True, timeout=120, check=False)
    assert (result.returncode, result.stdout, result.stderr) == (0, "done\n", "")
