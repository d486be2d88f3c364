"""Warns of gradients taken within a float16 region or policy, which no loss scale reaches.

jax names the transformations of an equation, and its traceback has the call of `jax.grad` between the function that is
differentiated and its caller.
"""

import sysconfig
import warnings
from collections.abc import Iterable, Sequence
from typing import Any

from jmp_train.policies.autocasting.source_lines import is_of_jax, is_of_package

_GRADIENTS = frozenset(("value_and_grad_f", "vjp", "linearize"))  # functions of jax around the differentiated one
_STANDARD_LIBRARY = (sysconfig.get_path("stdlib"), "<frozen", sysconfig.get_path("purelib"))


class InnerGradientWarning(UserWarning):
    """A gradient is taken inside of `autocast` or a half policy, and runs in float16 without a scale.

    The loss scale of the step multiplies the outer loss only. Elements of the inner gradient below 6e-8 become 0, and
    those below 6e-5 lose digits. `autocast`, `apply_policy` and steps warn when they are first traced. Use
    `jt.scaled_grad(fn)` in place of `jax.grad(fn)`, or bfloat16. Filter the warning if you scale the gradient yourself.

    Example:
      >>> import warnings
      >>> import jmp_train as jt
      >>> warnings.filterwarnings("ignore", category=jt.policies.InnerGradientWarning)
    """


def warn_of_inner_gradients(products: Iterable[Sequence[Any]], half: str, under: str) -> None:
    """Warns at the line of the first gradient that runs in float16, unless a function of this package takes it.

    Args:
      products: products in half precision, each as the equations around it, the outermost first, and its own.
      half: the name of the half type.
      under: the name of the policy or transformation that lowers them.
    """
    if half != "float16":
        return
    for equations in products:
        if not any("transpose(" in str(equation.source_info.name_stack) for equation in equations):
            continue
        if place := _line_of_gradient(equations):
            warnings.warn_explicit(
                f"the gradient taken at {place[0]}:{place[1]} runs in float16 under {under}, and the loss scale does "
                "not reach it: elements below 6e-8 become 0. Use jt.scaled_grad(fn) for jax.grad(fn), or bfloat16",
                InnerGradientWarning,
                *place,
            )
            return


def _line_of_gradient(equations: Sequence[Any]) -> tuple[str, int] | None:
    """Returns file and line of the user's call of `jax.grad` or its kin; None if there is none, or it is of ours."""
    tracebacks = (equation.source_info.traceback for equation in reversed(equations))
    frames = [frame for traceback in tracebacks if traceback is not None for frame in traceback.frames]
    found = False
    for frame in frames:
        file = frame.file_name
        if is_of_jax(file):
            found = found or frame.function_name.rsplit(".", 1)[-1] in _GRADIENTS
        elif found and is_of_package(file):
            return None
        elif found and not file.startswith(_STANDARD_LIBRARY):
            return file, frame.line_num
    return None
