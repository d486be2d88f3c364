"""What is tuned, as a pure function of examples and of how the function that autocast runs is transformed."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import optax

from jmp_train.policies.autocasting import FlatCall, missing_key_explained
from jmp_train.policies.dtype_policies import FirstTrace, Policy
from jmp_train.policies.loss_scaling import StaticLossScale, unpack_loss
from jmp_train.policies.optimizers import scaled_states
from jmp_train.policies.pytrees import is_float_array, is_inexact_array, is_nnx_object, named_leaves
from jmp_train.steps import NO_KEY, TrainState, TrainStep, unstacked, unwatched_value_and_grad
from jmp_train.tuning.tolerance import Outcome

Transform = Callable[[Callable[..., Any]], Callable[..., Any]]
Example = tuple[Any, ...]

_F32 = jnp.float32


def as_it_is(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function as it runs in float32."""
    return fn


@dataclasses.dataclass(frozen=True, eq=False)
class TransformPolicy(Policy):
    """A policy under which functions run as a transform has them run, on float32 arguments.

    Args:
      param_dtype: see `Policy`.
      compute_dtype: see `Policy`.
      output_dtype: see `Policy`.
      reduce_dtype: see `Policy`.
      run: returns a function as it runs.
    """

    run: Transform = as_it_is

    def transform(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """Returns `run(fn)`."""
        return self.run(fn)


class Subject(Protocol):
    """A function or a step of which precision is tuned."""

    def outcome(self, transform: Transform, scale: Any, *example: Any) -> Outcome:
        """Returns results and gradients.

        Args:
          transform: of the function that autocast runs.
          scale: of the loss; gradients are divided by it again.
          *example: arguments.
        """
        ...

    def rounded(self, example: Example, dtype: Any) -> Example:
        """Returns an example whose parameters were rounded to a half type once; what has none as it is."""
        ...

    def objective(self, transform: Transform, *example: Any) -> jax.Array:
        """Returns a scalar whose derivative says what matters: the loss or, of other results, their squares.

        Args:
          transform: see `outcome`.
          *example: arguments.
        """
        ...


def subject_of(fn: Callable[..., Any], examples: Sequence[Example]) -> tuple[Subject, list[Example]]:
    """Returns what is tuned, and the examples that it takes.

    Args:
      fn: a loss, another function, or a `TrainStep`.
      examples: its arguments; an nnx module among the first ones is taken apart.

    Raises:
      TypeError: an example of a step is no state and batch.
    """
    if isinstance(fn, TrainStep):
        for number, example in enumerate(examples):
            if len(example) != 2 or not isinstance(example[0], TrainState):
                raise TypeError(f"examples[{number}] must be a TrainState and a batch, as the step takes them")
        return _Step(fn), list(examples)
    if examples[0] and is_nnx_object(examples[0][0]):
        fn, examples = _of_parts(fn, examples)
    return _Function(fn, _kind(fn, examples[0])), list(examples)


def steps_taken(examples: Sequence[Example]) -> int | None:
    """Returns how many steps of training the least trained state among the examples has behind it.

    That is a state's `step` without those that were skipped, or the largest `count` that optax keeps in its
    `opt_state`. None if no example has such a counter.

    Args:
      examples: arguments, with values.
    """
    found = [steps for example in examples for x in example if (steps := _steps_of(x)) is not None]
    return min(found, default=None)


def _steps_of(x: object) -> int | None:
    opt_state = getattr(x, "opt_state", None)
    skipped = max((int(jnp.max(state.skipped_steps)) for _, state in scaled_states(opt_state)), default=0)
    steps = [getattr(x, "step", None)] if opt_state is not None else []
    made = [int(step) - skipped for step in jax.tree.leaves(steps) if _is_counter((), step)]
    counts = optax.tree.get_all_with_path(opt_state, "count", _is_counter)
    return max(made + [int(count) for _, count in counts], default=None)


def _is_counter(path: object, x: Any) -> bool:  # the moments of a parameter "count" have the name too
    is_number = isinstance(x, int) or hasattr(x, "dtype")
    return is_number and jnp.shape(x) == () and jnp.issubdtype(jnp.result_type(x), jnp.integer)


def _of_parts(fn: Callable[..., Any], examples: Sequence[Example]) -> tuple[Callable[..., Any], list[Example]]:
    """Returns a function of an nnx module as one of its parameters and of all else in it."""
    from flax import nnx

    graph, *_ = nnx.split(examples[0][0], nnx.Param, ...)

    def of_parts(params: Any, rest: Any, *args: Any) -> Any:
        return fn(nnx.merge(graph, params, rest, copy=True), *args)

    taken = [(*nnx.split(example[0], nnx.Param, ...)[1:], *example[1:]) for example in examples]
    return of_parts, taken


def _kind(fn: Callable[..., Any], example: Example) -> str:
    """Returns whether a function is a "loss", a loss with an "aux", or something else, "results"."""
    found: list[str] = []

    def noted(*args: Any) -> Any:
        result = fn(*args)
        first = result[0] if isinstance(result, tuple) and len(result) == 2 else None
        found[:] = ["loss" if _is_scalar(result) else "aux" if _is_scalar(first) else "results"]
        return result

    call = FlatCall(example, {})
    jax.eval_shape(call.of_arrays(noted), *call.avals)
    differentiable = example and any(is_inexact_array(x) for x in jax.tree.leaves(example[0]))
    return found[0] if differentiable else "results"


def _is_scalar(x: object) -> bool:
    return is_float_array(x) and jnp.shape(x) == ()


@dataclasses.dataclass(frozen=True)
class _Function:
    """A loss, or any other function of arrays."""

    fn: Callable[..., Any]
    kind: str

    def outcome(self, transform: Transform, scale: Any, *example: Any) -> Outcome:
        """See `Subject`."""
        if self.kind == "results":
            return Outcome(_floats(transform(self.fn)(*example)), {})
        policy = TransformPolicy(_F32, _F32, _F32, run=transform)
        value_and_grad = unwatched_value_and_grad(self.fn, policy, has_aux=self.kind == "aux")
        value, grads = value_and_grad(StaticLossScale(scale), *example)
        return Outcome([value[0] if self.kind == "aux" else value], _unscaled(grads, scale))

    def rounded(self, example: Example, dtype: Any) -> Example:
        """See `Subject`."""
        return example if self.kind == "results" else (_rounded(example[0], dtype), *example[1:])

    def objective(self, transform: Transform, *example: Any) -> jax.Array:
        """See `Subject`."""
        result = transform(self.fn)(*example)
        if self.kind == "results":
            return jnp.asarray(sum(jnp.vdot(jax.lax.stop_gradient(x), x) for x in _floats(result)))
        return jnp.asarray(result[0] if self.kind == "aux" else result, _F32)


@dataclasses.dataclass(frozen=True)
class _Step:
    """A training step: loss and gradients of a batch, with its micro-batches."""

    step: TrainStep

    def outcome(self, transform: Transform, scale: Any, *example: Any) -> Outcome:
        """See `Subject`."""
        state, batch = example
        found = self._under(transform).gradients(
            StaticLossScale(scale), state.params, state.model_state, batch, _key_of(state)
        )
        return Outcome([found.loss], _unscaled(found.grads, scale))

    def rounded(self, example: Example, dtype: Any) -> Example:
        """See `Subject`."""
        state, batch = example
        return dataclasses.replace(state, params=_rounded(state.params, dtype)), batch

    def objective(self, transform: Transform, *example: Any) -> jax.Array:
        """See `Subject`."""
        state, batch = example
        batch = unstacked(batch, self.step.accumulate_steps)
        with missing_key_explained(lambda: NO_KEY if state.rng is None else None):
            result = transform(self.step.loss_fn)(state.params, state.model_state, batch, _key_of(state))
        loss, _ = unpack_loss(result)
        return jnp.asarray(sum(loss) if isinstance(loss, tuple | list) else loss, _F32)

    def _under(self, transform: Transform) -> TrainStep:
        policy = TransformPolicy(_F32, _F32, _F32, reduce_dtype=self.step.reduce_dtype, run=transform)
        return dataclasses.replace(self.step, policy=policy, first_trace=FirstTrace.past())


def _rounded(params: Any, dtype: Any) -> Any:
    """Returns parameters with float32 numbers rounded to a half type, those beyond its range as they are."""

    def once(x: Any) -> Any:
        if not is_float_array(x) or x.dtype != _F32:
            return x
        cast = jnp.asarray(x).astype(dtype).astype(_F32)
        return jnp.where(jnp.isfinite(cast), cast, x)

    return jax.tree.map(once, params)


def _key_of(state: TrainState) -> Any:
    return None if state.rng is None else jax.random.split(state.rng)[1]


def _floats(tree: Any) -> list[jax.Array]:
    return [jnp.asarray(x, _F32) for x in jax.tree.leaves(tree) if is_float_array(x)]


def _unscaled(grads: Any, scale: Any) -> dict[str, jax.Array]:
    return {path: x / scale for path, x in named_leaves(grads) if is_float_array(x)}
