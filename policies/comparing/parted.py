"""The results of `parity` for operations: their differences, and where the functions diverge."""

import dataclasses
import linecache
from typing import Literal

Kind = Literal["value", "rounding"]


@dataclasses.dataclass(frozen=True)
class OperationParity:
    """An operation of one function, compared with the other function.

    Attributes:
      primitive: the name of its jax primitive.
      path: the path of its modules and scopes.
      file: the file of the user's line, or of the library that the user called.
      line: the number of that line; 0 if unknown.
      dtype: the dtype of its result.
      shape: the shape of its result.
      runs: the number of times that it ran.
      unknown: the fraction of its result's rows that the other function has nowhere, even in float32.
      difference: the mean difference of its rows from the same rows of the other function, relative to a row's norm;
        NaN if no row is known.
      error: the mean difference of its rows from those in float32, likewise.
      contribution: the fraction of the log-probabilities' difference that disappears when this operation, after those
        before it, gets the values of the other function. NaN if not tried, for example if only the rounding differs.

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
        """The source line, if its file can be read."""
        return linecache.getline(self.file, self.line).strip() if self.line else ""


@dataclasses.dataclass(frozen=True)
class FirstDifference:
    """The operations where two functions diverge.

    Attributes:
      kind: "value" if they differ even when both run in float32, "rounding" if they then agree.
      train: the first operation of training with results that inference lacks; None if there is none.
      infer: the first operation of inference with results that training lacks; None if there is none.

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
      train: the operations of training, in the order in which they run.
      infer: the operations of inference, likewise.
      first: the first operations that differ; None if none differs.
      mean: the mean of |log p_train - log p_infer| if operations run one by one; NaN if it is not finite.
    """

    train: tuple[OperationParity, ...]
    infer: tuple[OperationParity, ...]
    first: FirstDifference | None
    mean: float
