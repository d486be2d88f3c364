"""A GPT that predicts the next byte of a text: `jmp-train train examples/tasks/lm.py --model small`.

By default the text is Python's documentation, `pydoc_data.topics`, so this job runs anywhere. The
last tenth is held out. The text is split into windows as long as the model's context. Within a window, the model
predicts each byte from the ones before it.
"""

import dataclasses
import functools
from functools import partial
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from models import GPT, Accuracy, GPTConfig
from task_options import Arrays, with_warm_up

import jmp_train as jt

BETAS, WEIGHT_DECAY, LARGEST_NORM = (0.9, 0.95), 0.1, 1.0
WARM_UP_SHARE = 10  # a tenth of the steps
FINAL_SHARE = 0.1  # of the learning rate
TEST_SHARE = 10  # the last tenth of the text


@dataclasses.dataclass(frozen=True)
class Recipe:
    """A model and its hyperparameters.

    Attributes:
      config: the model's sizes.
      context: bytes per window.
      batch_size: windows per step.
      learning_rate: the highest learning rate.
      epochs: passes over the text.
    """

    config: GPTConfig
    context: int
    batch_size: int
    learning_rate: float
    epochs: int


RECIPES = {
    "tiny": Recipe(GPTConfig(width=128, depth=4, heads=4, kv_heads=2, mlp=384), 128, 8, 1.2e-3, 1),
    "small": Recipe(GPTConfig(width=384, depth=6, heads=6, kv_heads=2, mlp=1024), 256, 16, 1e-3, 4),
    "gpt2-small": Recipe(
        GPTConfig(width=768, depth=12, heads=12, kv_heads=4, mlp=2432, vocabulary=50_257), 1024, 8, 6e-4, 8
    ),
}


def init(key: jax.Array, config: GPTConfig) -> tuple[Any, Any]:
    """Returns float32 parameters, and None as model state.

    Args:
      key: key of the random values.
      config: the model's sizes.
    """
    return jax.jit(lambda key: nnx.state(GPT(config, nnx.Rngs(key)), nnx.Param))(key), {}


def model_of(params: Any, config: GPTConfig) -> GPT:
    """Returns the model with these parameters.

    Args:
      params: from `init`, or trained.
      config: the model's sizes.
    """
    return nnx.merge(_structure(config), params)


@functools.lru_cache
def _structure(config: GPTConfig) -> nnx.GraphDef[GPT]:
    return nnx.graphdef(nnx.eval_shape(lambda: GPT(config, nnx.Rngs(0))))


def loss_fn(
    params: Any, model_state: Any, batch: Arrays, rng: jax.Array | None, config: GPTConfig
) -> tuple[jax.Array, Any]:
    """Returns the mean cross-entropy in nats, the empty model state, and the accuracy.

    Args:
      params: from `init`.
      model_state: from `init`.
      batch: `token` and `label`, from `prepare`.
      rng: unused.
      config: the model's sizes.
    """
    del rng
    found = model_of(params, config).losses(batch["token"], batch["label"])
    return found.losses.mean(), (model_state, {"accuracy": found.right.mean(dtype=jnp.float32)})


def predict(params: Any, model_state: Any, batch: Arrays, config: GPTConfig) -> jax.Array:
    """Returns the logits [batch, context, vocabulary] of `batch["token"]`; see `loss_fn`."""
    del model_state
    return model_of(params, config)(batch["token"])


def prepare(examples: Arrays) -> dict[str, np.ndarray]:
    """Returns the bytes as int32."""
    return {name: array.astype(np.int32) for name, array in examples.items()}


def schedule(steps: int, highest: float) -> optax.Schedule:
    """Returns the learning rate: a warm-up over a tenth of the run, then a cosine down to a tenth of it.

    Args:
      steps: number of steps of the run.
      highest: the highest learning rate.
    """
    warm_up = steps // WARM_UP_SHARE
    down = optax.cosine_decay_schedule(highest, steps - warm_up, FINAL_SHARE)
    return with_warm_up(down, highest, warm_up)


def optimizer(learning_rate: optax.ScalarOrSchedule) -> optax.GradientTransformation:
    """Returns AdamW with gradient clipping and with weight decay for matrices only.

    Args:
      learning_rate: a number or a schedule.
    """
    first, second = BETAS
    adamw = optax.adamw(learning_rate, first, second, weight_decay=WEIGHT_DECAY, mask=decays)
    return optax.chain(optax.clip_by_global_norm(LARGEST_NORM), adamw)


def decays(params: Any) -> Any:
    """Returns a tree of booleans: True for parameters with weight decay (matrices of linear layers), otherwise False.

    Args:
      params: parameters of a `GPT`.
    """
    return jax.tree.map_with_path(lambda path, x: x.ndim > 1 and "embedding" not in jax.tree_util.keystr(path), params)


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of the job.

    Args:
      model: the model.
      text_file: the text, any file; default: Python's documentation.
      remat: recompute the blocks for the gradient, which saves memory.
    """

    model: Literal["tiny", "small", "gpt2-small"] = "tiny"
    text_file: Path | None = None
    remat: bool = dataclasses.field(default=False, metadata={"identity": False})  # does not change the results


def task(options: Options) -> jt.Task:
    """Returns the task with the text of `options.text_file`, or with Python's documentation."""
    recipe = RECIPES[options.model]
    config = dataclasses.replace(recipe.config, remat=options.remat)
    rate = partial(schedule, highest=recipe.learning_rate)
    train, test = _data(options, recipe.context)
    return jt.Task(
        train=train,
        test=test,
        prepare=prepare,
        init=partial(init, config=config),
        loss_fn=partial(loss_fn, config=config),
        metrics=Accuracy(partial(predict, config=config), with_bits=True),
        learning_rate=rate,
        optimizer=lambda steps: optimizer(rate(steps)),
        batch_size=recipe.batch_size,
        epochs=recipe.epochs,
    )


def _data(options: Options, context: int) -> tuple[Arrays, Arrays]:
    text = documentation() if options.text_file is None else options.text_file.read_bytes()
    held_out = len(text) // TEST_SHARE
    if held_out <= context:
        least = TEST_SHARE * (context + 1)
        raise ValueError(f"{options.text_file} has {len(text)} bytes; windows of {context} need at least {least}")
    return windows(text[:-held_out], context), windows(text[-held_out:], context)


def documentation() -> bytes:
    """Returns the text of `pydoc_data.topics`, Python's language reference, which differs between Python versions."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics)).encode()


def windows(text: bytes, context: int) -> Arrays:
    """Splits a text into windows that do not overlap, and drops the rest at its end.

    Args:
      text: a text longer than a window.
      context: bytes per window.

    Returns:
      `token`, uint8 [windows, context], and `label`, the byte after each, with the same shape.

    Example:
      >>> cut = windows(b"abcdefgh", 3)
      >>> [x.tobytes() for x in cut["token"]], [x.tobytes() for x in cut["label"]]
      ([b'abc', b'def'], [b'bcd', b'efg'])
    """
    array = np.frombuffer(text, np.uint8)
    count = (len(array) - 1) // context
    size = count * context
    return {"token": array[:size].reshape(count, context), "label": array[1 : size + 1].reshape(count, context)}
