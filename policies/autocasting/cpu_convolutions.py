"""Warns of jaxlib releases that compute bfloat16 convolutions wrong on CPUs; a flag avoids the fault.

XLA:CPU of jaxlib 0.11 and 0.12 passes chains of convolutions to YNNPACK as one fusion. In bfloat16, some of these
fusions never write their results, and the compiled code reads uninitialized memory.
"""

import functools
import os
from collections.abc import Iterable, Iterator
from importlib.metadata import version
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr
from jax.typing import DTypeLike

from jmp_train.policies.autocasting.operations import held_jaxprs
from jmp_train.policies.autocasting.values import traced_dtype
from jmp_train.policies.user_warnings import warn_user

FUSION_FLAG = "--xla_cpu_experimental_ynn_fusion_type="
_FIRST, _FIRST_UNKNOWN = (0, 11), (0, 13)


class CpuConvolutionWarning(UserWarning):
    """This jaxlib may compute bfloat16 convolutions wrong on a CPU.

    `train_step`, `scaled_value_and_grad`, `apply_policy` and `autocast` warn when they trace one.
    `XLA_FLAGS=--xla_cpu_experimental_ynn_fusion_type=`, set before jax starts, turns off the faulty fusion and this
    warning.

    Example:
      >>> import warnings
      >>> import jmp_train as jt
      >>> warnings.filterwarnings("error", category=jt.policies.CpuConvolutionWarning)
    """


def is_faulty(jaxlib: tuple[int, ...], xla_flags: str) -> bool:
    """Returns whether a jaxlib has the fault and no flag turns it off.

    Args:
      jaxlib: the version, such as (0, 12, 0).
      xla_flags: the value of the environment variable `XLA_FLAGS`.

    Example:
      >>> is_faulty((0, 12, 0), ""), is_faulty((0, 12, 0), FUSION_FLAG), is_faulty((0, 10, 2), "")
      (True, False, False)
    """
    return _FIRST <= jaxlib < _FIRST_UNKNOWN and FUSION_FLAG not in xla_flags


def is_at_risk() -> bool:
    """Returns whether the program that is being traced runs on CPUs, with a jaxlib that has the fault."""
    faulty = is_faulty(_jaxlib(), os.environ.get("XLA_FLAGS", ""))
    return faulty and jax.default_backend() == "cpu"  # starts the devices if tracing has not


def warn_of_convolutions(equations: Iterable[Any], dtype: DTypeLike | None = None) -> None:
    """Warns of bfloat16 convolutions on CPUs if this jaxlib has the fault.

    Args:
      equations: the equations of a program, nested ones included.
      dtype: the dtype of the convolutions; None for the traced one.
    """
    if dtype not in (None, jnp.bfloat16) or not is_at_risk():
        return
    dtypes = (
        dtype or traced_dtype(atom)
        for equation in equations
        if equation.primitive.name == "conv_general_dilated"
        for atom in equation.invars
    )
    if jnp.bfloat16 in dtypes:
        warn_user(
            f"jaxlib {version('jaxlib')} leaves results of some bfloat16 convolutions unwritten on CPUs: "
            f"set XLA_FLAGS={FUSION_FLAG} in the environment before jax starts",
            CpuConvolutionWarning,
        )


def all_equations(jaxpr: Jaxpr) -> Iterator[Any]:
    """Yields the equations of an open jaxpr and of the programs within it."""
    for equation in jaxpr.eqns:
        yield equation
        for inner in held_jaxprs(equation):
            yield from all_equations(inner)


@functools.cache
def _jaxlib() -> tuple[int, ...]:
    return tuple(int(part) for part in version("jaxlib").split(".")[:3] if part.isdecimal())
