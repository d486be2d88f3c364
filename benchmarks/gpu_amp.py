"""The workloads `resnet34` and `vit-b16` of `gpu.py`: the steps of the tasks `cifar10` and `vit-b16`.

Our steps are the tasks' whole steps, as in `jmp-train train`, in float32 and in every AMP mode; a step converts its
inputs from bytes. torch trains the same networks on images that are ready. The learning rates are constant, so that
losses after a few steps on one batch can be compared. A mode with a scale too high for its gradients skips its first
steps, and its facts have their number.
"""

import dataclasses
import importlib
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from example_tasks import cifar10, load_task, vit
from example_tasks import models as our_models
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

from jmp_train import Task
from jmp_train.app.runs import setup_of

RESNET_RATE = 1e-3  # the task's, with which it begins after a warm-up, makes the loss of one batch jump
TINY_STAGES = (
    1,
    1,
    1,
    1,
)  # of the ResNet, and the ViT's blocks and pixels a side, where a batch is not whole
TINY_DEPTH, TINY_SIDE = 2, 32
COLOSSALAI = (
    "ColossalAI, beside float32: torch.amp 1.10 times as fast, 0.75 of the memory; naive 1.20, 0.63; Apex O1 1.04, 0.74"
)
READY = "ours also crops, flips and normalizes the images within the step"


def _resnet_job(variant: Variant, size: float, folder: Path) -> Job:
    del folder
    stages = our_models.ResNet.stages if size >= RESNET34.size else TINY_STAGES
    rows = cifar10.prepare(cifar10.synthetic_data(int(size), seed=0))
    if variant.way == OURS:
        task = cifar10.make_task(our_models.ResNet(stages), rows, rows)
        return _our_job(task, variant.precision, RESNET_RATE)

    torch, models = _torch()

    def sgd(params: Any) -> Any:
        decay = cifar10.WEIGHT_DECAY
        return torch.optim.SGD(params, lr=RESNET_RATE, momentum=0.9, weight_decay=decay, fused=True)

    inputs, labels = _tensors(cifar10.normalize(jnp.asarray(rows["image"])), rows["label"])
    compiled = variant.way == "torch compile"
    return TorchJob(models.ResNet(stages), sgd, inputs, labels, variant.precision, compiled)


def _vit_job(variant: Variant, size: float, folder: Path) -> Job:
    del folder
    is_whole = size >= VIT_B16.size
    depth = our_models.VisionTransformer.depth if is_whole else TINY_DEPTH
    side = vit.IMAGE_SIZE if is_whole else TINY_SIDE
    rows = vit.synthetic_data(int(size), side, seed=0)
    if variant.way == OURS:
        return _our_job(_vit_task(depth, side, rows), variant.precision, vit.LEARNING_RATE)

    torch, models = _torch()

    def sgd(params: Any) -> Any:
        return torch.optim.SGD(params, lr=vit.LEARNING_RATE, weight_decay=vit.WEIGHT_DECAY, fused=True)

    inputs, labels = _tensors(vit.normalized(jnp.asarray(rows["image"])), rows["label"])
    model, compiled = models.VisionTransformer(side, depth), variant.way == "torch compile"
    norm = vit.LARGEST_NORM
    return TorchJob(model, sgd, inputs, labels, variant.precision, compiled, largest_norm=norm)


def _vit_task(depth: int, side: int, rows: dict[str, np.ndarray]) -> Task:
    """Returns the task with a number of blocks and these rows as training data."""
    classifier = vit.classifier(our_models.VisionTransformer(depth=depth), side)
    return dataclasses.replace(
        load_task("vit-b16", synthetic=True, image_size=side),
        train=rows,
        init=classifier.init,
        loss_fn=classifier.loss_fn,
    )


def _our_job(task: Task, precision: str, rate: float) -> Job:
    """Returns the step on all of the task's rows in one of MODES, or in float32 with float32 or tf32 products."""
    set_matmul_precision(precision)
    name = precision if precision in MODES else "float32"
    setup = setup_of(task, name)
    init_key, step_key = jax.random.split(jax.random.key(0))
    state = setup.create_state(*task.init(init_key), step_key)
    return JaxJob(setup.step, state, task.train)


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
