"""Wrappers of optax optimizers: loss scales, master weights, Kahan sums, stochastic rounding, state in few bits."""

from jmp_train.policies.optimizers.adopted_state import adopt_opt_state as adopt_opt_state
from jmp_train.policies.optimizers.kahan import KahanState as KahanState
from jmp_train.policies.optimizers.kahan import compensated_params as compensated_params
from jmp_train.policies.optimizers.kahan import with_kahan as with_kahan
from jmp_train.policies.optimizers.loss_scaled import ZeroGradientsState as ZeroGradientsState
from jmp_train.policies.optimizers.loss_scaled import (
    count_zero_gradients as count_zero_gradients,
)
from jmp_train.policies.optimizers.loss_scaled import with_loss_scale as with_loss_scale
from jmp_train.policies.optimizers.loss_scaled_state import LossScaledState as LossScaledState
from jmp_train.policies.optimizers.loss_scaled_state import get_loss_scale as get_loss_scale
from jmp_train.policies.optimizers.loss_scaled_state import loss_scale_of as loss_scale_of
from jmp_train.policies.optimizers.loss_scaled_state import scaled_states as scaled_states
from jmp_train.policies.optimizers.loss_scaled_state import select_step as select_step
from jmp_train.policies.optimizers.loss_scaled_state import set_loss_scale as set_loss_scale
from jmp_train.policies.optimizers.master_weights import MasterWeightsState as MasterWeightsState
from jmp_train.policies.optimizers.master_weights import get_master_weights as get_master_weights
from jmp_train.policies.optimizers.master_weights import set_master_weights as set_master_weights
from jmp_train.policies.optimizers.master_weights import with_master_weights as with_master_weights
from jmp_train.policies.optimizers.nesting import check_nesting as check_nesting
from jmp_train.policies.optimizers.nesting import has_nested_scale as has_nested_scale
from jmp_train.policies.optimizers.outer_step import Evaluate as Evaluate
from jmp_train.policies.optimizers.outer_step import extra_arguments as extra_arguments
from jmp_train.policies.optimizers.outer_step import optimizer_step as optimizer_step
from jmp_train.policies.optimizers.skip_rules import SkipRule as SkipRule
from jmp_train.policies.optimizers.skip_rules import SkipRuleState as SkipRuleState
from jmp_train.policies.optimizers.skip_rules import SpikeStatistics as SpikeStatistics
from jmp_train.policies.optimizers.skip_rules import reason_of_skip as reason_of_skip
from jmp_train.policies.optimizers.skip_rules import spikes as spikes
from jmp_train.policies.optimizers.skip_rules import taken_by_rules as taken_by_rules
from jmp_train.policies.optimizers.stalls import StalledTrainingError as StalledTrainingError
from jmp_train.policies.optimizers.stalls import check_progress as check_progress
from jmp_train.policies.optimizers.stalls import skips_to_floor as skips_to_floor
from jmp_train.policies.optimizers.state_dtypes import StateDtypesState as StateDtypesState
from jmp_train.policies.optimizers.state_dtypes import decode_opt_state as decode_opt_state
from jmp_train.policies.optimizers.state_dtypes import with_state_dtypes as with_state_dtypes
from jmp_train.policies.optimizers.stochastic_rounding import (
    StochasticRoundingState as StochasticRoundingState,
)
from jmp_train.policies.optimizers.stochastic_rounding import stochastic_round as stochastic_round
from jmp_train.policies.optimizers.stochastic_rounding import (
    with_stochastic_rounding as with_stochastic_rounding,
)
from jmp_train.policies.optimizers.stored_parameters import Addition as Addition
from jmp_train.policies.optimizers.stored_parameters import ParamsOptimizer as ParamsOptimizer
from jmp_train.policies.optimizers.stored_parameters import as_transformation as as_transformation
