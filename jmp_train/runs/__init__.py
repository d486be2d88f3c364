"""Training runs of the command line, from data to accuracy."""

from jmp_train.runs.events import Compiled as Compiled
from jmp_train.runs.events import Epoch as Epoch
from jmp_train.runs.events import Event as Event
from jmp_train.runs.events import Planned as Planned
from jmp_train.runs.events import Progress as Progress
from jmp_train.runs.events import Run as Run
from jmp_train.runs.events import event_from_json as event_from_json
from jmp_train.runs.events import event_to_json as event_to_json
from jmp_train.runs.events import finite_or_none as finite_or_none
from jmp_train.runs.loop import check_run as check_run
from jmp_train.runs.loop import train as train
from jmp_train.runs.memory import peak_memory as peak_memory
from jmp_train.runs.resuming import ResumeError as ResumeError
from jmp_train.runs.resuming import Saving as Saving
from jmp_train.runs.resuming import Stopped as Stopped
from jmp_train.runs.run_log import RunLog as RunLog
from jmp_train.runs.run_log import check_unused as check_unused
from jmp_train.runs.setups import MODE_CHOICES as MODE_CHOICES
from jmp_train.runs.setups import check_float64 as check_float64
from jmp_train.runs.setups import loss_scale_for as loss_scale_for
from jmp_train.runs.setups import make_setup as make_setup
from jmp_train.runs.setups import precision_of as precision_of
from jmp_train.runs.task_batches import evaluation_batches as evaluation_batches
from jmp_train.runs.task_batches import train_batches as train_batches
