"""Emulates autocast in float32 with rounding, with one run-time flag per operation."""

from jmp_train.policies.autocasting.emulating.emulation import emulated_autocast as emulated_autocast
from jmp_train.policies.autocasting.emulating.rounded_operations import COMPILER_OPTIONS as COMPILER_OPTIONS
from jmp_train.policies.autocasting.emulating.rounded_operations import Bit as Bit
from jmp_train.policies.autocasting.emulating.rounded_operations import both as both
from jmp_train.policies.autocasting.emulating.rounded_operations import rounded as rounded
