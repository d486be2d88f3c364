"""What `gpu.py` measures: what a workload is, training steps in jmp_train and in torch, and mnist's."""

import importlib
import importlib.metadata
import pickle
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from jmp_train.tasks import mnist

WARM_UP = 3  # steps, after which the loss is noted: all variants should have about the same
PRECISIONS = ("float32", "tf32", "float16", "bfloat16")
OURS = "jmp_train"
PREPARED = "data.pickle"  # in the folder that belongs to a run
NOTEBOOK = "the notebook, torch.amp beside float32: 2.3 times as fast, 0.63 of the memory"


class Variant(NamedTuple):
    """Who steps, and how.

    Attributes:
      way: "jmp_train", "torch eager", "PyG compile" and their kin; the first word is what must be
        installed.
      precision: one of PRECISIONS.
      part: the share of the workload's data that it is given.
    """

    way: str
    precision: str
    part: float = 1.0

    @property
    def label(self) -> str:
        """What a table calls it."""
        return f"{self.way} {self.precision}{part_text(self.part)}"


def part_text(part: float) -> str:
    """Returns what a label says of a share of the data, which is a power of a half."""
    return "" if part == 1 else f", 1/{round(1 / part)}"


class Job(Protocol):
    """A training step that is ready to be measured."""

    def steps(self, count: int) -> float:
        """Makes so many steps and returns the seconds until the last was done."""
        ...

    def facts(self) -> dict[str, Any]:
        """Returns device, version, memory, and the loss after WARM_UP steps."""
        ...


class Workload(NamedTuple):
    """A model and its training step, or a set of operations.

    Attributes:
      unit: what its size counts.
      size: on an accelerator.
      tiny_size: with `--tiny`.
      variants: those to measure, in this order; of several parts, the whole only.
      job: makes a variant's job, given the size and the folder of what `prepare` made.
      prepare: makes, once a run, what all variants' processes load from a folder; None for nothing.
      is_together: whether the processes of all variants fit on the device at once, and step in turn;
        else one is measured after the other.
      note: a line to print below the table.
    """

    unit: str
    size: float
    tiny_size: float
    variants: tuple[Variant, ...]
    job: Callable[[Variant, float, Path], Job]
    prepare: Callable[[float, Path], None] | None = None
    is_together: bool = True
    note: str = ""


def policy_of(precision: str) -> Any:
    """Returns our policy of one of PRECISIONS."""
    import jmp_train as jt

    names = {"float16": "mixed_float16", "bfloat16": "mixed_bfloat16"}
    return jt.get_policy(names.get(precision, "float32"))


def write_prepared(folder: Path, data: Any) -> None:
    """Writes what a workload's variants load."""
    with (folder / PREPARED).open("wb") as file:
        pickle.dump(data, file, protocol=5)


def read_prepared(folder: Path) -> Any:
    """Returns what `write_prepared` wrote in this run."""
    with (folder / PREPARED).open("rb") as file:
        return pickle.load(file)


def first_line(error: Exception) -> str:
    """Returns what an error says, in short."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


class JaxJob:
    """`train_step` on one batch that stays on the device."""

    def __init__(self, loss_fn: Any, optimizer: Any, init: Any, batch: Any, precision: str) -> None:
        import jax

        import jmp_train as jt

        policy = policy_of(precision)
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
        """Returns loss, skipped steps, peak memory, and what XLA says that the program itself needs."""
        import jax

        from jmp_train.memory import peak_memory

        memory, memory_of = peak_memory()
        analysis = self.step.memory_analysis()
        program = getattr(analysis, "peak_memory_in_bytes", 0) / 1e6
        return {
            "device": jax.local_devices()[0].device_kind,
            "version": jax_version(),
            "compile_seconds": self.compile_seconds,
            "loss": self.loss,
            "skipped_steps": int(self.metrics["skipped_steps"]),
            "memory_mb": memory,
            "memory_of": memory_of,
            "program_mb": program or None,
        }


def jax_version() -> str:
    """Returns jax's version and that of its compiler, on which scatters depend most."""
    import jax

    return f"jax {jax.__version__} (jaxlib {importlib.metadata.version('jaxlib')})"


class TorchJob:
    """torch's training step on one batch that stays on the device.

    Args:
      model: of the inputs; gives logits.
      make_optimizer: of the parameters.
      inputs: tensors; channels last where they are images.
      labels: int64, a tensor.
      precision: one of PRECISIONS.
      compiled: whether by `torch.compile`.
    """

    def __init__(
        self,
        model: Any,
        make_optimizer: Any,
        inputs: tuple[Any, ...],
        labels: Any,
        precision: str,
        compiled: bool,
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
        formats = [torch.channels_last if x.ndim == 4 else torch.preserve_format for x in inputs]
        pairs = zip(inputs, formats, strict=True)
        self.inputs = [x.to(self.device, memory_format=layout) for x, layout in pairs]
        self.labels = labels.to(self.device)
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
                logits = self.forward(*self.inputs)
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

        return JaxJob(mnist.loss_fn, optax.adam(1e-4), mnist.init, rows, variant.precision)

    torch: Any = importlib.import_module("torch")
    images = torch.from_numpy(np.ascontiguousarray(rows["image"].transpose(0, 3, 1, 2)))
    labels = torch.from_numpy(rows["label"].astype(np.int64))

    def adam(params: Any) -> Any:
        return torch.optim.Adam(params, lr=1e-4, fused=True)

    compiled = variant.way == "torch compile"
    return TorchJob(mnist_torch_model(), adam, (images,), labels, variant.precision, compiled)


def variants_of(*ways: str) -> tuple[Variant, ...]:
    """Returns each way in all precisions."""
    return tuple(Variant(way, precision) for way in ways for precision in PRECISIONS)


MNIST = Workload(
    unit="batch",
    size=256,
    tiny_size=8,
    variants=variants_of(OURS, "torch eager", "torch compile"),
    job=_mnist_job,
    note=NOTEBOOK,
)
