"""The task `cifar10`: its data on the way into the network, its optimizer, and training with a small ResNet."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from image_files import write_cifar
from jax.sharding import PartitionSpec as P
from made_runs import first_examples
from promotion import promoting, promoting_task, relaxed

from jmp_train.runs import RunSettings
from jmp_train.runs.loop import train
from jmp_train.runs.precisions import precision_of
from jmp_train.task import Task
from jmp_train.tasks import cifar10, load_task
from jmp_train.tasks.models.convolution import ResNet

pytestmark = pytest.mark.quick


def small_task(examples: int, features: tuple[int, ...], devices: int = 1) -> Task:
    """Returns the task with one block a stage and images of 8 x 8, which compiles in seconds."""
    train, test = cifar10.synthetic_data(examples, seed=0), cifar10.synthetic_data(96, seed=1)
    train, test = ({**data, "image": data["image"][:, :8, :8]} for data in (train, test))
    model = ResNet(stages=(1,) * len(features), features=features, axis_name="data" if devices > 1 else None)
    return promoting_task(cifar10.make_task(model, train, test))


@pytest.mark.full
def test_augmented_images_are_crops_of_the_frame_flipped_or_not() -> None:
    random = np.random.default_rng(0)
    images = random.integers(0, 256, (200, 32, 32, 3), np.uint8)
    augmented = np.asarray(jax.jit(cifar10.augment)(images, jax.random.key(0)))
    assert (augmented.dtype, augmented.shape) == (np.uint8, images.shape)
    found = []
    for image, result in zip(images, augmented, strict=True):
        framed = np.zeros((40, 40, 3), np.uint8)
        framed[4:36, 4:36] = image
        matches = [
            (row, column, flip)
            for row in range(9)
            for column in range(9)
            for flip in (1, -1)
            if (framed[row : row + 32, column : column + 32][:, ::flip] == result).all()
        ]
        assert len(matches) == 1
        found += matches
    rows, columns, flips = zip(*found, strict=True)
    assert set(rows) == set(columns) == set(range(9))
    assert abs(sum(flips)) < 70  # fair draws; 70 are five standard deviations
    assert abs(np.corrcoef(rows, columns)[0, 1]) < 0.35
    other = np.asarray(cifar10.augment(jnp.asarray(images), jax.random.key(1)))
    assert (other != augmented).any()


def test_images_are_normalized_as_by_torchvision() -> None:
    images = np.arange(256, dtype=np.uint8).reshape(1, 16, 16, 1).repeat(3, axis=-1)
    wanted = (images.astype(np.float64) / 255 - [0.4914, 0.4822, 0.4465]) / [0.2023, 0.1994, 0.2010]
    normalized = cifar10.normalize(jnp.asarray(images))
    assert normalized.dtype == jnp.float32
    np.testing.assert_allclose(normalized, wanted, rtol=1e-5, atol=1e-6)


def test_sgd_with_decay_is_torchs() -> None:
    random = np.random.default_rng(0)
    weights = {"kernel": random.normal(size=(3, 4)), "scale": random.normal(size=4)}
    rates = [0.1, 0.07, 0.03, 0.0]
    optimizer = relaxed(cifar10.sgd(lambda count: jnp.asarray(rates)[count]))
    params: Any = jax.tree.map(jnp.float32, weights)
    state = optimizer.init(params)
    momentum: dict[str, Any] = {}
    for rate in rates:
        grads = {name: random.normal(size=w.shape) for name, w in weights.items()}
        for name, grad in grads.items():
            # torch.optim.SGD: the first momentum is the gradient itself
            decayed = grad + 5e-4 * weights[name]
            momentum[name] = 0.9 * momentum[name] + decayed if name in momentum else decayed
            weights[name] = weights[name] - rate * momentum[name]
        updates, state = optimizer.update(jax.tree.map(jnp.float32, grads), state, params)
        params = optax.apply_updates(params, updates)
        for name, w in weights.items():
            np.testing.assert_allclose(params[name], w, rtol=1e-5, atol=1e-6)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("total", [16, 78_000])
def test_the_rate_falls_by_a_cosine_and_rises_over_the_first_epoch(total: int) -> None:
    schedule = jax.vmap(promoting(cifar10.schedule(total)))
    steps = np.unique(np.concatenate([np.arange(450), np.arange(0, 78_001, 1950)]))
    steps = steps[steps <= total]
    wanted = 0.05 * (1 + np.cos(np.pi * steps / total)) * np.minimum((steps + 1) / 390, 1)
    np.testing.assert_allclose(schedule(jnp.asarray(steps, jnp.int32)), wanted, atol=1e-6)


@pytest.mark.full
def test_the_task_is_the_tutorials() -> None:
    task = first_examples(load_task("cifar10", synthetic=True), 256)
    assert (task.batch_size, task.epochs) == (128, 200)
    assert task.train["image"].shape == (256, 32, 32, 3)
    assert task.test["image"].shape == (2_000, 32, 32, 3)
    assert {task.train["image"].dtype, task.test["image"].dtype} == {np.dtype(np.uint8)}
    batch = task.prepare(task.train)
    assert batch["image"] is task.train["image"]  # the host does nothing
    assert batch["label"].dtype == np.int32
    params, stats = jax.eval_shape(task.init, jax.random.key(0))
    assert sum(x.size for x in jax.tree.leaves(params)) == 21_282_122
    # means and variances of torchvision's BatchNorms: 64 + 6 * 64 + 9 * 128 + 13 * 256 + 7 * 512 channels
    assert sum(x.size for x in jax.tree.leaves(stats)) == 17_024
    assert {x.dtype for x in jax.tree.leaves((params, stats))} == {jnp.dtype("float32")}
    assert len(task.batch_norms()) == 36
    assert task.batch_norms()[:2] == ("stage1_block1/norm1", "stage1_block1/norm2")


def test_files_are_found_and_options_checked(tmp_path: Any) -> None:
    write_cifar(tmp_path, examples=3)
    task = load_task("cifar10", data_dir=tmp_path, devices=2)
    assert (len(task.train["label"]), len(task.test["label"])) == (15, 3)
    with pytest.raises(FileNotFoundError, match="task cifar10 needs --data-dir, the folder of these") as caught:
        load_task("cifar10")
    assert [line.split()[0] for line in str(caught.value).splitlines()[1:]] == [
        *(f"data_batch_{number}.bin" for number in range(1, 6)),
        "test_batch.bin",
    ]


@pytest.mark.full
@pytest.mark.parametrize("mode", ["torch", "apex-O1", "apex-O2", "apex-O3", "naive"])
def test_all_convolutions_are_half_in_every_mode(mode: str) -> None:
    """Reads the dtypes of their results in the program of a loss and its gradient."""
    task = small_task(8, (4, 8))
    amp: Any = precision_of(mode)
    amp = dataclasses.replace(amp, batch_norms=task.batch_norms())
    loss_fn, _ = amp.transform(task.loss_fn, optax.sgd(0.1))
    params, stats = jax.eval_shape(task.init, jax.random.key(0))
    params, stats = jax.eval_shape(amp.cast_params, params), jax.eval_shape(amp.cast_model_state, stats)
    with jax.numpy_dtype_promotion("standard"):
        gradient = jax.value_and_grad(loss_fn, has_aux=True)
        program = str(jax.make_jaxpr(gradient)(params, stats, task.prepare(task.train), jax.random.key(1)))
    results = [line.partition(" = conv")[0] for line in program.splitlines() if "= conv_general_dilated[" in line]
    assert len(results) > 10
    assert all(":f16[" in result for result in results)


@pytest.mark.full
@pytest.mark.parametrize("mode", ["float32", "torch", "apex-O1", "apex-O2", "apex-O3", "mixed_bfloat16"])
def test_a_small_network_learns(mode: str) -> None:
    task = small_task(512, (8, 16))
    # The task's cosine without its warm-up: at a rate that stays, running statistics do not settle.
    task = dataclasses.replace(
        task, optimizer=lambda steps: relaxed(cifar10.sgd(optax.cosine_decay_schedule(0.1, steps)))
    )
    run = train(task, mode, RunSettings(epochs=8, batch_size=32))
    assert len(run.skipped) <= 3
    assert run.epochs[-1].loss < 0.6 * run.epochs[0].loss
    assert run.metrics["test_accuracy"] > 0.5  # chance level: 0.1
    assert run.metrics["nonfinite_outputs"] == 0


@pytest.mark.full
def test_batch_norm_is_synchronized(monkeypatch: pytest.MonkeyPatch) -> None:
    # Each device draws crops and flips of its own; all else is the whole batch's.
    monkeypatch.setattr(cifar10, "augment", lambda images, key: images)
    one, two = (small_task(16, (4,), count) for count in (1, 2))
    params, stats = one.init(jax.random.key(0))
    batch = one.prepare(one.train)

    def on_part(params: Any, stats: Any, batch: Any) -> Any:
        loss, (stats, _) = two.loss_fn(params, stats, batch, None)
        return loss[None], jax.tree.map(lambda x: x[None], stats)

    mesh = jax.sharding.Mesh(jax.devices()[:2], ("data",))
    specs = {"in_specs": (P(), P(), P("data")), "out_specs": P("data"), "check_vma": False}
    on_parts = jax.jit(jax.shard_map(on_part, mesh=mesh, **specs))
    losses, parts_stats = on_parts(params, stats, batch)
    loss, (whole_stats, _) = jax.jit(one.loss_fn)(params, stats, batch, None)
    assert float(losses.mean()) == pytest.approx(float(loss), rel=1e-5)
    for parts, whole in zip(jax.tree.leaves(parts_stats), jax.tree.leaves(whole_stats), strict=True):
        np.testing.assert_allclose(parts[0], whole, rtol=1e-4, atol=1e-6)
        np.testing.assert_array_equal(parts[0], parts[1])
