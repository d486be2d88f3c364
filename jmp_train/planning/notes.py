"""Notes about a precision on a kind of device."""

import re
from collections import Counter
from collections.abc import Iterator

from jmp_train.aot import PASSES, TPU, Costs, Device

_FLOAT16 = re.compile(r"\bf16\[")
_EMULATED = (
    "float16 is emulated: TPUs have no units for it, and libtpu converts it; use bfloat16, which needs no loss scale"
)


def notes_of(device: Device, hlo: str, costs: Costs) -> Iterator[str]:
    """Yields notes about a program on a device; none for GPUs, whose dtypes are in `costs`.

    Args:
      device: the device that runs it.
      hlo: the text of the program.
      costs: costs of the program.
    """
    if not isinstance(device, TPU):
        return
    if _FLOAT16.search(hlo):
        yield _EMULATED
    shares: Counter[str] = Counter()
    for kernel in costs.kernels:
        for product in kernel.products:
            shares[_computed(product.dtype, product.precision)] += kernel.times * product.operations
    total = sum(shares.values())
    if total:
        parts = (f"{count / total:.3g} in {name}" if len(shares) > 1 else name for name, count in shares.most_common())
        yield f"products: {', '.join(parts)}"


def _computed(dtype: str, precision: str) -> str:
    """Returns how a TPU computes products of a dtype, XLA's name, at a precision of jax."""
    if dtype == "f16":  # in some programs, libtpu leaves the conversion to its last stage
        return "f16, emulated"
    if dtype not in ("f32", "f64", "c64", "c128"):
        return dtype
    passes = PASSES[precision]
    return f"{dtype} by {passes} pass{'es' * (passes > 1)} in bfloat16 (precision {precision!r})"
