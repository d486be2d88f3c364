"""jax's primitives: their kinds by name, and binding them as jitted functions.

`jax.grad` linearizes a primitive each time it is bound, but a jitted function only once per set of input types.
Differentiating a program that is bound operation by operation thus takes less than half the time. The resulting program
is the same.
"""

import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive
from jax.typing import DTypeLike

from jmp_train.policies.autocasting.rules import PRESETS
from jmp_train.policies.autocasting.rules import PRODUCTS as _PRODUCTS
from jmp_train.policies.autocasting.rules import TRANSCENDENTAL as _TRANSCENDENTAL
from jmp_train.policies.programs import opened, walk


def names(text: str) -> frozenset[str]:
    """Returns the words of a text."""
    return frozenset(text.split())


def body_of(call: Any) -> Any:
    """Returns the program that a call, one of `CALLS`, runs, as an open jaxpr."""
    return opened(call.params[CALLS[call.primitive.name]])


def results_inside(body: Any, equation: Any, outer: Collection[Any]) -> frozenset[Any]:
    """Returns the results of a body, without literals, that are `outer` results of the equation that holds it."""
    pairs = zip(body.outvars, equation.outvars, strict=True)
    return frozenset(x for x, out in pairs if out in outer and not isinstance(x, jex.Literal))


def multiplies(jaxpr: Any, *, by_default: bool = False) -> bool:
    """Returns whether a program, or a program within it, has a matrix product or a convolution.

    Args:
      jaxpr: the program.
      by_default: True to count only products that request no precision.
    """
    return any(
        e.primitive.name in PRODUCTS and not (by_default and e.params["precision"] is not None)
        for e in (place.equation for place in walk(jaxpr))
    )


def precisions_of(equation: Any) -> tuple[Any, ...]:
    """Returns the precision that an equation requests, or that of each operand; None if it requests none."""
    precision = equation.params.get("precision")
    return precision if isinstance(precision, tuple) else (precision,)


def is_complex(atom: Any) -> bool:
    """Returns whether a variable or literal of a jaxpr is complex."""
    return getattr(getattr(atom.aval, "dtype", None), "kind", "") == "c"


# These only set the place, the name or the order of computation of values.
PLACEMENT = names(
    "name sharding_constraint reshard layout_constraint relayout with_memory_space_constraint "
    "device_put optimization_barrier"
)
LAYOUT = PLACEMENT | names(
    "reshape transpose broadcast_in_dim squeeze expand_dims rev slice copy copy_p stop_gradient pvary pcast"
)
ADDITIONS = names("add sub neg add_any")  # their gradients need neither inputs nor result
ARITHMETIC = ADDITIONS | {"mul", "div"}
TRANSCENDENTAL, PRODUCTS = names(_TRANSCENDENTAL), names(_PRODUCTS)
# The derivatives of these square, invert or subtract values, which leaves the range or the precision of half.
DERIVED_IN_FLOAT32 = names(
    "acos acosh asin asinh atan atan2 atanh cosh div erf erfc erf_inv exp2 expm1 integer_pow pow rem rsqrt sinh tan"
)
NEAR_A_CONSTANT = names("logistic tanh erf erfc cos sin exp exp2")  # functions whose values crowd there
PICKS = names("gather dynamic_slice")
LIMITS = names("max min abs")
# Autocast runs the programs of these by its rules.
ENTERED = names("jit pjit closed_call scan while cond shard_map remat2 custom_jvp_call custom_vjp_call")
CALLS = {"jit": "jaxpr", "pjit": "jaxpr", "custom_jvp_call": "call_jaxpr"}  # to the parameter that holds the body

# Elementwise and data-moving operations, whose floating operands must have one dtype.
PROMOTE = (
    LAYOUT
    | ARITHMETIC
    | TRANSCENDENTAL
    | names(
        "rem max min sign abs floor ceil round is_finite tanh logistic erf erfc sqrt sin cos atan "
        "atan2 eq ne lt le gt ge select_n clamp concatenate pad stack unstack split "
        "dynamic_slice dynamic_update_slice gather scatter reduce_max reduce_min argmax argmin "
        "cummax cummin top_k reduce_window_max reduce_window_min real imag tile reduce_sum reduce_prod cumsum "
        "cumprod cumlogsumexp reduce_window_sum"
    )
)
# Exchanges between devices, whose gradients are exchanges too. The gradients of others, such as all_gather, are sums.
EXCHANGES = names("all_to_all ppermute")
# Their results depend only on their operands.
COMPUTED = (PROMOTE | PRODUCTS) - PLACEMENT
EACH = PLACEMENT | {"sort"}  # each operand has its own dtype


@functools.partial(jax.jit, static_argnums=1, inline=True)
def cast(array: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Returns an array cast to a dtype."""
    return lax.convert_element_type(array, dtype)


def bind(primitive: Primitive, arrays: Sequence[Any], params: dict[str, Any]) -> Any:
    """Returns the result of `primitive.bind(*arrays, **params)` for a primitive without effects.

    Args:
      primitive: a jax primitive.
      arrays: its operands.
      params: its parameters.
    """
    try:
        run = _jitted(primitive, tuple(params.items()))
    except TypeError:  # a parameter is not hashable
        return primitive.bind(*arrays, **params)
    return run(*arrays)


@functools.lru_cache(maxsize=4096)
def _jitted(primitive: Primitive, params: tuple[tuple[str, Any], ...]) -> Callable[..., Any]:
    return jax.jit(lambda *arrays: bind_product(primitive, arrays, dict(params)), inline=True)


def in_float32(name: str, params: dict[str, Any], rule: str | None) -> dict[str, Any]:
    """Returns the parameters of a product of float32 operands by a rule, one of `FLOAT32_RULES`.

    The equation's own precision, also from `jax_default_matmul_precision`, comes first.
    """
    if params.get("precision") is not None or rule == "tf32":
        return params
    named = rule if rule in PRESETS and name == "dot_general" else None
    return {**params, "precision": named or (lax.Precision.HIGHEST,) * 2}


def product_rule(params: dict[str, Any]) -> str:
    """Returns the rule whose products of float32 operands have the precision of these parameters, or its own name."""
    precision = params.get("precision")
    if isinstance(precision, str | lax.DotAlgorithm | lax.DotAlgorithmPreset):
        return str(precision)
    return "float32" if precision is not None and lax.Precision.HIGHEST in precision else "tf32"


def bind_product(primitive: Primitive, arrays: Sequence[Any], params: dict[str, Any]) -> Any:
    """Returns the result of `primitive.bind`; the precision may be one of `PRESETS`, by its name."""
    preset = params.get("precision")
    if not isinstance(preset, str):
        return primitive.bind(*arrays, **params)

    def run(precision: Any) -> Callable[..., Any]:
        return lambda *arrays: primitive.bind(*arrays, **{**params, "precision": precision})

    by_preset, exact = run(PRESETS[preset]), run((lax.Precision.HIGHEST,) * 2)
    if preset in ("bf16_x3", "bf16_x6"):
        return by_preset(*arrays)
    return lax.platform_dependent(*arrays, cuda=by_preset, rocm=by_preset, default=exact)


def float32_product(primitive: Primitive, arrays: Sequence[Any], params: dict[str, Any]) -> Any:
    """Returns a matrix product of half arrays in float32, with the derivative of the half product.

    Args:
      primitive: `dot_general`.
      arrays: its two operands, of one half type.
      params: its parameters.
    """
    return _float32_product(primitive, tuple(params.items()))(*arrays)


@functools.lru_cache(maxsize=4096)
def _float32_product(primitive: Primitive, params: tuple[tuple[str, Any], ...]) -> Callable[..., Any]:
    def product(dtype: DTypeLike, *arrays: object) -> Any:
        typed = {**dict(params), "preferred_element_type": jnp.dtype(dtype)}
        return bind(primitive, arrays, typed)

    @jax.custom_jvp
    def in_float32(x: object, y: object) -> Any:
        return product(jnp.float32, x, y)

    @functools.partial(in_float32.defjvp, symbolic_zeros=True)
    def tangents_in_half(primals: Sequence[jax.Array], tangents: Sequence[jax.Array]) -> tuple[Any, Any]:
        (x, y), (dx, dy) = primals, tangents
        parts = [(a, b) for a, b in ((dx, y), (x, dy)) if not _is_zero(a) and not _is_zero(b)]
        half = [cast(product(x.dtype, a, b), jnp.float32) for a, b in parts]
        return in_float32(x, y), functools.reduce(lax.add, half)

    return in_float32


def saving(run: Callable[..., Any], arrays: Sequence[Any], saved: Sequence[Any], **options: Any) -> Any:
    """Returns `run(*arrays)`; gradients go to the arrays, and store `saved`.

    Args:
      run: a function of arrays that upcasts half arrays.
      arrays: its arguments.
      saved: the same values, each in float32 or half.
      **options: options of `jax.checkpoint`.
    """
    count = len(arrays)

    @jax.custom_jvp
    def call(*operands: Any) -> Any:
        return run(*operands[:count])

    @functools.partial(call.defjvp, symbolic_zeros=True)
    def recomputed(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, Any]:
        moved = [i for i in range(count) if not _is_zero(tangents[i])]

        def tangent(saved: Sequence[Any], tangents: Sequence[Any]) -> Any:
            operands = [x if x.dtype == a.dtype else cast(x, a.dtype) for x, a in zip(saved, primals, strict=False)]

            def of_moved(*arrays: Any) -> Any:
                return run(*(dict(zip(moved, arrays, strict=True)).get(i, x) for i, x in enumerate(operands)))

            return jax.jvp(of_moved, [operands[i] for i in moved], tangents)[1]

        run_again = jax.checkpoint(tangent, **options)
        return call(*primals), run_again(primals[count:], [tangents[i] for i in moved])

    return call(*arrays, *saved)


def _is_zero(tangent: object) -> bool:
    return isinstance(tangent, jax.custom_derivatives.SymbolicZero)
