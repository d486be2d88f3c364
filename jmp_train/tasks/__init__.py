"""The jobs that `jmp-train` runs: data, model, loss and optimizer of each, one module a task."""

import importlib

from jmp_train.tasks.task import Task

_MODULES = {"digits": "jmp_train.tasks.digits"}

TASK_NAMES = tuple(_MODULES)


def load_task(name: str) -> Task:
    """Returns the task of that name with its data loaded; raises KeyError if there is none."""
    return importlib.import_module(_MODULES[name]).load()
