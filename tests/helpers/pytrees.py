"""Trees compared bit by bit, and gradients that a test poisons."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np


def compiled_vjp(fn: Callable[..., Any], cotangent: Any, *args: Any) -> tuple[Any, Any]:
    """Returns the results of `fn(*args)` and the cotangents of the arguments, of one program."""

    def run(cotangent: Any, *args: Any) -> tuple[Any, Any]:
        results, pullback = jax.vjp(fn, *args)
        return results, pullback(cotangent)

    return jax.jit(run)(cotangent, *args)


def assert_bitwise_equal(a: Any, b: Any) -> None:
    """Asserts that two trees have the same structure, dtypes and bits, NaN and -0.0 included."""
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for (path, x), y in zip(jax.tree_util.tree_leaves_with_path(a), jax.tree.leaves(b), strict=True):
        name = jax.tree_util.keystr(path)
        if jax.numpy.issubdtype(x.dtype, jax.dtypes.prng_key):
            x, y = jax.random.key_data(x), jax.random.key_data(y)
        assert x.dtype == y.dtype, name
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes(), name


def assert_same(found: Any, wanted: Any) -> None:
    """Asserts the same of trees whose leaves are arrays, keys or numbers, and that leaves have the same types."""
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for (path, x), y in zip(jax.tree_util.tree_leaves_with_path(found), jax.tree.leaves(wanted), strict=True):
        assert (type(x), getattr(x, "dtype", None)) == (type(y), getattr(y, "dtype", None)), path
    assert_bitwise_equal(*(jax.tree.map(_as_array, tree) for tree in (found, wanted)))


def _as_array(leaf: Any) -> Any:
    return leaf if hasattr(leaf, "dtype") else np.asarray(leaf)


def assert_close(found: Any, wanted: Any, *, rtol: float = 0.0, atol: float = 0.0) -> None:
    """Asserts that two trees have the same structure and shapes, and values as close as these tolerances."""
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for (path, x), y in zip(jax.tree_util.tree_leaves_with_path(found), jax.tree.leaves(wanted), strict=True):
        x, y = jax.device_get((x, y))
        np.testing.assert_allclose(x, y, rtol=rtol, atol=atol, err_msg=jax.tree_util.keystr(path))


def host_copy(tree: Any) -> Any:
    """Returns copies on the host, for comparison with what a donating step makes of the tree."""
    return jax.tree.map(lambda x: x if jax.numpy.issubdtype(x.dtype, jax.dtypes.prng_key) else np.array(x), tree)


@jax.custom_vjp
def poison_gradient(x: jax.Array, poison: jax.Array) -> jax.Array:
    """Returns x; its gradient is multiplied with `poison`, an inf or a 1."""
    del poison
    return x


def _forward(x: jax.Array, poison: jax.Array) -> tuple[jax.Array, jax.Array]:
    return x, poison


def _backward(poison: jax.Array, cotangent: jax.Array) -> tuple[jax.Array, jax.Array]:
    return cotangent * poison.astype(cotangent.dtype), jax.numpy.zeros_like(poison)


poison_gradient.defvjp(_forward, _backward)
