"""Matrix products in 8 or 4 bits, with gradients that are products in few bits too.

Operands are brought into one order, batch dimensions first and contracted ones last, so that a product and both its
gradients are the same function of transposed operands. What the gradients need is quantized in the forward pass as it
is multiplied in the backward pass, and stored once.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jmp_train.policies.autocasting.fp8.casting import Draw, Quantized, quantized, spread
from jmp_train.policies.autocasting.fp8.multiplying import multiply
from jmp_train.policies.autocasting.fp8.recipes import Recipe
from jmp_train.policies.pytrees import vary_like

STORED = "fp8_operands"  # the checkpoint name of what a product in few bits stores


@dataclasses.dataclass(frozen=True)
class Product:
    """The static settings of a product.

    Attributes:
      recipe: the recipe by which operands are quantized.
      dtype: the dtype of the result.
      batch: the number of batch dimensions.
      contracted: the number of contracted dimensions.
      weights: for each operand, True if it is a weight.
    """

    recipe: Recipe
    dtype: Any
    batch: int
    contracted: int
    weights: tuple[bool, bool] = (False, True)


class Extra(NamedTuple):
    """Further arrays of a product; None for those that it does not have.

    Attributes:
      scales: float32 [3], the scales of lhs, rhs and the gradient of the result. Their "gradients" are the largest
        magnitudes of these arrays.
      key: a jax random key for stochastic rounding.
      number: uint32 scalar; products with different ones draw different numbers.
      groups: the sizes of the groups of a ragged product.
    """

    scales: jax.Array | None = None
    key: jax.Array | None = None
    number: Any = None
    groups: jax.Array | None = None


NOTHING = Extra()


def product_in_few_bits(
    lhs: jax.Array,
    rhs: jax.Array,
    numbers: lax.DotDimensionNumbers,
    recipe: Recipe,
    dtype: Any = jnp.float32,
    extra: Extra = NOTHING,
    weights: tuple[bool, bool] = (False, True),
) -> jax.Array:
    """Returns a matrix product computed in 8 or 4 bits; its gradients are computed so too.

    Args:
      lhs: floating array.
      rhs: floating array; for a ragged product, its first dimension are the groups.
      numbers: ((lhs_contracting, rhs_contracting), (lhs_batch, rhs_batch)), as for `dot_general`.
      recipe: the recipe by which they are quantized.
      dtype: the dtype of the result.
      extra: further arrays.
      weights: for each operand, True if it is a weight.

    Returns:
      The product. Gradients have the dtypes of the operands; their sums are float32.

    Example:
      >>> import jax.numpy as jnp
      >>> from jmp_train.policies import Float8CurrentScaling
      >>> x, w = jnp.array([[7.0, 3.4]]), jnp.array([[7.0], [7.0]])  # the scales are 64; 3.4 becomes 3.5
      >>> product_in_few_bits(x, w, (((1,), (0,)), ((), ())), Float8CurrentScaling())
      Array([[73.5]], dtype=float32)
    """
    (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = numbers
    product = Product(recipe, jnp.dtype(dtype), len(lhs_batch), len(lhs_contract), weights)
    left = _ordered(lhs, tuple(lhs_batch), tuple(lhs_contract))
    right = _ordered(rhs, tuple(rhs_batch), tuple(rhs_contract))
    return _product(product, vary_like(right, left), vary_like(left, right), extra)


def _ordered(x: jax.Array, batch: tuple[int, ...], contracted: tuple[int, ...]) -> jax.Array:
    free = [i for i in range(x.ndim) if i not in (*batch, *contracted)]
    return lax.transpose(x, (*batch, *free, *contracted))


def _swapped(x: jax.Array, leading: int, last: int) -> jax.Array:
    """Returns an array whose last dimensions come directly after the leading ones."""
    first, rest = range(leading), range(leading, x.ndim - last)
    return lax.transpose(x, (*first, *range(x.ndim - last, x.ndim), *rest))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product(product: Product, lhs: jax.Array, rhs: jax.Array, extra: Extra) -> jax.Array:
    return _forward(product, lhs, rhs, extra)[0]


@jax.custom_vjp
def derived_once(x: jax.Array) -> jax.Array:
    """Returns an operand of which the gradient of a gradient, that of a cast to few bits, would be wrong."""
    return x


def _refuse(*_: object) -> Any:
    raise TypeError(
        "products in 8 or 4 bits have no second derivatives from outside of the autocast region; take the inner "
        "gradient within the function that autocast gets, or use another rule than 'fp8' for them"
    )


derived_once.defvjp(lambda x: (x, None), _refuse)


def _derived(product: Product, lhs: jax.Array, rhs: jax.Array, extra: Extra) -> Any:
    return _forward(product, derived_once(lhs), derived_once(rhs), extra)


def _of_groups(x: jax.Array, groups: jax.Array | None) -> jax.Array:
    """Returns an array with zeros in the rows of no group, which would otherwise count for its scales."""
    if groups is None:
        return x
    rows = lax.broadcasted_iota(groups.dtype, x.shape, 0)
    return jnp.where(rows < groups.sum(dtype=groups.dtype), x, jnp.zeros((), x.dtype))


def _forward(product: Product, lhs: jax.Array, rhs: jax.Array, extra: Extra) -> Any:
    lhs = _of_groups(lhs, extra.groups)
    terms, leading = product.contracted, product.batch + (extra.groups is not None)
    left = _operand(product, lhs, terms, extra, 0, product.batch)
    right = _operand(product, rhs, terms, extra, 1, leading)
    out = multiply(left, right, product.batch, terms, product.dtype, extra.groups)
    stored = _stored(product, lhs, left, extra, 0, product.batch), _stored(product, rhs, right, extra, 1, leading)
    like = [jnp.zeros((0,), x.dtype) for x in (lhs, rhs)]
    return out, (checkpoint_name(stored, STORED), like, extra)


def _stored(product: Product, x: jax.Array, operand: Quantized, extra: Extra, index: int, leading: int) -> Quantized:
    """Returns an operand as the gradient of the other one multiplies it: its other dimensions are contracted."""
    if product.recipe.activations.whole:  # one scale serves all products
        array, inverse = (_swapped(a, leading, product.contracted) for a in operand[:2])
        return operand._replace(array=array, inverse=inverse)
    swapped, free = _swapped(x, leading, product.contracted), x.ndim - leading - product.contracted
    return _operand(product, swapped, free, extra, index, leading, spreads=product.weights[1 - index])


def _operand(
    product: Product,
    x: jax.Array,
    contracted: int,
    extra: Extra,
    index: int,
    leading: int,
    *,
    spreads: bool = False,
) -> Quantized:
    """Quantizes lhs, rhs or the gradient for either, which are 0, 1, 2 and 3, with contracted dimensions last.

    Args:
      product: the product.
      x: the operand.
      contracted: the number of contracted dimensions.
      extra: further arrays.
      index: the number of the operand.
      leading: the number of dimensions for batches and groups.
      spreads: True for a product that computes the gradient of a weight.
    """
    recipe = product.recipe
    is_weight, is_gradient = index < 2 and product.weights[index], index >= 2
    x = spread(x) if spreads and recipe.hadamard and extra.groups is None else x
    return quantized(
        x,
        contracted,
        recipe.weights if is_weight else recipe.activations,
        recipe.backward_dtype if is_gradient else recipe.forward_dtype,
        leading=leading,
        scale=None if extra.scales is None else extra.scales[index],
        draw=_draw_of(x, extra, index) if is_gradient else None,
    )


def _draw_of(x: jax.Array, extra: Extra, index: int) -> Draw | None:
    """Returns a key and a number for stochastic rounding, which differ between devices where the array does."""
    if extra.key is None:
        return None
    axes = sorted(jax.typeof(x).manual_axis_type.varying)
    device = lax.axis_index(tuple(axes)).astype(jnp.uint32) if axes else jnp.uint32(0)
    return extra.key, extra.number + (device * 4 + index).astype(jnp.uint32)


def _backward(product: Product, residuals: Any, cotangent: jax.Array) -> Any:
    (lhs, rhs), like, extra = residuals
    cotangent = _of_groups(derived_once(cotangent), extra.groups)
    batch, groups, weights = product.batch, extra.groups, product.weights
    of_rhs = rhs.array.ndim - product.contracted - batch - (groups is not None)
    of_lhs = cotangent.ndim - batch - of_rhs
    gradient = functools.partial(_operand, product, extra=extra, leading=batch)
    for_lhs = gradient(cotangent, of_rhs, index=2, spreads=weights[0])
    swapped = _swapped(cotangent, batch, of_rhs)
    if product.recipe.activations.whole:
        for_rhs = for_lhs._replace(array=_swapped(for_lhs.array, batch, of_rhs))
    else:
        for_rhs = gradient(swapped, of_lhs, index=3, spreads=weights[1])
    grads = (
        multiply(for_lhs, rhs, batch, of_rhs, like[0].dtype, groups),
        multiply(for_rhs, lhs, batch, of_lhs, like[1].dtype, groups),
    )
    scales = None if extra.scales is None else jnp.stack([lhs.amax, rhs.amax, for_lhs.amax])
    return *grads, Extra(scales)


_product.defvjp(_derived, _backward)
