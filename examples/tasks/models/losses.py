"""Losses and metrics of the tasks: classifiers, and linen models with BatchNorm on images."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

from jmp_train.policies import autocast, batch_norm_paths

Variables: TypeAlias = Mapping[str, Any]  # of a linen module, or the arrays of a batch, by name


class ImageClassifier(NamedTuple):
    """The functions of a `Task` for a model; its `loss_fn` also takes an `axis_name`, see `image_classifier`."""

    init: Callable[[jax.Array], tuple[Any, Any]]
    loss_fn: Callable[..., tuple[jax.Array, Any]]
    predict: Callable[[Any, Any, Any], Any]
    batch_norms: Callable[[], tuple[str, ...]]


@dataclasses.dataclass(frozen=True)
class Accuracy:
    """The `metrics` of a classifier: `test_accuracy`, and the number of outputs that are not finite.

    An output that is not finite counts as wrong. Rows with a negative label do not count.

    Args:
      predict: `predict(params, model_state, batch) -> logits [batch, ..., classes]` for `batch["label"]`, int
        [batch, ...].
      with_bits: also return `bits_per_byte`, the mean of -log2 of the labels' probabilities over finite
        outputs.
    """

    predict: Callable[..., jax.Array]
    with_bits: bool = False

    def __call__(self, params: Any, model_state: Any, batch: Variables) -> dict[str, Any]:
        """Returns the metrics of a batch."""
        logits = self.predict(params, model_state, batch)
        return autocast(self._judged, enabled=False)(logits, jnp.asarray(batch["label"]))

    def _judged(self, logits: jax.Array, label: jax.Array) -> dict[str, Any]:
        is_label = label >= 0
        is_finite = jnp.isfinite(logits).all(-1) & is_label
        is_right = is_finite & (logits.argmax(-1).astype(label.dtype) == label)
        found: dict[str, Any] = {"test_accuracy": (is_right.sum(), is_label.sum())}
        if self.with_bits:
            losses = optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), label)
            bits = jnp.where(is_finite, losses, 0) / np.float32(math.log(2))
            found["bits_per_byte"] = (bits.sum(), is_finite.sum())
        return found | {"nonfinite_outputs": (is_label & ~is_finite).sum()}


def image_classifier(
    make: Callable[[str | None], nn.Module],
    shape: tuple[int, ...],
    *,
    normalize: Callable[[jax.Array], jax.Array] | None = None,
    augment: Callable[[jax.Array, Any], jax.Array] | None = None,
) -> ImageClassifier:
    """Returns the functions of a task for a model that is trained and evaluated on images.

    Args:
      make: returns the model, given the mesh axis over which its BatchNorms are synchronized if a batch is sharded,
        or None.
      shape: shape of one image, with a batch axis of 1.
      normalize: returns the model's input in float32, given a batch's images; the input is then cast to the dtype of
        the model's layer "head", because casting a batch leaves bytes unchanged. None for images that are the input.
      augment: `augment(images, rng)` changes training images first.
    """
    model = make(None)  # initialization and evaluation have no mesh axis

    def init(key: jax.Array) -> tuple[Any, Any]:
        # Compiled, so that the forward pass is removed instead of compiled and run operation by operation.
        variables = jax.jit(partial(model.init, train=False))(key, jnp.zeros(shape))
        return variables["params"], variables.get("batch_stats", {})

    def model_input(params: Variables, images: jax.Array) -> jax.Array:
        return images if normalize is None else normalize(images).astype(params["head"]["kernel"].dtype)

    def loss_fn(
        params: Variables, batch_stats: Variables, batch: Variables, rng: jax.Array | None, axis_name: str | None = None
    ) -> tuple[jax.Array, Any]:
        """Returns the mean cross-entropy, the next batch statistics and the accuracy."""
        images = batch["image"] if augment is None else augment(batch["image"], rng)
        logits, updated = make(axis_name).apply(
            {"params": params, "batch_stats": batch_stats},
            model_input(params, images),
            train=True,
            mutable=["batch_stats"],
            rngs=None if rng is None else {"dropout": rng},
        )
        logits = logits.astype(jnp.float32)  # the loss should not be in half precision
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()
        accuracy = (logits.argmax(-1) == batch["label"]).mean(dtype=jnp.float32)
        return loss, (updated["batch_stats"], {"accuracy": accuracy})

    def predict(params: Variables, batch_stats: Variables, batch: Variables) -> Any:
        variables = {"params": params, "batch_stats": batch_stats}
        return model.apply(variables, model_input(params, batch["image"]), train=False)

    def batch_norms() -> tuple[str, ...]:
        return batch_norm_paths(model, jax.ShapeDtypeStruct(shape, jnp.float32), train=False)

    return ImageClassifier(init, loss_fn, predict, batch_norms)
