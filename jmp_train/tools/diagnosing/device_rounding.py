"""Marks in a traced program what rounds operands of products: a device those in float32, and recipes those in few bits.

A GPU with TF32 rounds operands of products and convolutions to 10 bits, a TPU to the 7 bits of bfloat16, unless jax's
precision says otherwise. Such a product gets a `Rounding` as its precision, by which `arithmetic` rounds its operands.
The call that rounds to few bits becomes one operation, so that its shadow holds the numbers before. Of branches by
platform, only that of this one is left.
"""

from typing import Any

import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr

from jmp_train.policies.autocasting import PRODUCTS, precisions_of
from jmp_train.policies.programs import bodies_of, on_this_platform, opened
from jmp_train.tools.diagnosing.arithmetic import TO_FEW_BITS, Rounding, dtype_of

_TF32, _BFLOAT16 = Rounding(10), Rounding(7)
_DEFAULT = (None, lax.Precision.DEFAULT)


def rounding_on(device: Any) -> Rounding | None:
    """Returns how a device rounds the float32 operands of products; None if it does not.

    Args:
      device: None, "cpu", "cuda", "tpu", or a device with a `platform`, such as a `GPU` or `TPU` of `jt.aot` or one of
        `jax.devices()`.

    Raises:
      ValueError: there is no such platform.

    Example:
      >>> rounding_on("cuda"), rounding_on("cpu")
      (Rounding(bits=10), None)
    """
    platform = getattr(device, "platform", device)
    if platform is None or platform == "cpu":
        return None
    if platform == "tpu":
        return _BFLOAT16
    if platform not in ("cuda", "gpu"):
        raise ValueError(
            f'device={device!r} must be "cpu", "cuda", "tpu", or a device, such as jt.aot.GPUS["H100-80GB"]'
        )
    capability = getattr(device, "capability", getattr(device, "compute_capability", "8.0"))
    major = capability[0] if isinstance(capability, tuple) else str(capability).partition(".")[0]
    return _TF32 if int(major) >= 8 else None


def rounding_text(rounding: Rounding | None) -> str:
    """Returns a sentence about a rounding; empty for None."""
    names = {_TF32: "TF32", _BFLOAT16: "bfloat16"}
    return (
        "" if rounding is None else f"Products of float32 operands round them to {names[rounding]}, as the device does."
    )


def with_rounding(program: ClosedJaxpr, rounding: Rounding | None) -> ClosedJaxpr:
    """Returns a program with its rounding to few bits as one operation each.

    Args:
      program: a traced program.
      rounding: how its products of float32 operands, at jax's default precision, round them; None if they do not.
    """
    return _rounded(program, rounding)


def _rounded(program: Any, rounding: Rounding | None) -> Any:
    """Returns a jaxpr, closed or open, with marks."""
    if isinstance(program, tuple):
        return tuple(_rounded(x, rounding) for x in program)
    jaxpr = opened(program)
    jaxpr = jaxpr.replace(eqns=[_marked(equation, rounding) for equation in jaxpr.eqns])
    return jaxpr if isinstance(program, Jaxpr) else program.replace(jaxpr=jaxpr)


def _marked(equation: Any, rounding: Rounding | None) -> Any:
    # Of what differentiating a loop moves out of it, a part that is not all of the rounding has the name too.
    if equation.params.get("name") == TO_FEW_BITS.name and _is_rounding(equation):
        return equation.replace(primitive=TO_FEW_BITS)
    equation = on_this_platform(equation)
    return equation.replace(params=_params(equation, rounding))


def _is_rounding(equation: Any) -> bool:
    shapes = [x.aval.shape for x in (*equation.invars[:1], *equation.outvars)]
    return len(shapes) == 2 and shapes[0] == shapes[1] and dtype_of(equation.outvars[0]) != np.float32


def _params(equation: Any, rounding: Rounding | None) -> dict[str, Any]:
    params = equation.params
    if equation.primitive.name in PRODUCTS and rounding is not None:
        known = _DEFAULT if rounding == _BFLOAT16 else (*_DEFAULT, lax.Precision.HIGH)
        is_rounded = any(dtype_of(atom) == np.float32 for atom in equation.invars[:2])
        if is_rounded and all(precision in known for precision in precisions_of(equation)):
            return {**params, "precision": rounding}
    held = {id(body) for body in bodies_of(equation)}
    within = {
        name: _rounded(value, rounding)
        for name, value in params.items()
        if id(value) in held or (isinstance(value, tuple) and value and all(id(x) in held for x in value))
    }
    return {**params, **within}
