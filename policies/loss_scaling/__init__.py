"""Loss scales: factors that keep half-precision gradients from underflow."""

from jmp_train.policies.loss_scaling.dynamic_loss_scale import DynamicLossScale as DynamicLossScale
from jmp_train.policies.loss_scaling.loss_functions import AUTOCASTS_BY_AMP as AUTOCASTS_BY_AMP
from jmp_train.policies.loss_scaling.loss_functions import CASTS_BY_AMP as CASTS_BY_AMP
from jmp_train.policies.loss_scaling.loss_functions import check_is_stateless as check_is_stateless
from jmp_train.policies.loss_scaling.loss_functions import check_takes_state as check_takes_state
from jmp_train.policies.loss_scaling.loss_functions import is_stateless as is_stateless
from jmp_train.policies.loss_scaling.loss_functions import loss_and_aux as loss_and_aux
from jmp_train.policies.loss_scaling.loss_functions import only_losses as only_losses
from jmp_train.policies.loss_scaling.loss_functions import refuse_pair as refuse_pair
from jmp_train.policies.loss_scaling.loss_functions import refuse_second_cast as refuse_second_cast
from jmp_train.policies.loss_scaling.loss_functions import unpack_loss as unpack_loss
from jmp_train.policies.loss_scaling.loss_scale import LossScale as LossScale
from jmp_train.policies.loss_scaling.loss_scale import LossScales as LossScales
from jmp_train.policies.loss_scaling.loss_scale import NoOpLossScale as NoOpLossScale
from jmp_train.policies.loss_scaling.loss_scale import PerLossScale as PerLossScale
from jmp_train.policies.loss_scaling.loss_scale import StaticLossScale as StaticLossScale
from jmp_train.policies.loss_scaling.loss_scale import check_loss_scales as check_loss_scales
from jmp_train.policies.loss_scaling.loss_scale import is_loss_scale as is_loss_scale
from jmp_train.policies.loss_scaling.loss_scale import scales_in as scales_in
from jmp_train.policies.loss_scaling.loss_scale import unscale_and_check as unscale_and_check
from jmp_train.policies.loss_scaling.presets import apex_loss_scale as apex_loss_scale
from jmp_train.policies.loss_scaling.presets import megatron_loss_scale as megatron_loss_scale
from jmp_train.policies.loss_scaling.presets import torch_loss_scale as torch_loss_scale
