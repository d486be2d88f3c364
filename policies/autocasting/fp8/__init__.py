"""Matrix products in 8 bits, for autocast's rule "fp8"."""

from jmp_train.policies.autocasting.fp8.products import fp8_dot as fp8_dot
from jmp_train.policies.autocasting.fp8.quantizing import quantize as quantize
from jmp_train.policies.autocasting.fp8.recipes import DEFAULT_RECIPE as DEFAULT_RECIPE
from jmp_train.policies.autocasting.fp8.recipes import E4M3 as E4M3
from jmp_train.policies.autocasting.fp8.recipes import Float8CurrentScaling as Float8CurrentScaling
from jmp_train.policies.autocasting.fp8.recipes import MXFP8BlockScaling as MXFP8BlockScaling
from jmp_train.policies.autocasting.fp8.recipes import Recipe as Recipe
