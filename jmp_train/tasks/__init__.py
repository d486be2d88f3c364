"""The jobs that `jmp-train` runs: data, model, loss and optimizer of each, one module a task."""

from jmp_train.tasks.options import DATA_AXIS as DATA_AXIS
from jmp_train.tasks.options import Option as Option
from jmp_train.tasks.options import TaskOptions as TaskOptions
from jmp_train.tasks.options import option as option
from jmp_train.tasks.options import options_of as options_of
from jmp_train.tasks.registry import TASK_NAMES as TASK_NAMES
from jmp_train.tasks.registry import check_options as check_options
from jmp_train.tasks.registry import has_option as has_option
from jmp_train.tasks.registry import load_task as load_task
from jmp_train.tasks.registry import model_choices as model_choices
from jmp_train.tasks.task import Arrays as Arrays
from jmp_train.tasks.task import Task as Task
