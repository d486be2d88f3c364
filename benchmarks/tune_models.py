"""Models for `tune.py` in addition to those of `rescue_models`: tasks' networks, a vision transformer, a scan."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.random as jr
import optax
from example_tasks import load_task, models, vit

from jmp_train import Task
from jmp_train.app.runs import train_batches

EXAMPLES = 3  # the last of which the search does not see


class Case(NamedTuple):
    """A model to tune.

    Attributes:
      loss_fn: takes parameters and a batch, returns the loss.
      examples: its arguments.
    """

    loss_fn: Callable[[Any, Any], jax.Array]
    examples: list[tuple[Any, Any]]


def mnist(tiny: bool) -> Case:
    """The network of `examples/tasks/mnist.py`."""
    return _of_task(load_task("mnist", synthetic=True), 4 if tiny else 32)


def resnet34(tiny: bool) -> Case:
    """ResNet-34 on images of 32 pixels."""
    return _of_task(load_task("cifar10", synthetic=True), 2 if tiny else 16)


def gat(tiny: bool) -> Case:
    """A graph attention network on a synthetic graph like Reddit's."""
    task = load_task("reddit", synthetic=True, scale=0.001 if tiny else 0.01)
    return _of_task(task, len(task.train["label"]))


def _of_task(task: Task, batch_size: int) -> Case:
    params, model_state = task.init(jr.key(0))
    batches = train_batches(task, batch_size, 0, 1)
    shared = task.shared()

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        return task.loss_fn(params, model_state, batch, jr.key(1))[0]

    chosen = [batch for batch, _ in zip(batches, range(EXAMPLES), strict=False)]
    return Case(loss_fn, [(params, jax.device_put(batch | shared)) for batch in chosen])


def vit_tiny(tiny: bool) -> Case:
    """A vision transformer of ViT-tiny's width, depth and heads, on images of 32 pixels."""
    model = models.VisionTransformer(classes=10, patch=4, width=192, depth=12, mlp=768, heads=3)
    if tiny:
        model = models.VisionTransformer(classes=10, patch=4, width=32, depth=2, mlp=64, heads=2)
    classifier = vit.classifier(model, 32)
    params, model_state = classifier.init(jr.key(0))

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        return classifier.loss_fn(params, model_state, batch, jr.key(1))[0]

    return Case(loss_fn, [(params, vit.synthetic_data(4 if tiny else 16, 32, seed)) for seed in range(EXAMPLES)])


def language_model(tiny: bool) -> Case:
    """A causal language model in plain JAX, whose blocks are one `scan`."""
    width, depth, length, words = (16, 2, 16, 32) if tiny else (128, 6, 64, 256)
    keys = iter(jr.split(jr.key(0), 8))

    def weights(*shape: int) -> jax.Array:
        return jr.normal(next(keys), shape) / shape[-2] ** 0.5

    blocks = {
        "qkv": weights(depth, width, 3 * width),
        "out": weights(depth, width, width),
        "up": weights(depth, width, 4 * width),
        "down": weights(depth, 4 * width, width),
    }
    params = {"words": weights(words, width), "places": weights(length, width), "blocks": blocks}
    mask = jnp.tril(jnp.ones((length, length), bool))

    def norm(x: jax.Array) -> jax.Array:
        return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)

    def block(x: jax.Array, weights: Any) -> tuple[jax.Array, None]:
        with jax.named_scope("attention"):
            query, key, value = jnp.split(norm(x) @ weights["qkv"], 3, -1)
            logits = jnp.where(mask, query @ key.swapaxes(-1, -2) / width**0.5, -1e9)
            x = x + jax.nn.softmax(logits) @ value @ weights["out"]
        with jax.named_scope("mlp"):
            return x + jax.nn.gelu(norm(x) @ weights["up"]) @ weights["down"], None

    def loss_fn(params: Any, tokens: jax.Array) -> jax.Array:
        x = params["words"][tokens[:, :-1]] + params["places"]
        x, _ = jax.lax.scan(block, x, params["blocks"])
        logits = norm(x) @ params["words"].T
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    batches = jr.randint(jr.key(1), (EXAMPLES, 2 if tiny else 8, length + 1), 0, words)
    return Case(loss_fn, [(params, tokens) for tokens in batches])


CASES = {case.__name__: case for case in (mnist, resnet34, vit_tiny, gat, language_model)}
