"""Arrays in few bits: rounding to half types, and blocks of 8-bit codes with one scale per block."""

from jmp_train.policies.quantizing.alike import CallArguments as CallArguments
from jmp_train.policies.quantizing.alike import map_alike as map_alike
from jmp_train.policies.quantizing.block_rows import dequantize_rows as dequantize_rows
from jmp_train.policies.quantizing.block_rows import requantize_rows as requantize_rows
from jmp_train.policies.quantizing.block_rows import row_groups as row_groups
from jmp_train.policies.quantizing.blocks import BLOCK_DTYPES as BLOCK_DTYPES
from jmp_train.policies.quantizing.blocks import BlockQuantized as BlockQuantized
from jmp_train.policies.quantizing.blocks import code_of as code_of
from jmp_train.policies.quantizing.blocks import dequantize as dequantize
from jmp_train.policies.quantizing.blocks import dynamic_code as dynamic_code
from jmp_train.policies.quantizing.blocks import from_bits as from_bits
from jmp_train.policies.quantizing.blocks import quantize as quantize
from jmp_train.policies.quantizing.blocks import quantize_bits as quantize_bits
from jmp_train.policies.quantizing.blocks import requantize as requantize
from jmp_train.policies.quantizing.blocks import requantize_bits as requantize_bits
from jmp_train.policies.quantizing.blocks import to_bits as to_bits
from jmp_train.policies.quantizing.rounding import fold_in_each as fold_in_each
from jmp_train.policies.quantizing.rounding import is_reproduced as is_reproduced
from jmp_train.policies.quantizing.rounding import round_to as round_to
from jmp_train.policies.quantizing.rounding import split_in_two as split_in_two
from jmp_train.policies.quantizing.rounding import uniform as uniform
