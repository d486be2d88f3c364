"""The train step and what it is made of: state, scaled gradients, micro-batches."""

from jmp_train.steps.batch_parts import check_divides as check_divides
from jmp_train.steps.batch_parts import check_no_graph as check_no_graph
from jmp_train.steps.batch_parts import hint_of_split as hint_of_split
from jmp_train.steps.batch_parts import in_parts as in_parts
from jmp_train.steps.batch_parts import warn_of_split as warn_of_split
from jmp_train.steps.costs import StepCosts as StepCosts
from jmp_train.steps.costs import step_costs as step_costs
from jmp_train.steps.flax_train_state import FlaxTrainState as FlaxTrainState
from jmp_train.steps.fp8_scales import own_state as own_state
from jmp_train.steps.fp8_state import with_fp8_state as with_fp8_state
from jmp_train.steps.gradients import scaled_value_and_grad as scaled_value_and_grad
from jmp_train.steps.gradients import unwatched_value_and_grad as unwatched_value_and_grad
from jmp_train.steps.nnx_gradients import nnx_value_and_grad as nnx_value_and_grad
from jmp_train.steps.step import LossFn as LossFn
from jmp_train.steps.step import StepGradients as StepGradients
from jmp_train.steps.step import TrainStep as TrainStep
from jmp_train.steps.step import check_param_dtypes as check_param_dtypes
from jmp_train.steps.step import stateless as stateless
from jmp_train.steps.step import train_step as train_step
from jmp_train.steps.step_checks import check_is_train_state as check_is_train_state
from jmp_train.steps.step_checks import check_not_replicated as check_not_replicated
from jmp_train.steps.step_checks import missing_key_explained as missing_key_explained
from jmp_train.steps.step_checks import why_no_key as why_no_key
from jmp_train.steps.train_state import TrainState as TrainState
from jmp_train.steps.watches import WATCHES as WATCHES
