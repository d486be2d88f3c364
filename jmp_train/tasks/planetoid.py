"""Task `planetoid`: node classification of one of Planetoid's three citation graphs: Cora, Citeseer or Pubmed.

It does the same as task `cora` for each of them, with the words of a paper as sparse features. A paper of Citeseer has
32 of 3,703 words, and a dense first layer, which multiplies the zeros too, would take most of the time.
"""

import dataclasses
from typing import Literal

from jmp_train.graphs.datasets import PLANETOID
from jmp_train.task import Task
from jmp_train.tasks.cora import make_task, read_papers
from jmp_train.tasks.task_options import FileOptions


@dataclasses.dataclass(frozen=True)
class Options(FileOptions):
    """Options of task `planetoid`.

    Args:
      model: the model.
      dataset: the data set: Cora, Citeseer or Pubmed, in any case.
    """

    model: Literal["gcn", "gat", "sage"] = "gcn"
    dataset: str = dataclasses.field(default="Cora", metadata={"identity": False})  # the data's digest identifies it


def task(options: Options) -> Task:
    """Returns the task with the data set of `options.dataset`; moves nothing to a device."""
    name = options.dataset.lower()
    if name not in PLANETOID:
        raise ValueError(f"dataset={options.dataset!r} must be one of {', '.join(PLANETOID)}")
    if options.synthetic and name != PLANETOID[0]:
        raise ValueError(f"dataset={options.dataset!r} has no synthetic data; only {PLANETOID[0]} does")
    return make_task(read_papers(options, "planetoid", name), options.model, name, sparse=True)
