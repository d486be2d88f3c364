"""`PolicySchedule`: the policy of each step of a run, such as half precision with float32 at the end.

Each phase is a separate compiled program, and all of them take and return the same state. So a run passes from
one phase to the next without any conversion, and a checkpoint fits both.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeVar

import numpy as np
from jax.typing import DTypeLike

from jmp_train.policies.dtype_policies.policy import PathPolicy, Policy, named_policy

AnyStep = TypeVar("AnyStep")


class PolicyPhase(NamedTuple):
    """Consecutive steps of a run with the same policy.

    Attributes:
      start: index of the first step, from 0: the number of steps before it.
      stop: index after the last step.
      policy: the policy.
    """

    start: int
    stop: int
    policy: Policy | PathPolicy


@dataclasses.dataclass(frozen=True, init=False, repr=False)
class PolicySchedule:
    """Policies by the fraction of a run at which they begin; a frozen, hashable value.

    The usual schedule ends in float32: half precision for most of the steps, and float32 for the last ones, in which
    the learning rate is low and half-precision rounding is no longer small compared with the updates.

    All phases share one optimizer and one state, in which nothing may depend on the policy: neither the dtype of stored
    parameters, nor whether there is a loss scale. In a float32 phase, the loss scale stays in the optimizer,
    where it multiplies and divides by a power of two, which is exact; it still grows by its own rules.

    Args:
      policies: fraction -> policy, or the name of one. Fractions are from 0 to below 1, ascending, the first is 0. A
        fraction that is not a whole number of steps is rounded to the nearest step.

    Raises:
      TypeError: `policies` is not a mapping from numbers to policies.
      ValueError: the fractions are not as above, or a policy stores parameters in another dtype than the one before;
        the message names both.

    Example:
      >>> schedule = PolicySchedule({0.0: "mixed_float16", 0.9: "float32"})
      >>> [(start, stop, str(policy)) for start, stop, policy in schedule.phases(1000)]
      [(0, 900, 'p=full,c=f16,o=full'), (900, 1000, 'p=full,c=full,o=full')]

    Reference: NVIDIA/TransformerEngine#2569 and AMD-AGI/Primus#1010, the last steps of a run in higher precision.
    """

    starts: tuple[tuple[float, Policy | PathPolicy], ...]

    def __init__(self, policies: Mapping[float, Policy | PathPolicy | str]) -> None:
        if not isinstance(policies, Mapping):
            raise TypeError(f"policies must map fractions of the run to policies, got {policies!r}")
        check_shares(list(policies))
        starts = tuple((float(share), named_policy(policy, f"policies[{share}]")) for share, policy in policies.items())
        for (share, first), (other_share, second) in itertools.pairwise(starts):
            if _stored(first) != _stored(second):
                raise ValueError(
                    f"all policies of a schedule must store the parameters in the same dtypes: {_described(first)} "
                    f"from {share:g} on, {_described(second)} from {other_share:g} on. To compute in float32 with the "
                    "parameters of 'float16', write 'params=float16,compute=float32,output=float32'"
                )
        object.__setattr__(self, "starts", starts)

    def __repr__(self) -> str:
        """Returns the call that creates it, if no policy has rules."""
        named = (repr(str(policy) if isinstance(policy, Policy) else policy) for _, policy in self.starts)
        pairs = zip((share for share, _ in self.starts), named, strict=True)
        return f"PolicySchedule({{{', '.join(f'{share}: {name}' for share, name in pairs)}}})"

    def phases(self, total_steps: int, start: int = 0) -> tuple[PolicyPhase, ...]:
        """Returns the phases of a run, or the remaining ones.

        Args:
          total_steps: number of steps of the whole run, as in its learning rate schedule.
          start: number of steps done; completed phases are left out.

        Raises:
          ValueError: the run is so short that a phase has no step, or `start` is not from 0 to `total_steps`.

        Example:
          >>> schedule = PolicySchedule({0.0: "mixed_bfloat16", 0.9: "float32"})
          >>> [(phase.start, phase.stop) for phase in schedule.phases(100, start=40)]
          [(40, 90), (90, 100)]
        """
        if not 0 <= start <= total_steps:
            raise ValueError(f"start={start} must be from 0 to total_steps={total_steps}")
        firsts = first_steps([share for share, _ in self.starts], total_steps)
        bounds = itertools.pairwise((*firsts, total_steps))
        found = zip(bounds, self.starts, strict=True)
        return tuple(
            PolicyPhase(max(first, start), stop, policy) for (first, stop), (_, policy) in found if stop > start
        )

    def policy_at(self, step: int, total_steps: int) -> Policy | PathPolicy:
        """Returns the policy of a step.

        Args:
          step: number of steps before it; after the last step the last policy applies, as for an evaluation.
          total_steps: see `phases`.

        Raises:
          ValueError: see `phases`.

        Example:
          >>> schedule = PolicySchedule({0.0: "mixed_bfloat16", 0.9: "float32"})
          >>> [str(schedule.policy_at(step, 100)) for step in (0, 89, 90, 100)][1:]
          ['p=full,c=bf16,o=full', 'p=full,c=full,o=full', 'p=full,c=full,o=full']
        """
        left = self.phases(total_steps, step)
        return left[0].policy if left else self.starts[-1][1]

    def steps(
        self, make_step: Callable[[Policy | PathPolicy], AnyStep], total_steps: int, start: int = 0
    ) -> Iterator[AnyStep]:
        """Yields the train step of each step of a run, in order.

        A phase's step is created when it is first needed, once per policy. The host counts the steps, and reads nothing
        from the device.

        Args:
          make_step: creates the step of a policy; it should compile it, with the same optimizer for all.
          total_steps: see `phases`.
          start: number of steps done, for a run that resumes from a checkpoint.

        Raises:
          ValueError: see `phases`.

        Example:
          >>> import jax, jax.numpy as jnp, optax
          >>> import jmp_train as jt
          >>> optimizer = jt.with_loss_scale(optax.sgd(0.1), jt.torch_loss_scale())
          >>> loss_fn = jt.stateless(lambda w, x: ((x @ w).astype(jnp.float32) ** 2).mean())
          >>> schedule = jt.PolicySchedule({0.0: "mixed_float16", 0.5: "float32"})
          >>> state = jt.TrainState.create(jnp.ones((2, 1)), optimizer)
          >>> make_step = lambda policy: jax.jit(jt.train_step(loss_fn, optimizer, policy=policy), donate_argnums=0)
          >>> for step in schedule.steps(make_step, 10):
          ...     state, metrics = step(state, jnp.full((4, 2), 0.25))
          >>> int(state.step)
          10
        """
        made = functools.cache(make_step)
        phases = self.phases(total_steps, start)  # at once, so that a wrong number raises here
        return (made(phase.policy) for phase in phases for _ in range(phase.start, phase.stop))


def check_shares(shares: Sequence[object]) -> None:
    """Raises TypeError or ValueError if numbers are not valid fractions of a run at which its phases begin.

    Args:
      shares: the fractions in the order given.

    Example:
      >>> check_shares([0.0, 0.9])
    """
    numbers = []
    for share in shares:
        if isinstance(share, bool) or not isinstance(share, int | float | np.integer | np.floating):
            raise TypeError(f"fractions of the run must be numbers, got {share!r}")
        if not 0 <= share < 1:
            raise ValueError(f"{share!r} must be a fraction of the run, from 0 to below 1, not a number of steps")
        numbers.append(share)
    if numbers[:1] != [0]:
        raise ValueError(f"the first fraction must be 0, the start of the run, got {numbers}")
    if any(first >= second for first, second in itertools.pairwise(numbers)):
        raise ValueError(f"fractions must increase, got {numbers}")


def first_steps(shares: Sequence[float], total_steps: int) -> tuple[int, ...]:
    """Returns the index of the first step of each phase, from 0; raises ValueError if a phase has no step.

    Args:
      shares: see `check_shares`.
      total_steps: number of steps of the run.

    Example:
      >>> first_steps([0.0, 0.5, 0.9], 1000)
      (0, 500, 900)
    """
    # round, because 0.29 * 100 is a little less than 29.
    firsts = tuple(round(float(share) * total_steps) for share in shares)
    for number, (first, stop) in enumerate(itertools.pairwise((*firsts, total_steps))):
        if first >= stop:
            raise ValueError(
                f"a run of {total_steps} steps has no step for the phase that starts at {shares[number]:g}; use more "
                "steps or other fractions"
            )
    return firsts


def _stored(policy: Policy | PathPolicy) -> object:
    """Returns the property of a policy that decides the stored dtypes of parameters: one dtype, or the rules."""
    if isinstance(policy, Policy):
        return policy.param_dtype
    default: DTypeLike = policy.default.param_dtype
    rules = tuple((regex, rule.param_dtype) for regex, rule in policy.rules)
    return default if all(dtype == default for _, dtype in rules) else (rules, default)


def _described(policy: Policy | PathPolicy) -> str:
    if isinstance(policy, Policy):
        return f"{str(policy)!r} in {np.dtype(policy.param_dtype)}"
    return f"a policy by path with the default {str(policy.default)!r}"
