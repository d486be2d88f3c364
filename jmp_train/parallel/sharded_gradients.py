"""Gradients of parameters that are sharded over the devices that share a batch, gathered in the dtype of their use.

Policies, AMP modes and autocast all cast parameters in their own way, so the casts are read from the traced program:
parameters that are only ever cast to float16 are gathered in float16.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Jaxpr, jaxpr_as_fun
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

from jmp_train.parallel.mesh_axes import (
    dimension_over,
    without_axis,
)
from jmp_train.parallel.shardings import gradient_dimensions
from jmp_train.policies import Params, PyTree
from jmp_train.policies.loss_scaling import LossScales, PerLossScale
from jmp_train.policies.optimizers import loss_scale_of
from jmp_train.policies.programs import ABSTRACTLY, Enter, Reading
from jmp_train.policies.pytrees import is_inexact, mean_over_axes, scatter_gradients
from jmp_train.steps import (
    GradientFunction,
    StepGradients,
    TrainState,
    TrainStep,
    weighed,
    with_device_sums,
)
from jmp_train.types import Batch, ModelState

# Pass on the values of their first operand, reordered or in part.
_MOVE = frozenset(
    [
        "reshape",
        "transpose",
        "squeeze",
        "broadcast_in_dim",
        "expand_dims",
        "slice",
        "dynamic_slice",
        "gather",
        "rev",
        "copy",
        "pvary",
        "pcast",
        "sharding_constraint",
    ]
)


def all_gather_dtypes(jaxpr: Jaxpr, variables: Sequence[Any]) -> list[Any]:
    """Returns for each input the one dtype to which all of its uses cast it; otherwise the input's own dtype.

    Args:
      jaxpr: the program.
      variables: some of its inputs.

    Returns:
      A dtype per variable. Casting an input to it and back does not change the results of the program.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> f = lambda w, b: (w.astype(jnp.float16).sum(), jnp.exp(b))
      >>> jaxpr = jax.make_jaxpr(f)(jnp.ones((2, 2)), jnp.ones(2)).jaxpr
      >>> [dtype.name for dtype in all_gather_dtypes(jaxpr, jaxpr.invars)]
      ['float16', 'float32']
    """
    uses = _Uses({variable: set() for variable in jaxpr.invars})
    for moved in uses.evaluate(jaxpr, [frozenset((variable,)) for variable in jaxpr.invars]):
        uses.note(moved)
    return [_lowest_precision(variable.aval.dtype, uses.dtypes[variable]) for variable in variables]


def _lowest_precision(own: np.dtype, used: set[Any]) -> Any:
    if len(used) != 1 or not jnp.issubdtype(own, jnp.floating):
        return own
    (only,) = used
    is_lower = jnp.issubdtype(only, jnp.floating) and jnp.finfo(only).bits < jnp.finfo(own).bits
    return only if is_lower else own


@dataclasses.dataclass(frozen=True)
class _Uses(Reading[frozenset[Any]]):
    """Records the dtypes to which a program casts its inputs; a value is the set of inputs that it is a copy of.

    Attributes:
      dtypes: by input, the dtypes to which its uses cast it; its own if a use is no cast.
    """

    dtypes: dict[Any, set[Any]]

    # The condition of a `while` loop uses values too.
    table: ClassVar[Mapping[str, Enter]] = {name: enter for name, enter in ABSTRACTLY.items() if name != "while"}

    def constant(self, array: Any) -> frozenset[Any]:
        return frozenset()

    def joined(self, values: Sequence[frozenset[Any]]) -> frozenset[Any]:
        return frozenset().union(*values)

    def bind(self, equation: Any, inputs: list[frozenset[Any]]) -> list[frozenset[Any]]:
        name, nothing = equation.primitive.name, frozenset[Any]()
        moved, others = (inputs[0], inputs[1:]) if name in _MOVE else (nothing, inputs)
        for variables in others:
            self.note(variables, equation.params["new_dtype"] if name == "convert_element_type" else None)
        return [moved, *[nothing] * (len(equation.outvars) - 1)][: len(equation.outvars)]

    def note(self, variables: frozenset[Any], dtype: Any = None) -> None:
        """Notes a use of inputs, in a dtype or in their own."""
        for variable in variables:
            self.dtypes[variable].add(variable.aval.dtype if dtype is None else jnp.dtype(dtype))


def dimensions_of_gradients(state: TrainState, shardings: TrainState | None, axis: str) -> Any:
    """Returns the dimension along which each parameter's gradient is sharded over the batch axis; -1 for whole ones."""
    if shardings is None:
        dimensions = jax.tree.map(lambda x: -1, state.params)
    else:
        dimensions = gradient_dimensions(state, shardings, axis)
    losses = loss_scale_of(state.opt_state)
    return (dimensions,) * len(losses.loss_scales) if isinstance(losses, PerLossScale) else dimensions


def gradients_over_devices(parallel: TrainStep, mesh: Mesh, axis: str, dimensions: PyTree) -> GradientFunction:
    """Returns the gradient function over the devices along an axis; each device gets its part of the gradients."""
    local = parallel.local_gradients

    def of_device(
        loss_scale: LossScales, params: Params, model_state: ModelState, batch: Batch, rng: jax.Array | None
    ) -> tuple[StepGradients, Any]:
        loss, new_state, aux, grads = local(loss_scale, params, model_state, batch, rng)
        loss, aux, grads = weighed(loss, aux, grads, (axis,))
        grads = scatter_gradients(grads, dimensions, axis, parallel.reduce_dtype)
        new_state = with_device_sums(new_state, model_state, (axis,), parallel.accumulate_steps)
        loss, model_state, aux = mean_over_axes((loss, new_state, aux), (axis,))
        averaged = jax.tree.map(lambda x: x if is_inexact(x) else None, aux)
        rows = jax.tree.map(lambda x: None if is_inexact(x) else jnp.asarray(x)[None], aux)
        return StepGradients(loss, model_state, averaged, grads), rows

    specs = jax.tree.map(lambda dim: P(*(None,) * dim, axis) if dim >= 0 else P(), dimensions)
    over_devices = jax.shard_map(
        of_device,
        mesh=mesh,
        in_specs=(P(), P(), P(), P(axis), P()),
        out_specs=(StepGradients._make((P(), P(), P(), specs)), P(axis)),
        axis_names={axis},
        check_vma=False,
    )

    def gradients(
        loss_scale: LossScales, params: Params, model_state: ModelState, batch: Batch, rng: jax.Array | None
    ) -> StepGradients:
        result, rows = over_devices(loss_scale, params, model_state, batch, rng)
        aux = jax.tree.map(
            lambda mean, row: row if mean is None else mean, result.aux, rows, is_leaf=lambda x: x is None
        )
        return result._replace(aux=aux)

    return gradients


def with_whole_params(run: Callable[..., Any], shardings: PyTree, axis: str) -> Any:
    """Returns a function that gathers parameters which may be sharded over an axis, and passes them to `run`.

    Parameters that all uses cast to a lower-precision dtype are gathered in that dtype. XLA does not do so by itself.
    An `all_gather` within the `shard_map` does not either: in jaxlib 0.10, scattering into its result is wrong if
    another dimension is sharded too.
    """
    is_sharded = jax.tree.map(lambda sharding: dimension_over(axis, sharding) >= 0, shardings)
    if not any(jax.tree.leaves(is_sharded)):
        return run

    def gather(x: jax.Array, dtype: DTypeLike, sharding: NamedSharding) -> Any:
        entries = (without_axis(axis, entry) for entry in sharding.spec)
        whole = NamedSharding(sharding.mesh, P(*entries))
        # Sharded as before; otherwise it would be gathered before it is cast.
        low_precision = lax.with_sharding_constraint(x.astype(dtype), sharding)
        return lax.with_sharding_constraint(low_precision, whole).astype(x.dtype)

    def with_whole(loss_scale: LossScales, params: Params, *rest: object) -> Any:
        program, shapes = jax.make_jaxpr(run, return_shape=True)(loss_scale, params, *rest)
        first, (leaves, structure) = len(jax.tree.leaves(loss_scale)), jax.tree.flatten(params)
        inputs = program.jaxpr.invars[first : first + len(leaves)]
        dtypes = jax.tree.unflatten(structure, all_gather_dtypes(program.jaxpr, inputs))
        params = jax.tree.map(
            lambda x, dtype, sharding, apply: gather(x, dtype, sharding) if apply else x,
            params,
            dtypes,
            shardings,
            is_sharded,
        )
        results = jaxpr_as_fun(program)(*jax.tree.leaves((loss_scale, params, *rest)))
        return jax.tree.unflatten(jax.tree.structure(shapes), results)

    return with_whole
