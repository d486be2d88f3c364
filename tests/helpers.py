"""What several test modules share."""

import dataclasses
import gzip
import math
import resource
import shutil
import struct
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest

from jmp_train.runs.events import Epoch, Run, Step
from jmp_train.steps.traced_costs import StepCosts
from jmp_train.task import Task

METRICS = {"test_accuracy": 0.987, "nonfinite_outputs": 0}
COSTS = StepCosts(
    half_flops_share=0.0,
    residual_bytes=3_000_000,
    params_bytes=200_000,
    opt_state_bytes=400_000,
    model_state_bytes=1_000,
)


def relaxed(optimizer: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Lets optax's own code promote dtypes (adam raises a float to an int32), ours stays strict."""
    inner = optax.with_extra_args_support(optimizer)

    def init(params: Any) -> Any:
        with jax.numpy_dtype_promotion("standard"):
            return inner.init(params)

    def update(updates: Any, state: Any, params: Any = None, **extra_args: Any) -> Any:
        with jax.numpy_dtype_promotion("standard"):
            return inner.update(updates, state, params, **extra_args)

    return optax.GradientTransformationExtraArgs(init, update)


def promoting(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Lets flax's own code promote dtypes within `fn`."""

    def relaxed_fn(*args: Any) -> Any:
        with jax.numpy_dtype_promotion("standard"):
            return fn(*args)

    return relaxed_fn


def promoting_task(task: Task) -> Task:
    """Returns the task with dtypes promoted within flax and optax, ours stay strict."""
    metrics: Any = task.metrics
    return dataclasses.replace(
        task,
        loss_fn=promoting(task.loss_fn),
        metrics=dataclasses.replace(metrics, predict=promoting(metrics.predict)),
        init=promoting(task.init),
        optimizer=lambda steps: relaxed(task.optimizer_for(steps)),
    )


def first_examples(task: Task, count: int) -> Task:
    """Returns the task with the first training examples only."""
    return dataclasses.replace(task, train={name: array[:count] for name, array in task.train.items()})


def compiled_vjp(fn: Callable[..., Any], cotangent: Any, *args: Any) -> tuple[Any, Any]:
    """Returns the results of `fn(*args)` and the cotangents of the arguments, of one program."""

    def run(cotangent: Any, *args: Any) -> tuple[Any, Any]:
        results, pullback = jax.vjp(fn, *args)
        return results, pullback(cotangent)

    return jax.jit(run)(cotangent, *args)


def assert_bitwise_equal(a: Any, b: Any) -> None:
    """Asserts that two trees have the same structure, dtypes and bits, NaN and -0.0 included."""
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for (path, x), y in zip(jax.tree_util.tree_leaves_with_path(a), jax.tree.leaves(b), strict=True):
        name = jax.tree_util.keystr(path)
        if jax.numpy.issubdtype(x.dtype, jax.dtypes.prng_key):
            x, y = jax.random.key_data(x), jax.random.key_data(y)
        assert x.dtype == y.dtype, name
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes(), name


def host_copy(tree: Any) -> Any:
    """Returns copies on the host, for comparison with what a donating step makes of the tree."""
    return jax.tree.map(lambda x: x if jax.numpy.issubdtype(x.dtype, jax.dtypes.prng_key) else np.array(x), tree)


@jax.custom_vjp
def poison_gradient(x: jax.Array, poison: jax.Array) -> jax.Array:
    """Returns x; its gradient is multiplied with `poison`, an inf or a 1."""
    del poison
    return x


def _forward(x: jax.Array, poison: jax.Array) -> tuple[jax.Array, jax.Array]:
    return x, poison


def _backward(poison: jax.Array, cotangent: jax.Array) -> tuple[jax.Array, jax.Array]:
    return cotangent * poison.astype(cotangent.dtype), jax.numpy.zeros_like(poison)


poison_gradient.defvjp(_forward, _backward)


def make_run(policy: str = "float32", *, scale: float = 1.0, skips: tuple[int, ...] = ()) -> Run:
    """Returns a run of two epochs of 50 steps, whose losses fall from 1 and whose skips halve."""
    steps, epochs = [], []
    for number in range(1, 101):
        skipped = number in skips
        scale = scale / 2 if skipped else scale
        loss = math.nan if skipped else 1 / number
        steps.append(Step(number, loss, 1.0, scale, not skipped))
        if number % 50 == 0:
            count = sum(skip <= number for skip in skips)
            epochs.append(Epoch(number // 50, loss, 1e-3, number / 25, 300.0, scale, count))
    return Run(
        policy,
        "cpu",
        {"test_accuracy": 0.987, "nonfinite_outputs": 0},
        7.5,
        "process",
        64,
        tuple(epochs),
        tuple(steps),
        COSTS,
    )


@contextmanager
def memory_limited_to(more: int) -> Iterator[None]:
    """Lets the process take so many bytes of memory more than it has, and no further ones."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + more, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


@contextmanager
def mounted_tmpfs(directory: Path, options: str) -> Iterator[Path]:
    """Makes a folder a disk of its own in memory; skips the test where it may not.

    Args:
      directory: the folder, which is made.
      options: of the mount, such as its size.
    """
    directory.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(directory)]
    mount = shutil.which("mount")
    if mount is None or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("a test may not mount a tmpfs here")
    try:
        yield directory
    finally:
        subprocess.run(["umount", str(directory)], check=True)


def idx_bytes(array: np.ndarray) -> bytes:
    """Returns an array of bytes in IDX, written from the format's description."""
    magic = 0x0800 + array.ndim
    return struct.pack(f">I{array.ndim}I", magic, *array.shape) + array.tobytes()


def cifar_bytes(images: np.ndarray, labels: np.ndarray) -> bytes:
    """Returns images uint8 [n, 32, 32, 3] and labels as CIFAR-10's page describes its binary version."""
    rows = []
    for image, label in zip(images, labels, strict=True):
        planes = (image[..., color].tobytes() for color in range(3))
        rows.append(bytes([label]) + b"".join(planes))
    return b"".join(rows)


def write_cifar(directory: Path, examples: int) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Writes CIFAR-10's six files with that many examples each; returns (images, labels) by the files' names."""
    random = np.random.default_rng(0)
    names = [f"data_batch_{number}.bin" for number in range(1, 6)] + ["test_batch.bin"]
    contents = {}
    for name in names:
        images = random.integers(0, 256, (examples, 32, 32, 3), np.uint8)
        labels = random.integers(0, 10, examples, np.uint8)
        (directory / name).write_bytes(cifar_bytes(images, labels))
        contents[name] = images, labels
    return contents


def write_mnist(directory: Path, train: int, test: int) -> None:
    """Writes files of MNIST's format and sizes of image; each digit is a shade of gray."""
    for prefix, count in (("train", train), ("t10k", test)):
        labels = np.arange(count, dtype=np.uint8) % 10
        images = np.repeat(25 * labels, 28 * 28).reshape(count, 28, 28)
        (directory / f"{prefix}-images-idx3-ubyte.gz").write_bytes(gzip.compress(idx_bytes(images)))
        (directory / f"{prefix}-labels-idx1-ubyte").write_bytes(idx_bytes(labels))


def write_image_folder(directory: Path, train: int, val: int) -> None:
    """Writes an image folder of two classes, dark and light, with so many noisy images each."""
    from PIL import Image

    random = np.random.default_rng(0)
    for part, count in (("train", train), ("val", val)):
        for name, start in (("dark", 0), ("light", 128)):
            folder = directory / part / name
            folder.mkdir(parents=True)
            for number in range(count):
                pixels = random.integers(start, start + 128, (40, 50, 3), np.uint8)
                Image.fromarray(pixels).save(folder / f"{number}.png")
