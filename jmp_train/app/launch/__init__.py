"""`jmp-train launch`: one script as several processes."""

from jmp_train.app.launch.child_processes import ChildProcess as ChildProcess
from jmp_train.app.launch.child_processes import signals_as_exceptions as signals_as_exceptions
from jmp_train.app.launch.launcher import LaunchError as LaunchError
from jmp_train.app.launch.launcher import check_launch as check_launch
from jmp_train.app.launch.launcher import launch as launch
from jmp_train.app.launch.launcher import threads_for as threads_for
from jmp_train.app.launch.output import Output as Output
from jmp_train.app.launch.output import lasting_output as lasting_output
from jmp_train.app.launch.output import own_output as own_output
