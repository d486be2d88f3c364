"""The programs that a plan compares: a step in several precisions, on one device or sharded over several."""

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from jmp_train.parallel import (
    data_parallel,
    fsdp_shardings,
    sharded_step,
    specs_by_path,
    state_shardings,
    zero1_shardings,
)
from jmp_train.policies import Amp, PathPolicy, Policy
from jmp_train.policies.dtype_policies import named_policy
from jmp_train.steps import TrainState, TrainStep
from jmp_train.tools.aot import ExportedProgram, ExportError, export_program, is_shape, shapes_of
from jmp_train.tools.planning.batches import Batches, batches_of

Shardings = str | Callable[[Any, AbstractMesh], Any] | Mapping[str, Any]
Precision = str | Policy | PathPolicy | Amp

REPLICATED, ZERO1, FSDP = "replicated", "zero1", "fsdp"
DATA = "data"  # the axis of a mesh along which the batch is split
_RULES: dict[str, Callable[..., Any]] = {ZERO1: zero1_shardings, FSDP: fsdp_shardings}


@dataclasses.dataclass(frozen=True)
class Placement:
    """The devices of a step and the shardings of its state.

    Attributes:
      devices: number of devices.
      shardings: "replicated", "zero1", "fsdp", rules of `specs_by_path`, or a function of the state's shapes and the
        mesh.
      mesh: the axes of the mesh and their lengths; () for one axis, "data".
      hosts: number of hosts, for GPUs.

    Example:
      >>> str(Placement()), str(Placement(8, "zero1")), str(Placement(64, "fsdp", (("data", 32), ("model", 2)), 8))
      ('1 device', '8 devices, zero1', '64 devices on 8 hosts, data 32 x model 2, fsdp')
    """

    devices: int = 1
    shardings: Shardings = REPLICATED
    mesh: tuple[tuple[str, int], ...] = ()
    hosts: int = 1

    @property
    def axes(self) -> dict[str, int]:
        """The axes of the mesh and their lengths."""
        return dict(self.mesh or ((DATA, self.devices),))

    @property
    def batch_parts(self) -> int:
        """The number of parts into which the batch is split."""
        return self.axes[DATA]

    def __str__(self) -> str:
        if self.devices == 1:
            return "1 device"
        name = self.shardings if isinstance(self.shardings, str) else getattr(self.shardings, "__name__", "own")
        hosts = f" on {self.hosts} hosts" if self.hosts > 1 else ""
        mesh = f", {' x '.join(f'{axis} {n}' for axis, n in self.mesh)}" if self.mesh else ""
        return f"{self.devices} devices{hosts}{mesh}, {name}"

    def __hash__(self) -> int:
        """Returns a hash, also of rules."""
        rules = tuple(self.shardings) if isinstance(self.shardings, Mapping) else self.shardings
        return hash((self.devices, rules, self.mesh, self.hosts))


@dataclasses.dataclass(frozen=True)
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
        """Returns the number of which batch sizes must be multiples."""
        return placement.batch_parts * (self.step.accumulate_steps if isinstance(self.step, TrainStep) else 1)

    def state_bytes(self, placement: Placement) -> int:
        """Returns the bytes of the state on each device, without padding: the least that any program takes.

        Args:
          placement: the devices and shardings.
        """
        mesh = _abstract_mesh(placement)
        _, own = _spread(self.step, self.state, placement.shardings, mesh)
        is_sharding = lambda x: isinstance(x, NamedSharding)
        pairs = zip(jax.tree.leaves(self.state), jax.tree.leaves(own, is_leaf=is_sharding), strict=True)
        return sum(math.prod(s.shard_shape(x.shape)) * _item_bytes(x) for x, s in pairs if is_shape(x))

    def exported(self, placement: Placement, size: int, *, donate: bool, platform: str = "cuda") -> ExportedProgram:
        """Returns the step for a batch size, traced for some devices.

        Raises:
          ExportError: the program cannot be compiled for other devices; the message names the precision and the remedy.
        """
        try:
            return self._exported(placement, size, donate, platform)
        except ExportError as error:
            raise ExportError(f"policy {self.policy}, {placement}: {error}") from error

    def _exported(self, placement: Placement, size: int, donate: bool, platform: str) -> ExportedProgram:
        arguments = (self.state, shapes_of(self.batches(size)))
        donated = (0,) if donate else ()
        names = ("state", "batch")
        if placement.devices == 1:
            return export_program(self.step, arguments, names=names, donated=donated, platform=platform)
        mesh = _abstract_mesh(placement)
        step, state_shardings = _spread(self.step, self.state, placement.shardings, mesh)
        split, whole = NamedSharding(mesh, PartitionSpec(DATA)), NamedSharding(mesh, PartitionSpec())
        batch_shardings = jax.tree.map(lambda x: split if getattr(x, "shape", ()) else whole, arguments[1])
        return export_program(
            step,
            arguments,
            names=names,
            donated=donated,
            shardings=(state_shardings, batch_shardings),
            devices=placement.devices,
            platform=platform,
        )


def variants_of(
    step: Callable[..., Any],
    state: Any,
    batch: Any,
    batch_size: int | None,
    policies: Precision | Sequence[Precision] | None,
    *,
    grows: bool = True,
) -> list[Variant]:
    """Returns the step in each of the precisions.

    Args:
      step: see `plan`, as are the others.
      state: its state.
      batch: its batch, or a function of the number of examples.
      batch_size: the first number of examples.
      policies: one or several; None for the step as it is.
      grows: see `batches_of`.

    Raises:
      TypeError: the precision of the step cannot be replaced.
      ValueError: there is no such policy, or none at all.
    """
    return [
        Variant(policy, step, shapes_of(state), *batches_of(batch, batch_size, grows=grows))
        for policy, step, state, batch in _in_precisions(step, state, batch, policies)
    ]


def _in_precisions(
    step: Callable[..., Any], state: Any, batch: Any, policies: Precision | Sequence[Precision] | None
) -> list[tuple[str, Callable[..., Any], Any, Any]]:
    """Returns name, step, state and batch of each precision."""
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
        return [("as it is" if policy is None else _name(policy), step, state, batch)]
    if not isinstance(step, TrainStep) or not isinstance(state, TrainState):
        raise TypeError(
            f"policies can be given for a TrainStep and its TrainState, not for {type(step).__name__} and "
            f"{type(state).__name__}; or let step be a function of the policy that returns (step, state, batch)"
        )
    return [(_name(policy), *in_precision(step, state, policy), batch) for policy in policies]


def several(name: str, given: Any, kinds: tuple[Any, ...]) -> list[Any]:
    """Returns an argument, one item or several, as a list.

    Args:
      name: name of the argument, for errors.
      given: the argument.
      kinds: the types of one.

    Raises:
      TypeError: `given` is neither one item nor several.
      ValueError: `given` is empty.
    """
    if isinstance(given, kinds):
        return [given]
    if not isinstance(given, Iterable):
        names = " or ".join(kind.__name__ for kind in kinds)
        raise TypeError(f"{name}={given!r} must be of type {names}, or several of these")
    if not (found := list(given)):
        raise ValueError(f"{name} is empty")
    return found


def _made_by(make: Callable[..., Any], policy: Precision) -> tuple[Any, Any, Any]:
    made = make(policy)
    if not isinstance(made, tuple) or len(made) != 3:
        raise TypeError(f"step({policy!r}) must return (step, state, batch), got {type(made).__name__}")
    return made


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


def _abstract_mesh(placement: Placement) -> AbstractMesh:
    axes = placement.axes
    return AbstractMesh(tuple(axes.values()), tuple(axes), axis_types=(AxisType.Auto,) * len(axes))


def _item_bytes(x: jax.ShapeDtypeStruct) -> int:
    return 8 if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else jnp.dtype(x.dtype).itemsize


def _spread(step: Callable[..., Any], state: Any, shardings: Shardings, mesh: Any) -> tuple[Any, Any]:
    """Returns the step over a mesh, and the shardings of its state."""
    whole = jax.tree.map(lambda x: NamedSharding(mesh, PartitionSpec()), state)
    if shardings == REPLICATED:
        return (data_parallel(step, mesh) if isinstance(step, TrainStep) else step), whole  # pyright: ignore
    if callable(shardings):
        own = shardings(state, mesh)
    elif isinstance(state, TrainState) and isinstance(shardings, Mapping):
        own = state_shardings(state, mesh, params=specs_by_path(state.params, shardings))
    elif isinstance(state, TrainState) and isinstance(shardings, str):
        own = _RULES[shardings](state, mesh)
    else:
        raise TypeError(f"shardings={shardings!r} is for a TrainState, not for {type(state).__name__}: give a function")
    return (sharded_step(step, mesh, shardings=own) if isinstance(step, TrainStep) else step), own  # pyright: ignore


def _name(policy: object) -> str:
    """Returns a row's name of a precision; modes have the names of the command line: "apex-O2", "torch-bfloat16"."""
    if not isinstance(policy, Amp):
        return policy if isinstance(policy, str) else str(policy)
    level = getattr(policy.options, "opt_level", None)
    half = "" if policy.dtype == "float16" else f"-{policy.dtype}"
    return policy.mode.value + (f"-{level}" if level else "") + half
