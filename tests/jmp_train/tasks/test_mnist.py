import dataclasses
import hashlib
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from image_files import idx_bytes, write_mnist
from made_runs import first_examples
from promotion import promoting, promoting_task

from jmp_train.cli.entry import _parser
from jmp_train.cli.jobs import load_job
from jmp_train.data.public_images import read_mnist
from jmp_train.runs import RunSettings
from jmp_train.runs.loop import train
from jmp_train.task import Task
from jmp_train.tasks import load_task, mnist
from jmp_train.tasks.mnist import BLOCKS, prepare
from jmp_train.tasks.models.convolution import torch_uniform

pytestmark = pytest.mark.quick

REAL = Path(__file__).resolve().parents[4] / "shared/data/mnist"


@pytest.fixture(name="folder")
def fixture_folder(tmp_path: Path) -> Path:
    """Files of MNIST's format: 40 training and 10 test images, two of the four files gzipped."""
    write_mnist(tmp_path, train=40, test=10)
    return tmp_path


@pytest.fixture(name="synthetic", scope="module")
def fixture_synthetic() -> Task:
    task = first_examples(load_task("mnist", synthetic=True), 96)
    return dataclasses.replace(promoting_task(task), test={name: array[:40] for name, array in task.test.items()})


@pytest.mark.full
def test_the_real_files() -> None:
    if not REAL.is_dir():
        pytest.skip("../shared/data is not there: MNIST's files are not in the project")
    task = load_task("mnist", data_dir=REAL)
    assert task.train["image"].shape == (60000, 28, 28)
    assert task.test["image"].shape == (10000, 28, 28)
    assert task.train["label"][:10].tolist() == [5, 0, 4, 1, 9, 2, 1, 3, 1, 4]
    assert task.test["label"][:10].tolist() == [7, 2, 1, 0, 4, 1, 4, 9, 5, 9]
    # The published mean and standard deviation of the training pixels.
    pixels = task.train["image"] / np.float32(255)
    assert float(pixels.mean()) == pytest.approx(0.1307, abs=5e-5)
    assert float(pixels.std()) == pytest.approx(0.3081, abs=5e-5)
    digest = hashlib.sha256(idx_bytes(task.train["image"])).hexdigest()
    assert digest == "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db"


def test_files_gzipped_or_not(folder: Path) -> None:
    train_data, test_data = read_mnist(folder)
    assert train_data["image"].shape == (40, 28, 28)
    assert test_data["label"].tolist() == list(range(10))
    batch = prepare({name: array[[3, 5]] for name, array in train_data.items()})
    assert batch["image"].shape == (2, 28, 28, 1)
    assert (batch["image"].dtype, batch["label"].dtype) == (np.float32, np.int32)
    assert batch["image"][0, 0, 0, 0] == np.float32(75 / 255)


def test_train_size_takes_the_first_examples(folder: Path) -> None:
    arguments = ["train", "mnist", "--data-dir", str(folder), "--train-size", "7"]
    job = load_job(_parser(arguments).parse_args(arguments))
    assert job.task.train["label"].tolist() == list(range(7))
    assert len(job.task.test["label"]) == 10


def test_missing_files_are_named_with_address_size_and_sha256(folder: Path) -> None:
    (folder / "t10k-labels-idx1-ubyte").unlink()
    with pytest.raises(FileNotFoundError) as caught:
        read_mnist(folder)
    first, *lines = str(caught.value).splitlines()
    address = "https://storage.googleapis.com/cvdf-datasets/mnist/"
    assert first == f"data_dir {folder} lacks files; MNIST's are public in {address}:"
    assert lines == [
        (
            f"  t10k-labels-idx1-ubyte.gz or t10k-labels-idx1-ubyte ({address}"
            "t10k-labels-idx1-ubyte.gz, 4542 bytes, sha256 "
            "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6)"
        )
    ]
    with pytest.raises(FileNotFoundError, match="task mnist needs --data-dir") as caught:
        load_task("mnist")
    assert lines[0] in str(caught.value).splitlines()
    assert len(str(caught.value).splitlines()) == 5
    with pytest.raises(FileNotFoundError, match="nowhere is not a folder"):
        read_mnist(folder / "nowhere")


def test_data_that_does_not_fit_is_named(folder: Path) -> None:
    images, labels = folder / "train-images-idx3-ubyte.gz", folder / "train-labels-idx1-ubyte"
    for file, array, message in (
        (labels, np.arange(40, dtype=np.uint8) % 11, r"train-labels.* has the label 10 at row 10; .* 0 to 9"),
        (labels, np.zeros(39, np.uint8), r"train-labels.* has 39 labels for 40 images in .*train"),
        (labels, np.zeros(0, np.uint8), r"train-labels.* has 0 labels for 40 images in .*train"),
        (images, np.zeros((0, 28, 28), np.uint8), r"train-images.* has no images"),
        (images, np.zeros((40, 32, 32), np.uint8), "has images of 32 x 32 pixels; MNIST's are 28 x 28"),
    ):
        file.write_bytes(idx_bytes(array))
        with pytest.raises(ValueError, match=message):
            read_mnist(folder)


def test_the_network_is_pytorchs(synthetic: Task) -> None:
    params, batch_stats = jax.eval_shape(synthetic.init, jax.random.key(0))
    # weights and biases of each block, and BatchNorm's two; of the dense layers 1024-1000-1000-10
    blocks = sum(i * o * k * k + o + 2 * o for i, o, k, _, _ in BLOCKS)
    dense = 1024 * 1000 + 1000 + 1000 * 1000 + 1000 + 1000 * 10 + 10
    assert sum(x.size for x in jax.tree.leaves(params)) == blocks + dense == 14_740_522
    assert sum(x.size for x in jax.tree.leaves(batch_stats)) == 2 * sum(o for _, o, *_ in BLOCKS)
    assert {x.dtype for x in jax.tree.leaves((params, batch_stats))} == {jnp.dtype("float32")}


def test_initial_values_are_pytorchs() -> None:
    values = torch_uniform(64 * 9)(jax.random.key(0), (100_000,))
    bound = 1 / 24
    assert -bound <= float(values.min()) < -0.999 * bound
    assert 0.999 * bound < float(values.max()) <= bound
    assert float(values.std()) == pytest.approx(bound / 3**0.5, rel=0.01)


@pytest.mark.full
def test_batch_norm_is_synchronized(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mnist, "BLOCKS", BLOCKS[:1])
    monkeypatch.setattr(mnist, "DENSE", ())
    task = first_examples(load_task("mnist", synthetic=True, devices=2), 4)
    on_part, on_whole = promoting(task.loss_fn), promoting(mnist.loss_fn)
    params, batch_stats = jax.jit(promoting(mnist.init))(jax.random.key(0))
    batch: Any = prepare(task.train)
    parts = jax.tree.map(lambda x: x.reshape(2, 2, *x.shape[1:]), batch)

    over_parts = jax.vmap(on_part, (None, None, 0, None), axis_name="data")
    losses, (stats, _) = jax.jit(over_parts)(params, batch_stats, parts, None)
    loss, (whole_stats, _) = jax.jit(on_whole)(params, batch_stats, batch, None)
    assert float(losses.mean()) == pytest.approx(float(loss), rel=1e-5)
    for x, y in zip(jax.tree.leaves(stats), jax.tree.leaves(whole_stats), strict=True):
        np.testing.assert_allclose(x[0], y, rtol=1e-4, atol=1e-6)
        np.testing.assert_array_equal(x[0], x[1])


@pytest.mark.full
def test_half_precision_starts_as_float32_does(synthetic: Task) -> None:
    losses = {
        name: [step.loss for step in train(synthetic, name, RunSettings(epochs=1, batch_size=16)).steps]
        for name in ("float32", "mixed_float16", "mixed_bfloat16", "autocast_float16")
    }
    assert losses["float32"][-1] < losses["float32"][0]
    np.testing.assert_allclose(losses["mixed_float16"], losses["float32"], rtol=0.005)
    np.testing.assert_allclose(losses["autocast_float16"], losses["float32"], rtol=0.005)
    np.testing.assert_allclose(losses["mixed_bfloat16"], losses["float32"], rtol=0.02)
