import dataclasses
import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import vit
from example_tasks import load_task
from image_files import write_image_folder
from models import Accuracy
from models.vision_transformer import VisionTransformer, attention, is_kept
from promotion import promoting, relaxed
from readers.image_folder import center_crops, random_crops

from jmp_train.app.runs.precisions import precision_of
from jmp_train.app.runs.task_batches import evaluation_batches as batches_of_test
from jmp_train.app.runs.task_batches import train_batches
from jmp_train.data.array_loading import example_seeds
from jmp_train.task import Task

pytestmark = pytest.mark.quick

MODES = ("apex-O0", "torch", "apex-O1", "apex-O2", "apex-O3", "naive")
TINY = VisionTransformer(classes=10, patch=8, width=16, depth=1, heads=2, mlp=32)
SIZE = 16


def with_model(task: Task, model: VisionTransformer, size: int) -> Task:
    """Returns the task with another network, and with dtypes promoted within flax and optax."""
    classifier = vit.classifier(model, size)
    return dataclasses.replace(
        task,
        init=promoting(classifier.init),
        loss_fn=promoting(classifier.loss_fn),
        metrics=Accuracy(promoting(classifier.predict)),
        optimizer=lambda steps: relaxed(task.optimizer_for(steps)),
    )


@pytest.fixture(name="tiny", scope="module")
def fixture_tiny() -> Task:
    return with_model(load_task("vit-b16", synthetic=True, image_size=SIZE), TINY, SIZE)


@pytest.fixture(name="params", scope="module")
def fixture_params() -> Any:
    """Parameters of `TINY` that are random everywhere, float32."""
    shapes, _ = jax.eval_shape(promoting(vit.classifier(TINY, SIZE).init), jax.random.key(0))
    random = np.random.default_rng(0)
    return jax.tree.map(lambda x: random.normal(0, 0.3, x.shape).astype(np.float32), shapes)


def batch_of(examples: int) -> dict[str, np.ndarray]:
    return vit.synthetic_data(examples, SIZE, seed=5)


def reference(params: Any, images: np.ndarray, model: VisionTransformer) -> np.ndarray:
    """Returns the logits in float64, from the equations of the paper and of timm's defaults."""
    p = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
    means, stds = np.array([0.485, 0.456, 0.406]), np.array([0.229, 0.224, 0.225])
    pixels = (images / 255 - means) / stds
    count, side, patch = len(images), images.shape[1] // model.patch, model.patch

    def dense(layer: Any, x: np.ndarray) -> np.ndarray:
        return x @ layer["kernel"] + layer["bias"]

    def norm(layer: Any, x: np.ndarray) -> np.ndarray:
        centered = x - x.mean(-1, keepdims=True)
        return centered / np.sqrt(x.var(-1, keepdims=True) + 1e-6) * layer["scale"] + layer["bias"]

    def attend(layer: Any, x: np.ndarray) -> np.ndarray:
        out, size = np.empty_like(x), model.width // model.heads
        q, k, v = np.split(dense(layer["qkv"], x), 3, axis=-1)
        for head in range(model.heads):
            own = slice(head * size, (head + 1) * size)
            logits = q[..., own] @ k[..., own].transpose(0, 2, 1) / math.sqrt(size)
            exp = np.exp(logits - logits.max(-1, keepdims=True))
            out[..., own] = exp / exp.sum(-1, keepdims=True) @ v[..., own]
        return dense(layer["projection"], out)

    patches = pixels.reshape(count, side, patch, side, patch, 3).transpose(0, 1, 3, 2, 4, 5)
    kernel = p["patch_embed"]["kernel"].reshape(-1, model.width)
    tokens = patches.reshape(count, side**2, -1) @ kernel + p["patch_embed"]["bias"]
    first = np.broadcast_to(p["class_token"], (count, 1, model.width))
    x = np.concatenate([first, tokens], axis=1) + p["positions"]
    erf = np.vectorize(math.erf)
    for number in range(model.depth):
        layer = p[f"attention_{number}"]
        x = x + attend(layer, norm(layer["norm"], x))
        layer = p[f"mlp_{number}"]
        hidden = dense(layer["dense_1"], norm(layer["norm"], x))
        x = x + dense(layer["dense_2"], hidden * 0.5 * (1 + erf(hidden / math.sqrt(2))))
    return dense(p["head"], norm(p["norm"], x[:, 0]))


def test_the_full_network_has_timms_parameters() -> None:
    init = promoting(vit.classifier(VisionTransformer(), 224).init)
    params, model_state = jax.eval_shape(init, jax.random.key(0))
    assert sum(x.size for x in jax.tree.leaves(params)) == 86_567_656
    assert {x.dtype for x in jax.tree.leaves(params)} == {jnp.dtype("float32")}
    assert params["positions"].shape == (1, 197, 768)
    assert model_state == {}


def test_logits_are_those_of_the_equations_and_nothing_is_dropped(params: Any) -> None:
    images = batch_of(3)["image"]
    logits = jax.jit(promoting(vit.classifier(TINY, SIZE).predict))(params, {}, {"image": images})
    expected = reference(params, images, TINY)
    assert np.abs(expected).max() > 0.5
    np.testing.assert_allclose(logits, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.full
def test_the_loss_is_that_of_the_equations_and_dropout_draws_from_the_key(params: Any) -> None:
    batch = batch_of(4)
    sure, run = (
        jax.jit(promoting(vit.classifier(model, SIZE).loss_fn))
        for model in (dataclasses.replace(TINY, drop_rate=0.0), TINY)
    )
    loss, (state, aux) = sure(params, {}, batch, jax.random.key(0))
    logits = reference(params, batch["image"], TINY)
    terms = np.log(np.exp(logits).sum(-1)) - logits[np.arange(4), batch["label"]]
    assert float(loss) == pytest.approx(terms.mean(), rel=1e-4)
    assert float(aux["accuracy"]) == np.mean(logits.argmax(-1) == batch["label"])
    assert state == {}
    drawn = [float(run(params, {}, batch, jax.random.key(seed))[0]) for seed in (0, 0, 1)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert float(loss) not in drawn


def test_attention_of_half_values_has_its_softmax_in_float32() -> None:
    # Rounding the weights to float16 costs 3e-4; a softmax in float16 rounds powers, sum and quotients: 1.1e-3.
    tokens = 2048
    qkv = np.zeros((1, tokens, 3), np.float16)
    qkv[..., 0] = 1
    qkv[0, 1:, 1] = -8.5
    qkv[0, 1:, 2] = 4
    shares = np.exp(qkv[0, :, 1].astype(np.float64))
    expected = (shares / shares.sum()) @ qkv[0, :, 2].astype(np.float64)
    out = jax.jit(attention, static_argnums=1)(qkv, 1)
    assert out.dtype == np.float16
    assert float(out[0, 0, 0]) == pytest.approx(expected, rel=7e-4)


def test_masks_have_their_rate_and_no_pattern() -> None:
    words = np.random.default_rng(0).integers(0, 2**32, (4, 2), np.uint32)
    masks = np.stack([is_kept(jnp.asarray(two), 0.1, (300, 400)) for two in words])
    std = math.sqrt(0.1 * 0.9 / masks[0].size)
    np.testing.assert_allclose(masks.mean((1, 2)), 0.9, atol=5 * std)
    np.testing.assert_allclose(masks.mean((0, 1)), 0.9, atol=5 * 0.3 / math.sqrt(1200))
    drops = ~masks
    pairs = [drops[0] & drops[1], drops[:, 1:] & drops[:, :-1], drops[:, :, 1:] & drops[:, :, :-1]]
    for pair in pairs:  # words, rows and columns are independent
        assert pair.mean() == pytest.approx(0.01, abs=5 * 0.1 / math.sqrt(pair.size))


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("mode", MODES)
def test_what_is_kept_of_a_block_is_half(tiny: Task, params: Any, mode: str) -> None:
    amp: Any = dataclasses.replace(precision_of(mode), batch_norms=())
    loss_fn, _ = amp.transform(tiny.loss_fn, tiny.optimizer_for(100))
    stored = jax.eval_shape(amp.cast_params, params)
    program = jax.make_jaxpr(loss_fn)(stored, {}, batch_of(8), jax.random.key(0))
    # The parts, which have six parameters, and not what autocast makes of single operations.
    blocks = [e for e in program.eqns if e.primitive.name in ("checkpoint", "remat2") and len(e.invars) > 6]
    tokens = [x.aval.dtype for e in blocks for x in e.invars if x.aval.shape == (8, 5, 16)]  # pyright: ignore[reportAttributeAccessIssue]
    assert tokens == 2 * [np.float32 if mode == "apex-O0" else np.float16]


@pytest.fixture(name="folder")
def fixture_folder(tmp_path: Path) -> Path:
    write_image_folder(tmp_path, train=6, val=2)
    return tmp_path


@pytest.mark.full
def test_a_folder_is_cropped_by_chance_for_training_and_from_the_center_for_evaluation(folder: Path) -> None:
    task = load_task("vit-b16", data_dir=folder, image_size=SIZE)
    assert sorted(task.train["label"].tolist()) == [0] * 6 + [1] * 6 != task.train["label"].tolist()
    shapes, _ = jax.eval_shape(promoting(task.init), jax.random.key(0))
    assert shapes["head"]["kernel"].shape == (768, 2)  # as many classes as folders
    assert shapes["positions"].shape == (1, 2, 768)
    (batch, count), *rest = batches_of_test(task, 3)
    assert (count, [count for _, count in rest]) == (3, [1])
    np.testing.assert_array_equal(batch["image"], center_crops(task.test["path"][:3], SIZE))
    assert batch["label"].tolist() == [0, 0, 1]

    # All examples are a batch, so its labels and images tell the epoch's order.
    batches = list(train_batches(task, 12, seed=3, epochs=2))
    for epoch, batch in enumerate(batches):
        crops = random_crops(task.train["path"], list(example_seeds(3, epoch, np.arange(12))), SIZE)
        wanted = {(label, crop.tobytes()) for label, crop in zip(task.train["label"].tolist(), crops, strict=True)}
        images = np.asarray(batch["image"])
        assert {(int(y), x.tobytes()) for x, y in zip(images, batch["label"], strict=True)} == wanted
        assert len(wanted) == 12


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("threads", [1, 4])
def test_crops_are_the_same_with_any_number_of_threads_and_from_any_start(folder: Path, threads: int) -> None:
    task = load_task("vit-b16", data_dir=folder, image_size=SIZE)
    alone = dataclasses.replace(task, loading_threads=1)
    whole = [np.asarray(batch["image"]) for batch in train_batches(alone, 4, seed=0, epochs=3)]
    assert len({batch.tobytes() for batch in whole}) == len(whole) == 9
    several = dataclasses.replace(task, loading_threads=threads)
    for start in (0, 4):
        rest = [np.asarray(batch["image"]) for batch in train_batches(several, 4, seed=0, epochs=3, start=start)]
        np.testing.assert_array_equal(rest, whole[start:])
