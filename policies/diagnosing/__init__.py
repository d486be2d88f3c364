"""What half precision does to every operation of a function or a training step."""

from jmp_train.policies.diagnosing.diagnosis import diagnose as diagnose
from jmp_train.policies.diagnosing.measures import is_low as is_low
from jmp_train.policies.diagnosing.pairs import Pair as Pair
from jmp_train.policies.diagnosing.places import place_of as place_of
from jmp_train.policies.diagnosing.problems import Problem as Problem
from jmp_train.policies.diagnosing.recording import Recorded as Recorded
from jmp_train.policies.diagnosing.recording import record as record
from jmp_train.policies.diagnosing.remedies import Remedy as Remedy
from jmp_train.policies.diagnosing.report import NumericsReport as NumericsReport
from jmp_train.policies.diagnosing.rows import OperationNumerics as OperationNumerics
