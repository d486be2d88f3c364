"""The jobs that `jmp-train` runs: the built-in task `digits`, and the tasks of users' files."""

from jmp_train.app.tasks.sources import BUILT_IN as BUILT_IN
from jmp_train.app.tasks.sources import TASK_FORMS as TASK_FORMS
from jmp_train.app.tasks.sources import FileError as FileError
from jmp_train.app.tasks.sources import TaskSource as TaskSource
from jmp_train.app.tasks.sources import described as described
from jmp_train.app.tasks.sources import errors_of_file as errors_of_file
from jmp_train.app.tasks.sources import find_task as find_task
from jmp_train.app.tasks.sources import is_task_text as is_task_text
