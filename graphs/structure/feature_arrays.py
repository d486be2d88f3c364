"""Arrays of features: half precision in storage, float32 in computation, and small functions of rows."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from jmp_train.policies import autocast_as
from jmp_train.policies.dtype_policies import check_narrowed

Result = TypeVar("Result")
_SMALL = 2**20  # bytes, up to which copying an array takes less time than compiling a program


def on_device(array: ArrayLike, dtype: DTypeLike | None = None) -> jax.Array:
    """Returns an array on the device, as `jnp.asarray`, which compiles a program for each new shape of NumPy's arrays.

    Args:
      array: an array of any shape, which may change afterwards if it is NumPy's.
      dtype: the wanted dtype; the array's own if None.
    """
    if isinstance(array, np.ndarray) and array.nbytes <= _SMALL:
        return jax.device_put(np.array(array, dtype))
    return jnp.asarray(array, dtype)


def as_array(name: str, data: ArrayLike) -> jax.Array:
    """Returns data as an array; raises ValueError if NumPy's 64-bit integers do not fit into 32 bits, if JAX has these.

    Args:
      name: the argument's name, for the message.
      data: an array of any shape.
    """
    check_narrowed(data, name, floats=False)
    return jnp.asarray(data)


def upcast(data: jax.Array) -> jax.Array:
    """Returns floats in float32 or higher precision, other arrays unchanged."""
    is_low_precision = jnp.issubdtype(data.dtype, jnp.floating) and data.dtype.itemsize < 4
    return data.astype(jnp.float32) if is_low_precision else data


def upcast_integers(data: jax.Array) -> jax.Array:
    """Returns booleans and integers in at least 32 bits, as `jnp.sum` adds them, other arrays unchanged."""
    if jnp.issubdtype(data.dtype, jnp.inexact) or data.dtype.itemsize >= 4:
        return data
    is_unsigned = jnp.issubdtype(data.dtype, jnp.unsignedinteger)
    return data.astype(jnp.uint32 if is_unsigned else jnp.int32)


def as_inexact(data: jax.Array) -> jax.Array:
    """Returns booleans and integers as floats, like their means, other arrays unchanged."""
    if jnp.issubdtype(data.dtype, jnp.inexact):
        return data
    return data.astype(jnp.float64 if data.dtype.itemsize == 8 else jnp.float32)


def accumulation_dtype(dtype: DTypeLike) -> np.dtype:
    """Returns the dtype in which arrays of a dtype are computed, as by `upcast`."""
    is_low_precision = jnp.issubdtype(dtype, jnp.floating) and np.dtype(dtype).itemsize < 4
    return np.dtype(np.float32 if is_low_precision else dtype)


def common_dtype(*dtypes: DTypeLike) -> np.dtype:
    """Returns the common dtype of several, as jax promotes them without strict promotion."""
    with jax.numpy_dtype_promotion("standard"):
        return np.dtype(functools.reduce(jnp.promote_types, dtypes))


def is_one_precision(*operands: jax.Array | None) -> bool:
    """Returns whether operands, except None, are floats that are computed in one dtype."""
    dtypes = [x.dtype for x in operands if x is not None]
    are_floats = all(jnp.issubdtype(dtype, jnp.floating) for dtype in dtypes)
    return are_floats and len({accumulation_dtype(dtype) for dtype in dtypes}) == 1


@jax.jit
def graph_storage(data: jax.Array) -> jax.Array:
    """Returns the same array, which autocast stores in half precision: its tables have this function's name."""
    return jnp.copy(data)


def in_float32(compute: Callable[..., Result], *operands: jax.Array) -> Result:
    """Returns the result of a float32 computation on stored operands, stored in their common dtype.

    For integer operands, the result keeps its computed dtype, a larger integer or a float. Integer results, such as
    places, are unchanged.

    Args:
      compute: a function that upcasts the operands and returns a tree of arrays.
      *operands: features in their stored dtypes.
    """
    common = common_dtype(*[operand.dtype for operand in operands])
    stored = [graph_storage(operand) for operand in operands]
    result = autocast_as("float32")(compute)(*stored)
    is_inexact = jnp.issubdtype(common, jnp.inexact)

    def store(x: jax.Array) -> jax.Array:
        return graph_storage(x.astype(common if is_inexact and jnp.issubdtype(x.dtype, jnp.inexact) else x.dtype))

    return jax.tree.map(store, result)


def rows_like(column: jax.Array, array: jax.Array) -> jax.Array:
    """Returns a column [rows] with axes added for broadcasting with an array [rows, ...]."""
    return column.reshape(-1, *[1] * (array.ndim - 1))


def checked_rows(name: str, rows: ArrayLike | Any, count: int, kind: str) -> jax.Array:
    """Returns rows as a checked array.

    Args:
      name: the argument's name, for messages.
      rows: an array [count, ...].
      count: the expected number of rows.
      kind: "nodes", "edges" or "graphs", for messages.

    Raises:
      ValueError: there is another number of rows, or NumPy's 64-bit integers do not fit into 32 bits.
    """
    array = as_array(name, rows)
    check_rows(name, array.shape, count, kind)
    return array


def check_rows(name: str, shape: tuple[int, ...], count: int, kind: str) -> None:
    """Raises ValueError unless an array of some shape has `count` rows; see `checked_rows`."""
    if shape[:1] != (count,):
        raise ValueError(f"{name} must have {count} rows, one for each of the {kind}, got shape {shape}")


def first_rows(rows: jax.Array, count: int) -> jax.Array:
    """Returns the first of some rows, or the same array if these are all."""
    return rows if count == rows.shape[0] else rows[:count]


def finite_or_zero(data: jax.Array) -> jax.Array:
    """Returns data with 0 for infinities, as for the largest logits if all are masked."""
    return jnp.where(jnp.isfinite(data), data, jnp.zeros_like(data))


def reciprocal(data: jax.Array) -> jax.Array:
    """Returns 1 divided by data, with 1 for zeros."""
    return 1 / jnp.where(data == 0, jnp.ones_like(data), data)


def inverse_degrees(degrees: jax.Array, features: jax.Array) -> jax.Array:
    """Returns 1 divided by degrees, with 0 counted as 1, in the dtype in which features are computed."""
    return 1 / jnp.maximum(degrees, 1).astype(accumulation_dtype(features.dtype))


@jax.custom_jvp
def root_or_zero(data: jax.Array) -> jax.Array:
    """Returns the square roots of data; 0 if not positive, with gradient 0 instead of infinity.

    No comparison decides the value: XLA may compute data twice, rounded differently, and two comparisons could differ.
    """
    return jnp.sqrt(jnp.maximum(data, 0))


@root_or_zero.defjvp
def _root_tangent(data: tuple[jax.Array], tangents: tuple[jax.Array]) -> tuple[jax.Array, jax.Array]:
    root = root_or_zero(*data)
    is_zero = root <= 0  # NaN stays
    slope = jnp.where(is_zero, jnp.zeros_like(root), 0.5 / jnp.where(is_zero, jnp.ones_like(root), root))
    return root, slope * tangents[0]


def lstm_cell(
    weights: Sequence[jax.Array], enters: jax.Array, state: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """Returns the next hidden state and cell of an LSTM, [rows, width], with gates in torch's order.

    Args:
      weights: of_input [in, 4 * width], of_hidden [width, 4 * width], and their biases, in the dtype of the state.
      enters: the input, [rows, in].
      state: hidden state and cell.
    """
    of_input, of_hidden, input_bias, hidden_bias = weights
    hidden, cell = state
    gates = enters @ of_input + input_bias + (hidden @ of_hidden + hidden_bias)
    enter, forget, new, leave = jnp.split(gates, 4, axis=-1)
    cell = jax.nn.sigmoid(forget) * cell + jax.nn.sigmoid(enter) * jnp.tanh(new)
    return jax.nn.sigmoid(leave) * jnp.tanh(cell), cell


@jax.custom_jvp
def _zero_if_negative(data: jax.Array) -> jax.Array:
    """Returns data, 0 if negative; as in `root_or_zero`, no comparison decides the value. 0 has a gradient."""
    return jnp.maximum(data, 0)


@_zero_if_negative.defjvp
def _tangent_if_not_negative(data: tuple[jax.Array], tangents: tuple[jax.Array]) -> tuple[jax.Array, jax.Array]:
    return _zero_if_negative(*data), jnp.where(data[0] < 0, jnp.zeros_like(tangents[0]), tangents[0])


def moments_about(shift: jax.Array, rest: jax.Array, square: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the mean and the variance of numbers from their moments about a number near the mean.

    Up to rounding, the result does not depend on that number, so it needs no gradient. Its difference from the
    mean is subtracted again, which corrects the mean's own rounding.

    Args:
      shift: the number.
      rest: the mean of the differences to it.
      square: the mean of their squares.

    Reference: Chan, Golub and LeVeque, Algorithms for Computing the Sample Variance, 1983.
    """
    variance = square - rest * rest
    return shift + rest, _zero_if_negative(variance)
