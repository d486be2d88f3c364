"""Tuned functions and steps, as pure functions of an example and of the transform that stands for autocast."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jmp_train.policies.autocasting import FlatCall, missing_key_explained
from jmp_train.policies.dtype_policies import FirstTrace, Policy
from jmp_train.policies.loss_scaling import StaticLossScale, unpack_loss
from jmp_train.policies.optimizers import scaled_states
from jmp_train.policies.pytrees import is_float_array, is_inexact_array, is_nnx_object, named_leaves
from jmp_train.steps import NO_KEY, TrainState, TrainStep, unstacked, unwatched_value_and_grad
from jmp_train.tools.tuning.tolerance import Outcome

Transform = Callable[[Callable[..., Any]], Callable[..., Any]]
Example = tuple[Any, ...]

_F32 = jnp.float32


def as_it_is(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the function itself, which runs in float32."""
    return fn


@dataclasses.dataclass(frozen=True, eq=False)
class TransformPolicy(Policy):
    """A policy that applies a transform to functions, and passes them float32 arguments.

    Args:
      param_dtype: see `Policy`.
      compute_dtype: see `Policy`.
      output_dtype: see `Policy`.
      reduce_dtype: see `Policy`.
      run: the transform.
    """

    run: Transform = as_it_is

    def transform(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """Returns `run(fn)`."""
        return self.run(fn)


def subject_of(fn: Callable[..., Any], examples: Sequence[Example]) -> tuple["Subject", list[Example]]:
    """Returns the tuned subject, and the examples that it takes.

    Args:
      fn: a loss, another function, or a `TrainStep`.
      examples: its arguments. An nnx module as first argument is split into parameters and the rest.

    Raises:
      TypeError: an example of a step is not a state and a batch.
    """
    if isinstance(fn, TrainStep):
        for number, example in enumerate(examples):
            if len(example) != 2 or not isinstance(example[0], TrainState):
                raise TypeError(f"examples[{number}] must be a TrainState and a batch, as the step takes them")
        return Subject(fn, "step"), list(examples)
    if examples[0] and is_nnx_object(examples[0][0]):
        fn, examples = _of_parts(fn, examples)
    return Subject(fn, _kind(fn, examples[0])), list(examples)


def steps_taken(examples: Sequence[Example]) -> int | None:
    """Returns the number of training steps of the least trained state among the examples.

    This is the state's `step` minus skipped steps, or the largest `count` in its `opt_state`. The result is None if
    no example has such a counter.

    Args:
      examples: arguments with values.
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
    """Returns a function of an nnx module as a function of its parameters and its other state."""
    from flax import nnx

    graph, *_ = nnx.split(examples[0][0], nnx.Param, ...)

    def of_parts(params: Any, rest: Any, *args: Any) -> Any:
        return fn(nnx.merge(graph, params, rest, copy=True), *args)

    taken = [(*nnx.split(example[0], nnx.Param, ...)[1:], *example[1:]) for example in examples]
    return of_parts, taken


def _kind(fn: Callable[..., Any], example: Example) -> str:
    """Returns "loss" for a scalar loss, "aux" for a loss with aux, and "results" otherwise."""
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
class Subject:
    """A function or a step whose precision is tuned.

    Attributes:
      fn: the function or the `TrainStep`.
      kind: "step", "loss", "aux" for a loss with aux, or "results" of any other function.
    """

    fn: Any
    kind: str

    def outcome(self, transform: Transform, scale: Any, *example: Any) -> Outcome:
        """Returns results and gradients.

        Args:
          transform: transform of the function that autocast runs.
          scale: loss scale; the returned gradients are unscaled.
          *example: arguments.
        """
        if self.kind == "results":
            return Outcome(_floats(transform(self.fn)(*example)), {})
        reduce_dtype = self.fn.reduce_dtype if self.kind == "step" else _F32
        policy = TransformPolicy(_F32, _F32, _F32, reduce_dtype=reduce_dtype, run=transform)
        if self.kind == "step":
            state, batch = example
            step = dataclasses.replace(self.fn, policy=policy, first_trace=FirstTrace.past())
            key = _key_of(state)
            found = step.gradients(StaticLossScale(scale), state.params, state.model_state, batch, key)
            return Outcome([found.loss], _unscaled(found.grads, scale))
        value_and_grad = unwatched_value_and_grad(self.fn, policy, has_aux=self.kind == "aux")
        value, grads = value_and_grad(StaticLossScale(scale), *example)
        return Outcome([value[0] if self.kind == "aux" else value], _unscaled(grads, scale))

    def rounded(self, example: Example, rounded: Callable[[jax.Array], jax.Array]) -> Example:
        """Returns the example with its parameters, if any, rounded once."""
        if self.kind == "results":
            return example
        first, *others = example
        is_step = self.kind == "step"
        params = _rounded(first.params if is_step else first, rounded)
        return (dataclasses.replace(first, params=params) if is_step else params, *others)

    def objective(self, transform: Transform, *example: Any) -> jax.Array:
        """Returns the scalar to differentiate: the loss, or the squares of other results.

        Args:
          transform: see `outcome`.
          *example: arguments.
        """
        if self.kind == "step":
            return _loss_of_step(self.fn, transform, *example)
        result = transform(self.fn)(*example)
        if self.kind == "results":
            return jnp.asarray(sum(jnp.vdot(jax.lax.stop_gradient(x), x) for x in _floats(result)))
        return jnp.asarray(result[0] if self.kind == "aux" else result, _F32)


def _loss_of_step(step: TrainStep, transform: Transform, state: TrainState, batch: Any) -> jax.Array:
    batch = unstacked(batch, step.accumulate_steps)
    with missing_key_explained(lambda: NO_KEY if state.rng is None else None):
        result = transform(step.loss_fn)(state.params, state.model_state, batch, _key_of(state))
    loss, _ = unpack_loss(result)
    return jnp.asarray(sum(loss) if isinstance(loss, tuple | list) else loss, _F32)


def _rounded(params: Any, rounded: Callable[[jax.Array], jax.Array]) -> Any:
    """Returns parameters with rounded float32 numbers; numbers beyond the range of the lower type are kept."""

    def once(x: Any) -> Any:
        if not is_float_array(x) or x.dtype != _F32:
            return x
        cast = rounded(jnp.asarray(x))
        return jnp.where(jnp.isfinite(cast), cast, x)

    return jax.tree.map(once, params)


def _key_of(state: TrainState) -> Any:
    return None if state.rng is None else jax.random.split(state.rng)[1]


def _floats(tree: Any) -> list[jax.Array]:
    return [jnp.asarray(x, _F32) for x in jax.tree.leaves(tree) if is_float_array(x)]


def _unscaled(grads: Any, scale: Any) -> dict[str, jax.Array]:
    return {path: x / scale for path, x in named_leaves(grads) if is_float_array(x)}
