"""Placements: how the devices of a machine hold the state of a step and share its batch."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from jmp_train.parallel import (
    data_parallel,
    fsdp_shardings,
    sharded_step,
    specs_by_path,
    state_shardings,
    zero1_shardings,
)
from jmp_train.steps import TrainState, TrainStep
from jmp_train.tools.planning.machines import Machine

Shardings = str | Callable[[Any, AbstractMesh], Any] | Mapping[str, Any]

REPLICATED, ZERO1, FSDP = "replicated", "zero1", "fsdp"
DATA = "data"  # the axis of a mesh along which the batch is split
_RULES: dict[str, Callable[..., Any]] = {ZERO1: zero1_shardings, FSDP: fsdp_shardings}
_LENGTHS = (2, 4, 8, 16)  # of the axis that rules shard over, in a search


@dataclass(frozen=True)
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

    @property
    def abstract_mesh(self) -> AbstractMesh:
        """The mesh, without devices."""
        axes = self.axes
        return AbstractMesh(tuple(axes.values()), tuple(axes), axis_types=(AxisType.Auto,) * len(axes))

    def spread(self, step: Callable[..., Any], state: Any) -> tuple[Callable[..., Any], Any]:
        """Returns a step over the mesh, and the shardings of its state.

        Args:
          step: the step of one device.
          state: the shapes of its state.

        Raises:
          TypeError: the shardings are for a `TrainState`, which the state is not.
        """
        mesh: Any = self.abstract_mesh
        shardings = self.shardings
        if shardings == REPLICATED:
            whole = jax.tree.map(lambda x: NamedSharding(mesh, PartitionSpec()), state)
            return (data_parallel(step, mesh) if isinstance(step, TrainStep) else step), whole
        if callable(shardings):
            own = shardings(state, mesh)
        elif isinstance(state, TrainState) and isinstance(shardings, Mapping):
            own = state_shardings(state, mesh, params=specs_by_path(state.params, shardings))
        elif isinstance(state, TrainState) and isinstance(shardings, str):
            own = _RULES[shardings](state, mesh)
        else:
            raise TypeError(
                f"shardings={shardings!r} is for a TrainState, not for {type(state).__name__}: give a function"
            )
        return (sharded_step(step, mesh, shardings=own) if isinstance(step, TrainStep) else step), own

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


@dataclass(frozen=True)
class PlanSearch:
    """The search of a plan: placements, and the largest batch.

    Attributes:
      largest_batch: whether to search for the largest batch that fits, which takes about five compilations. Without
        it, a batch without a common first axis, such as a graph, is planned as it is, as one example.
      shardings: shardings of the state over several devices: "replicated"; "zero1" or "fsdp", over "data"; rules of
        `specs_by_path` for the parameters; a function of the state's shapes and a mesh that returns shardings; or
        several of these.
      mesh: the axes of the mesh of all devices and their lengths, such as {"data": 16, "model": 16}; the batch is split
        along "data". None for this one axis.
      placement: whether to search for the fastest placement that fits, instead of planning the given ones: over
        "replicated", "zero1", "fsdp", and rules in `shardings` over meshes with an axis for them; where a step does not
        fit, also micro-batches and rematerialization. At most 40 programs are compiled. `Plan.fastest`,
        `Plan.smallest` and `Plan.cuts` have the result; largest batches are not searched for.
      progress: called with the number of programs compiled so far and the name of the next.

    Raises:
      TypeError: an argument is of another type.
      ValueError: there is no such sharding, or a mesh lacks the axis "data" or has a length below 1.

    Example:
      >>> [str(placed) for placed in PlanSearch(shardings=["replicated", "fsdp"]).placements(Machine("v5e:2x2"))]
      ['4 devices, replicated', '4 devices, fsdp']
    """

    largest_batch: bool = True
    shardings: Shardings | Sequence[Shardings] = REPLICATED
    mesh: Mapping[str, int] | None = None
    placement: bool = False
    progress: Callable[[int, str], None] | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        for one in several("shardings", self.shardings, (str, Callable, Mapping)):
            if isinstance(one, str) and one not in (REPLICATED, ZERO1, FSDP):
                raise ValueError(f"shardings={one!r} must be 'replicated', 'zero1', 'fsdp', rules, or a function")
        mesh = self.mesh
        if mesh is None:
            return
        if not isinstance(mesh, Mapping) or not all(isinstance(axis, str) for axis in mesh):
            raise TypeError(f"mesh={mesh!r} must be a dict of axes and lengths, such as {{'data': 16, 'model': 16}}")
        if not all(isinstance(n, int) and not isinstance(n, bool) and n > 0 for n in mesh.values()):
            raise ValueError(f"mesh={dict(mesh)!r} must have lengths of at least 1")
        if DATA not in mesh:
            raise ValueError(
                f"mesh={dict(mesh)!r} needs an axis {DATA!r} along which the batch is split, perhaps of length 1"
            )

    def placements(self, machine: Machine) -> list[Placement]:
        """Returns the placements to compare on a machine; with `placement`, those with which the search begins.

        Args:
          machine: the devices; on one device, nothing is sharded.

        Raises:
          ValueError: the mesh has another number of devices.
        """
        count, mesh = machine.devices, tuple((self.mesh or {}).items())
        if mesh and math.prod(n for _, n in mesh) != count:
            found = math.prod(n for _, n in mesh)
            raise ValueError(f"mesh={dict(mesh)!r} has {found} devices, but {machine.kind.name} has {count}")
        given = several("shardings", self.shardings, (str, Callable, Mapping))
        if count == 1 or not self.placement:
            return [Placement(count, one, mesh, machine.hosts) for one in (given if count > 1 else [REPLICATED])]
        own = [one for one in given if not isinstance(one, str)]
        found = [Placement(count, one, mesh, machine.hosts) for one in (REPLICATED, ZERO1, FSDP, *own)]
        return list(dict.fromkeys(mesh for placed in found for mesh in _over_meshes(placed)))


def _over_meshes(placed: Placement) -> list[Placement]:
    """Returns a placement; if it has rules without a mesh, over the meshes with an axis for them."""
    names = _axes(placed.shardings) if isinstance(placed.shardings, Mapping) else []
    if placed.mesh or len(names) != 1:
        return [placed]
    lengths = [n for n in _LENGTHS if placed.devices % n == 0]
    return [replace(placed, mesh=((DATA, placed.devices // n), (names[0], n))) for n in lengths]


def _axes(rules: Mapping[str, Any]) -> list[str]:
    """Returns the axes that rules name, without the batch's."""
    entries = [entry for spec in rules.values() for entry in (spec or ())]
    names = [name for entry in entries for name in (entry if isinstance(entry, tuple) else (entry,))]
    return [name for name in dict.fromkeys(names) if isinstance(name, str) and name != DATA]


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
