"""Matrix products in 8 bits, for autocast's rule "fp8"."""

from jmp_train.policies.autocasting.fp8.delayed import DelayedScales as DelayedScales
from jmp_train.policies.autocasting.fp8.delayed import Fp8Scales as Fp8Scales
from jmp_train.policies.autocasting.fp8.delayed import Fp8State as Fp8State
from jmp_train.policies.autocasting.fp8.delayed import after_step as after_step
from jmp_train.policies.autocasting.fp8.delayed import fp8_state as fp8_state
from jmp_train.policies.autocasting.fp8.delayed import place_of as place_of
from jmp_train.policies.autocasting.fp8.delayed import scales_of as scales_of
from jmp_train.policies.autocasting.fp8.delayed import with_magnitudes as with_magnitudes
from jmp_train.policies.autocasting.fp8.products import Contract as Contract
from jmp_train.policies.autocasting.fp8.products import fp8_dot as fp8_dot
from jmp_train.policies.autocasting.fp8.products import operand_gradients as operand_gradients
from jmp_train.policies.autocasting.fp8.recipes import DEFAULT_RECIPE as DEFAULT_RECIPE
from jmp_train.policies.autocasting.fp8.recipes import E4M3 as E4M3
from jmp_train.policies.autocasting.fp8.recipes import DelayedScaling as DelayedScaling
from jmp_train.policies.autocasting.fp8.recipes import Float8CurrentScaling as Float8CurrentScaling
from jmp_train.policies.autocasting.fp8.recipes import MXFP8BlockScaling as MXFP8BlockScaling
from jmp_train.policies.autocasting.fp8.recipes import Recipe as Recipe
from jmp_train.policies.autocasting.fp8.recipes import quantize as quantize
