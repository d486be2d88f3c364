"""The costliest kernels of a step; equal kernels are merged."""

import dataclasses
import re
from functools import reduce

from jmp_train.aot import Costs


@dataclasses.dataclass(frozen=True)
class Kernels:
    """Equal kernels of one operation.

    Attributes:
      operation: jax's name of their operation, or the compiler's name.
      dtypes: XLA's dtypes of the operands of their matrix products.
      operations: operations of the matrix products in one execution.
      n_bytes: bytes that one execution reads and writes.
      times: number of executions in a step, of all together.
      seconds: the least time of one execution without the L2 cache.
    """

    operation: str
    dtypes: tuple[str, ...]
    operations: int
    n_bytes: int
    times: int
    seconds: float

    @property
    def all_seconds(self) -> float:
        """The least time of all executions."""
        return self.times * self.seconds


def costliest_first(costs: Costs) -> list[Kernels]:
    """Returns the kernels of a step by the least time that they take together, without the L2 cache.

    Args:
      costs: costs of the step.
    """
    alike: dict[tuple[object, ...], list[Kernels]] = {}
    for kernel in costs.kernels:
        found = Kernels(
            operation=_inside_of_wrappers(kernel.op_name) or kernel.name,
            dtypes=tuple(dict.fromkeys(product.dtype for product in kernel.products)),
            operations=sum(product.operations for product in kernel.products),
            n_bytes=kernel.read_bytes + kernel.written_bytes,
            times=kernel.times,
            seconds=kernel.seconds_without_cache,
        )
        key = tuple(value for name, value in vars(found).items() if name != "times")
        alike.setdefault(key, []).append(found)
    return sorted((reduce(_together, group) for group in alike.values()), key=lambda found: -found.all_seconds)


def _together(first: Kernels, second: Kernels) -> Kernels:
    return dataclasses.replace(first, times=first.times + second.times)


def _inside_of_wrappers(op_name: str) -> str:
    """Returns an operation's name without the functions around the whole step, which a plan has added itself."""
    return re.sub(r"^(jit\(\w+\)/|call_exported/)+", "", op_name)
