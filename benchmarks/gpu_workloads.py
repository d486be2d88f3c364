"""The training steps that `gpu.py` measures: one registry of workloads, in jmp_train and in torch."""

import importlib
import importlib.metadata
import time
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import numpy as np

from jmp_train.tasks import mnist

WARM_UP = 3  # steps, after which the loss is noted: all variants should have about the same
PRECISIONS = ("float32", "tf32", "float16", "bfloat16")


class Variant(NamedTuple):
    """Who steps, and how: "jmp_train", "torch eager" or "torch compile", and one of PRECISIONS."""

    way: str
    precision: str


class Job(Protocol):
    """A training step that is ready to be measured."""

    def steps(self, count: int) -> float:
        """Makes so many steps and returns the seconds until the last was done."""
        ...

    def facts(self) -> dict[str, Any]:
        """Returns device, version, memory, and the loss after WARM_UP steps."""
        ...


class Workload(NamedTuple):
    """A model and its training step.

    Attributes:
      batch: rows a step.
      tiny_batch: rows a step with `--tiny`.
      jax_job: makes our job of a precision and a batch size.
      torch_job: makes torch's of a precision, whether to compile it, and a batch size.
    """

    batch: int
    tiny_batch: int
    jax_job: Callable[[str, int], Job]
    torch_job: Callable[[str, bool, int], Job]

    def job(self, variant: Variant, batch: int) -> Job:
        """Returns the job of a variant."""
        if variant.way == "jmp_train":
            return self.jax_job(variant.precision, batch)
        return self.torch_job(variant.precision, variant.way == "torch compile", batch)


class JaxJob:
    """`train_step` on one batch that stays on the device."""

    def __init__(self, loss_fn: Any, optimizer: Any, init: Any, batch: Any, precision: str) -> None:
        import jax

        import jmp_train as jt

        names = {"float16": "mixed_float16", "bfloat16": "mixed_bfloat16"}
        policy = jt.get_policy(names.get(precision, "float32"))
        matmul = {"float32": "float32", "tf32": "tensorfloat32"}.get(precision)
        if matmul is not None:
            jax.config.update("jax_default_matmul_precision", matmul)
        optimizer = jt.with_loss_scale(
            optimizer, jt.torch_loss_scale(enabled=precision == "float16")
        )
        params, model_state = init(jax.random.key(0))
        self.state = jt.TrainState.create(
            params, optimizer, model_state=model_state, rng=jax.random.key(1)
        )
        self.batch = jax.device_put(batch)
        start = time.perf_counter()
        step = jax.jit(jt.train_step(loss_fn, optimizer, policy=policy), donate_argnums=0)
        self.step = step.lower(self.state, self.batch).compile()
        self.metrics: dict[str, Any] = {}
        self.steps(WARM_UP)
        self.compile_seconds = time.perf_counter() - start
        self.loss = float(self.metrics["loss"])

    def steps(self, count: int) -> float:
        """Makes so many steps and returns the seconds until the last was done."""
        import jax

        start = time.perf_counter()
        for _ in range(count):
            self.state, self.metrics = self.step(self.state, self.batch)
        jax.block_until_ready((self.state, self.metrics))
        return time.perf_counter() - start

    def facts(self) -> dict[str, Any]:
        """Returns loss, peak memory, and what XLA says that the program itself needs."""
        import jax

        from jmp_train.memory import peak_memory

        memory, memory_of = peak_memory()
        analysis = self.step.memory_analysis()
        program = getattr(analysis, "peak_memory_in_bytes", 0) / 1e6
        return {
            "device": jax.local_devices()[0].device_kind,
            "version": f"jax {jax.__version__}",
            "compile_seconds": self.compile_seconds,
            "loss": self.loss,
            "memory_mb": memory,
            "memory_of": memory_of,
            "program_mb": program or None,
        }


class TorchJob:
    """torch's training step on one batch that stays on the device."""

    def __init__(
        self, model: Any, make_optimizer: Any, batch: Any, precision: str, compiled: bool
    ) -> None:
        torch: Any = importlib.import_module("torch")
        self.torch = torch
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        tf32 = precision == "tf32"
        torch.backends.cuda.matmul.allow_tf32 = tf32
        torch.backends.cudnn.allow_tf32 = tf32
        torch.backends.cudnn.benchmark = True
        self.half = {"float16": torch.float16, "bfloat16": torch.bfloat16}.get(precision)
        self.model = model.to(self.device, memory_format=torch.channels_last).train()
        self.forward = torch.compile(self.model) if compiled else self.model
        self.optimizer = make_optimizer(self.model.parameters())
        self.scaler = torch.amp.GradScaler(self.device, enabled=self.half == torch.float16)
        images, labels = batch
        self.images = torch.from_numpy(images).to(self.device, memory_format=torch.channels_last)
        self.labels = torch.from_numpy(labels).to(self.device)
        self.last_loss: Any = None
        start = time.perf_counter()
        self.steps(WARM_UP)
        self.compile_seconds = time.perf_counter() - start
        self.loss = float(self.last_loss)
        if self.device == "cuda":
            torch.cuda.reset_peak_memory_stats()

    def steps(self, count: int) -> float:
        """Makes so many steps and returns the seconds until the last was done."""
        torch = self.torch
        start = time.perf_counter()
        for _ in range(count):
            self.optimizer.zero_grad(set_to_none=True)
            with torch.autocast(self.device, dtype=self.half, enabled=self.half is not None):
                logits = self.forward(self.images)
                loss = torch.nn.functional.cross_entropy(logits, self.labels)
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.last_loss = loss.detach()
        if self.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start

    def facts(self) -> dict[str, Any]:
        """Returns loss and peak memory, warm-up excluded where the device counts it."""
        from jmp_train.memory import peak_memory

        torch = self.torch
        if self.device == "cuda":
            device = torch.cuda.get_device_name()
            memory, memory_of = torch.cuda.max_memory_allocated() / 1e6, "device"
        else:
            device = "cpu"
            memory, memory_of = peak_memory()
        return {
            "device": device,
            "version": f"torch {torch.__version__}",
            "compile_seconds": self.compile_seconds,
            "loss": self.loss,
            "memory_mb": memory,
            "memory_of": memory_of,
            "program_mb": None,
        }


def _mnist_rows(batch: int) -> dict[str, np.ndarray]:
    return mnist.prepare(mnist.synthetic_data(batch, seed=0))


def _mnist_jax(precision: str, batch: int) -> Job:
    import optax

    rows = _mnist_rows(batch)
    return JaxJob(mnist.loss_fn, optax.adam(1e-4), mnist.init, rows, precision)


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


def _mnist_torch(precision: str, compiled: bool, batch: int) -> Job:
    torch: Any = importlib.import_module("torch")
    rows = _mnist_rows(batch)
    images = np.ascontiguousarray(rows["image"].transpose(0, 3, 1, 2))
    data = images, rows["label"].astype(np.int64)

    def adam(params: Any) -> Any:
        return torch.optim.Adam(params, lr=1e-4, fused=True)

    return TorchJob(mnist_torch_model(), adam, data, precision, compiled)


WORKLOADS = {"mnist": Workload(256, 8, _mnist_jax, _mnist_torch)}
