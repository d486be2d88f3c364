"""The tasks, each declared in one value; its module is imported when the task is loaded."""

import dataclasses
import importlib

from jmp_train.tasks.options import FolderWanted, TaskOptions, options_of
from jmp_train.tasks.task import Task


@dataclasses.dataclass(frozen=True)
class TaskDeclaration:
    """What is known of a task without its module.

    Attributes:
      name: what the command line calls it.
      module: where its `load(options) -> Task` is; of `options` it has to heed those that it has.
      options: those it has, beside `train_size`, which all have, and `model`.
      models: if there are several, the default first.
    """

    name: str
    module: str
    options: tuple[str, ...] = ()
    models: tuple[str, ...] = ()

    def has(self, option: str) -> bool:
        """Returns whether the task has an option, by its name."""
        return option == "train_size" or option in self.options or (option == "model" and self.several)

    @property
    def several(self) -> bool:
        """Whether there is a choice of models."""
        return len(self.models) > 1


_FILES = ("data_dir", "synthetic")
_BATCHES = ("devices", "accumulate_steps")  # of tasks that do not train on a whole graph
_DECLARED = (
    TaskDeclaration("digits", "jmp_train.tasks.digits", _BATCHES),
    TaskDeclaration("mnist", "jmp_train.tasks.mnist", (*_FILES, *_BATCHES)),
    TaskDeclaration("karate", "jmp_train.tasks.karate", models=("gcn", "gat")),
    TaskDeclaration("cora", "jmp_train.tasks.cora", (*_FILES, "devices"), models=("gcn", "gat", "sage")),
    TaskDeclaration("planetoid", "jmp_train.tasks.planetoid", (*_FILES, "dataset"), models=("gcn", "gat", "sage")),
    TaskDeclaration("reddit", "jmp_train.tasks.reddit", (*_FILES, "devices", "heads", "scale")),
    TaskDeclaration("proteins", "jmp_train.tasks.proteins", (*_FILES, *_BATCHES)),
    TaskDeclaration("cifar10", "jmp_train.tasks.cifar10", (*_FILES, *_BATCHES)),
    TaskDeclaration("vit-b16", "jmp_train.tasks.vit", (*_FILES, *_BATCHES, "image_size")),
    TaskDeclaration(
        "lm", "jmp_train.tasks.lm", (*_BATCHES, "text_file", "remat"), models=("tiny", "small", "gpt2-small")
    ),
)

TASKS = {task.name: task for task in _DECLARED}
TASK_NAMES = tuple(TASKS)


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
    options = check_options(name, TaskOptions() if options is None else options)
    try:
        task = importlib.import_module(TASKS[name].module).load(options)
    except FolderWanted as wanted:
        raise FileNotFoundError(f"task {name} wants --data-dir, {wanted}") from None
    task = dataclasses.replace(task, name=name, options=options)
    if options.train_size is None:
        return task
    count = len(next(iter(task.train.values())))
    if not 1 <= options.train_size <= count:
        raise ValueError(f"train_size={options.train_size} must be between 1 and the {count} training examples")
    first = {name: array[: options.train_size] for name, array in task.train.items()}
    return dataclasses.replace(task, train=first)


def has_option(name: str, option: str) -> bool:
    """Returns whether a task has an option: "synthetic" if its data are files, "devices" if it trains on several.

    Args:
      name: one of `TASK_NAMES`.
      option: a field of `TaskOptions`.

    Example:
      >>> has_option("mnist", "synthetic"), has_option("digits", "synthetic"), has_option("karate", "devices")
      (True, False, False)
    """
    return TASKS[name].has(option)


def model_choices() -> str:
    """Returns which models the tasks have that have several.

    Example:
      >>> model_choices()
      'gcn or gat of karate; gcn, gat or sage of cora; gcn, gat or sage of planetoid; tiny, small or gpt2-small of lm'
    """
    return "; ".join(
        f"{', '.join(task.models[:-1])} or {task.models[-1]} of {task.name}" for task in TASKS.values() if task.several
    )


def check_options(name: str, options: TaskOptions) -> TaskOptions:
    """Returns the options with the task's choice of its models; raises ValueError if they do not suit it.

    Args:
      name: one of `TASK_NAMES`.
      options: which data and model.
    """
    task = TASKS[name]
    if options.synthetic and options.data_dir is not None:
        raise ValueError("--data-dir and --synthetic exclude each other")
    for field, option in options_of(TaskOptions).items():
        value = getattr(options, field)
        if value != getattr(TaskOptions, field) and not task.has(field):
            having = ", ".join(other.name for other in TASKS.values() if other.has(field))
            raise option.refuse(field, value, name, having)
    if not task.several:
        return options
    if options.model is not None and options.model not in task.models:
        models = ", ".join(task.models)
        raise ValueError(f"model={options.model!r} is not one of task {name}'s: {models}")
    return dataclasses.replace(options, model=options.model or task.models[0])
