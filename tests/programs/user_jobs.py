"""Jobs as a user writes them: one small model, and training data from each kind of source."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jmp_train as jt

STEPS = 5


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of the job.

    Args:
      width: of the hidden layer.
      source: where the batches come from.
      learning_rate: Adam's, at its peak.
    """

    width: int = 8
    source: Literal["generator", "list", "grain", "arrays"] = "generator"
    learning_rate: float = 0.01


def init(key: jax.Array, width: int = 8) -> tuple[Any, Any]:
    keys = jax.random.split(key)
    params = {"in": jax.random.normal(keys[0], (3, width)) / 2, "out": jax.random.normal(keys[1], (width, 1)) / 2}
    return params, {"mean": jnp.zeros(3)}


def loss_fn(params: Any, model_state: Any, batch: Any, rng: jax.Array | None) -> tuple[jax.Array, Any]:
    hidden = jnp.tanh(batch["x"] @ params["in"])
    if rng is not None:
        hidden = jnp.where(jax.random.bernoulli(rng, 0.8, hidden.shape), hidden, jnp.zeros_like(hidden))
    error = ((hidden @ params["out"])[:, 0] - batch["y"]).astype(jnp.float32)
    mean = 0.9 * model_state["mean"] + 0.1 * batch["x"].astype(jnp.float32).mean(0)
    return jnp.square(error).mean(), ({"mean": mean}, None)


def metrics(params: Any, model_state: Any, batch: Any) -> dict[str, Any]:
    loss = loss_fn(params, model_state, batch, None)[0]
    return {"loss": loss, "rows": len(batch["y"]), "mean_x": (batch["x"].astype(jnp.float32).sum(), batch["x"].size)}


def examples(count: int, seed: int = 0) -> dict[str, np.ndarray]:
    x = np.random.default_rng(seed).normal(size=(count, 3)).astype(np.float32)
    return {"x": x, "y": np.sin(x).sum(1)}


def batches(epoch: int) -> Iterator[dict[str, np.ndarray]]:
    for number in range(STEPS):
        yield examples(16, 100 * epoch + number)


def grain_batches(epoch: int) -> Any:
    import grain

    data = examples(16 * STEPS)
    rows = [{name: array[row] for name, array in data.items()} for row in range(16 * STEPS)]
    return grain.MapDataset.source(rows).seed(epoch).shuffle().batch(16).to_iter_dataset()


SOURCES: dict[str, dict[str, Any]] = {
    "generator": {"train": batches},
    "list": {"train": lambda epoch: list(batches(epoch))},
    "grain": {"train": grain_batches, "steps_per_epoch": STEPS},
    "arrays": {"train": examples(16 * STEPS), "batch_size": 16},
}


def make_task(source: str = "generator", width: int = 8, rate: float = 0.01, **changes: Any) -> jt.Task:
    optimizer: Any = optax.adam(rate)
    if source != "generator":  # whose number of steps is unknown
        optimizer = adam_with_cosine(rate)
    given: dict[str, Any] = {
        "init": lambda key: init(key, width),
        "loss_fn": loss_fn,
        "optimizer": optimizer,
        "epochs": 3,
        "metrics": metrics,
        "test": examples(40, seed=1),
        "higher_is_better": False,
        **SOURCES[source],
        **changes,
    }
    return jt.Task(**given)


def adam_with_cosine(rate: float) -> Callable[[int], optax.GradientTransformation]:
    return lambda steps: optax.adam(optax.cosine_decay_schedule(rate, steps))


def task(options: Options) -> jt.Task:
    return make_task(options.source, options.width, options.learning_rate)
