"""Classifies equations of a traced program: those that can lose digits, and those with programs to enter."""

from typing import Any

import jax.numpy as jnp

from jmp_train.policies.autocasting import LAYOUT
from jmp_train.policies.diagnosing.measures import is_float, is_low

# What holds a program that runs once, by the name of the parameter.
BODIES = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "remat2": "jaxpr",
    "checkpoint": "jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
}

# What moves numbers, picks among them or says where they are, and so has no error of its own.
_MOVES = frozenset(
    (
        *LAYOUT,
        *("concatenate", "pad", "gather"),
        *("dynamic_slice", "dynamic_update_slice", "select_n", "split", "sort", "max", "min", "neg", "abs", "sign"),
        *("clamp", "reduce_max", "reduce_min", "argmax", "argmin", "cummax", "cummin", "reduce_window_max"),
        *("reduce_window_min", "all_gather", "all_to_all", "ppermute", "pmax", "pmin", "top_k", "tile", "scatter"),
        *("scatter-min", "scatter-max", "scatter_min", "scatter_max", "select_and_scatter", "select_and_gather_add"),
        *("reduce_precision", "bitcast_convert_type", "random_bits", "random_wrap", "random_unwrap"),
        *("empty", "empty2"),
    )
)


def bodies_of(equation: Any) -> list[Any]:
    """Returns the programs within an equation that are entered, each a jaxpr with or without its constants."""
    name, params = equation.primitive.name, equation.params
    if name in BODIES:
        return [params[BODIES[name]]]
    match name:
        case "scan" | "shard_map":
            return [params["jaxpr"]]
        case "while":
            return [params["body_jaxpr"]]
        case "cond":
            return list(params["branches"])
    return []


def is_measured(equation: Any) -> bool:
    """Returns whether an equation can lose digits, and so has a row; equations with programs have none."""
    name = equation.primitive.name
    if name in _MOVES or bodies_of(equation) or not all(hasattr(v.aval, "dtype") for v in equation.outvars):
        return False
    if name == "convert_element_type":
        is_other = dtype_of(equation.invars[0]) != equation.params["new_dtype"]
        return (is_low(equation.params["new_dtype"]) and is_other) or decides(equation)
    return any(is_float(dtype_of(variable)) for variable in equation.outvars)


def decides(equation: Any) -> bool:
    """Returns whether an equation converts a float to a whole number, such as an index or a bucket."""
    if equation.primitive.name != "convert_element_type" or not is_float(dtype_of(equation.invars[0])):
        return False
    return jnp.issubdtype(equation.params["new_dtype"], jnp.integer)


def count_rows(program: Any) -> int:
    """Returns the number of rows of a program, including those of the programs inside."""
    jaxpr = getattr(program, "jaxpr", program)
    return sum(
        sum(map(count_rows, bodies)) if (bodies := bodies_of(equation)) else is_measured(equation)
        for equation in jaxpr.eqns
    )


def dtype_of(value: Any) -> Any:
    """Returns the dtype of an array or of a program's variable; None if it has none."""
    return getattr(getattr(value, "aval", value), "dtype", None)
