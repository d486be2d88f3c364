"""Configurations of which others have reported whether they fit, and a decoder of their sizes to plan.

The decoder is Llama's: RMSNorm, rotary positions left out, grouped-query attention, a gated MLP, blocks in a scan of
which only named arrays are kept for the backward pass, Adam in float32, computation in bfloat16, and every array of the
state sharded over all chips (FSDP), as MaxText does by default.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from example_tasks import models
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

import jmp_train as jt
from jmp_train.aot import GPUS, tpu_slice
from jmp_train.planning import PlanSearch, Workload

EPSILON = 1e-5  # of the norms
OPTIMIZER = optax.adam(1e-4)
MEGABYTE = 2**20  # elements of the smallest array that is sharded


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The sizes of a decoder.

    Attributes:
      width: features of a token.
      depth: number of blocks.
      heads: number of query heads.
      kv_heads: number of key and value heads.
      head_size: features of a head.
      mlp: features within the MLP.
      vocabulary: number of tokens.
      gated: True if the MLP has a gate.
      tied: True if the output shares the matrix of the embedding.
    """

    width: int
    depth: int
    heads: int
    kv_heads: int
    head_size: int
    mlp: int
    vocabulary: int = 32_000
    gated: bool = True
    tied: bool = False


LLAMA_7B = Sizes(4096, 32, 32, 32, 128, 11_008)
LLAMA_70B = Sizes(8192, 80, 64, 8, 128, 28_672)
MAXTEXT_16B = Sizes(4096, 32, 64, 64, 128, 28_672)  # base.yml by global_parameter_scale=16
GPT2_XL = Sizes(1600, 48, 25, 25, 64, 6400, 50_257, gated=False, tied=True)

PROJECTIONS = ("query", "key", "value")
DOTS_BUT_MLP_IN = (*PROJECTIONS, "out", "mlp_out")  # MaxText's save_dot_except_mlpwi


@dataclasses.dataclass(frozen=True)
class Report:
    """A report of others.

    Attributes:
      source: its address.
      said: what it says, in short.
      fits: whether the step fits, by the report.
      device: the slice of TPUs, or the GPU.
      sizes: the decoder's.
      windows: per chip; 0 if parameters and optimizer state alone decide, and nothing is compiled.
      tokens: per window.
      kept: the arrays of a block that the backward pass keeps, besides the block's input.
    """

    source: str
    said: str
    fits: bool
    device: str
    sizes: Sizes
    windows: int
    tokens: int = 2048
    kept: tuple[str, ...] = ()


MAXTEXT = "https://github.com/AI-Hypercomputer/maxtext"
REPORTS = {
    "GPT-2 1.5B, V100-16GB": Report(
        "https://github.com/nshepperd/gpt-2/issues/37",
        "training the 1558M model on one V100 of 16 GB reaches out of memory",
        False,
        "V100-16GB",
        GPT2_XL,
        0,
    ),
    "Llama 2 7B, v4-8": Report(
        f"{MAXTEXT}/issues/606",
        "trained on a v4-8, four chips, with Adam in float32; the maintainers count 12 bytes per parameter",
        True,
        "v4:2x2x1",
        LLAMA_7B,
        1,
    ),
    "Llama 2 70B, v5p-128, batch 2": Report(
        f"{MAXTEXT}/pull/2957",
        "two windows of 4,096 tokens per chip, remat_policy save_dot_except_mlpwi: success",
        True,
        "v5p:4x4x4",
        LLAMA_70B,
        2,
        4096,
        DOTS_BUT_MLP_IN,
    ),
    "Llama 2 70B, v5p-128, batch 4": Report(
        f"{MAXTEXT}/pull/2957",
        "four windows of 4,096 tokens per chip, remat_policy save_dot_except_mlpwi: out of memory",
        False,
        "v5p:4x4x4",
        LLAMA_70B,
        4,
        4096,
        DOTS_BUT_MLP_IN,
    ),
    "MaxText 16B, v5e-256": Report(
        f"{MAXTEXT}/blob/07775101f8aa8329d71765c5633d980bf6b3afac/MaxText/configs/v5e/16b.sh",
        "six windows of 2,048 tokens per chip, remat_policy full: 120 TFLOP/s per chip",
        True,
        "v5e:16x16",
        MAXTEXT_16B,
        6,
    ),
}


def planned(report: Report) -> dict[str, Any]:
    """Returns a report with the memory that a plan finds, in bytes of each device.

    Args:
      report: one of `REPORTS`.
    """
    state = jax.eval_shape(lambda: make_state(report.sizes))
    found = {
        "source": report.source,
        "said": report.said,
        "parameters": sum(x.size for x in jax.tree.leaves(state["params"])),
        "reported_fits": report.fits,
    }
    if not report.windows:
        needed, usable = (
            sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state)),
            GPUS[report.device].memory_bytes,
        )
        by = "parameters and optimizer state alone, of the whole memory"
    else:
        devices = tpu_slice(report.device).devices
        batch = jax.ShapeDtypeStruct((report.windows * devices, report.tokens + 1), jnp.int32)
        step = make_step(report, devices)
        search = PlanSearch(largest_batch=False, shardings=shard_all)
        (row,) = jt.plan(Workload(step, state, batch), report.device, search).rows
        needed, usable, by = row.peak_bytes, row.usable_bytes, "compiled"
    return {**found, "by": by, "needed_bytes": needed, "usable_bytes": usable, "fits": needed <= usable}


def make_state(sizes: Sizes) -> dict[str, Any]:
    """Returns parameters, those of all blocks in one array each, and the optimizer's state, all float32."""
    queries, keys = sizes.heads * sizes.head_size, sizes.kv_heads * sizes.head_size
    shapes = {
        "attention_norm": (sizes.width,),
        "query": (sizes.width, queries),
        "key": (sizes.width, keys),
        "value": (sizes.width, keys),
        "out": (queries, sizes.width),
        "mlp_norm": (sizes.width,),
        **({"gate": (sizes.width, sizes.mlp)} if sizes.gated else {}),
        "up": (sizes.width, sizes.mlp),
        "mlp_out": (sizes.mlp, sizes.width),
    }
    params = {
        "blocks": {name: jnp.zeros((sizes.depth, *shape)) for name, shape in shapes.items()},
        "embedding": jnp.zeros((sizes.vocabulary, sizes.width)),
        "norm": jnp.zeros(sizes.width),
        **({} if sizes.tied else {"head": jnp.zeros((sizes.vocabulary, sizes.width))}),
    }
    return {"params": params, "optimizer": OPTIMIZER.init(params)}


def make_step(report: Report, devices: int) -> Callable[[Any, jax.Array], tuple[Any, jax.Array]]:
    """Returns a training step, whose activations are split along the batch."""
    split = NamedSharding(AbstractMesh((devices,), ("data",), axis_types=(AxisType.Auto,)), PartitionSpec("data"))

    def loss_fn(params: Any, tokens: jax.Array) -> jax.Array:
        x = jax.lax.with_sharding_constraint(params["embedding"].astype(jnp.bfloat16)[tokens[:, :-1]], split)

        def block(x: jax.Array, weights: Any) -> tuple[jax.Array, None]:
            return jax.lax.with_sharding_constraint(one_block(x, weights, report.sizes), split), None

        kept = jax.checkpoint_policies.save_only_these_names(*report.kept)
        x, _ = jax.lax.scan(jax.checkpoint(block, policy=kept, prevent_cse=False), x, params["blocks"])
        head = params["embedding" if report.sizes.tied else "head"].astype(x.dtype)
        logits = (normed(x, params["norm"]) @ head.T).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    def step(state: Any, tokens: jax.Array) -> tuple[Any, jax.Array]:
        loss, gradients = jax.value_and_grad(loss_fn)(state["params"], tokens)
        updates, optimizer = OPTIMIZER.update(gradients, state["optimizer"])
        return {"params": optax.apply_updates(state["params"], updates), "optimizer": optimizer}, loss

    return step


def one_block(x: jax.Array, weights: Any, sizes: Sizes) -> jax.Array:
    """Returns a block's output, in bfloat16, with names for what the backward pass may keep."""
    half = jax.tree.map(lambda w: w.astype(x.dtype), weights)

    def heads(name: str, y: jax.Array) -> jax.Array:
        return checkpoint_name(y @ half[name], name).reshape(*y.shape[:2], -1, sizes.head_size)

    y = normed(x, weights["attention_norm"])
    attended = models.causal_attention(heads("query", y), heads("key", y), heads("value", y))
    x = x + checkpoint_name(attended.reshape(*x.shape[:2], -1) @ half["out"], "out")
    y = normed(x, weights["mlp_norm"])
    hidden = jax.nn.silu(y @ half["gate"]) * (y @ half["up"]) if sizes.gated else jax.nn.gelu(y @ half["up"])
    return x + checkpoint_name(hidden @ half["mlp_out"], "mlp_out")


def normed(x: jax.Array, scale: jax.Array) -> jax.Array:
    """Returns x divided by its root mean square, computed in float32, times the scale."""
    y = x.astype(jnp.float32)
    return (y * jax.lax.rsqrt((y * y).mean(-1, keepdims=True) + EPSILON) * scale).astype(x.dtype)


def shard_all(state: Any, mesh: Any) -> Any:
    """Returns shardings of large arrays along their largest axis that the devices divide, but never along blocks."""

    def of(x: Any) -> NamedSharding:
        axes = [axis for axis in range(x.ndim) if x.shape[axis] % mesh.size == 0 and (axis > 0 or x.ndim < 3)]
        if not axes or math.prod(x.shape) < MEGABYTE:
            return NamedSharding(mesh, PartitionSpec())
        axis = max(axes, key=lambda axis: x.shape[axis])
        return NamedSharding(mesh, PartitionSpec(*("data" if place == axis else None for place in range(x.ndim))))

    return jax.tree.map(of, state)
