"""The jobs of `examples/tasks`, for benchmarks and tests: their modules, and `load_task`."""

import importlib
import sys
from pathlib import Path
from typing import Any

from jmp_train import Task

FOLDER = Path(__file__).parents[1] / "examples" / "tasks"
sys.path.insert(0, str(FOLDER))  # the files import each other by their names

import cifar10
import cora
import lm
import mnist
import models
import reddit
import vit

NAMES = ("digits", "mnist", "karate", "cora", "reddit", "proteins", "cifar10", "vit", "lm")


def load_task(name: str, **options: Any) -> Task:
    """Returns a task with its data loaded: `digits`, or that of a file in `examples/tasks`.

    Args:
      name: one of `NAMES`, or "vit-b16" for "vit", as results have it.
      **options: fields of the task's `Options`.
    """
    module = task_module(name)
    return module.task(module.Options(**options))


def task_module(name: str) -> Any:
    """Returns the module of a task, with `Options` and `task(options)`; see `load_task`."""
    file = {"digits": "jmp_train.app.tasks.digits", "vit-b16": "vit"}.get(name, name)
    return importlib.import_module(file)
