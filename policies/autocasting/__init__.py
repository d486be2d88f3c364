"""Per-operation precision as a function transformation."""

from jmp_train.policies.autocasting.explain import AutocastReport as AutocastReport
from jmp_train.policies.autocasting.explain import decided as decided
from jmp_train.policies.autocasting.explain import explain_autocast as explain_autocast
from jmp_train.policies.autocasting.fp8 import DEFAULT_RECIPE as DEFAULT_RECIPE
from jmp_train.policies.autocasting.fp8 import DelayedScales as DelayedScales
from jmp_train.policies.autocasting.fp8 import DelayedScaling as DelayedScaling
from jmp_train.policies.autocasting.fp8 import Float8CurrentScaling as Float8CurrentScaling
from jmp_train.policies.autocasting.fp8 import Fp8Scales as Fp8Scales
from jmp_train.policies.autocasting.fp8 import Fp8State as Fp8State
from jmp_train.policies.autocasting.fp8 import MXFP8BlockScaling as MXFP8BlockScaling
from jmp_train.policies.autocasting.fp8 import Recipe as Recipe
from jmp_train.policies.autocasting.fp8 import after_step as after_step
from jmp_train.policies.autocasting.fp8 import fp8_scales as fp8_scales
from jmp_train.policies.autocasting.fp8 import fp8_state as fp8_state
from jmp_train.policies.autocasting.fp8 import scales_of as scales_of
from jmp_train.policies.autocasting.fp8 import with_magnitudes as with_magnitudes
from jmp_train.policies.autocasting.higher_order import scan_counts as scan_counts
from jmp_train.policies.autocasting.opaque import float32_dot_general as float32_dot_general
from jmp_train.policies.autocasting.opaque import opaque_to_autocast as opaque_to_autocast
from jmp_train.policies.autocasting.operations import OperationReport as OperationReport
from jmp_train.policies.autocasting.operations import OperationsReport as OperationsReport
from jmp_train.policies.autocasting.operations import elements_of as elements_of
from jmp_train.policies.autocasting.operations import flops_of as flops_of
from jmp_train.policies.autocasting.operations import half_share as half_share
from jmp_train.policies.autocasting.operations import held_jaxprs as held_jaxprs
from jmp_train.policies.autocasting.operations import is_float32 as is_float32
from jmp_train.policies.autocasting.operations import table as table
from jmp_train.policies.autocasting.primitives import LAYOUT as LAYOUT
from jmp_train.policies.autocasting.primitives import PRODUCTS as PRODUCTS
from jmp_train.policies.autocasting.product_warnings import FUSION_FLAG as FUSION_FLAG
from jmp_train.policies.autocasting.product_warnings import TOLERATED_SHARE as TOLERATED_SHARE
from jmp_train.policies.autocasting.product_warnings import (
    CpuConvolutionWarning as CpuConvolutionWarning,
)
from jmp_train.policies.autocasting.product_warnings import (
    Float32ProductsWarning as Float32ProductsWarning,
)
from jmp_train.policies.autocasting.product_warnings import is_at_risk as is_at_risk
from jmp_train.policies.autocasting.product_warnings import is_exact as is_exact
from jmp_train.policies.autocasting.product_warnings import product_text as product_text
from jmp_train.policies.autocasting.product_warnings import share_text as share_text
from jmp_train.policies.autocasting.product_warnings import (
    warn_of_convolutions as warn_of_convolutions,
)
from jmp_train.policies.autocasting.region import DECIDED as DECIDED
from jmp_train.policies.autocasting.region import INNER_REGION as INNER_REGION
from jmp_train.policies.autocasting.region import BannedOperationError as BannedOperationError
from jmp_train.policies.autocasting.region import join as join
from jmp_train.policies.autocasting.rules import APEX_O1 as APEX_O1
from jmp_train.policies.autocasting.rules import MOSTLY_HALF as MOSTLY_HALF
from jmp_train.policies.autocasting.rules import TORCH_CPU as TORCH_CPU
from jmp_train.policies.autocasting.rules import TORCH_CUDA as TORCH_CUDA
from jmp_train.policies.autocasting.rules import AutocastRules as AutocastRules
from jmp_train.policies.autocasting.rules import Rule as Rule
from jmp_train.policies.autocasting.rules_as_code import replace_arguments as replace_arguments
from jmp_train.policies.autocasting.rules_as_code import rules_code as rules_code
from jmp_train.policies.autocasting.source_lines import address_of as address_of
from jmp_train.policies.autocasting.source_lines import lines_of as lines_of
from jmp_train.policies.autocasting.source_lines import source_of as source_of
from jmp_train.policies.autocasting.source_lines import user_line_of as user_line_of
from jmp_train.policies.autocasting.source_lines import warn_user as warn_user
from jmp_train.policies.autocasting.traced_calls import FlatCall as FlatCall
from jmp_train.policies.autocasting.traced_calls import argument_names as argument_names
from jmp_train.policies.autocasting.traced_calls import missing_key_explained as missing_key_explained
from jmp_train.policies.autocasting.traced_calls import none_key_explained as none_key_explained
from jmp_train.policies.autocasting.transform import autocast as autocast
from jmp_train.policies.autocasting.transform import autocast_as as autocast_as
from jmp_train.policies.autocasting.transform import is_trying as is_trying
from jmp_train.policies.autocasting.transform import mark_of as mark_of
from jmp_train.policies.autocasting.transform import run_region as run_region
from jmp_train.policies.autocasting.transform import trying as trying
from jmp_train.policies.autocasting.unmet_rules import UnmetRulesWarning as UnmetRulesWarning
from jmp_train.policies.autocasting.unmet_rules import unmet_entries as unmet_entries
from jmp_train.policies.autocasting.unmet_rules import unmet_lines as unmet_lines
from jmp_train.policies.autocasting.values import HALVES as HALVES
from jmp_train.policies.autocasting.values import chosen as chosen
from jmp_train.policies.autocasting.values import traced_dtype as traced_dtype
from jmp_train.policies.autocasting.values import variables_read as variables_read
