"""Kinds of jax's primitives, by name: those that move values, add them, multiply them or compute with them."""

from jmp_train.policies.autocasting.rules import PRODUCTS as _PRODUCTS
from jmp_train.policies.autocasting.rules import TRANSCENDENTAL as _TRANSCENDENTAL


def names(text: str) -> frozenset[str]:
    """Returns the words of a text."""
    return frozenset(text.split())


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
PICKS = names("gather dynamic_slice")
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
