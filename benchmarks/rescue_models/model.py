"""Defines a model and its training."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jmp_train as jt

Batch = tuple[jax.Array, ...]


@dataclasses.dataclass(frozen=True)
class Model:
    """A model to be trained.

    Attributes:
      loss_fn: takes parameters and a batch, returns the loss.
      params: in float32.
      batches: all of the same shapes.
      optimizer: without a loss scale.
      guilty: a regular expression of the paths of what fails in float16.
      steps: after how many steps float32 has learned the task.
    """

    loss_fn: Callable[[Any, Batch], jax.Array]
    params: Any
    batches: tuple[Batch, ...]
    optimizer: optax.GradientTransformation
    guilty: str
    steps: int


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The final results of a model's training runs, one number per seed.

    Attributes:
      before: mean losses of all batches with the first parameters, in float32.
      losses: the same with the last parameters.
      skipped: fractions of skipped steps in the last quarter of the run.
    """

    before: np.ndarray
    losses: np.ndarray
    skipped: np.ndarray


def train(make: Callable[[int], Model], rules: jt.AutocastRules | None, seeds: Sequence[int] = (0,)) -> Outcome:
    """Trains a model from some seeds, in float32 or under autocast to float16 with a dynamic loss scale.

    Args:
      make: makes the model, with parameters of a seed and the same batches for all seeds.
      rules: those of autocast; None for float32.
      seeds: of the parameters and the order of the batches.
    """
    model = make(seeds[0])
    optimizer, policy = model.optimizer, None
    if rules is not None:
        optimizer = jt.with_loss_scale(optimizer, jt.torch_loss_scale())
        policy = jt.AutocastPolicy(jnp.float32, jnp.float32, jnp.float32, rules=rules)
    step = jax.jit(jt.train_step(jt.stateless(model.loss_fn), optimizer, policy=policy))
    loss_fn = jax.jit(model.loss_fn)

    def mean_loss(params: Any) -> float:
        return float(np.mean([loss_fn(params, batch) for batch in model.batches]))

    def of_seed(seed: int) -> tuple[float, float, float]:
        params, finite = make(seed).params, []
        state = jt.TrainState.create(params, optimizer)
        for batch in _in_order(model, seed):
            state, metrics = step(state, batch)
            finite.append(metrics["grads_finite"])
        return mean_loss(params), mean_loss(state.params), 1 - float(np.mean(finite[-model.steps // 4 :]))

    return Outcome(*np.array([of_seed(seed) for seed in seeds]).T)


def moments(make: Callable[[int], Model], count: int = 4, seed: int = 0) -> list[tuple[Any, Batch]]:
    """Returns arguments of the loss function, of moments of a training in float32 at equal distances.

    Args:
      make: see `train`.
      count: how many; the first are those before the training, the last those after it.
      seed: see `train`.
    """
    model = make(seed)
    step = jax.jit(jt.train_step(jt.stateless(model.loss_fn), model.optimizer))
    states = [jt.TrainState.create(model.params, model.optimizer)]
    for batch in _in_order(model, seed):
        states.append(step(states[-1], batch)[0])
    chosen = np.linspace(0, model.steps, count).astype(int)
    return [(states[i].params, model.batches[n % len(model.batches)]) for n, i in enumerate(chosen)]


def _in_order(model: Model, seed: int) -> Iterator[Batch]:
    order = np.random.default_rng(seed).integers(len(model.batches), size=model.steps)
    return (model.batches[index] for index in order)
