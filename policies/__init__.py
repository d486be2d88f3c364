"""Floor 1: dtypes, casting, loss scales and their optax wrapper.

The way of the data: a `Policy` says which dtypes parameters, computation, outputs and gradient
reductions have; a loss scale lifts half-precision gradients out of the range where they vanish;
`with_loss_scale` keeps that scale inside the optax state, where it travels, is checkpointed and
decides whether a step is taken.
"""

from jmp_train.policies.adopted_state import adopt_opt_state as adopt_opt_state
from jmp_train.policies.amp import Amp as Amp
from jmp_train.policies.amp import amp_mode as amp_mode
from jmp_train.policies.amp_config import amp_from_config as amp_from_config
from jmp_train.policies.amp_options import AmpType as AmpType
from jmp_train.policies.autocast import autocast as autocast
from jmp_train.policies.autocast import autocast_as as autocast_as
from jmp_train.policies.autocast_region import BannedOperationError as BannedOperationError
from jmp_train.policies.autocast_rules import APEX_O1 as APEX_O1
from jmp_train.policies.autocast_rules import TORCH_CPU as TORCH_CPU
from jmp_train.policies.autocast_rules import TORCH_CUDA as TORCH_CUDA
from jmp_train.policies.autocast_rules import AutocastRules as AutocastRules
from jmp_train.policies.batch_norms import batch_norm_paths as batch_norm_paths
from jmp_train.policies.casting import cast_to_full as cast_to_full
from jmp_train.policies.casting import cast_to_half as cast_to_half
from jmp_train.policies.collapsed_values import CollapsedValuesWarning as CollapsedValuesWarning
from jmp_train.policies.collapsed_values import collapse_report as collapse_report
from jmp_train.policies.collectives import reduce_gradients as reduce_gradients
from jmp_train.policies.collectives import vary as vary
from jmp_train.policies.cpu_convolutions import CpuConvolutionWarning as CpuConvolutionWarning
from jmp_train.policies.dtypes import half_dtype as half_dtype
from jmp_train.policies.explain_autocast import AutocastReport as AutocastReport
from jmp_train.policies.explain_autocast import explain_autocast as explain_autocast
from jmp_train.policies.explain_policy import PolicyReport as PolicyReport
from jmp_train.policies.explain_policy import explain_policy as explain_policy
from jmp_train.policies.finite import LeafReport as LeafReport
from jmp_train.policies.finite import all_finite as all_finite
from jmp_train.policies.finite import nonfinite_report as nonfinite_report
from jmp_train.policies.finite import select_tree as select_tree
from jmp_train.policies.half_products import Float32ProductsWarning as Float32ProductsWarning
from jmp_train.policies.loss_scale import DynamicLossScale as DynamicLossScale
from jmp_train.policies.loss_scale import LossScale as LossScale
from jmp_train.policies.loss_scale import NoOpLossScale as NoOpLossScale
from jmp_train.policies.loss_scale import StaticLossScale as StaticLossScale
from jmp_train.policies.loss_scaled_optimizer import LossScaledState as LossScaledState
from jmp_train.policies.loss_scaled_optimizer import get_loss_scale as get_loss_scale
from jmp_train.policies.loss_scaled_optimizer import set_loss_scale as set_loss_scale
from jmp_train.policies.loss_scaled_optimizer import with_loss_scale as with_loss_scale
from jmp_train.policies.master_weights import MasterWeightsState as MasterWeightsState
from jmp_train.policies.master_weights import get_master_weights as get_master_weights
from jmp_train.policies.master_weights import set_master_weights as set_master_weights
from jmp_train.policies.master_weights import with_master_weights as with_master_weights
from jmp_train.policies.operations import OperationReport as OperationReport
from jmp_train.policies.path_policy import PathPolicy as PathPolicy
from jmp_train.policies.path_policy import policy_by_path as policy_by_path
from jmp_train.policies.per_loss_scale import PerLossScale as PerLossScale
from jmp_train.policies.policy import AutocastPolicy as AutocastPolicy
from jmp_train.policies.policy import Policy as Policy
from jmp_train.policies.policy import apply_policy as apply_policy
from jmp_train.policies.policy import get_policy as get_policy
from jmp_train.policies.presets import apex_loss_scale as apex_loss_scale
from jmp_train.policies.presets import deepspeed_loss_scale as deepspeed_loss_scale
from jmp_train.policies.presets import megatron_loss_scale as megatron_loss_scale
from jmp_train.policies.presets import nemo_loss_scale as nemo_loss_scale
from jmp_train.policies.presets import torch_loss_scale as torch_loss_scale
from jmp_train.policies.progress import StalledTrainingError as StalledTrainingError
from jmp_train.policies.progress import check_progress as check_progress
from jmp_train.policies.progress import skips_to_floor as skips_to_floor
from jmp_train.policies.select_step import select_step as select_step
from jmp_train.policies.stochastic_rounding import stochastic_round as stochastic_round
from jmp_train.policies.stochastic_rounding import (
    with_stochastic_rounding as with_stochastic_rounding,
)
from jmp_train.policies.torch_scaler import loss_scale_from_torch as loss_scale_from_torch
from jmp_train.policies.torch_scaler import loss_scale_to_torch as loss_scale_to_torch
from jmp_train.policies.wide_products import wide_dot_general as wide_dot_general
from jmp_train.policies.zero_gradients import count_zero_gradients as count_zero_gradients
