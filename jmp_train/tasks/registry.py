"""The built-in tasks by name; a task's module has `Options` and `task(options)`, as users' files do."""

import importlib
from typing import Any

from jmp_train.task import Task

TASK_NAMES = ("digits", "mnist", "karate", "cora", "planetoid", "reddit", "proteins", "cifar10", "vit-b16", "lm")
_MODULES = {name: name for name in TASK_NAMES} | {"vit-b16": "vit"}


def module_of(name: str) -> Any:
    """Returns the module of a built-in task.

    Args:
      name: one of `TASK_NAMES`.
    """
    return importlib.import_module(f"jmp_train.tasks.{_MODULES[name]}")


def load_task(name: str, **options: Any) -> Task:
    """Returns a built-in task with its data loaded.

    Args:
      name: one of `TASK_NAMES`.
      **options: fields of the task's `Options`.

    Raises:
      KeyError: there is no such task.
      TypeError: the task has no such option.
      ValueError: an option is out of range, or a file is damaged.
      FileNotFoundError: files are missing; the message has their public address.

    Example:
      >>> load_task("karate", model="gat").epochs
      50
    """
    module = module_of(name)
    return module.task(module.Options(**options))
