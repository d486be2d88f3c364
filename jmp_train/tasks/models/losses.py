"""Losses and metrics of the tasks: classifiers, and linen models with BatchNorm on images."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

from jmp_train.policies import autocast
from jmp_train.policies.amp_modes import batch_norm_paths
from jmp_train.task import Examples

Variables: TypeAlias = Mapping[str, Any]  # of a linen module, by name


def image_loss(
    model: nn.Module,
    params: Variables,
    batch_stats: Variables,
    batch: Examples,
    rngs: dict[str, jax.Array] | None = None,
) -> tuple[jax.Array, Any]:
    """Returns the mean cross-entropy, the next batch statistics and the accuracy.

    Args:
      model: of which `model(images, train)` are logits [batch, classes].
      params: the model's.
      batch_stats: the model's.
      batch: `image` and `label`, as `prepare` makes them.
      rngs: the random keys by their names, for a model that draws.
    """
    updated: Any
    logits, updated = model.apply(
        {"params": params, "batch_stats": batch_stats},
        batch["image"],
        train=True,
        mutable=["batch_stats"],
        rngs=rngs,
    )
    logits = logits.astype(jnp.float32)  # the loss is not a place for half precision
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()
    accuracy = (logits.argmax(-1) == batch["label"]).mean(dtype=jnp.float32)
    return loss, (updated["batch_stats"], {"accuracy": accuracy})


class ImageClassifier(NamedTuple):
    """What a `Task` takes of a model; its `loss_fn` takes an `axis_name` besides, see `image_classifier`."""

    init: Callable[[jax.Array], tuple[Any, Any]]
    loss_fn: Callable[..., tuple[jax.Array, Any]]
    predict: Callable[[Any, Any, Any], Any]
    batch_norms: Callable[[], tuple[str, ...]]


@dataclasses.dataclass(frozen=True)
class Accuracy:
    """The `metrics` of a classifier: `test_accuracy`, and the number of outputs that are not finite.

    An output that is not finite is a wrong one. Rows whose label is negative do not count.

    Args:
      predict: `predict(params, model_state, batch) -> logits [batch, ..., classes]` for `batch["label"]`, int
        [batch, ...].
      with_bits: also return `bits_per_byte`, the mean of -log2 of the labels' probabilities where the output is
        finite.
    """

    predict: Callable[..., jax.Array]
    with_bits: bool = False

    def __call__(self, params: Any, model_state: Any, batch: Examples) -> dict[str, Any]:
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


def image_classifier(make: Callable[[str | None], nn.Module], shape: tuple[int, ...]) -> ImageClassifier:
    """Returns what a task takes of a model that is trained and evaluated on images as they are.

    Args:
      make: returns the model, given the mesh axis over which its BatchNorms are synchronized where a batch is sharded,
        or None.
      shape: of one image, with a batch axis of 1.
    """
    model = make(None)  # there is no axis where it is initialized and evaluated

    def init(key: jax.Array) -> tuple[Any, Any]:
        variables = model.init(key, jnp.zeros(shape), train=False)
        return variables["params"], variables["batch_stats"]

    def loss_fn(
        params: Variables, batch_stats: Variables, batch: Examples, rng: jax.Array | None, axis_name: str | None = None
    ) -> tuple[jax.Array, Any]:
        rngs = None if rng is None else {"dropout": rng}
        return image_loss(make(axis_name), params, batch_stats, batch, rngs)

    def predict(params: Variables, batch_stats: Variables, batch: Examples) -> Any:
        variables = {"params": params, "batch_stats": batch_stats}
        return model.apply(variables, batch["image"], train=False)

    def batch_norms() -> tuple[str, ...]:
        return batch_norm_paths(model, jax.ShapeDtypeStruct(shape, jnp.float32), train=False)

    return ImageClassifier(init, loss_fn, predict, batch_norms)
