"""Measures what `jmp_train.autocast` costs and saves, compared with float32, dtypes set by hand, and torch.

    python benchmarks/autocast.py [--rounds 10] [--residuals-of ViT-B/16] [--json FILE]
    python benchmarks/autocast.py --tiny --rounds 1     # in a small size, to see that it runs

The model is a vision transformer in flax linen, as published; the small ones are an MLP
and the network of `examples/tasks/mnist.py`. Four things are printed:

1. The optimized HLO of loss and gradients on this backend: its instructions, fused ones included,
   and how many of them are `convert`; for float32, for flax's `dtype=` set by hand, for autocast.
2. The time to trace the gradients with empty caches, plain and in autocast, in turn; also of 20
   layers within 0 to 6 nested jitted functions.
3. The bytes that `jax.vjp` keeps for the backward pass (the leaves of the function it returns,
   parameters included), plain and in autocast. Nothing is computed.
4. The time of a step of SGD in float32 and in bfloat16: by hand, in autocast and, if torch is
   installed, in `torch.autocast`: same architectures, sizes and data, one process, in turn. Each
   library has its own default number of threads and its own attention, torch a fused one.

Times are medians over the rounds, and their ratios medians of the rounds' ratios.
"""

import argparse
import gc
import importlib
import os
import statistics
import time
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

# Without it jaxlib 0.11 and 0.12 miscompile bfloat16 convolutions on the CPU.
os.environ.setdefault("XLA_FLAGS", "--xla_cpu_experimental_ynn_fusion_type=")

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from example_tasks import mnist
from result_files import write_results

from jmp_train.policies.autocasting import autocast

CLASSES = 1000
LEARNING_RATE = 1e-3
HALVES = ("float16", "bfloat16")
TRACE_GOAL, NESTED_TRACE_GOAL, RESIDUALS_GOAL = 2.0, 2.5, 0.6
NESTED_DEPTHS, NESTED_LAYERS = range(7), 20

Loss = Callable[[Any, Any], jax.Array]


class VitSize(NamedTuple):
    """The sizes of a vision transformer and its batch of square images."""

    width: int
    heads: int
    blocks: int
    patch: int
    image: int
    batch: int


class MlpSize(NamedTuple):
    """The sizes of an MLP, all of whose layers are square, and its batch."""

    width: int
    layers: int
    batch: int


class Model(NamedTuple):
    """A loss of parameters and batch, and the shapes of these two."""

    loss: Loss
    params: Any
    batch: Any


class Workload(NamedTuple):
    """A training step: a flax module, the same by hand and in torch, the data, the steps."""

    module: nn.Module
    by_hand: nn.Module
    make_torch: Callable[[], Any]
    batch: tuple[np.ndarray, np.ndarray]
    steps: int


VITS = {
    "ViT-B/16": VitSize(width=768, heads=12, blocks=12, patch=16, image=224, batch=8),
    "ViT-tiny": VitSize(width=192, heads=3, blocks=12, patch=16, image=224, batch=8),
    "ViT-tiny, 2 blocks": VitSize(width=192, heads=3, blocks=2, patch=8, image=32, batch=2),
}


class Block(nn.Module):
    """Attention and an MLP, each after a LayerNorm and with a residual connection."""

    size: VitSize
    dtype: Any = None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns tokens [batch, tokens, width] of tokens."""
        y = nn.LayerNorm(dtype=self.dtype)(x)
        x = x + nn.MultiHeadDotProductAttention(self.size.heads, dtype=self.dtype)(y, y)
        y = nn.LayerNorm(dtype=self.dtype)(x)
        y = nn.gelu(nn.Dense(4 * self.size.width, dtype=self.dtype)(y))
        return x + nn.Dense(self.size.width, dtype=self.dtype)(y)


class Vit(nn.Module):
    """A vision transformer with mean pooling; `dtype` is what a user sets by hand."""

    size: VitSize
    dtype: Any = None

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        """Returns logits [batch, classes] of images [batch, image, image, 3]."""
        patch = (self.size.patch, self.size.patch)
        x = nn.Conv(self.size.width, patch, patch, dtype=self.dtype)(images)
        x = x.reshape(len(x), -1, self.size.width)
        x = x + self.param("positions", nn.initializers.normal(0.02), x.shape[1:]).astype(x.dtype)
        for _ in range(self.size.blocks):
            x = Block(self.size, self.dtype)(x)
        x = nn.LayerNorm(dtype=self.dtype)(x).mean(1)
        return nn.Dense(CLASSES, dtype=self.dtype)(x)


class Mlp(nn.Module):
    """Dense layers with ReLU between them; `dtype` is what a user sets by hand."""

    size: MlpSize
    dtype: Any = None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns logits [batch, width] of rows [batch, width]."""
        for _ in range(self.size.layers - 1):
            x = nn.relu(nn.Dense(self.size.width, dtype=self.dtype)(x))
        return nn.Dense(self.size.width, dtype=self.dtype)(x)


def torch_vit(size: VitSize) -> Any:
    """Returns `Vit` in torch."""
    torch: Any = importlib.import_module("torch")
    layer = partial(
        torch.nn.TransformerEncoderLayer,
        size.width,
        size.heads,
        4 * size.width,
        dropout=0.0,
        activation=partial(torch.nn.functional.gelu, approximate="tanh"),
        layer_norm_eps=1e-6,
        batch_first=True,
        norm_first=True,
    )

    class TorchVit(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            tokens = (size.image // size.patch) ** 2
            self.patches = torch.nn.Conv2d(3, size.width, size.patch, size.patch)
            self.positions = torch.nn.Parameter(0.02 * torch.randn(tokens, size.width))
            self.blocks = torch.nn.Sequential(*(layer() for _ in range(size.blocks)))
            self.norm = torch.nn.LayerNorm(size.width, eps=1e-6)
            self.head = torch.nn.Linear(size.width, CLASSES)

        def forward(self, images: Any) -> Any:
            x = self.patches(images.permute(0, 3, 1, 2)).flatten(2).transpose(1, 2)
            return self.head(self.norm(self.blocks(x + self.positions)).mean(1))

    return TorchVit()


def torch_mlp(size: MlpSize) -> Any:
    """Returns `Mlp` in torch."""
    torch_nn: Any = importlib.import_module("torch").nn
    layers = [torch_nn.Linear(size.width, size.width)]
    for _ in range(size.layers - 1):
        layers += [torch_nn.ReLU(inplace=True), torch_nn.Linear(size.width, size.width)]
    return torch_nn.Sequential(*layers)


def loss_of(module: nn.Module) -> Loss:
    """Returns the mean cross-entropy, in float32, of a module's logits."""

    def loss(params: Any, batch: Any) -> jax.Array:
        inputs, labels = batch
        logits = module.apply({"params": params}, inputs)
        logits = jnp.asarray(logits, jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    return loss


def init(module: nn.Module, inputs: Any) -> Any:
    """Returns float32 parameters."""
    return module.init(jax.random.key(0), inputs)["params"]


def vit_model(size: VitSize, dtype: Any = None) -> Model:
    """Returns the vision transformer, with a dtype set by hand or none."""
    images = jax.ShapeDtypeStruct((size.batch, size.image, size.image, 3), jnp.float32)
    labels = jax.ShapeDtypeStruct((size.batch,), jnp.int32)
    module = Vit(size, dtype)
    params = jax.eval_shape(partial(init, module), images)
    return Model(loss_of(module), params, (images, labels))


def mnist_model(batch: int) -> Model:
    """Returns the network of `examples/tasks/mnist.py`; its batch statistics are part of the batch."""
    params, batch_stats = jax.eval_shape(mnist.init, jax.random.key(0))
    rows = {
        "image": jax.ShapeDtypeStruct((batch, 28, 28, 1), jnp.float32),
        "label": jax.ShapeDtypeStruct((batch,), jnp.int32),
    }

    def loss(params: Any, stats_and_rows: Any) -> jax.Array:
        return mnist.loss_fn(params, *stats_and_rows, rng=None)[0]

    return Model(loss, params, (batch_stats, rows))


def nested_model(depth: int) -> Model:
    """Returns the loss of tanh layers within jitted functions."""

    def loss(params: Any, x: Any) -> jax.Array:
        for w in params:
            x = jnp.tanh(x @ w)
        return jnp.sum(x)

    for _ in range(depth):
        loss = jax.jit(partial(lambda within, params, x: within(params, x), loss))
    square = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    return Model(loss, [square] * NESTED_LAYERS, square)


def hlo_counts(model: Model, loss: Loss) -> dict[str, int]:
    """Returns how many instructions, and converts, the optimized HLO of value and gradients has."""
    lowered = jax.jit(jax.value_and_grad(loss)).lower(model.params, model.batch)
    lines = [line for line in (lowered.compile().as_text() or "").splitlines() if " = " in line]
    return {"instructions": len(lines), "converts": sum(" convert(" in line for line in lines)}


def all_hlo_counts(size: VitSize) -> dict[str, dict[str, int]]:
    """Returns the counts in float32 and, in each half type, by hand and in autocast."""
    plain = vit_model(size)
    counts = {"float32": hlo_counts(plain, plain.loss)}
    for half in HALVES:
        counts[f"by hand {half}"] = hlo_counts(plain, vit_model(size, jnp.dtype(half)).loss)
        counts[f"autocast {half}"] = hlo_counts(plain, autocast(plain.loss, half))
    return counts


def trace_seconds(model: Model, transform: Callable[[Loss], Loss]) -> float:
    """Returns how long it takes to trace the gradients of a transformed loss from nothing."""

    def fresh(params: Any, batch: Any) -> jax.Array:
        return model.loss(params, batch)

    jax.clear_caches()
    gc.collect()
    start = time.perf_counter()
    jax.jit(jax.grad(transform(fresh))).trace(model.params, model.batch)
    return time.perf_counter() - start


def unchanged(loss: Loss) -> Loss:
    """Returns the loss."""
    return loss


def residual_bytes(model: Model, loss: Loss) -> int:
    """Returns the bytes that the backward pass of a loss needs from its forward pass."""

    def pullback(params: Any, batch: Any) -> Any:
        return jax.vjp(lambda params: loss(params, batch), params)[1]

    leaves = jax.tree.leaves(jax.eval_shape(pullback, model.params, model.batch))
    return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)


class JaxSteps:
    """Steps of SGD in jax on one batch."""

    def __init__(self, workload: Workload, loss_fn: Loss) -> None:

        def step(params: Any, batch: Any) -> tuple[Any, jax.Array]:
            loss, grads = jax.value_and_grad(loss_fn)(params, batch)
            return jax.tree.map(lambda p, g: p - LEARNING_RATE * g, params, grads), loss

        self.count = workload.steps
        self.batch = jax.device_put(workload.batch)
        self.params = jax.jit(partial(init, workload.module))(self.batch[0])
        self.step = jax.jit(step, donate_argnums=0).lower(self.params, self.batch).compile()
        self.loss: Any = None

    def __call__(self) -> float:
        """Makes some steps and returns the seconds per step."""
        start = time.perf_counter()
        for _ in range(self.count):
            self.params, self.loss = self.step(self.params, self.batch)
        jax.block_until_ready((self.params, self.loss))
        return (time.perf_counter() - start) / self.count


class TorchSteps:
    """Steps of SGD in torch, on the CPU, on one batch."""

    def __init__(self, workload: Workload, half: str | None) -> None:
        self.torch: Any = importlib.import_module("torch")
        self.torch.manual_seed(0)
        self.count = workload.steps
        self.model = workload.make_torch().train()
        self.half = half and getattr(self.torch, half)
        self.optimizer = self.torch.optim.SGD(self.model.parameters(), LEARNING_RATE, fused=True)
        inputs, labels = workload.batch
        self.inputs = self.torch.from_numpy(inputs)
        self.labels = self.torch.from_numpy(labels.astype(np.int64))
        self.loss: Any = None

    def __call__(self) -> float:
        """Makes some steps and returns the seconds per step."""
        start = time.perf_counter()
        for _ in range(self.count):
            self.optimizer.zero_grad(set_to_none=True)
            with self.torch.autocast("cpu", dtype=self.half, enabled=self.half is not None):
                logits = self.model(self.inputs)
                loss = self.torch.nn.functional.cross_entropy(logits, self.labels)
            loss.backward()
            self.optimizer.step()
            self.loss = loss.detach()
        return (time.perf_counter() - start) / self.count


def workloads(vit: VitSize, mlp: MlpSize) -> dict[str, Workload]:
    """Returns what is stepped, with data of noise."""
    random = np.random.default_rng(0)

    def noise(*shape: int) -> tuple[np.ndarray, np.ndarray]:
        labels = random.integers(0, min(CLASSES, mlp.width), shape[0], np.int32)
        return random.standard_normal(shape, np.float32), labels

    half = jnp.bfloat16
    images = noise(vit.batch, vit.image, vit.image, 3)
    rows = noise(mlp.batch, mlp.width)
    return {
        "ViT": Workload(Vit(vit), Vit(vit, half), partial(torch_vit, vit), images, 1),
        "MLP": Workload(Mlp(mlp), Mlp(mlp, half), partial(torch_mlp, mlp), rows, 5),
    }


def in_turn(contenders: dict[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Returns seconds, [round], of each contender; each round runs all, after one to warm up."""
    names = list(contenders)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for round_index in range(-1, rounds):
        shift = round_index % len(names)
        for name in names[shift:] + names[:shift]:
            elapsed = contenders[name]()
            if round_index >= 0:
                seconds[name].append(elapsed)
    return seconds


def trace_times(models: dict[str, Model], rounds: int) -> dict[str, dict[str, list[float]]]:
    """Returns seconds, [round], of each model's trace, plain and in autocast."""
    in_float16 = partial(autocast, dtype=jnp.float16)
    return {
        name: in_turn(
            {
                "plain": partial(trace_seconds, model, unchanged),
                "autocast": partial(trace_seconds, model, in_float16),
            },
            rounds,
        )
        for name, model in models.items()
    }


def step_times(workload: Workload, rounds: int) -> dict[str, dict[str, Any]]:
    """Returns seconds of a step, [round], and the last loss, of each library and precision."""
    contenders: dict[str, JaxSteps | TorchSteps] = {
        "jax float32": JaxSteps(workload, loss_of(workload.module)),
        "jax by hand": JaxSteps(workload, loss_of(workload.by_hand)),
        "jax autocast": JaxSteps(workload, autocast(loss_of(workload.module), jnp.bfloat16)),
    }
    if find_spec("torch") is not None:
        contenders["torch float32"] = TorchSteps(workload, None)
        contenders["torch autocast"] = TorchSteps(workload, "bfloat16")
    seconds = in_turn({name: steps.__call__ for name, steps in contenders.items()}, rounds)
    return {name: {"seconds": seconds[name], "loss": float(steps.loss)} for name, steps in contenders.items()}


def median_ratio(seconds: list[float], base: list[float]) -> float:
    """Returns the median over the rounds of their ratios."""
    return statistics.median(a / b for a, b in zip(seconds, base, strict=True))


def print_hlo(name: str, counts: dict[str, dict[str, int]]) -> None:
    """Prints the counts, and autocast's relative to those by hand."""
    print(f"\n1. {name}, loss and gradients: the optimized HLO")
    print(f"{'':<20}{'instructions':>14}{'converts':>10}{'  autocast / by hand':<20}")
    for variant, count in counts.items():
        ratios = ""
        way, _, half = variant.rpartition(" ")
        if way == "autocast":
            base = counts[f"by hand {half}"]
            ratios = "".join(f"{count[key] / base[key]:9.3f}" for key in count)
        print(f"{variant:<20}{count['instructions']:>14}{count['converts']:>10}{ratios}")


def print_traces(times: dict[str, dict[str, list[float]]]) -> None:
    """Prints the times to trace."""
    print(
        f"\n2. Time to trace the gradients; the goal is a ratio of at most {TRACE_GOAL:g}, "
        f"and {NESTED_TRACE_GOAL:g} within jit"
    )
    print(f"{'':<20}{'plain ms':>14}{'autocast ms':>13}{'ratio':>9}")
    for name, seconds in times.items():
        plain, ours = (1e3 * statistics.median(seconds[way]) for way in ("plain", "autocast"))
        ratio = median_ratio(seconds["autocast"], seconds["plain"])
        print(f"{name:<20}{plain:>14.0f}{ours:>13.0f}{ratio:>9.2f}")


def print_residuals(residuals: dict[str, dict[str, int]]) -> None:
    """Prints the bytes kept for the backward pass."""
    print(f"\n3. Kept for the backward pass; the goal is a ratio of at most {RESIDUALS_GOAL:g}")
    print(f"{'':<20}{'float32 MB':>14}{'autocast MB':>13}{'ratio':>9}")
    for name, kept in residuals.items():
        plain, ours = kept["float32"], kept["autocast"]
        print(f"{name:<20}{plain / 1e6:>14.1f}{ours / 1e6:>13.1f}{ours / plain:>9.3f}")


def print_steps(times: dict[str, dict[str, dict[str, Any]]]) -> None:
    """Prints the times of a step, and autocast's relative to the same library's float32."""
    print("\n4. Time of a step, bfloat16 beside float32")
    print(f"{'':<20}{'ms/step':>14}{'last loss':>13}{'/float32':>10}")
    for name, variants in times.items():
        for variant, result in variants.items():
            base = variants[f"{variant.split()[0]} float32"]["seconds"]
            print(
                f"{f'{name} {variant}':<20}{1e3 * statistics.median(result['seconds']):>14.2f}"
                f"{result['loss']:>13.3f}{median_ratio(result['seconds'], base):>10.3f}"
            )


def facts() -> dict[str, Any]:
    """Returns device, versions and threads."""
    known = {"device": jax.devices()[0].device_kind, "jax": jax.__version__, "cpus": os.cpu_count()}
    if find_spec("torch") is not None:
        torch: Any = importlib.import_module("torch")
        known |= {"torch": torch.__version__, "torch threads": torch.get_num_threads()}
    return known


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=10, help="of times; default: 10")
    parser.add_argument("--residuals-of", choices=VITS, default="ViT-B/16", help="default: B/16")
    parser.add_argument("--tiny", action="store_true", help="small models and batches")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    args = parser.parse_args()

    name = "ViT-tiny, 2 blocks" if args.tiny else "ViT-tiny"
    mlp = MlpSize(64, 4, 8) if args.tiny else MlpSize(1024, 4, 256)
    small = mnist_model(8 if args.tiny else 256)
    report: dict[str, Any] = {"facts": facts(), "rounds": args.rounds, "model": name}
    print(", ".join(f"{key} {value}" for key, value in report["facts"].items()))

    report["hlo"] = all_hlo_counts(VITS[name])
    print_hlo(name, report["hlo"])

    nested = {f"within {depth} jit": nested_model(depth) for depth in NESTED_DEPTHS}
    traced = {name: vit_model(VITS[name]), "mnist": small, **nested}
    report["trace"] = trace_times(traced, args.rounds)
    print_traces(report["trace"])

    models = {args.residuals_of: vit_model(VITS[args.residuals_of]), "mnist": small}
    report["residual_bytes"] = {
        name: {
            "float32": residual_bytes(model, model.loss),
            "autocast": residual_bytes(model, autocast(model.loss, jnp.float16)),
        }
        for name, model in models.items()
    }
    print_residuals(report["residual_bytes"])

    report["steps"] = {name: step_times(workload, args.rounds) for name, workload in workloads(VITS[name], mlp).items()}
    print_steps(report["steps"])

    if args.json is not None:
        write_results(args.json, report)


if __name__ == "__main__":
    main()
