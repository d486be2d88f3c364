"""Ten planted faults of a ResNet with batch statistics in linen, with heads and losses as its users write them.

The model has the structure of google/flax (examples/imagenet/models.py, `_ResNet1`): a stem, a block whose last norm
begins at zero, the mean over pixels, a linear layer.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import jax.random as jr
import optax
from flax import linen as nn
from planting import Case, Fault, Way, values
from promotion import promoting

FILTERS, CLASSES, SIZE = 8, 8, 16
BF16 = "bfloat16"


class Block(nn.Module):
    conv: Any
    norm: Any

    @nn.compact
    def __call__(self, x: Any) -> Any:
        y = nn.relu(self.norm()(self.conv(FILTERS, (3, 3))(x)))
        y = self.norm(scale_init=nn.initializers.zeros_init())(self.conv(FILTERS, (3, 3))(y))
        return nn.relu(x + y)


def batch_norm(**options: Any) -> Any:
    return nn.BatchNorm(use_running_average=False, momentum=0.9, epsilon=1e-5, **options)


def mean_over_pixels(x: Any) -> Any:
    return jnp.mean(x, axis=(1, 2))


class ResNet(nn.Module):
    classes: int = CLASSES
    pool: Callable[[Any], Any] = mean_over_pixels
    stem: Callable[..., Any] = lambda x: x

    @nn.compact
    def __call__(self, x: Any) -> Any:
        conv = partial(nn.Conv, use_bias=False)
        x = conv(FILTERS, (7, 7), (2, 2), padding=[(3, 3), (3, 3)], name="conv_init")(self.stem(x))
        x = nn.max_pool(nn.relu(batch_norm(name="bn_init")(x)), (3, 3), strides=(2, 2), padding="SAME")
        x = self.pool(Block(conv, batch_norm, name="block")(x))
        return nn.Dense(self.classes, name="head")(x) if self.classes else x


def images(count: int = 8, seed: int = 1) -> jax.Array:
    return values(count, SIZE, SIZE, 3, seed=seed)


def start(model: Any, x: Any) -> tuple[Any, Any]:
    """Returns parameters and batch statistics."""
    variables: Any = jax.jit(promoting(model.init))(jr.key(0), x)
    return variables["params"], variables["batch_stats"]


def outputs(model: Any, params: Any, stats: Any, x: Any) -> Any:
    return model.apply({"params": params, "batch_stats": stats}, x, mutable=["batch_stats"])[0]


def cross_entropy(logits: Any, labels: Any) -> Any:
    return optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), labels).mean()


def classifier(
    way: Way, x: Any, loss: Any = cross_entropy, change: Any = lambda params, *_: params, **parts: Any
) -> Case:
    """Returns the loss and the gradients of the model, its parameters and a batch."""
    model = ResNet(**parts)
    params, stats = start(model, x)
    labels = jnp.arange(len(x)) % CLASSES

    def loss_fn(params: Any, batch: Any) -> Any:
        return loss(outputs(model, params, stats, batch[0]), batch[1])

    return way.gradients(promoting(loss_fn)), (change(params), (x, labels))


def tomography(way: Way) -> Case:
    """A window of computed tomography, whose numbers are whole ones above 1024."""
    model = ResNet()
    x = jnp.round(1060 + 20 * images()).astype(jnp.int32)
    params, stats = start(model, x.astype(jnp.float32))

    def loss_fn(params: Any, batch: Any) -> Any:
        image, labels = batch
        dtype = params["conv_init"]["kernel"].dtype
        x = (image.astype(dtype) - 1040) / 40  # fault: window of a scan
        return cross_entropy(outputs(model, params, stats, x), labels)

    return way.gradients(promoting(loss_fn)), (params, (x, jnp.arange(len(x)) % CLASSES))


def noisy_or(way: Way) -> Case:
    """The probability of a finding in a scan by those of its pixels, as models of weakly labeled images have it."""

    def loss(logits: Any, labels: Any) -> Any:
        p = jax.nn.sigmoid(logits - 7)
        whole = 1 - jnp.prod(1 - p, axis=(1, 2))  # fault: probability of any pixel
        y = jax.nn.one_hot(labels, CLASSES)
        return -(y * jnp.log(whole) + (1 - y) * jnp.log1p(-whole)).astype(jnp.float32).mean()

    return classifier(way, images(), loss, pool=lambda x: x)


def debiased(way: Way) -> Case:
    """Features by a running mean that is rid of its bias, as haiku's moving averages are."""
    model, x = ResNet(), images()
    params, stats = start(model, x)

    def loss_fn(params: Any, batch: Any) -> Any:
        x, labels, count = batch
        logits = outputs(model, params, stats, x)
        decay = jnp.asarray(0.999, logits.dtype)
        hidden = (1 - decay) * logits.mean(0)
        mean = hidden / (1 - decay ** count.astype(logits.dtype))  # fault: average without its bias
        return cross_entropy(logits - mean, labels)

    return way.gradients(promoting(loss_fn)), (params, (x, jnp.arange(len(x)) % CLASSES, jnp.array(1)))


def angular_margin(way: Way) -> Case:
    """ArcFace of a trained model, whose features are near the centers of their classes."""
    model, x = ResNet(classes=0), images()
    net, stats = start(model, x)
    centers = outputs(model, net, stats, x).T
    centers = centers + 0.05 * values(*centers.shape, scale=float(centers.std()), seed=4)

    def loss_fn(params: Any, batch: Any) -> Any:
        x, labels = batch
        features = outputs(model, params["net"], stats, x)
        features = features / jnp.linalg.norm(features, axis=1, keepdims=True)
        cosine = features @ (params["centers"] / jnp.linalg.norm(params["centers"], axis=0))
        sine = jnp.sqrt(jnp.clip(1 - cosine**2, 0, 1))  # fault: sine of an angular margin
        margin = cosine * jnp.cos(0.5) - sine * jnp.sin(0.5)
        return cross_entropy(30 * jnp.where(jax.nn.one_hot(labels, CLASSES) > 0, margin, cosine), labels)

    return way.gradients(promoting(loss_fn)), ({"net": net, "centers": centers}, (x, jnp.arange(len(x)) % CLASSES))


def barlow_twins(way: Way) -> Case:
    """Barlow Twins late in training: two views agree, and what is on the diagonal is nearly 1."""
    model, x = ResNet(), images(16)
    params, stats = start(model, x)

    def loss_fn(params: Any, batch: Any) -> Any:
        a, b = (outputs(model, params, stats, view) for view in batch)
        a, b = ((z - z.mean(0)) / z.std(0) for z in (a, b))
        correlation = a.T @ b / len(a)
        on_diagonal = jnp.square(jnp.diag(correlation) - 1).sum()  # fault: redundancy reduction
        apart = jnp.square(correlation * (1 - jnp.eye(CLASSES, dtype=a.dtype))).sum()
        return on_diagonal.astype(jnp.float32) + 1e-4 * apart.astype(jnp.float32)

    return way.gradients(promoting(loss_fn)), (params, (x, x + 0.1 * images(16, seed=2)))


def soft_targets(way: Way) -> Case:
    """Hinton's distillation at a temperature at which all classes are nearly alike."""
    model, x = ResNet(), images()
    params, stats = start(model, x)
    teacher = outputs(model, jax.tree.map(lambda p: p + 0.1 * values(*p.shape, seed=3), params), stats, x)

    def loss_fn(params: Any, batch: Any) -> Any:
        x, teacher = batch
        target, log_p = jax.nn.softmax(teacher / 20), jax.nn.log_softmax(outputs(model, params, stats, x) / 20)
        divergence = (target * (jnp.log(target) - log_p)).sum(-1)  # fault: soft targets
        return 400 * divergence.astype(jnp.float32).mean()

    return way.gradients(promoting(loss_fn)), (params, (x, teacher))


def generalized_mean(way: Way) -> Case:
    """GeM pooling, of a trained model with large activations."""

    def pool(x: Any) -> Any:
        return jnp.mean(jnp.maximum(x, 1e-6) ** 3, (1, 2)) ** (1 / 3)  # fault: generalized mean

    def change(params: Any) -> Any:
        params["bn_init"]["scale"] = 20 * params["bn_init"]["scale"]
        return params

    return classifier(way, images(), change=change, pool=pool)


def dead_channel(params: Any) -> Any:
    params["bn_init"]["bias"] = params["bn_init"]["bias"].at[0].set(-10)
    return params


def bilinear(way: Way) -> Case:
    """The signed roots of a bilinear CNN, of a model in which a channel is dead."""

    def pool(x: Any) -> Any:
        pairs = jnp.einsum("nhwc,nhwd->ncd", x, x) / x[0, ..., 0].size
        flat = pairs.reshape(len(x), -1)
        return jnp.sign(flat) * jnp.sqrt(jnp.abs(flat) + 1e-10)  # fault: signed roots

    return classifier(way, images(), change=dead_channel, pool=pool)


def keypoints(way: Way) -> Case:
    """Coordinates in pixels, of a trained model that is off by less than one."""
    model, x = ResNet(), images()
    params, stats = start(model, x)
    target = 224 * outputs(model, params, stats, x) + 0.3 * values(len(x), CLASSES, seed=6)

    def loss_fn(params: Any, batch: Any) -> Any:
        x, target = batch
        apart = 224 * outputs(model, params, stats, x) - target  # fault: keypoints in pixels
        return optax.huber_loss(apart.astype(jnp.float32)).mean()

    return way.gradients(promoting(loss_fn)), (params, (x, target))


class PixelNorm(nn.Module):
    """Batch normalization of pixels by hand."""

    @nn.compact
    def __call__(self, x: Any) -> Any:
        running = self.variable("batch_stats", "mean", lambda: jnp.zeros(x.shape[-1]))
        mean = x.sum((0, 1, 2)) / x[..., 0].size  # fault: mean of a batch
        running.value = 0.9 * running.value + 0.1 * mean
        return (x - mean) / 64


def raw_pixels(way: Way) -> Case:
    return classifier(way, jnp.clip(120 + 60 * images(), 0, 255), stem=lambda x: PixelNorm()(x))


RESNET = (
    Fault("window of a scan", "integer precision lost", "linen", tomography, BF16),
    Fault("probability of any pixel", "cancellation", "linen", noisy_or, BF16),
    Fault("average without its bias", "NaN made", "linen", debiased, BF16),
    Fault("sine of an angular margin", "cancellation", "linen", angular_margin, BF16, autocast=True),
    Fault("redundancy reduction", "cancellation", "linen", barlow_twins, BF16, autocast=True),
    Fault("soft targets", "cancellation", "linen", soft_targets, BF16),
    Fault("generalized mean", "overflow", "linen", generalized_mean),
    Fault("signed roots", "underflow", "linen", bilinear, action="epsilon"),
    Fault("keypoints in pixels", "cancellation", "linen", keypoints, BF16, autocast=True),
    Fault("mean of a batch", "overflow", "linen", raw_pixels),
)
