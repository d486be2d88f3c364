"""Row normalization of node features: the magnitudes of each row add up to 1."""

from typing import TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np

from jmp_train.policies.pytrees import has_tracers

Array = TypeVar("Array", np.ndarray, jax.Array)


def normalize_rows(features: Array) -> Array:
    """Returns each row divided by the sum of its magnitudes, as is usual for Planetoid's words; on the host.

    For nonnegative features that is the row's sum. If signs differ, a sum may be close to 0,
    and dividing by it would make rows huge or change their signs. Magnitudes add up to 0 only in rows of
    zeros, which stay zeros. (PyTorch Geometric subtracts the smallest of all features first, and leaves rows
    unchanged that add up to less than 1.)

    Args:
      features: floating [nodes, width], an array of NumPy or jax.

    Returns:
      [nodes, width] in the features' dtype, of NumPy or jax likewise. Half precision is computed in
      float32 and rounded once; sums are float64.

    Raises:
      TypeError: features are not an array, not floating, or traced.
      ValueError: features have another rank than 2.

    Example:
      >>> import numpy as np
      >>> normalize_rows(np.array([[1, 3], [0, 0], [-1, 1]], np.float16)).tolist()
      [[0.25, 0.75], [0.0, 0.0], [-0.5, 0.5]]
    """
    if not isinstance(features, np.ndarray | jax.Array):
        raise TypeError(f"features must be an array, got {type(features).__name__}")
    if has_tracers(features):
        raise TypeError("features is traced: rows are normalized outside of jit")
    if not jnp.issubdtype(features.dtype, jnp.floating):
        raise TypeError(f"features must be floating, got {features.dtype}")
    if features.ndim != 2:
        raise ValueError(f"features must have shape [nodes, width], got shape {features.shape}")
    rows = np.asarray(features)
    rows = rows.astype(np.promote_types(rows.dtype, np.float32), copy=False)
    sums = np.abs(rows).sum(axis=1, keepdims=True, dtype=np.float64)
    sums[sums == 0] = 1
    with np.errstate(invalid="ignore"):  # inf / inf
        results = np.divide(rows, sums, out=np.empty_like(rows), casting="same_kind")
    results = results.astype(features.dtype, copy=False)
    return cast(Array, results if isinstance(features, np.ndarray) else jnp.asarray(results))
