"""Measures how far autocast's losses and gradients are from float64's, compared with `torch.autocast` on the CPU.

    python benchmarks/autocast_parity.py [--seeds 16] [--dtypes bfloat16 float16] [--models cnn ...] [--json FILE]

Ten models are written twice, in jax.numpy and in torch, with the same parameters, data and float64 reference, on which
both agree. A row is a model, with two numbers per library: the distances of the examples' losses, and of the gradients
of their mean, from float64's, relative to these, each as the root of the mean square over the seeds. The last columns
are the ratios of ours to torch's; the goal is at most 1.05.

Larger ratios have two reasons. torch's CPU kernels add a layer's bias to the product before they round once; XLA's CPU
backend rounds the product, and then the sum (XLA's products by themselves are as exact as their dtype allows). On
GPUs, XLA passes the bias to cuBLAS, which adds it before rounding if the product is half. As a float32 product, the
sum would be rounded once on CPUs too, but six layers of 2,048 features and 8,192 rows compiled for an A100 then take
848 MB instead of 646. And the values that a LayerNorm saves for its gradient, its centered and its scaled features,
are rounded to half before use; torch's LayerNorm is one kernel, which rounds its result.

torch is not a dependency: install it by `pip install torch==2.13.0`, or put a folder with it in PYTHONPATH. Without
it, only our columns are printed, with the reason.
"""

import argparse
import importlib
import os
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Without it jaxlib 0.11 and 0.12 miscompile bfloat16 convolutions on the CPU.
os.environ.setdefault("XLA_FLAGS", "--xla_cpu_experimental_ynn_fusion_type=")

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from result_files import write_results

from jmp_train.policies.autocasting import autocast

GOAL = 1.05
BATCH, WIDTH, CLASSES, IMAGE, TOKENS = 64, 96, 10, 12, 16
HAS_TORCH = find_spec("torch") is not None
torch: Any = importlib.import_module("torch") if HAS_TORCH else None

Params = dict[str, Any]
Loss = Callable[[Params, dict[str, Any]], Any]


class Model(NamedTuple):
    """A model: shapes of its parameters, its data, and its losses [example] in both libraries."""

    shapes: dict[str, tuple[int, ...]]
    data: Callable[[np.random.Generator], dict[str, np.ndarray]]
    ours: Loss
    torchs: Loss


def rows(random: np.random.Generator) -> dict[str, np.ndarray]:
    """Returns rows [example, feature] and labels [example]."""
    x = random.normal(size=(BATCH, WIDTH)).astype(np.float32)
    return {"x": x, "labels": random.integers(0, CLASSES, BATCH)}


def images(random: np.random.Generator) -> dict[str, np.ndarray]:
    """Returns images [example, channel, row, column] and labels [example]."""
    x = random.normal(size=(BATCH, 3, IMAGE, IMAGE)).astype(np.float32)
    return {"x": x, "labels": random.integers(0, CLASSES, BATCH)}


def pairs(random: np.random.Generator) -> dict[str, np.ndarray]:
    """Returns two rows [example, feature] per example, which belong together."""
    x = random.normal(size=(BATCH, WIDTH)).astype(np.float32)
    y = x + random.normal(size=(BATCH, WIDTH)).astype(np.float32)
    return {"x": x, "y": y, "labels": np.arange(BATCH)}


def sequences(random: np.random.Generator) -> dict[str, np.ndarray]:
    """Returns tokens [example, token, feature] and labels [example]."""
    x = random.normal(size=(BATCH, TOKENS, WIDTH)).astype(np.float32)
    return {"x": x, "labels": random.integers(0, CLASSES, BATCH)}


def texts(random: np.random.Generator) -> dict[str, np.ndarray]:
    """Returns words [example, token] and the ones that follow."""
    words = random.integers(0, WIDTH, (BATCH, TOKENS + 1))
    return {"x": words[:, :-1], "labels": words[:, 1:]}


def linear_shapes(name: str, n_in: int, n_out: int) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of a dense layer: a kernel as torch has it, and a bias."""
    return {f"{name}.w": (n_out, n_in), f"{name}.b": (n_out,)}


def norm_shapes(name: str, width: int) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of a norm's scale and bias."""
    return {f"{name}.scale": (width,), f"{name}.b": (width,)}


def conv_shapes(name: str, n_in: int, n_out: int, size: int) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of a convolution."""
    return {f"{name}.w": (n_out, n_in, size, size), f"{name}.b": (n_out,)}


def parameters(shapes: dict[str, tuple[int, ...]], random: np.random.Generator) -> dict[str, np.ndarray]:
    """Returns float32 parameters of the usual sizes, the biases small and not zero."""

    def one(name: str, shape: tuple[int, ...]) -> np.ndarray:
        noise = random.normal(size=shape)
        if name.endswith(".scale"):
            return 1 + 0.1 * noise
        return noise / np.sqrt(np.prod(shape[1:])) if len(shape) > 1 else 0.1 * noise

    return {name: one(name, shape).astype(np.float32) for name, shape in shapes.items()}


# In jax.numpy


def dense(p: Params, name: str, x: jax.Array) -> jax.Array:
    """Returns a dense layer's features."""
    return x @ p[f"{name}.w"].T + p[f"{name}.b"]


def conv(p: Params, name: str, x: jax.Array, stride: int = 1) -> jax.Array:
    """Returns a convolution's features [example, channel, row, column]."""
    dims = ("NCHW", "OIHW", "NCHW")
    y = lax.conv_general_dilated(x, p[f"{name}.w"], (stride, stride), "SAME", dimension_numbers=dims)
    return y + p[f"{name}.b"][:, None, None]


def layer_norm(p: Params, name: str, x: jax.Array) -> jax.Array:
    """Returns features of mean 0 and variance 1, scaled and shifted."""
    mean = x.mean(-1, keepdims=True)
    variance = jnp.square(x - mean).mean(-1, keepdims=True)
    return (x - mean) * lax.rsqrt(variance + 1e-5) * p[f"{name}.scale"] + p[f"{name}.b"]


def batch_norm(p: Params, name: str, x: jax.Array) -> jax.Array:
    """Returns channels of mean 0 and variance 1 over the batch, scaled and shifted."""
    mean = x.mean((0, 2, 3), keepdims=True)
    variance = jnp.square(x - mean).mean((0, 2, 3), keepdims=True)
    y = (x - mean) * lax.rsqrt(variance + 1e-5)
    return y * p[f"{name}.scale"][:, None, None] + p[f"{name}.b"][:, None, None]


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Returns losses of logits [..., class]."""
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels)


def unit(x: jax.Array) -> jax.Array:
    """Returns rows of length 1."""
    return x / jnp.linalg.norm(x, axis=-1, keepdims=True)


def attention(p: Params, name: str, x: jax.Array) -> jax.Array:
    """Returns what 4 heads attend to, projected."""
    shape = (*x.shape[:2], 3, 4, -1)
    q, k, v = jnp.moveaxis(dense(p, f"{name}.qkv", x).reshape(shape), 2, 0)
    y = jax.nn.dot_product_attention(q, k, v)
    return dense(p, f"{name}.out", y.reshape(x.shape))


def ours_mlp(p: Params, batch: Params) -> jax.Array:
    """Dense layers and ReLU."""
    x = jax.nn.relu(dense(p, "1", batch["x"]))
    x = jax.nn.relu(dense(p, "2", x))
    return cross_entropy(dense(p, "3", x), batch["labels"])


def ours_mlp_norm(p: Params, batch: Params) -> jax.Array:
    """Dense layers, each before a LayerNorm and ReLU."""
    x = jax.nn.relu(layer_norm(p, "n1", dense(p, "1", batch["x"])))
    x = jax.nn.relu(layer_norm(p, "n2", dense(p, "2", x)))
    return cross_entropy(dense(p, "3", x), batch["labels"])


def ours_residual(p: Params, batch: Params) -> jax.Array:
    """Residual blocks behind a LayerNorm, with GELU."""
    x = batch["x"]
    for i in "12":
        y = jax.nn.gelu(dense(p, f"{i}a", layer_norm(p, f"n{i}", x)), approximate=False)
        x = x + dense(p, f"{i}b", y)
    return cross_entropy(dense(p, "3", x), batch["labels"])


def ours_cnn(p: Params, batch: Params) -> jax.Array:
    """Convolutions with ReLU, and a dense layer of their means."""
    x = jax.nn.relu(conv(p, "1", batch["x"]))
    x = jax.nn.relu(conv(p, "2", x, 2))
    x = jax.nn.relu(conv(p, "3", x))
    return cross_entropy(dense(p, "4", x.mean((2, 3))), batch["labels"])


def ours_cnn_norm(p: Params, batch: Params) -> jax.Array:
    """Convolutions with BatchNorm and ReLU, and a dense layer of their means."""
    x = jax.nn.relu(batch_norm(p, "n1", conv(p, "1", batch["x"])))
    x = jax.nn.relu(batch_norm(p, "n2", conv(p, "2", x, 2)))
    return cross_entropy(dense(p, "4", x.mean((2, 3))), batch["labels"])


def ours_autoencoder(p: Params, batch: Params) -> jax.Array:
    """Dense layers with tanh around a code, and squared errors."""
    x = jnp.tanh(dense(p, "1", batch["x"]))
    x = jnp.tanh(dense(p, "3", dense(p, "2", x)))
    return jnp.square(dense(p, "4", x) - batch["x"]).mean(-1)


def ours_gated(p: Params, batch: Params) -> jax.Array:
    """Gated linear units with SiLU, and squared errors."""
    x = jax.nn.silu(dense(p, "1", batch["x"])) * dense(p, "2", batch["x"])
    x = jax.nn.silu(dense(p, "3", x)) * dense(p, "4", x)
    return jnp.square(dense(p, "5", x)[:, 0] - batch["x"][:, 0])


def ours_contrastive(p: Params, batch: Params) -> jax.Array:
    """Two towers whose unit vectors are compared, at a temperature of 0.07."""

    def tower(name: str, x: jax.Array) -> jax.Array:
        return unit(dense(p, f"{name}2", jax.nn.relu(dense(p, f"{name}1", x))))

    logits = tower("x", batch["x"]) @ tower("y", batch["y"]).T / 0.07
    return cross_entropy(logits, batch["labels"]) + cross_entropy(logits.T, batch["labels"])


def ours_transformer(p: Params, batch: Params) -> jax.Array:
    """Two blocks of attention and dense layers behind LayerNorms, and a mean."""
    x = batch["x"]
    for i in "12":
        x = x + attention(p, f"a{i}", layer_norm(p, f"m{i}", x))
        y = jax.nn.gelu(dense(p, f"{i}a", layer_norm(p, f"n{i}", x)), approximate=False)
        x = x + dense(p, f"{i}b", y)
    return cross_entropy(dense(p, "3", x.mean(1)), batch["labels"])


def ours_language(p: Params, batch: Params) -> jax.Array:
    """An embedding, dense layers behind a LayerNorm, and the embedding again for the logits."""
    x = p["embedding.w"][batch["x"]]
    y = jax.nn.gelu(dense(p, "1", layer_norm(p, "n1", x)), approximate=False)
    x = layer_norm(p, "n2", x + dense(p, "2", y))
    return cross_entropy(x @ p["embedding.w"].T, batch["labels"]).mean(-1)


# In torch


def torch_dense(p: Params, name: str, x: Any) -> Any:
    """`dense`."""
    return torch.nn.functional.linear(x, p[f"{name}.w"], p[f"{name}.b"])


def torch_conv(p: Params, name: str, x: Any, stride: int = 1) -> Any:
    """`conv`; XLA's "SAME" pads an even side of stride 2 behind only."""
    w, b = p[f"{name}.w"], p[f"{name}.b"]
    if stride == 1:
        return torch.nn.functional.conv2d(x, w, b, padding=1)
    return torch.nn.functional.conv2d(torch.nn.functional.pad(x, (0, 1, 0, 1)), w, b, stride)


def torch_layer_norm(p: Params, name: str, x: Any) -> Any:
    """`layer_norm`."""
    scale, bias = p[f"{name}.scale"], p[f"{name}.b"]
    return torch.nn.functional.layer_norm(x, x.shape[-1:], scale, bias, 1e-5)


def torch_batch_norm(p: Params, name: str, x: Any) -> Any:
    """`batch_norm`."""
    scale, bias = p[f"{name}.scale"], p[f"{name}.b"]
    return torch.nn.functional.batch_norm(x, None, None, scale, bias, training=True, eps=1e-5)


def torch_cross_entropy(logits: Any, labels: Any) -> Any:
    """`cross_entropy`."""
    return torch.nn.functional.cross_entropy(logits, labels, reduction="none")


def torch_attention(p: Params, name: str, x: Any) -> Any:
    """`attention`."""
    shape = (*x.shape[:2], 3, 4, -1)
    q, k, v = torch_dense(p, f"{name}.qkv", x).reshape(shape).permute(2, 0, 3, 1, 4)
    y = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    return torch_dense(p, f"{name}.out", y.transpose(1, 2).reshape(x.shape))


def torch_mlp(p: Params, batch: Params) -> Any:
    """`ours_mlp`."""
    x = torch.relu(torch_dense(p, "1", batch["x"]))
    x = torch.relu(torch_dense(p, "2", x))
    return torch_cross_entropy(torch_dense(p, "3", x), batch["labels"])


def torch_mlp_norm(p: Params, batch: Params) -> Any:
    """`ours_mlp_norm`."""
    x = torch.relu(torch_layer_norm(p, "n1", torch_dense(p, "1", batch["x"])))
    x = torch.relu(torch_layer_norm(p, "n2", torch_dense(p, "2", x)))
    return torch_cross_entropy(torch_dense(p, "3", x), batch["labels"])


def torch_residual(p: Params, batch: Params) -> Any:
    """`ours_residual`."""
    x = batch["x"]
    for i in "12":
        y = torch_dense(p, f"{i}a", torch_layer_norm(p, f"n{i}", x))
        x = x + torch_dense(p, f"{i}b", torch.nn.functional.gelu(y))
    return torch_cross_entropy(torch_dense(p, "3", x), batch["labels"])


def torch_cnn(p: Params, batch: Params) -> Any:
    """`ours_cnn`."""
    x = torch.relu(torch_conv(p, "1", batch["x"]))
    x = torch.relu(torch_conv(p, "2", x, 2))
    x = torch.relu(torch_conv(p, "3", x))
    return torch_cross_entropy(torch_dense(p, "4", x.mean((2, 3))), batch["labels"])


def torch_cnn_norm(p: Params, batch: Params) -> Any:
    """`ours_cnn_norm`."""
    x = torch.relu(torch_batch_norm(p, "n1", torch_conv(p, "1", batch["x"])))
    x = torch.relu(torch_batch_norm(p, "n2", torch_conv(p, "2", x, 2)))
    return torch_cross_entropy(torch_dense(p, "4", x.mean((2, 3))), batch["labels"])


def torch_autoencoder(p: Params, batch: Params) -> Any:
    """`ours_autoencoder`."""
    x = torch.tanh(torch_dense(p, "1", batch["x"]))
    x = torch.tanh(torch_dense(p, "3", torch_dense(p, "2", x)))
    y = torch_dense(p, "4", x)
    return torch.nn.functional.mse_loss(y, batch["x"], reduction="none").mean(-1)


def torch_gated(p: Params, batch: Params) -> Any:
    """`ours_gated`."""
    silu = torch.nn.functional.silu
    x = silu(torch_dense(p, "1", batch["x"])) * torch_dense(p, "2", batch["x"])
    x = silu(torch_dense(p, "3", x)) * torch_dense(p, "4", x)
    y = torch_dense(p, "5", x)[:, 0]
    return torch.nn.functional.mse_loss(y, batch["x"][:, 0], reduction="none")


def torch_contrastive(p: Params, batch: Params) -> Any:
    """`ours_contrastive`."""

    def tower(name: str, x: Any) -> Any:
        y = torch_dense(p, f"{name}2", torch.relu(torch_dense(p, f"{name}1", x)))
        return torch.nn.functional.normalize(y, dim=-1)

    logits = tower("x", batch["x"]) @ tower("y", batch["y"]).T / 0.07
    labels = batch["labels"]
    return torch_cross_entropy(logits, labels) + torch_cross_entropy(logits.T, labels)


def torch_transformer(p: Params, batch: Params) -> Any:
    """`ours_transformer`."""
    x = batch["x"]
    for i in "12":
        x = x + torch_attention(p, f"a{i}", torch_layer_norm(p, f"m{i}", x))
        y = torch_dense(p, f"{i}a", torch_layer_norm(p, f"n{i}", x))
        x = x + torch_dense(p, f"{i}b", torch.nn.functional.gelu(y))
    return torch_cross_entropy(torch_dense(p, "3", x.mean(1)), batch["labels"])


def torch_language(p: Params, batch: Params) -> Any:
    """`ours_language`."""
    x = torch.nn.functional.embedding(batch["x"], p["embedding.w"])
    y = torch_dense(p, "1", torch_layer_norm(p, "n1", x))
    y = torch_dense(p, "2", torch.nn.functional.gelu(y))
    logits = torch.nn.functional.linear(torch_layer_norm(p, "n2", x + y), p["embedding.w"])
    return torch_cross_entropy(logits.transpose(1, 2), batch["labels"]).mean(-1)


# The table


def dense_shapes(**layers: tuple[int, int]) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of dense layers, `_1=(in, out)` of that named "1"."""
    shapes: dict[str, tuple[int, ...]] = {}
    for name, sizes in layers.items():
        shapes |= linear_shapes(name.removeprefix("_"), *sizes)
    return shapes


def block_shapes(number: str) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of a residual block of two dense layers."""
    first, second = (WIDTH, 4 * WIDTH), (4 * WIDTH, WIDTH)
    return dense_shapes(**{f"{number}a": first, f"{number}b": second}) | norm_shapes(f"n{number}", WIDTH)


def attention_shapes(number: str) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of an attention and its norm."""
    return {
        **linear_shapes(f"a{number}.qkv", WIDTH, 3 * WIDTH),
        **linear_shapes(f"a{number}.out", WIDTH, WIDTH),
        **norm_shapes(f"m{number}", WIDTH),
    }


SQUARE, HEAD = (WIDTH, WIDTH), (WIDTH, CLASSES)
MLP = dense_shapes(_1=SQUARE, _2=SQUARE, _3=HEAD)
BLOCKS = block_shapes("1") | block_shapes("2") | dense_shapes(_3=HEAD)
CONVS = conv_shapes("1", 3, 32, 3) | conv_shapes("2", 32, 32, 3)
TOWERS = dense_shapes(x1=SQUARE, x2=SQUARE, y1=SQUARE, y2=SQUARE)

MODELS = {
    "mlp": Model(MLP, rows, ours_mlp, torch_mlp),
    "mlp, LayerNorm": Model(
        MLP | norm_shapes("n1", WIDTH) | norm_shapes("n2", WIDTH),
        rows, ours_mlp_norm, torch_mlp_norm,
    ),
    "residual": Model(BLOCKS, rows, ours_residual, torch_residual),
    "cnn": Model(
        CONVS | conv_shapes("3", 32, 32, 3) | dense_shapes(_4=(32, CLASSES)),
        images, ours_cnn, torch_cnn,
    ),
    "cnn, BatchNorm": Model(
        CONVS | norm_shapes("n1", 32) | norm_shapes("n2", 32) | dense_shapes(_4=(32, CLASSES)),
        images, ours_cnn_norm, torch_cnn_norm,
    ),
    "autoencoder": Model(
        dense_shapes(_1=SQUARE, _2=(WIDTH, 16), _3=(16, WIDTH), _4=SQUARE),
        rows, ours_autoencoder, torch_autoencoder,
    ),
    "gated": Model(
        dense_shapes(_1=SQUARE, _2=SQUARE, _3=SQUARE, _4=SQUARE, _5=(WIDTH, 1)),
        rows, ours_gated, torch_gated,
    ),
    "contrastive": Model(TOWERS, pairs, ours_contrastive, torch_contrastive),
    "transformer": Model(
        BLOCKS | attention_shapes("1") | attention_shapes("2"),
        sequences, ours_transformer, torch_transformer,
    ),
    "language": Model(
        {"embedding.w": (WIDTH, WIDTH), **norm_shapes("n1", WIDTH), **norm_shapes("n2", WIDTH)}
        | dense_shapes(_1=(WIDTH, 4 * WIDTH), _2=(4 * WIDTH, WIDTH)),
        texts, ours_language, torch_language,
    ),
}  # fmt: skip


def losses_and_gradients(loss: Loss) -> Callable[..., Any]:
    """Returns a compiled function to losses [example] and the gradients of their mean."""

    def mean(p: Params, batch: Params) -> tuple[jax.Array, jax.Array]:
        losses = loss(p, batch)
        return losses.mean(), losses

    @jax.jit
    def run(p: Params, batch: Params) -> tuple[jax.Array, Params]:
        (_, losses), grads = jax.value_and_grad(mean, has_aux=True)(p, batch)
        return losses, grads

    return run


def in_torch(loss: Loss, p: Params, batch: Params, dtype: str | None) -> tuple[Any, Params]:
    """Returns torch's losses [example] and gradients, in autocast or, without a dtype, in float64."""

    def tensor(x: np.ndarray) -> Any:
        found = torch.from_numpy(x)
        return found.double() if dtype is None and found.is_floating_point() else found

    params = {name: tensor(x).requires_grad_() for name, x in p.items()}
    tensors = {name: tensor(x) for name, x in batch.items()}
    half = None if dtype is None else getattr(torch, dtype)
    with torch.autocast("cpu", dtype=half, enabled=half is not None):
        losses = loss(params, tensors)
    losses.mean().backward()
    grads = {name: x.grad.numpy() for name, x in params.items()}
    return losses.detach().double().numpy(), grads


def distance(tree: Any, exact: Any) -> float:
    """Returns the L2 distance of two trees, as a fraction of the norm of the exact one."""
    of = [np.asarray(x, np.float64) for x in jax.tree.leaves(tree)]
    to = [np.asarray(x, np.float64) for x in jax.tree.leaves(exact)]
    apart = sum(np.sum((a - b) ** 2) for a, b in zip(of, to, strict=True))
    return float(np.sqrt(apart / sum(np.sum(b**2) for b in to)))


def root_mean_square(numbers: list[float]) -> float:
    """Returns the root of the mean square."""
    return float(np.sqrt(np.mean(np.square(numbers))))


def distances(model: Model, dtypes: list[str], seeds: int) -> dict[str, dict[str, list[float]]]:
    """Returns the distances of losses and of gradients over the seeds, by library and dtype."""
    ours = {dtype: losses_and_gradients(autocast(model.ours, jnp.dtype(dtype))) for dtype in dtypes}
    reference = losses_and_gradients(model.ours)
    found: dict[str, list[tuple[float, float]]] = {}
    for seed in range(seeds):
        random = np.random.default_rng(seed)
        p, batch = parameters(model.shapes, random), model.data(random)
        with jax.enable_x64(True):
            exact_params = jax.tree.map(lambda x: x.astype(np.float64) if x.dtype == np.float32 else x, p)
            rest = jax.tree.map(lambda x: x.astype(np.float64) if x.dtype == np.float32 else x, batch)
            exact = reference(exact_params, rest)
        results = {f"ours {dtype}": run(p, batch) for dtype, run in ours.items()}
        if HAS_TORCH:
            apart = distance(in_torch(model.torchs, p, batch, None), exact)
            if apart > 1e-6:
                raise AssertionError(f"{model.ours.__name__} is not {model.torchs.__name__}: {apart:.1e} apart")
            results |= {f"torch {dtype}": in_torch(model.torchs, p, batch, dtype) for dtype in dtypes}
        for name, (losses, grads) in results.items():
            pair = distance(losses, exact[0]), distance(grads, exact[1])
            found.setdefault(name, []).append(pair)
    return {name: {"loss": [a for a, _ in pairs], "gradient": [b for _, b in pairs]} for name, pairs in found.items()}


def print_table(report: dict[str, Any], dtype: str) -> None:
    """Prints one line per model and the largest ratio."""
    print(f"\n{dtype}: distance from float64 of losses and gradients, and ours as a multiple")
    print(f"{'':<18}{'ours':>20}{'torch':>20}{'ratio':>16}")
    worst: list[float] = []
    for name, found in report.items():
        line = f"{name:<18}"
        kinds = ("loss", "gradient")
        sizes = {
            library: [root_mean_square(found[f"{library} {dtype}"][kind]) for kind in kinds]
            for library in ("ours", "torch")
            if f"{library} {dtype}" in found
        }
        for pair in sizes.values():
            line += "".join(f"{size:>10.2e}" for size in pair)
        if "torch" in sizes:
            ratios = [a / b for a, b in zip(sizes["ours"], sizes["torch"], strict=True)]
            worst += ratios
            line += "".join(f"{ratio:>8.2f}" for ratio in ratios)
        print(line)
    if worst:
        print(f"the greatest ratio is {max(worst):.2f}; the goal is at most {GOAL}")


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, default=16, help="default: 16")
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float16"])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    args = parser.parse_args()
    if not HAS_TORCH:
        print("torch is not installed (pip install torch==2.13.0): its columns are left out")
    else:
        print(f"jax {jax.__version__}, torch {torch.__version__}, {args.seeds} seeds")
    report = {name: distances(MODELS[name], args.dtypes, args.seeds) for name in args.models}
    for dtype in args.dtypes:
        print_table(report, dtype)
    sys.stdout.flush()
    if args.json is not None:
        write_results(args.json, report)


if __name__ == "__main__":
    main()
