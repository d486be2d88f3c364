"""Matrix products and convolutions in 8 or 4 bits, for autocast's rule "fp8"."""

from jmp_train.policies.autocasting.fp8.casting import dequantized as dequantized
from jmp_train.policies.autocasting.fp8.casting import largest_of as largest_of
from jmp_train.policies.autocasting.fp8.casting import quantized as quantized
from jmp_train.policies.autocasting.fp8.convolutions import convolution_in_few_bits as convolution_in_few_bits
from jmp_train.policies.autocasting.fp8.delayed import DelayedScales as DelayedScales
from jmp_train.policies.autocasting.fp8.delayed import after_step as after_step
from jmp_train.policies.autocasting.fp8.delayed import fp8_state as fp8_state
from jmp_train.policies.autocasting.fp8.delayed import place_of as place_of
from jmp_train.policies.autocasting.fp8.delayed import scales_of as scales_of
from jmp_train.policies.autocasting.fp8.delayed import with_magnitudes as with_magnitudes
from jmp_train.policies.autocasting.fp8.products import Extra as Extra
from jmp_train.policies.autocasting.fp8.products import product_in_few_bits as product_in_few_bits
from jmp_train.policies.autocasting.fp8.recipes import DEFAULT_RECIPE as DEFAULT_RECIPE
from jmp_train.policies.autocasting.fp8.recipes import RECIPES as RECIPES
from jmp_train.policies.autocasting.fp8.recipes import DelayedScaling as DelayedScaling
from jmp_train.policies.autocasting.fp8.recipes import Recipe as Recipe
