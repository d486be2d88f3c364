"""Arrays in few bits: rounding to half types, and blocks of 8-bit codes with a scale each."""

from jmp_train.policies.quantizing.blocks import BLOCK_DTYPES as BLOCK_DTYPES
from jmp_train.policies.quantizing.blocks import BlockQuantized as BlockQuantized
from jmp_train.policies.quantizing.blocks import dequantize as dequantize
from jmp_train.policies.quantizing.blocks import quantize as quantize
from jmp_train.policies.quantizing.blocks import requantize as requantize
from jmp_train.policies.quantizing.dynamic_codes import dynamic_code as dynamic_code
from jmp_train.policies.quantizing.rounding import round_to as round_to
