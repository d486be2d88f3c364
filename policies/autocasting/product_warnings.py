"""Warns of products and convolutions that autocast leaves in float32, or that jaxlib computes wrong on CPUs.

Products stay in float32 if autocast does not enter their program. XLA:CPU of jaxlib 0.11 and 0.12 passes chains of
convolutions to YNNPACK as one fusion. In bfloat16, some of these fusions never write their results, and the compiled
code reads uninitialized memory; a flag avoids the fault.
"""

import functools
import itertools
import os
from collections.abc import Iterable, Iterator, Sequence
from importlib.metadata import version
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import JaxprEqn
from jax.typing import DTypeLike

from jmp_train.policies.autocasting.operations import flops_of, is_float32
from jmp_train.policies.autocasting.primitives import PRODUCTS, precisions_of
from jmp_train.policies.autocasting.reasons import Cause
from jmp_train.policies.autocasting.region import DECIDED, Decision
from jmp_train.policies.autocasting.source_lines import user_line_of, warn_user
from jmp_train.policies.autocasting.values import traced_dtype
from jmp_train.policies.programs import programs_in, repeats_of, walk

FUSION_FLAG = "--xla_cpu_experimental_ynn_fusion_type="
_FIRST, _FIRST_UNKNOWN = (0, 11), (0, 13)
TOLERATED_SHARE = 0.1
_LINES = 3
COMPLEX_WAY = "Products of their real and imaginary parts can run in half precision."
_NOT_ENTERED = (Cause.NOT_ENTERED, Cause.NOT_KNOWN, Cause.TYPED_BODY)
_EXACT = frozenset(("custom_linear_solve",))  # every table runs solvers in float32
_WHY = {
    "pallas_call": "a Pallas kernel, which computes in the dtypes that it was written for",
    "custom_vjp_call": "a custom_vjp that autocast cannot enter",
    "custom_vmap_call": "a custom_vmap, which autocast does not enter",
    "cond": "a platform_dependent, which autocast does not enter",
}


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


@functools.cache
def _jaxlib() -> tuple[int, ...]:
    return tuple(int(part) for part in version("jaxlib").split(".")[:3] if part.isdecimal())


class Float32ProductsWarning(UserWarning):
    """A half policy, or autocast, leaves more than a tenth of the flops of products in float32.

    `train_step`, `scaled_value_and_grad`, `apply_policy` and `autocast` warn when they are first traced;
    `explain_policy` and `explain_autocast` show all operations. If the product should stay in float32, use one of the
    following: a rule of `policy_by_path` for the parameter, `autocast_as("float32")` around the product, or
    `precision=HIGHEST` as its argument. Or filter the warning. Autocast does not warn of products that its rules make
    float32.

    Example:
      >>> import warnings
      >>> import jmp_train as jt
      >>> warnings.filterwarnings("ignore", category=jt.policies.Float32ProductsWarning)
    """


class Unreached(NamedTuple):
    """A complex product, or a float32 product within a program that autocast does not enter.

    Attributes:
      equations: the equations around it, the outermost first, and its own.
      path: the path of modules and scopes.
      flops: the floating-point operations in all iterations of the loops around it.
      holder: the primitive that holds the program; "" for a complex product.
    """

    equations: tuple[Any, ...]
    path: str
    flops: int
    holder: str = ""

    def __str__(self) -> str:
        text = product_text(self.equations[-1], self.path, user_line_of(self.equations))
        not_entered = f"in {_WHY.get(self.holder, f'{self.holder}, which autocast does not enter')}"
        return f"{text}, {not_entered if self.holder else Cause.COMPLEX.value}"


def warn_of_unreached(decisions: Sequence[Decision], half: DTypeLike) -> None:
    """Warns if more than a tenth of the flops of products are complex, or in programs that autocast does not enter.

    Args:
      decisions: the decisions on all equations of a function.
      half: the half type.
    """
    found = [product for decision in decisions for product in _unreached(decision)]
    within = [product for product in found if product.holder]
    left = sum(product.flops for product in found)
    seen = (d.repeats * flops_of(d.equation) for d in decisions if d.equation.primitive.name in PRODUCTS)
    if left and (share := left / (sum(product.flops for product in within) + sum(seen))) > TOLERATED_SHARE:
        text = share_text(share, f"autocast to {half}", list(map(str, found)))
        way = f'jt.apply_policy(fn, "mixed_{half}") around the function that is not entered casts its arguments.'
        warn_user(
            f"{text}\n{way if within else COMPLEX_WAY} explain_autocast shows all operations.", Float32ProductsWarning
        )


def share_text(share: float, under: str, lines: Sequence[str]) -> str:
    """Returns the text of a warning of float32 products: their fraction of the flops and the first lines.

    Args:
      share: the fraction, from 0 to 1.
      under: the name of the policy or transformation that leaves them in float32.
      lines: one line per product.
    """
    lines = list(dict.fromkeys(lines))
    more = [f"and {len(lines) - _LINES} more"] if len(lines) > _LINES else []
    shown = "\n  ".join([*lines[:_LINES], *more])
    return f"{share:.0%} of the flops of products stay in float32 under {under}:\n  {shown}"


def product_text(equation: JaxprEqn, path: str, line: str) -> str:
    """Returns a description of a product: its line, primitive, operands and path.

    Args:
      equation: the equation of the product.
      path: the path of modules and scopes.
      line: the user's source line.
    """
    shapes = " and ".join(atom.aval.str_short() for atom in equation.invars[:2])
    return f"{line}: {equation.primitive.name} of {shapes}" + (f" in {path}" if path else "")


def is_exact(equation: Any) -> bool:
    """Returns whether a product requests the highest precision itself, not through jax's configuration."""
    if jax.config.jax_default_matmul_precision is not None:  # pyright: ignore[reportAttributeAccessIssue]
        return False
    return lax.Precision.HIGHEST in precisions_of(equation)


def _unreached(decision: Decision) -> Iterator[Unreached]:
    name, cause = decision.equation.primitive.name, decision.reason.cause
    equations = (*decision.callers, decision.equation)
    if cause is Cause.COMPLEX and name in PRODUCTS:
        yield Unreached(equations, decision.path, decision.repeats * flops_of(decision.equation))
    if decision.rule == "keep" and cause in _NOT_ENTERED and name not in _EXACT:
        repeats = decision.repeats * repeats_of(decision.equation)
        held = (walk(body, callers=equations, repeats=repeats) for body in programs_in(decision.equation))
        for place in itertools.chain.from_iterable(held):
            if _is_left_in_float32(place.equation):
                yield Unreached(place.equations, decision.path, place.repeats * flops_of(place.equation), name)


def _is_left_in_float32(equation: Any) -> bool:
    """Returns whether an equation is a float32 product that nothing asks for."""
    is_asked_for = is_exact(equation) or DECIDED in str(equation.source_info.name_stack)
    is_product = equation.primitive.name in PRODUCTS
    return is_product and not is_asked_for and any(map(is_float32, equation.invars))
