"""Emulates autocast in float32 with rounding, with one run-time flag per operation."""

from jmp_train.policies.autocasting.emulating.interpreter import Flags as Flags
from jmp_train.policies.autocasting.emulating.interpreter import Run as Run
from jmp_train.policies.autocasting.emulating.interpreter import emulated_autocast as emulated_autocast
from jmp_train.policies.autocasting.emulating.rounding import COMPILER_OPTIONS as COMPILER_OPTIONS
from jmp_train.policies.autocasting.emulating.rounding import Bit as Bit
from jmp_train.policies.autocasting.emulating.rounding import both as both
from jmp_train.policies.autocasting.emulating.rounding import rounded as rounded
