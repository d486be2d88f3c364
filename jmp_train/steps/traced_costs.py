"""Costs of a train step on any device, computed from its traced jax program.

The figures do not depend on how a compiler fuses or how a device rounds: the fraction of the floating-point
operations in half precision, the bytes that the forward pass stores for the backward pass, the bytes of the
state, and the bytes that devices exchange. Nothing is traced again and nothing is run.
"""

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.extend.core as jex
from jax.extend.core import Jaxpr, JaxprEqn

from jmp_train.policies import PyTree
from jmp_train.policies.autocasting import half_share, held_jaxprs, variables_read
from jmp_train.policies.dtype_policies import traced_operations
from jmp_train.policies.programs import repeats_of
from jmp_train.steps.train_state import TrainState

# jax names the scopes of an equation by its transformations, the outermost first: "jvp(Dense_0)" in the forward
# pass of a gradient and "transpose(jvp(Dense_0))" in its backward pass.
_TRANSFORMATION = re.compile(r"\b(jvp|transpose)\(")


@dataclasses.dataclass(frozen=True)
class StepCosts:
    """The costs of a train step, from `step_costs`.

    Attributes:
      half_flops_share: the fraction of the floating-point operations of the whole step (forward, backward and
        optimizer) whose operands are float16 or bfloat16, from 0 to 1. A device without half-precision
        arithmetic, such as most CPUs, may still compute some of them in float32.
      residual_bytes: bytes that the forward pass stores for the backward pass, without the parameters and the
        batch: activations, masks, casts of parameters. Under `shard_map` for one device, under
        `accumulate_steps` for one micro-batch. None if the step has no backward pass.
      params_bytes: bytes of the stored parameters.
      opt_state_bytes: bytes of the optimizer state, with master weights and loss scale.
      model_state_bytes: bytes of the model state, such as batch statistics.
      exchanged_bytes: bytes that a device sends to others by `all_to_all` in a step, forward and backward, such as
        the halo rows of a partitioned graph, with padding. Averages of gradients are not counted.

    Example:
      >>> costs = StepCosts(0.99, 2_000_000, params_bytes=200, opt_state_bytes=400, model_state_bytes=0)
      >>> costs.state_bytes
      600
    """

    half_flops_share: float
    residual_bytes: int | None
    params_bytes: int
    opt_state_bytes: int
    model_state_bytes: int
    exchanged_bytes: int = 0

    @property
    def state_bytes(self) -> int:
        """Bytes of parameters, optimizer state and model state together."""
        return self.params_bytes + self.opt_state_bytes + self.model_state_bytes


def step_costs(traced: jax.stages.Traced, state: TrainState) -> StepCosts:
    """Returns the costs of a traced train step.

    Args:
      traced: `jax.jit(step).trace(state, batch)`, whose `lower().compile()` is the step to run.
      state: the `TrainState`; `jax.ShapeDtypeStruct` works in place of its arrays.

    Raises:
      TypeError: the state is no `TrainState`.

    Example:
      >>> import jax, jax.numpy as jnp, optax
      >>> import jmp_train as jt
      >>> def loss_fn(params, batch):
      ...     hidden = jnp.sin(jnp.sin(batch @ params[0]) @ params[1])
      ...     return jnp.sum(hidden.astype(jnp.float32))
      >>> optimizer = jt.with_loss_scale(optax.sgd(0.1, momentum=0.9), jt.torch_loss_scale())
      >>> state = jt.TrainState.create([jnp.ones((16, 16)), jnp.ones((16, 16))], optimizer)
      >>> for policy in ("float32", "autocast_float16"):
      ...     step = jax.jit(jt.train_step(jt.stateless(loss_fn), optimizer, policy=policy))
      ...     costs = jt.steps.step_costs(step.trace(state, jnp.ones((64, 16))), state)
      ...     print(f"{costs.half_flops_share:.0%} in half, {costs.residual_bytes} bytes saved")
      0% in half, 12288 bytes saved
      95% in half, 8704 bytes saved
    """
    if not isinstance(state, TrainState):
        raise TypeError(
            f"state must be a TrainState, got {type(state).__name__}; for a step with another state, use "
            "explain_policy(step, None, state, batch)"
        )
    program = traced.jaxpr
    operations = traced_operations(program, [None] * len(program.jaxpr.invars))
    return StepCosts(
        half_flops_share=half_share([x for x in operations if x.in_half or x.is_float32]),
        residual_bytes=_residual_bytes(program.jaxpr),
        params_bytes=_bytes_of(state.params),
        opt_state_bytes=_bytes_of(state.opt_state),
        model_state_bytes=_bytes_of(state.model_state),
        exchanged_bytes=_exchanged_bytes(program.jaxpr, {}),
    )


def _bytes_of(tree: PyTree) -> int:
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree) if hasattr(x, "dtype"))


def _residual_bytes(jaxpr: Jaxpr) -> int | None:
    """Returns the bytes that forward equations pass to backward equations; None if there are no backward equations."""
    equations = _needed(jaxpr)
    forward = [equation for equation in equations if not _is_backward(equation)]
    within = [_residual_bytes(inner) for equation in forward for inner in held_jaxprs(equation)]
    most = max((found for found in within if found is not None), default=None)
    if len(forward) == len(equations):
        return most
    read = {v for equation in equations if _is_backward(equation) for v in variables_read(equation)}
    kept = {v for equation in forward for v in equation.outvars} & read
    kept -= _constants(equations, set())
    return sum(v.aval.size * v.aval.dtype.itemsize for v in kept) + (most or 0)


def _exchanged_bytes(jaxpr: Jaxpr, axes: Mapping[str, int]) -> int:
    """Returns the bytes that a device sends to others by `all_to_all`.

    Args:
      jaxpr: a program.
      axes: the sizes of its mesh axes.
    """
    total = 0
    for equation in _needed(jaxpr):
        params = equation.params
        if equation.primitive.name == "all_to_all":
            names = params["axis_name"]
            count = math.prod(axes.get(name, 1) for name in (names if isinstance(names, tuple) else (names,)))
            total += sum(v.aval.size * v.aval.dtype.itemsize for v in equation.invars) * (count - 1) // count
            continue
        inner_axes = {**axes, **params["mesh"].shape} if equation.primitive.name == "shard_map" else axes
        total += repeats_of(equation) * sum(_exchanged_bytes(inner, inner_axes) for inner in held_jaxprs(equation))
    return total


def _needed(jaxpr: Jaxpr) -> list[Any]:
    """Returns the equations that the results depend on, because a compiler drops the others."""
    wanted = {v for v in jaxpr.outvars if not isinstance(v, jex.Literal)}
    needed = []
    for equation in reversed(jaxpr.eqns):
        if equation.effects or not wanted.isdisjoint(equation.outvars):
            needed.append(equation)
            wanted.update(variables_read(equation))
    return needed[::-1]


def _constants(equations: Sequence[Any], known: set[Any]) -> set[Any]:
    """Returns the variables that depend on no argument, such as the zeros of a mask, which no device stores.

    Args:
      equations: equations of a jaxpr.
      known: its constant arguments.
    """
    constants = set(known)
    for equation in equations:
        given = [isinstance(x, jex.Literal) or x in constants for x in equation.invars]
        if all(given) and not equation.effects:
            constants.update(equation.outvars)
        elif equation.primitive.name in ("jit", "pjit"):
            inner = equation.params["jaxpr"].jaxpr
            known = {v for v, constant in zip(inner.invars, given, strict=True) if constant}
            found = _constants(inner.eqns, known)
            pairs = zip(equation.outvars, inner.outvars, strict=True)
            constants.update(out for out, x in pairs if isinstance(x, jex.Literal) or x in found)
    return constants


def _is_backward(equation: JaxprEqn) -> bool:
    """Returns whether an equation belongs to the backward pass of its outermost gradient."""
    outermost = _TRANSFORMATION.search(str(equation.source_info.name_stack))
    return outermost is not None and outermost[1] == "transpose"
