"""What `parity` says about operations: how far each is from the other function, and where the two part."""

import dataclasses
import linecache
from typing import Literal

Kind = Literal["value", "rounding"]


@dataclasses.dataclass(frozen=True)
class OperationParity:
    """An operation of one of the functions, beside the other function.

    Attributes:
      primitive: the name of its jax primitive.
      path: of the modules and scopes that it is in.
      file: of the user's line, or of the library that the user called.
      line: number of that line; 0 where it is not known.
      dtype: of its result.
      shape: of its result.
      runs: how often it ran.
      unknown: share of its result's rows that the other function has nowhere, even in float32.
      difference: mean difference of its rows from the same ones of the other function, relative to a row's norm; NaN
        if none is known.
      error: mean difference of its rows from those in float32, likewise.
      contribution: fraction of the difference of the log-probabilities that goes away once this operation has the
        values of the other function, after those before it; NaN if that was not tried, as where only rounding differs.

    Example:
      >>> import jax.numpy as jnp, jmp_train as jt
      >>> rows = jt.parity(lambda x: x * 2, lambda x: x + x, -jnp.ones((2, 3))).operations
      >>> [(row.primitive, row.shape, row.difference) for row in (*rows.train, *rows.infer)]
      [('mul', (2, 3), 0.0), ('add', (2, 3), 0.0)]
    """

    primitive: str
    path: str
    file: str
    line: int
    dtype: str
    shape: tuple[int, ...]
    runs: int
    unknown: float
    difference: float
    error: float
    contribution: float = float("nan")

    @property
    def code(self) -> str:
        """The line itself, where its file can be read."""
        return linecache.getline(self.file, self.line).strip() if self.line else ""


@dataclasses.dataclass(frozen=True)
class FirstDifference:
    """Where two functions part.

    Attributes:
      kind: "value" where they differ even if both are computed in float32, "rounding" where only then they agree.
      train: the first operation of training with results that inference has not; None if there is none.
      infer: the first operation of inference with results that training has not; None if there is none.

    Example:
      >>> import jax.numpy as jnp, jmp_train as jt
      >>> first = jt.parity(lambda x: x * 2, lambda x: (x + 0.1) * 2, -jnp.ones((2, 3))).first_difference
      >>> first.kind, first.train.primitive, first.infer.primitive
      ('value', 'mul', 'add')
    """

    kind: Kind
    train: OperationParity | None
    infer: OperationParity | None


@dataclasses.dataclass(frozen=True)
class Operations:
    """The operations of both functions.

    Attributes:
      train: in the order in which they run.
      infer: likewise.
      first: where they part; None where no operation differs.
      mean: of |log p_train - log p_infer|, each operation run by itself; NaN if that is not finite.
    """

    train: tuple[OperationParity, ...]
    infer: tuple[OperationParity, ...]
    first: FirstDifference | None
    mean: float
