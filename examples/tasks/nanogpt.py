"""nanoGPT in flax nnx on a text file: `jmp-train train examples/tasks/nanogpt.py:task --text-file input.txt`."""

import dataclasses
from pydoc_data import topics

import jax
import numpy as np
import optax
from flax import nnx

import jmp_train as jt

LAYERS, WIDTH, HEADS, WINDOW = 2, 64, 4, 65  # in a window of 65 bytes, 64 are predicted


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of the job."""

    text_file: str = dataclasses.field(default=topics.__file__, metadata={"help": "text of 10 kB or more"})


class Block(nnx.Module):
    """Attention and an MLP, each behind a norm and added to its input."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.norm1, self.norm2 = nnx.LayerNorm(WIDTH, rngs=rngs), nnx.LayerNorm(WIDTH, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(HEADS, WIDTH, decode=False, rngs=rngs)
        self.up, self.down = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs), nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns x [batch, window, width] after the block."""
        x = x + self.attention(self.norm1(x), mask=nnx.make_causal_mask(x[..., 0]))
        return x + self.down(nnx.gelu(self.up(self.norm2(x))))


class GPT(nnx.Module):
    """Blocks between an embedding of bytes and positions, and the same embedding of bytes for the logits."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.bytes, self.positions = nnx.Embed(256, WIDTH, rngs=rngs), nnx.Embed(WINDOW - 1, WIDTH, rngs=rngs)
        self.blocks = nnx.Sequential(*(Block(rngs) for _ in range(LAYERS)), nnx.LayerNorm(WIDTH, rngs=rngs))

    def __call__(self, token: jax.Array) -> jax.Array:
        """Returns logits [batch, window, 256]."""
        return self.bytes.attend(self.blocks(self.bytes(token) + self.positions(jax.numpy.arange(WINDOW - 1))))


def task(options: Options) -> jt.Task:
    """Returns the job: windows of the text, of which the last tenth is held out."""
    text = np.fromfile(options.text_file, np.uint8)
    windows = np.resize(text, (len(text) // WINDOW, WINDOW)).astype(np.int32)
    structure = nnx.graphdef(GPT(nnx.Rngs(0)))

    def loss_fn(params: jt.policies.Params, batch: dict[str, jax.Array]) -> jax.Array:
        logits = nnx.merge(structure, params)(batch["token"][:, :-1]).astype("float32")
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["token"][:, 1:]).mean()

    return jt.Task(
        init=lambda key: (nnx.state(GPT(nnx.Rngs(key)), nnx.Param), None),
        loss_fn=jt.stateless(loss_fn),
        optimizer=lambda steps: optax.adamw(optax.cosine_decay_schedule(1e-3, steps), b2=0.99, weight_decay=0.1),
        learning_rate=lambda steps: optax.cosine_decay_schedule(1e-3, steps),
        train={"token": windows[: -len(windows) // 10]},
        batch_size=32,
        test={"token": windows[-len(windows) // 10 :]},
        metrics=lambda params, _, batch: {"bits_per_byte": loss_fn(params, batch) / np.log(2)},
        higher_is_better=False,
    )
