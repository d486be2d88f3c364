"""Wrappers of optax optimizers: loss scales, master weights, Kahan sums, stochastic rounding, state in few bits."""

from jmp_train.policies.optimizers.loss_scaled import ZeroGradientsState as ZeroGradientsState
from jmp_train.policies.optimizers.loss_scaled import count_zero_gradients as count_zero_gradients
from jmp_train.policies.optimizers.loss_scaled import with_loss_scale as with_loss_scale
from jmp_train.policies.optimizers.loss_scaled_state import SkipRule as SkipRule
from jmp_train.policies.optimizers.loss_scaled_state import SkipRuleState as SkipRuleState
from jmp_train.policies.optimizers.loss_scaled_state import SpikeStatistics as SpikeStatistics
from jmp_train.policies.optimizers.loss_scaled_state import loss_scale_of as loss_scale_of
from jmp_train.policies.optimizers.loss_scaled_state import reason_of_skip as reason_of_skip
from jmp_train.policies.optimizers.loss_scaled_state import scaled_states as scaled_states
from jmp_train.policies.optimizers.loss_scaled_state import taken_by_rules as taken_by_rules
from jmp_train.policies.optimizers.master_weights import with_master_weights as with_master_weights
from jmp_train.policies.optimizers.outer_step import Evaluate as Evaluate
from jmp_train.policies.optimizers.outer_step import check_nesting as check_nesting
from jmp_train.policies.optimizers.outer_step import extra_arguments as extra_arguments
from jmp_train.policies.optimizers.outer_step import has_nested_scale as has_nested_scale
from jmp_train.policies.optimizers.outer_step import kept_if_skipped as kept_if_skipped
from jmp_train.policies.optimizers.outer_step import optimizer_step as optimizer_step
from jmp_train.policies.optimizers.stochastic_rounding import StochasticRoundingState as StochasticRoundingState
from jmp_train.policies.optimizers.stored_parameters import Addition as Addition
from jmp_train.policies.optimizers.stored_parameters import ParamsOptimizer as ParamsOptimizer
from jmp_train.policies.optimizers.stored_parameters import as_transformation as as_transformation
