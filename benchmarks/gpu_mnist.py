"""The workload `mnist` of `gpu.py`: the step of `examples/tasks/mnist.py`, in jmp_train and in torch."""

import importlib
from pathlib import Path
from typing import Any

import numpy as np
from example_tasks import mnist
from gpu_workloads import OURS, Job, TorchJob, Variant, Workload, policy_job, variants_of

NOTEBOOK = "the notebook, torch.amp beside float32: 2.3 times as fast, 0.63 of the memory"


def _mnist_rows(batch: int) -> dict[str, np.ndarray]:
    return dict(mnist.prepare(mnist.synthetic_data(batch, seed=0)))


def mnist_torch_model() -> Any:
    """Returns the notebook's network in torch."""
    nn: Any = importlib.import_module("torch").nn
    layers = []
    for channels, features, size, stride, padding in mnist.BLOCKS:
        layers += [
            nn.Conv2d(channels, features, size, stride, padding),
            nn.BatchNorm2d(features),
            nn.ReLU(inplace=True),
        ]
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    width = mnist.BLOCKS[-1][1]
    for features in mnist.DENSE:
        layers += [nn.Linear(width, features), nn.ReLU(inplace=True)]
        width = features
    return nn.Sequential(*layers, nn.Linear(width, mnist.CLASSES))


def _mnist_job(variant: Variant, size: float, folder: Path) -> Job:
    del folder
    rows = _mnist_rows(int(size))
    if variant.way == OURS:
        import optax

        return policy_job(mnist.loss_fn, optax.adam(1e-4), mnist.init, rows, variant.precision)

    torch: Any = importlib.import_module("torch")
    images = torch.from_numpy(np.ascontiguousarray(rows["image"].transpose(0, 3, 1, 2)))
    labels = torch.from_numpy(rows["label"].astype(np.int64))

    def adam(params: Any) -> Any:
        return torch.optim.Adam(params, lr=1e-4, fused=True)

    compiled = variant.way == "torch compile"
    return TorchJob(mnist_torch_model(), adam, (images,), labels, variant.precision, compiled)


MNIST = Workload(
    unit="batch",
    size=256,
    tiny_size=8,
    variants=variants_of(OURS, "torch eager", "torch compile"),
    job=_mnist_job,
    note=NOTEBOOK,
)
