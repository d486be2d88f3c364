"""Workloads of `gpu.py`: their definition, and training steps in jmp_train and in torch."""

import importlib
import importlib.metadata
import pickle
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, Protocol

WARM_UP = 3  # steps, after which the loss is noted: all variants should have about the same
PRECISIONS = ("float32", "tf32", "float16", "bfloat16")
MODES = ("torch", "apex-O1", "apex-O2", "apex-O3", "naive", "torch-bfloat16")  # ours alone has them
OURS = "jmp_train"
PREPARED = "data.pickle"  # in the folder that belongs to a run


class Variant(NamedTuple):
    """The library and the precision of a training step.

    Attributes:
      way: "jmp_train", "torch eager", "PyG compile" and their kin; the first word is what must be
        installed.
      precision: one of PRECISIONS or, of ours, of MODES.
      part: the fraction of the workload's data that it gets.
    """

    way: str
    precision: str
    part: float = 1.0

    @property
    def label(self) -> str:
        """Its name in tables."""
        return f"{self.way} {self.precision}{part_text(self.part)}"


def part_text(part: float) -> str:
    """Returns the label of a fraction of the data, a power of one half."""
    return "" if part == 1 else f", 1/{round(1 / part)}"


def variants_of(*ways: str) -> tuple[Variant, ...]:
    """Returns each way in all precisions."""
    return tuple(Variant(way, precision) for way in ways for precision in PRECISIONS)


class Job(Protocol):
    """A training step that is ready to be measured."""

    def steps(self, count: int) -> float:
        """Makes a number of steps and returns the seconds until the last is done."""
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


def set_matmul_precision(precision: str) -> None:
    """Sets how jax multiplies float32 where a precision says so: in full, or by tensor cores; else by its default.

    Args:
      precision: one of PRECISIONS or MODES.
    """
    import jax

    matmul = {"float32": "float32", "tf32": "tensorfloat32"}.get(precision)
    if matmul is not None:
        jax.config.update("jax_default_matmul_precision", matmul)


def policy_job(loss_fn: Any, optimizer: Any, init: Any, batch: Any, precision: str) -> "JaxJob":
    """Returns the job of training under our policy of one of PRECISIONS.

    Args:
      loss_fn: as `train_step` takes it.
      optimizer: of unscaled gradients.
      init: `init(key)` gives float32 parameters and model state.
      batch: arrays.
      precision: one of PRECISIONS.
    """
    import jax

    import jmp_train as jt

    set_matmul_precision(precision)
    optimizer = jt.with_loss_scale(optimizer, jt.torch_loss_scale(enabled=precision == "float16"))
    params, model_state = init(jax.random.key(0))
    state = jt.TrainState.create(params, optimizer, model_state=model_state, rng=jax.random.key(1))
    return JaxJob(jt.train_step(loss_fn, optimizer, policy=policy_of(precision)), state, batch)


class JaxJob:
    """A train step of ours on one batch that stays on the device.

    Args:
      step: of `train_step`.
      state: before the first step; it is donated.
      batch: arrays.
    """

    def __init__(self, step: Any, state: Any, batch: Any) -> None:
        import jax

        self.state = state
        self.batch = jax.device_put(batch)
        start = time.perf_counter()
        jitted = jax.jit(step, donate_argnums=0)
        self.step = jitted.lower(self.state, self.batch).compile()
        self.metrics: dict[str, Any] = {}
        self.steps(WARM_UP)
        self.compile_seconds = time.perf_counter() - start
        self.loss = float(self.metrics["loss"])

    def steps(self, count: int) -> float:
        """Makes a number of steps and returns the seconds until the last is done."""
        import jax

        start = time.perf_counter()
        for _ in range(count):
            self.state, self.metrics = self.step(self.state, self.batch)
        jax.block_until_ready((self.state, self.metrics))
        return time.perf_counter() - start

    def facts(self) -> dict[str, Any]:
        """Returns loss, skipped steps, peak memory, and what XLA says that the program itself needs."""
        import jax

        from jmp_train.app.runs import peak_memory

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
      largest_norm: at which the unscaled gradients are clipped; None for no clipping.
    """

    def __init__(
        self,
        model: Any,
        make_optimizer: Any,
        inputs: tuple[Any, ...],
        labels: Any,
        precision: str,
        compiled: bool,
        largest_norm: float | None = None,
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
        self.largest_norm = largest_norm
        self.last_loss: Any = None
        start = time.perf_counter()
        self.steps(WARM_UP)
        self.compile_seconds = time.perf_counter() - start
        self.loss = float(self.last_loss)
        if self.device == "cuda":
            torch.cuda.reset_peak_memory_stats()

    def steps(self, count: int) -> float:
        """Makes a number of steps and returns the seconds until the last is done."""
        torch = self.torch
        start = time.perf_counter()
        for _ in range(count):
            self.optimizer.zero_grad(set_to_none=True)
            with torch.autocast(self.device, dtype=self.half, enabled=self.half is not None):
                logits = self.forward(*self.inputs)
                loss = torch.nn.functional.cross_entropy(logits, self.labels)
            self.scaler.scale(loss).backward()
            if self.largest_norm is not None:
                self.scaler.unscale_(self.optimizer)
                torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.largest_norm)
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.last_loss = loss.detach()
        if self.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start

    def facts(self) -> dict[str, Any]:
        """Returns loss and peak memory, warm-up excluded where the device counts it."""
        from jmp_train.app.runs import peak_memory

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
