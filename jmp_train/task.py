"""`Task`: data, model, loss, optimizer and evaluation of a training job, as one value."""

import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import numpy as np
import optax

from jmp_train.policies import PyTree
from jmp_train.policies.pytrees import check_flag, named_leaves
from jmp_train.steps import LossFn

DATA_AXIS = "data"  # the mesh axis over which a batch is sharded

Arrays: TypeAlias = Mapping[str, Any]  # NumPy arrays [examples, ...]
Examples: TypeAlias = Mapping[str, jax.Array]  # examples of a batch, in the step
Optimizer: TypeAlias = optax.GradientTransformation | Callable[[int], optax.GradientTransformation]
LearningRate: TypeAlias = float | Callable[[int], optax.Schedule]


# The calls that the commands make; `train_step` checks the arguments of its own functions.
_CALLS: Mapping[str, Sequence[str]] = {
    "init": ("key",),
    "train": ("epoch",),
    "evaluate": ("params", "model_state"),
    "metrics": ("params", "model_state", "batch"),
    "test": (),
    "prepare": ("examples",),
    "augment": ("examples", "seeds"),
    "shared": (),
    "batch_norms": (),
}


def _as_they_are(examples: Any) -> Any:
    return examples


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
    """A training job for the commands `jmp-train train`, `compare`, `tune`, `diagnose` and `plan`.

    The batches come from `train`, which is one of:

    - a function of the epoch, counted from 0, that returns an iterable of batches: a list, a generator, a grain data
      set, a torch `DataLoader`, the batches of a Hugging Face data set. Batches are pytrees of arrays or torch tensors;
    - a dict of arrays `[examples, ...]`, which the library shuffles, splits into batches of `batch_size`, and
      prefetches.

    Several processes all iterate over the same global batches, and each takes its own part of them.

    Args:
      init: `init(key) -> (params, model_state)`, with parameters in float32; `model_state` is None if there is none.
      loss_fn: a loss function for `jt.train_step`, such as `jt.stateless(loss_fn)`.
      optimizer: an optax optimizer, or a function of the total number of steps that returns one. The command adds the
        loss scale that the policy needs. An optimizer with a loss scale of its own keeps it.
      train: the training data, see above.
      epochs: passes over the training data.
      evaluate: `evaluate(params, model_state) -> {name: number}`, called on the host after training. It gets the
        parameters as the policy casts them; autocast does not apply.
      metrics: `metrics(params, model_state, batch) -> {name: value}`, run on the batches of `test` under the policy.
        A float is the mean over the batch's examples, an integer is a count that is summed, and a pair
        `(sum, count)` adds up to a ratio. Either `evaluate` or `metrics` may be given. The first name is the headline
        of tables and plots.
      test: the evaluation data of `metrics`: a dict of arrays, or a function without arguments that returns an
        iterable of batches.
      higher_is_better: True if a larger headline metric is better.
      steps_per_epoch: batches per epoch; required if `train` returns an iterable without a length and a function of
        the number of steps, such as `optimizer`, needs it.
      batch_size: examples per batch of arrays; None for all of them in one batch.
      learning_rate: the optimizer's learning rate, a number or a function of the total number of steps that returns
        a schedule. It is reported, and `--learning-rate` scales the updates relative to its largest value.
      prepare: returns the input of `loss_fn` and `metrics`, given examples of the arrays; runs on the host.
      augment: `augment(examples, seeds)` replaces `prepare` for training examples if preparing them is random. `seeds`
        are uint64 [examples] and depend on the run's seed, the epoch and the example.
      shared: returns a dict that is the same for all batches, such as a graph. It is cast once, stays on the device,
        and is added to each batch.
      shards_shared: True if the devices share one large example, such as a partitioned graph. The arrays of `shared`
        and of each batch then have rows of the devices' parts, whatever the number of examples.
      loading_threads: threads that prepare batches of arrays.
      batch_norms: returns the paths of the model's BatchNorms in the parameters, for AMP modes that keep them in
        float32; see `jt.policies.batch_norm_paths`.

    Raises:
      TypeError: an argument is of another kind than listed above.
      ValueError: a number is out of range, arrays have different numbers of examples, or arguments exclude each other.

    Example:
      >>> import jax.numpy as jnp, jmp_train as jt
      >>> x = np.linspace(-1, 1, 64, dtype=np.float32)[:, None]
      >>> def loss_fn(params, batch):
      ...     return jnp.square(batch["x"] @ params["w"] - batch["y"]).mean()
      >>> task = jt.Task(
      ...     init=lambda key: ({"w": jnp.zeros((1, 1))}, None),
      ...     loss_fn=jt.stateless(loss_fn),
      ...     optimizer=optax.sgd(0.1),
      ...     train={"x": x, "y": 3 * x},
      ...     batch_size=16,
      ...     epochs=2,
      ... )
      >>> task.epochs
      2
    """

    init: Callable[[jax.Array], tuple[Any, Any]]
    loss_fn: LossFn
    optimizer: Optimizer
    train: Any  # Arrays, or a function of the epoch
    epochs: int = 1
    evaluate: Callable[[Any, Any], Mapping[str, Any]] | None = None
    metrics: Any = None  # a function
    test: Any = None  # Arrays, or a function
    higher_is_better: bool = True
    steps_per_epoch: int | None = None
    batch_size: int | None = None
    learning_rate: LearningRate | None = None
    prepare: Callable[[Any], Any] = _as_they_are
    augment: Callable[[Any, np.ndarray], Any] | None = None
    shared: Callable[[], dict[str, Any]] = dict
    shards_shared: bool = False
    loading_threads: int = 1
    batch_norms: Callable[[], tuple[str, ...]] = tuple

    def __post_init__(self) -> None:
        for name in ("init", "loss_fn", "prepare", "shared", "batch_norms"):
            if not callable(getattr(self, name)):
                raise TypeError(f"Task: {name} must be a function, got {_kind(getattr(self, name))}")
        for name in ("evaluate", "metrics", "augment"):
            if not (getattr(self, name) is None or callable(getattr(self, name))):
                raise TypeError(f"Task: {name} must be a function or None, got {_kind(getattr(self, name))}")
        for name, parameters in _CALLS.items():
            _check_parameters(name, getattr(self, name), parameters)
        if not (isinstance(self.optimizer, optax.GradientTransformation) or callable(self.optimizer)):
            raise TypeError(
                "Task: optimizer must be an optax optimizer, or a function of the number of steps that returns one, "
                f"got {_kind(self.optimizer)}"
            )
        for name in ("epochs", "steps_per_epoch", "batch_size", "loading_threads"):
            _check_count(name, getattr(self, name), optional=name in ("steps_per_epoch", "batch_size"))
        for name in ("higher_is_better", "shards_shared"):
            check_flag(f"Task: {name}", getattr(self, name))
        self._check_data()
        if self.evaluate is not None and self.metrics is not None:
            raise ValueError("Task: evaluate and metrics exclude each other")
        if (self.metrics is None) != (self.test is None):
            given, missing = ("test", "metrics") if self.metrics is None else ("metrics", "test")
            raise ValueError(f"Task: {given} is given without {missing}")
        rate = self.learning_rate
        if not (rate is None or callable(rate) or (isinstance(rate, int | float) and rate > 0)):
            raise TypeError(
                "Task: learning_rate must be a number above 0, or a function of the number of steps that returns a "
                f"schedule, got {rate!r}"
            )

    def _check_data(self) -> None:
        if callable(self.train):
            for name in ("batch_size", "augment"):
                if getattr(self, name) is not None:
                    raise ValueError(f"Task: {name} is for a train of arrays, but train returns batches")
        else:
            _check_arrays("train", self.train, "a function of the epoch that returns batches")
            if self.steps_per_epoch is not None:
                raise ValueError("Task: steps_per_epoch is for a train that returns batches, but train is arrays")
        if self.test is not None and not callable(self.test):
            _check_arrays("test", self.test, "a function that returns batches")

    def initial(self, key: jax.Array) -> tuple[Any, Any]:
        """Returns the parameters and the model state of a new model; raises TypeError if `init` returns others."""
        made = self.init(key)
        if not isinstance(made, tuple) or len(made) != 2:
            raise TypeError(f"Task: init must return (params, model_state), got {_kind(made)}")
        return made

    def optimizer_for(self, total: int | None) -> optax.GradientTransformation:
        """Returns the optimizer of a run.

        Args:
          total: steps of the run; None if it is unknown.

        Raises:
          ValueError: `optimizer` is a function of the number of steps, and the number is unknown.
          TypeError: `optimizer` does not return an optax optimizer.
        """
        if isinstance(self.optimizer, optax.GradientTransformation):
            return self.optimizer
        optimizer = self.optimizer(_known(total, "optimizer"))
        if not isinstance(optimizer, optax.GradientTransformation):
            raise TypeError(f"Task: optimizer({total}) must return an optax optimizer, got {_kind(optimizer)}")
        return optimizer

    def schedule_for(self, total: int | None) -> optax.Schedule | None:
        """Returns the learning rate by the number of steps taken; None if the task does not define it.

        Args:
          total: steps of the run; None if it is unknown.

        Raises:
          ValueError: `learning_rate` is a function of the number of steps, and the number is unknown.
          TypeError: `learning_rate` does not return a schedule.
        """
        if self.learning_rate is None:
            return None
        if not callable(self.learning_rate):
            return optax.constant_schedule(self.learning_rate)
        schedule = self.learning_rate(_known(total, "learning_rate"))
        if not callable(schedule):
            raise TypeError(f"Task: learning_rate({total}) must return a schedule, got {_kind(schedule)}")
        return schedule


def count_examples(data: PyTree) -> int:
    """Returns the number of examples of arrays.

    Args:
      data: tree of arrays `[examples, ...]`.
    """
    return len(jax.tree.leaves(data)[0])


def _known(total: int | None, name: str) -> int:
    if total is None:
        raise ValueError(
            f"Task: {name} is a function of the number of steps, which is unknown, because the batches of train have "
            "no length: give the task steps_per_epoch, or the command --steps"
        )
    return total


def _check_arrays(name: str, data: Any, otherwise: str) -> None:
    wanted = f"Task: {name} must be a dict of arrays [examples, ...], or {otherwise}"
    if not isinstance(data, Mapping) or not data:
        raise TypeError(f"{wanted}, got {_kind(data)}")
    counts = {}
    for path, leaf in named_leaves(data):
        if not getattr(leaf, "shape", ()):
            raise TypeError(f"{wanted}, got {_kind(leaf)} at {path!r}")
        counts[path] = len(leaf)
    if len(set(counts.values())) > 1:
        found = ", ".join(f"{path!r} has {count}" for path, count in counts.items())
        raise ValueError(f"Task: the arrays of {name} must have the same number of examples: {found}")
    if not all(counts.values()):
        raise ValueError(f"Task: {name} has no examples")


def _check_parameters(name: str, function: Any, parameters: Sequence[str]) -> None:
    """Raises TypeError now if a command could not call a function later, perhaps after hours of training."""
    if not callable(function):
        return
    try:
        signature = inspect.signature(function)
    except (ValueError, TypeError):  # the parameters of a built-in function are unknown
        return
    try:
        signature.bind(*parameters)
    except TypeError as error:
        raise TypeError(f"Task: {name} is called as {name}({', '.join(parameters)}): {error}") from None


def _check_count(name: str, number: Any, optional: bool) -> None:
    if number is None and optional:
        return
    if isinstance(number, bool) or not isinstance(number, int | np.integer):
        raise TypeError(f"Task: {name} must be a whole number, got {number!r}")
    if number < 1:
        raise ValueError(f"Task: {name}={number} must be at least 1")


def _kind(value: object) -> str:
    return "None" if value is None else f"a {type(value).__name__}"
