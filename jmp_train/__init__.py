"""Mixed-precision training for JAX, as transformations of pure functions.

`import jmp_train as jt` offers the names for training scripts: policies, loss scales, autocast, train steps and
checkpoints. `jt.graphs` passes messages on graphs, `jt.data` makes batches, `jt.aot` compiles ahead of time
for a target GPU, `jt.distributed` connects several processes; `jt.policies`, `jt.steps`, `jt.parallel`,
`jt.checkpoints` and `jt.tools` hold names for special needs. All names of jmp 0.0.4 are here unchanged.
"""

from jmp_train import command_start  # noqa: F401, I001 - before all modules that may be in the current folder

import importlib
import typing

from jmp_train import policies as policies
from jmp_train import steps as steps
from jmp_train.policies import APEX_O1 as APEX_O1
from jmp_train.policies import MOSTLY_HALF as MOSTLY_HALF
from jmp_train.policies import TORCH_CPU as TORCH_CPU
from jmp_train.policies import TORCH_CUDA as TORCH_CUDA
from jmp_train.policies import AutocastPolicy as AutocastPolicy
from jmp_train.policies import AutocastRules as AutocastRules
from jmp_train.policies import DelayedScaling as DelayedScaling
from jmp_train.policies import DynamicLossScale as DynamicLossScale
from jmp_train.policies import LossScale as LossScale
from jmp_train.policies import NoOpLossScale as NoOpLossScale
from jmp_train.policies import Policy as Policy
from jmp_train.policies import PolicySchedule as PolicySchedule
from jmp_train.policies import StaticLossScale as StaticLossScale
from jmp_train.policies import adopt_opt_state as adopt_opt_state
from jmp_train.policies import all_finite as all_finite
from jmp_train.policies import amp_from_config as amp_from_config
from jmp_train.policies import amp_mode as amp_mode
from jmp_train.policies import apex_loss_scale as apex_loss_scale
from jmp_train.policies import apply_policy as apply_policy
from jmp_train.policies import autocast as autocast
from jmp_train.policies import autocast_as as autocast_as
from jmp_train.policies import cast_to_full as cast_to_full
from jmp_train.policies import cast_to_half as cast_to_half
from jmp_train.policies import check_casts as check_casts
from jmp_train.policies import check_progress as check_progress
from jmp_train.policies import deepspeed_loss_scale as deepspeed_loss_scale
from jmp_train.policies import explain_autocast as explain_autocast
from jmp_train.policies import explain_policy as explain_policy
from jmp_train.policies import get_loss_scale as get_loss_scale
from jmp_train.policies import get_master_weights as get_master_weights
from jmp_train.policies import get_policy as get_policy
from jmp_train.policies import half_dtype as half_dtype
from jmp_train.policies import loss_scale_from_torch as loss_scale_from_torch
from jmp_train.policies import loss_scale_to_torch as loss_scale_to_torch
from jmp_train.policies import megatron_loss_scale as megatron_loss_scale
from jmp_train.policies import nonfinite_report as nonfinite_report
from jmp_train.policies import policy_by_path as policy_by_path
from jmp_train.policies import reduce_gradients as reduce_gradients
from jmp_train.policies import select_step as select_step
from jmp_train.policies import select_tree as select_tree
from jmp_train.policies import set_loss_scale as set_loss_scale
from jmp_train.policies import spikes as spikes
from jmp_train.policies import torch_loss_scale as torch_loss_scale
from jmp_train.policies import with_kahan as with_kahan
from jmp_train.policies import with_loss_scale as with_loss_scale
from jmp_train.policies import with_master_weights as with_master_weights
from jmp_train.policies import with_state_dtypes as with_state_dtypes
from jmp_train.policies import with_stochastic_rounding as with_stochastic_rounding
from jmp_train.steps import FlaxTrainState as FlaxTrainState
from jmp_train.steps import TrainState as TrainState
from jmp_train.steps import nnx_value_and_grad as nnx_value_and_grad
from jmp_train.steps import scaled_grad as scaled_grad
from jmp_train.steps import scaled_value_and_grad as scaled_value_and_grad
from jmp_train.steps import stateless as stateless
from jmp_train.steps import weighted as weighted
from jmp_train.steps import train_step as train_step

if typing.TYPE_CHECKING:
    from jmp_train import aot as aot
    from jmp_train import capsules as capsules
    from jmp_train import checkpoints as checkpoints
    from jmp_train import data as data
    from jmp_train import distributed as distributed
    from jmp_train import graphs as graphs
    from jmp_train import parallel as parallel
    from jmp_train import planning as planning
    from jmp_train import tools as tools
    from jmp_train import tuning as tuning
    from jmp_train.capsules import SkipRecorder as SkipRecorder
    from jmp_train.capsules import load_capsule as load_capsule
    from jmp_train.checkpoints import CheckpointStore as CheckpointStore
    from jmp_train.checkpoints import load_weights as load_weights
    from jmp_train.checkpoints import save_weights as save_weights
    from jmp_train.parallel import data_parallel as data_parallel
    from jmp_train.parallel import fsdp_shardings as fsdp_shardings
    from jmp_train.parallel import pipeline as pipeline
    from jmp_train.parallel import pmap_step as pmap_step
    from jmp_train.parallel import sharded_step as sharded_step
    from jmp_train.parallel import zero1_shardings as zero1_shardings
    from jmp_train.planning import plan as plan
    from jmp_train.task import Task as Task
    from jmp_train.tools import diagnose as diagnose
    from jmp_train.tools import parity as parity
    from jmp_train.tuning import tune as tune

__version__ = "0.1.0"

# Slow imports, which only users of these names wait for: modules, and names with the modules that have them.
_LAZY = (
    "aot",
    "capsules",
    "checkpoints",
    "data",
    "distributed",
    "graphs",
    "parallel",
    "planning",
    "task",
    "tools",
    "tuning",
)
_LAZY_NAMES = {
    "CheckpointStore": "checkpoints",
    "SkipRecorder": "capsules",
    "Task": "task",
    "data_parallel": "parallel",
    "diagnose": "tools",
    "fsdp_shardings": "parallel",
    "load_capsule": "capsules",
    "load_weights": "checkpoints",
    "parity": "tools",
    "pipeline": "parallel",
    "plan": "planning",
    "pmap_step": "parallel",
    "save_weights": "checkpoints",
    "sharded_step": "parallel",
    "tune": "tuning",
    "zero1_shardings": "parallel",
}


def __getattr__(name: str) -> typing.Any:
    if name in _LAZY:
        return importlib.import_module(f"jmp_train.{name}")
    if name in _LAZY_NAMES:
        return getattr(importlib.import_module(f"jmp_train.{_LAZY_NAMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY, *_LAZY_NAMES})
