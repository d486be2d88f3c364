"""Measures the effect of half precision on every operation of a function or a training step."""

from jmp_train.tools.diagnosing.arithmetic import bound as bound
from jmp_train.tools.diagnosing.arithmetic import float32_results as float32_results
from jmp_train.tools.diagnosing.flattening import ProgramPart as ProgramPart
from jmp_train.tools.diagnosing.flattening import compiled as compiled
from jmp_train.tools.diagnosing.flattening import has_references as has_references
from jmp_train.tools.diagnosing.flattening import nonfinite_allowed as nonfinite_allowed
from jmp_train.tools.diagnosing.flattening import operation_of as operation_of
from jmp_train.tools.diagnosing.measures import is_low as is_low
from jmp_train.tools.diagnosing.pairs import Pair as Pair
from jmp_train.tools.diagnosing.problems import file_and_line as file_and_line
from jmp_train.tools.diagnosing.recording import Key as Key
from jmp_train.tools.diagnosing.recording import Recorded as Recorded
from jmp_train.tools.diagnosing.recording import key_of as key_of
from jmp_train.tools.diagnosing.recording import record as record
from jmp_train.tools.diagnosing.remedies import line_expression as line_expression
