"""Small language models for `fp8.py`: a dense one, mixtures of experts after Mixtral and after Switch Transformers."""

import dataclasses
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import example_tasks
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import lax

GPT = example_tasks.models.GPT
CONFIG = example_tasks.models.GPTConfig(width=128, depth=2, heads=4, kv_heads=2, mlp=384)
CONTEXT, BATCH, LEARNING_RATE = 64, 4, 2e-3
EXPERTS, EXPERT_WIDTH, CAPACITY = 4, 256, 1.25
TEST_WINDOWS = 256


class Mixtral(nnx.Module):
    """Computes each token by two SwiGLU experts, in products of groups of rows.

    After `block_sparse_moe` of Mixtral, with sorted tokens as in MaxText's `sparse_matmul`.
    """

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.router = nnx.Linear(CONFIG.width, EXPERTS, use_bias=False, rngs=rngs)
        self.gate, self.up = (drawn(rngs, CONFIG.width, EXPERT_WIDTH) for _ in range(2))
        self.down = drawn(rngs, EXPERT_WIDTH, CONFIG.width)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns floating [batch, tokens, width]."""
        tokens = x.reshape(-1, x.shape[-1])
        gates = jax.nn.softmax(self.router(tokens).astype(jnp.float32))
        weights, chosen = lax.top_k(gates, 2)
        weights = (weights / weights.sum(-1, keepdims=True)).astype(x.dtype)
        order = jnp.argsort(chosen.ravel())
        sizes = jnp.bincount(chosen.ravel(), length=EXPERTS)
        with jax.named_scope("experts"):
            rows = tokens[order // 2]
            hidden = jax.nn.silu(lax.ragged_dot(rows, self.gate[...], sizes))
            hidden = hidden * lax.ragged_dot(rows, self.up[...], sizes)
            out = lax.ragged_dot(hidden, self.down[...], sizes)
        out = out[jnp.argsort(order)].reshape(-1, 2, x.shape[-1])
        return jnp.einsum("tkd,tk->td", out.astype(x.dtype), weights).reshape(x.shape).astype(x.dtype)


class Switch(nnx.Module):
    """Computes each token by one expert of limited capacity, in einsums with a batch of weights.

    After Switch Transformers, https://arxiv.org/abs/2101.03961, without the loss that balances loads.
    """

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.router = nnx.Linear(CONFIG.width, EXPERTS, use_bias=False, rngs=rngs)
        self.up, self.down = drawn(rngs, CONFIG.width, CONFIG.mlp), drawn(rngs, CONFIG.mlp, CONFIG.width)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns floating [batch, tokens, width]."""
        tokens = x.reshape(-1, x.shape[-1])
        gates = jax.nn.softmax(self.router(tokens).astype(jnp.float32))
        mask = jax.nn.one_hot(gates.argmax(-1), EXPERTS)
        place = ((jnp.cumsum(mask, axis=0) - 1) * mask).sum(-1)
        slots = jax.nn.one_hot(place.astype(jnp.int32), int(CAPACITY * len(tokens) / EXPERTS))
        dispatch = mask[:, :, None] * slots[:, None]  # no slot beyond the capacity
        combine = dispatch * gates.max(-1)[:, None, None]
        inputs = jnp.einsum("tec,td->ecd", dispatch.astype(x.dtype), tokens)
        with jax.named_scope("experts"):
            hidden = jax.nn.relu(jnp.einsum("ecd,edf->ecf", inputs, self.up[...]))
            out = jnp.einsum("ecf,efd->ecd", hidden, self.down[...])
        return jnp.einsum("tec,ecd->td", combine.astype(x.dtype), out.astype(x.dtype)).reshape(x.shape).astype(x.dtype)


def drawn(rngs: nnx.Rngs, inputs: int, outputs: int) -> nnx.Param[jax.Array]:
    """Returns a weight for each expert."""
    return nnx.Param(jax.random.normal(rngs.params(), (EXPERTS, inputs, outputs)) / inputs**0.5)


def gpt(layer: Callable[[nnx.Rngs], nnx.Module] | None, rngs: nnx.Rngs) -> Any:
    """Returns the transformer, of one block if a layer of experts takes the place of SwiGLU."""
    model: Any = GPT(dataclasses.replace(CONFIG, depth=1) if layer else CONFIG, rngs)
    if layer:
        for block in model.blocks:
            block.mlp = layer(rngs)
    return model


@dataclasses.dataclass(frozen=True)
class Model:
    """A language model as pure functions.

    Attributes:
      layer: of experts; None for a dense model.
      few: the paths of the products in few bits. Router, head, attention's own products and norms are not among them.
    """

    layer: Callable[[nnx.Rngs], nnx.Module] | None
    few: str

    def init(self, seed: int) -> Any:
        """Returns float32 parameters."""
        return jax.jit(lambda key: nnx.state(gpt(self.layer, nnx.Rngs(key)), nnx.Param))(jax.random.key(seed))

    def losses(self, params: Any, batch: Any) -> jax.Array:
        """Returns the cross-entropy of each next byte in nats."""
        structure = nnx.graphdef(nnx.eval_shape(partial(gpt, self.layer), nnx.Rngs(0)))
        return nnx.merge(structure, params).losses(batch["token"], batch["label"]).losses

    def loss_fn(self, params: Any, model_state: Any, batch: Any, rng: Any) -> Any:
        """Returns the mean loss, as `train_step` wants it."""
        del rng
        return self.losses(params, batch).mean(), (model_state, None)


MODELS = {
    "dense": Model(None, "attention|mlp"),
    "mixtral": Model(Mixtral, "attention|experts"),
    "switch": Model(Switch, "attention|experts"),
}


def optimizer(steps: int) -> optax.GradientTransformation:
    """Returns the optimizer of `examples/tasks/lm.py`."""
    return example_tasks.lm.optimizer(example_tasks.lm.schedule(steps, LEARNING_RATE))


def windows(file: Path | None) -> tuple[Any, Any]:
    """Returns the windows of a text for training, and of its held-out last tenth."""
    text = example_tasks.lm.documentation() if file is None else file.read_bytes()
    parts = text[: -len(text) // 10], text[-len(text) // 10 :]
    train, test = (
        {name: x.astype(np.int32) for name, x in example_tasks.lm.windows(part, CONTEXT).items()} for part in parts
    )
    return train, {name: x[:TEST_WINDOWS] for name, x in test.items()}
