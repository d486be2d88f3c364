"""The jobs that `jmp-train` runs: data, model, loss and optimizer of each, one module a task."""

import dataclasses
import importlib

from jmp_train.tasks.task import Task, TaskOptions

_MODULES = {
    "digits": "jmp_train.tasks.digits",
    "mnist": "jmp_train.tasks.mnist",
    "karate": "jmp_train.tasks.karate",
    "cora": "jmp_train.tasks.cora",
    "reddit": "jmp_train.tasks.reddit",
    "cifar10": "jmp_train.tasks.cifar10",
    "vit-b16": "jmp_train.tasks.vit",
}
_MODELS = {  # of the tasks that have several, the default first
    "karate": ("gcn", "gat"),
    "cora": ("gcn", "gat", "sage"),
}
_CUT = ("digits", "mnist", "cifar10", "vit-b16")  # the tasks whose batches can be cut over devices
# The tasks that have an option.
_HAVE = {"heads": ("reddit",), "scale": ("reddit",), "image_size": ("vit-b16",)}

TASK_NAMES = tuple(_MODULES)


def load_task(name: str, options: TaskOptions | None = None) -> Task:
    """Returns the task of that name with its data loaded.

    Args:
      name: one of `TASK_NAMES`.
      options: which data and model; None for the task's own, and all of the data.

    Returns:
      The task.

    Raises:
      KeyError: there is no such task.
      ValueError: the options do not suit the task, or a file is damaged.
      FileNotFoundError: files are missing; the message says where they are public.
    """
    options = TaskOptions() if options is None else options
    if options.synthetic and options.data_dir is not None:
        raise ValueError("--data-dir and --synthetic exclude each other")
    options = dataclasses.replace(options, model=_checked_model(name, options.model))
    for option, having in _HAVE.items():
        value = getattr(options, option)
        if value is not None and name not in having:
            tasks = ", ".join(having)
            raise ValueError(f"{option}={value}: task {name} has no such option, only {tasks} has")
    if options.devices > 1 and name not in _CUT:
        raise ValueError(
            f"task {name} trains on a whole graph, which is not cut: "
            f"--devices is for {', '.join(_CUT)}"
        )
    task = importlib.import_module(_MODULES[name]).load(options)
    task = dataclasses.replace(task, options=options)
    if options.train_size is None:
        return task
    rows = len(next(iter(task.train.values())))
    if not 1 <= options.train_size <= rows:
        raise ValueError(
            f"train_size={options.train_size} must lie between 1 and the {rows} training rows"
        )
    first = {name: array[: options.train_size] for name, array in task.train.items()}
    return dataclasses.replace(task, train=first)


def _checked_model(name: str, model: str | None) -> str | None:
    models = _MODELS.get(name)
    if models is None:
        if model is not None:
            raise ValueError(f"model={model!r}: task {name} has one model only")
        return None
    if model is not None and model not in models:
        raise ValueError(f"model={model!r} is none of task {name}'s: {', '.join(models)}")
    return models[0] if model is None else model
