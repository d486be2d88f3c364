"""The subject of a plan: a training step with its state and batch, in one or several precisions."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jmp_train.policies import Amp, PathPolicy, Policy
from jmp_train.policies.dtype_policies import named_policy
from jmp_train.steps import TrainState, TrainStep
from jmp_train.tools.aot import ExportedProgram, ExportError, export_program, is_shape, shapes_of
from jmp_train.tools.planning.batches import Batches, batches_of
from jmp_train.tools.planning.placements import DATA, Placement, several

Precision = str | Policy | PathPolicy | Amp


@dataclasses.dataclass(frozen=True, eq=False)
class Workload:
    """A training step to plan. Shapes suffice for state and batch.

    Attributes:
      step: a function `(state, batch) -> anything`, such as a `TrainStep`, not yet parallel. Without `state` and
        `batch`, a function of a policy that returns `(step, state, batch)`. The next state takes the place of the last.
      state: pytree of arrays or `jax.ShapeDtypeStruct`.
      batch: the same, with the examples along all first axes; or, for batches that grow otherwise, such as graphs, a
        function of the number of examples.
      policies: one or several names, `Policy`s or AMP modes in which to plan a `TrainStep`; the state's parameters and
        optimizer state are made anew for each. AMP modes want an optimizer without a loss scale. None for the step as
        it is.
      batch_size: examples of a step, over all devices; None for those of `batch`.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> import jmp_train as jt
      >>> step = jt.train_step(jt.stateless(lambda w, x: ((x @ w) ** 2).mean()), optax.adam(1e-3))
      >>> state = jax.eval_shape(lambda: jt.TrainState.create(jnp.zeros((1024, 1024)), optax.adam(1e-3)))
      >>> batch = jax.ShapeDtypeStruct((64, 1024), jnp.float32)
      >>> [variant.policy for variant in Workload(step, state, batch, ["float32", "mixed_float16"]).variants()]
      ['float32', 'mixed_float16']
    """

    step: Callable[..., Any]
    state: Any = None
    batch: Any = None
    policies: Precision | Sequence[Precision] | None = None
    batch_size: int | None = None

    def variants(self, *, grows: bool = True) -> list["Variant"]:
        """Returns the step in each of the precisions.

        Args:
          grows: see `batches_of`.

        Raises:
          TypeError: the precision of the step cannot be replaced.
          ValueError: there is no such policy, or none at all.
        """
        return [
            Variant(policy, step, shapes_of(state), *batches_of(batch, self.batch_size, grows=grows))
            for policy, step, state, batch in self._in_precisions()
        ]

    def _in_precisions(self) -> list[tuple[str, Callable[..., Any], Any, Any]]:
        """Returns name, step, state and batch of each precision."""
        step, state, policies = self.step, self.state, self.policies
        if policies is not None:
            policies = several("policies", policies, (str, Policy, PathPolicy, Amp))
        if not callable(step):
            raise TypeError(f"step must be a function of state and batch, got {type(step).__name__}")
        if isinstance(step, jax.stages.Compiled):
            raise TypeError("step is compiled already, for this machine: give the function that was lowered")
        if state is None:
            if policies is None:
                raise TypeError("step without a state must be a function of a policy, and so policies must be given")
            return [(_name(policy), *_made_by(step, policy)) for policy in policies]
        if policies is None:
            policy = getattr(step, "policy", None)
            return [("as it is" if policy is None else _name(policy), step, state, self.batch)]
        if not isinstance(step, TrainStep) or not isinstance(state, TrainState):
            raise TypeError(
                f"policies can be given for a TrainStep and its TrainState, not for {type(step).__name__} and "
                f"{type(state).__name__}; or let step be a function of the policy that returns (step, state, batch)"
            )
        return [(_name(policy), *in_precision(step, state, policy), self.batch) for policy in policies]


@dataclasses.dataclass(frozen=True, eq=False)
class Variant:
    """A step in one precision.

    Attributes:
      policy: its name.
      step: a function of state and batch.
      state: its shapes.
      batches: the shapes of a batch by its size.
      batch_size: the first size.
    """

    policy: str
    step: Callable[[Any, Any], Any]
    state: Any
    batches: Batches
    batch_size: int

    def multiple(self, placement: Placement) -> int:
        """Returns the number that must divide every batch size."""
        return placement.batch_parts * (self.step.accumulate_steps if isinstance(self.step, TrainStep) else 1)

    def state_bytes(self, placement: Placement) -> int:
        """Returns the bytes of the state on each device, without padding: the least that any program takes.

        Args:
          placement: the devices and shardings.
        """
        _, own = placement.spread(self.step, self.state)
        is_sharding = lambda x: isinstance(x, NamedSharding)
        pairs = zip(jax.tree.leaves(self.state), jax.tree.leaves(own, is_leaf=is_sharding), strict=True)
        return sum(math.prod(s.shard_shape(x.shape)) * _item_bytes(x) for x, s in pairs if is_shape(x))

    def exported(self, placement: Placement, size: int, platform: str = "cuda") -> ExportedProgram:
        """Returns the step for a batch size, traced for some devices.

        Args:
          placement: the devices and shardings.
          size: number of examples.
          platform: "cuda" or "tpu".

        Raises:
          ExportError: the program cannot be compiled for other devices; the message names the precision and the remedy.
        """
        arguments = (self.state, shapes_of(self.batches(size)))
        step, shardings = self.step, None
        if placement.devices > 1:
            step, of_state = placement.spread(step, self.state)
            split, whole = (
                NamedSharding(placement.abstract_mesh, spec) for spec in (PartitionSpec(DATA), PartitionSpec())
            )
            shardings = of_state, jax.tree.map(lambda x: split if getattr(x, "shape", ()) else whole, arguments[1])
        try:
            return export_program(
                step,
                arguments,
                names=("state", "batch"),
                donated=(0,),
                shardings=shardings,
                devices=placement.devices,
                platform=platform,
            )
        except ExportError as error:
            raise ExportError(f"policy {self.policy}, {placement}: {error}") from error


def in_precision(step: TrainStep, state: TrainState, policy: Precision) -> tuple[TrainStep, TrainState]:
    """Returns the step and the shapes of its state in another precision.

    Args:
      step: the step, whose optimizer has no loss scale if `policy` is an AMP mode.
      state: the shapes of its state.
      policy: the precision.
    """
    if isinstance(policy, Amp):
        return _in_mode(step, state, policy)
    policy = named_policy(policy, "each of policies that is no AMP mode")
    step = dataclasses.replace(
        step, policy=policy, first_trace=dataclasses.replace(step.first_trace, scale_missed=True)
    )

    def create(state: TrainState) -> TrainState:
        params = policy.cast_to_param(state.params)
        return TrainState.create(params, step.optimizer, model_state=state.model_state, rng=state.rng)

    return step, jax.eval_shape(create, state)


def _in_mode(step: TrainStep, state: TrainState, amp: Amp) -> tuple[TrainStep, TrainState]:
    loss_fn, optimizer = amp.transform(step.loss_fn, step.optimizer)
    step = dataclasses.replace(step, loss_fn=loss_fn, optimizer=optimizer, policy=None)

    def create(state: TrainState) -> TrainState:
        return TrainState.create(
            state.params,
            optimizer,
            model_state=amp.cast_model_state(state.model_state),
            rng=state.rng,
            cast_params=amp.cast_params,
        )

    return step, jax.eval_shape(create, state)


def _made_by(make: Callable[..., Any], policy: Precision) -> tuple[Any, Any, Any]:
    made = make(policy)
    if not isinstance(made, tuple) or len(made) != 3:
        raise TypeError(f"step({policy!r}) must return (step, state, batch), got {type(made).__name__}")
    return made


def _item_bytes(x: jax.ShapeDtypeStruct) -> int:
    return 8 if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else jnp.dtype(x.dtype).itemsize


def _name(policy: object) -> str:
    """Returns a row's name of a precision; modes have the names of the command line: "apex-O2", "torch-bfloat16"."""
    if not isinstance(policy, Amp):
        return policy if isinstance(policy, str) else str(policy)
    level = getattr(policy.options, "opt_level", None)
    half = "" if policy.dtype == "float16" else f"-{policy.dtype}"
    return policy.mode.value + (f"-{level}" if level else "") + half
