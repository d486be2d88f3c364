"""The train step and its parts: state, scaled gradients, micro-batches."""

from jmp_train.steps import flax_serialization as flax_serialization  # registers its types
from jmp_train.steps.batch_parts import check_divides as check_divides
from jmp_train.steps.batch_parts import check_no_graph as check_no_graph
from jmp_train.steps.batch_parts import in_parts as in_parts
from jmp_train.steps.batch_parts import unstacked as unstacked
from jmp_train.steps.batch_parts import warn_of_split as warn_of_split
from jmp_train.steps.call_checks import check_call as check_call
from jmp_train.steps.call_checks import check_is_train_state as check_is_train_state
from jmp_train.steps.call_checks import check_not_replicated as check_not_replicated
from jmp_train.steps.fp8_scaling import delayed_scaling as delayed_scaling
from jmp_train.steps.fp8_scaling import own_state as own_state
from jmp_train.steps.fp8_scaling import scaled_products as scaled_products
from jmp_train.steps.fp8_scaling import with_fp8_state as with_fp8_state
from jmp_train.steps.fp8_scaling import with_next_scales as with_next_scales
from jmp_train.steps.gradient_functions import GradientFunction as GradientFunction
from jmp_train.steps.gradient_functions import GradientTransform as GradientTransform
from jmp_train.steps.gradient_functions import LossFn as LossFn
from jmp_train.steps.gradient_functions import StepGradients as StepGradients
from jmp_train.steps.gradient_functions import Summed as Summed
from jmp_train.steps.gradient_functions import accumulated as accumulated
from jmp_train.steps.gradient_functions import over_axes as over_axes
from jmp_train.steps.gradient_functions import with_device_sums as with_device_sums
from jmp_train.steps.gradient_functions import without_sums as without_sums
from jmp_train.steps.gradients import Weighted as Weighted
from jmp_train.steps.gradients import scaled_grad as scaled_grad
from jmp_train.steps.gradients import scaled_value_and_grad as scaled_value_and_grad
from jmp_train.steps.gradients import unwatched_value_and_grad as unwatched_value_and_grad
from jmp_train.steps.gradients import weighed as weighed
from jmp_train.steps.gradients import weighted as weighted
from jmp_train.steps.metrics import WATCHES as WATCHES
from jmp_train.steps.metrics import step_metrics as step_metrics
from jmp_train.steps.nnx_gradients import nnx_value_and_grad as nnx_value_and_grad
from jmp_train.steps.step import StepFunction as StepFunction
from jmp_train.steps.step import TrainStep as TrainStep
from jmp_train.steps.step import apply_gradients as apply_gradients
from jmp_train.steps.step import evaluation as evaluation
from jmp_train.steps.step import train_step as train_step
from jmp_train.steps.step_losses import NO_KEY as NO_KEY
from jmp_train.steps.step_losses import loss_gradients as loss_gradients
from jmp_train.steps.step_losses import stateless as stateless
from jmp_train.steps.traced_costs import StepCosts as StepCosts
from jmp_train.steps.traced_costs import step_costs as step_costs
from jmp_train.steps.train_state import FlaxTrainState as FlaxTrainState
from jmp_train.steps.train_state import TrainState as TrainState
from jmp_train.steps.train_state import Update as Update
from jmp_train.types import Batch as Batch
from jmp_train.types import Metrics as Metrics
from jmp_train.types import ModelState as ModelState

# Names for users; other packages of the library import the rest.
__all__ = (
    "Batch",
    "FlaxTrainState",
    "GradientFunction",
    "GradientTransform",
    "Metrics",
    "ModelState",
    "StepCosts",
    "StepGradients",
    "Summed",
    "TrainState",
    "TrainStep",
    "Update",
    "Weighted",
    "accumulated",
    "apply_gradients",
    "evaluation",
    "loss_gradients",
    "nnx_value_and_grad",
    "over_axes",
    "scaled_grad",
    "scaled_products",
    "scaled_value_and_grad",
    "stateless",
    "step_costs",
    "train_step",
    "weighted",
    "with_fp8_state",
    "with_next_scales",
)
