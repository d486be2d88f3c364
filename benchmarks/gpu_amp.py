"""The workloads `resnet34` and `vit-b16` of `gpu.py`: the steps of the tasks `cifar10` and `vit-b16`.

Ours are the tasks' whole steps, as `jmp-train train` makes them, in float32 and in every AMP mode; the step makes its
inputs of bytes. Beside them torch trains the same networks, given images that are ready. The learning rates are
constant, so that after a few steps on one batch the losses can be compared; a mode whose scale begins too high for its
gradients skips those steps, and its facts say how many.
"""

import importlib
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from gpu_workloads import (
    MODES,
    OURS,
    JaxJob,
    Job,
    TorchJob,
    Variant,
    Workload,
    set_matmul_precision,
    variants_of,
)

from jmp_train.setups import make_setup
from jmp_train.tasks import cifar10, load_task, vit
from jmp_train.tasks.task import Arrays, Task, TaskOptions

RESNET_RATE = (
    1e-3  # the task's, with which it begins after a warm-up, makes the loss of one batch jump
)
TINY_SIDE = 32  # pixels of a ViT's image, where a batch is not whole
COLOSSALAI = (
    "ColossalAI, beside float32: torch.amp 1.10 times as fast, 0.75 of the memory; "
    "naive 1.20, 0.63; Apex O1 1.04, 0.74"
)
READY = "ours also crops, flips and normalises the images within the step"


def _resnet_job(variant: Variant, size: float, folder: Path) -> Job:
    del folder
    task = load_task("cifar10", TaskOptions(synthetic=True))
    rows = _rows(task, int(size))
    if variant.way == OURS:
        return _our_job(task, variant.precision, rows, RESNET_RATE)

    torch, models = _torch()

    def sgd(params: Any) -> Any:
        decay = cifar10.WEIGHT_DECAY
        return torch.optim.SGD(params, lr=RESNET_RATE, momentum=0.9, weight_decay=decay, fused=True)

    images, labels = cifar10.normalize(rows["image"]), rows["label"]
    compiled = variant.way == "torch compile"
    return TorchJob(models.ResNet(), sgd, *_tensors(images, labels), variant.precision, compiled)


def _vit_job(variant: Variant, size: float, folder: Path) -> Job:
    del folder
    side = vit.IMAGE_SIZE if size >= VIT_B16.size else TINY_SIDE
    task = load_task("vit-b16", TaskOptions(synthetic=True, image_size=side))
    rows = _rows(task, int(size))
    if variant.way == OURS:
        return _our_job(task, variant.precision, rows, vit.LEARNING_RATE)

    torch, models = _torch()

    def sgd(params: Any) -> Any:
        return torch.optim.SGD(
            params, lr=vit.LEARNING_RATE, weight_decay=vit.WEIGHT_DECAY, fused=True
        )

    return TorchJob(
        models.VisionTransformer(side),
        sgd,
        *_tensors(vit.normalised(rows["image"], np.float32), rows["label"]),
        variant.precision,
        variant.way == "torch compile",
        largest_norm=vit.LARGEST_NORM,
    )


def _rows(task: Task, batch: int) -> Arrays:
    """Returns the task's first batch, apart from its other rows, which are many."""
    return task.prepare({name: array[:batch].copy() for name, array in task.train.items()})


def _our_job(task: Task, precision: str, rows: Arrays, rate: float) -> Job:
    """Returns the task's step in one of MODES, or in float32 with float32 or tf32 products."""
    set_matmul_precision(precision)
    name = precision if precision in MODES else "float32"
    setup = make_setup(task, name, optax.constant_schedule(rate))
    init_key, step_key = jax.random.split(jax.random.key(0))
    state = setup.create_state(*task.init(init_key), step_key)
    return JaxJob(setup.step, state, rows)


def _torch() -> tuple[Any, Any]:
    """Returns torch and the networks in it; jax leaves the accelerator to them."""
    jax.config.update("jax_platforms", "cpu")
    return importlib.import_module("torch"), importlib.import_module("gpu_torch_models")


def _tensors(images: Any, labels: np.ndarray) -> tuple[tuple[Any, ...], Any]:
    """Returns torch's inputs and labels.

    Args:
      images: float32 [batch, rows, columns, 3].
      labels: integers [batch].
    """
    torch: Any = importlib.import_module("torch")
    planes = np.ascontiguousarray(np.asarray(images).transpose(0, 3, 1, 2))
    return (torch.from_numpy(planes),), torch.from_numpy(labels.astype(np.int64))


_VARIANTS = (
    *(Variant(OURS, precision) for precision in ("float32", "tf32", *MODES)),
    *variants_of("torch eager", "torch compile"),
)
RESNET34 = Workload(
    unit="batch",
    size=128,
    tiny_size=4,
    variants=_VARIANTS,
    job=_resnet_job,
    note=READY,
)
VIT_B16 = Workload(
    unit="batch",
    size=128,
    tiny_size=2,
    variants=_VARIANTS,
    job=_vit_job,
    is_together=False,  # 16 of up to 27 GB
    note=COLOSSALAI,
)
