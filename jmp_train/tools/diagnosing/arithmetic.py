"""Equations of a traced program: whether they can lose digits, and how they are bound, also in float32.

A GPU with TF32 rounds operands of products and convolutions to 10 bits, a TPU to the 7 bits of bfloat16, unless jax's
precision says otherwise. Such a product gets a `Rounding` as its precision, by which its operands are rounded. The call
that rounds to few bits becomes one operation, so that its shadow holds the numbers before. Of branches by platform,
only that of this one is left.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr

from jmp_train.policies.autocasting import LAYOUT, PRODUCTS, precisions_of
from jmp_train.policies.programs import Reading, bodies_of, on_this_platform, opened, walk
from jmp_train.tools.diagnosing.measures import is_float, is_low, is_whole, widened

SUMS = frozenset(
    (
        *("add", "sub", "add_any", "reduce_sum", "cumsum", "scatter-add", "scatter_add", "reduce_window_sum"),
        *("psum", "psum_invariant"),
    )
)
TO_FEW_BITS = jex.Primitive("to_few_bits")  # stands for the call of recipes that rounds, as one operation
_DTYPES = ("new_dtype", "dtype", "preferred_element_type", "accum_dtype")  # parameters that name a result's dtype
_EXACT = (lax.Precision.HIGHEST,) * 2
# Code that is not jax's, which has the dtypes that it has, and may have effects.
_FOREIGN = ("callback", "ffi_call", "pallas_call", "custom_call", "kernel_call")
# Their results say what bits there are, or the next number: float32 has others.
_OF_BITS = frozenset(("bitcast_convert_type", "nextafter"))
_TO_WHOLE = frozenset(("floor", "ceil", "round"))
# What makes whole numbers or booleans of floats, where a rounding can decide. That of NaN and infinities is the step's.
_DECIDERS = frozenset(
    (
        *_TO_WHOLE,
        *("eq", "ne", "lt", "le", "gt", "ge", "eq_to", "lt_to", "le_to"),
        *("argmax", "argmin", "sort", "top_k", "approx_top_k", "convert_element_type"),
    )
)
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
        *("new_ref", "free_ref", "freeze", "get", "swap", "addupdate"),  # of references
    )
)


@dataclasses.dataclass(frozen=True)
class Rounding:
    """The precision of a product that rounds its float32 operands to some bits of mantissa, as a device does."""

    bits: int

    @property
    def eps(self) -> float:
        """The distance from 1 to the next number."""
        return 2.0**-self.bits


def rounding_of(equation: Any) -> Rounding | None:
    """Returns how the device rounds the operands of a product; None if it does not."""
    precision = equation.params.get("precision")
    return precision if isinstance(precision, Rounding) else None


def bound(equation: Any, operands: Sequence[Any]) -> list[Any]:
    """Returns an equation's results for operands in its own dtypes."""
    params = equation.params
    if equation.primitive is TO_FEW_BITS:
        return jex.jaxpr_as_fun(params["jaxpr"])(*operands)
    if (rounding := rounding_of(equation)) is not None:
        operands = [lax.reduce_precision(x, 8, rounding.bits) if dtype_of(x) == np.float32 else x for x in operands]
        params = {**params, "precision": _EXACT}
    elif isinstance(params.get("precision"), lax.DotAlgorithmPreset) and jax.default_backend() == "cpu":
        params = {**params, "precision": _EXACT}  # as CPUs compute it, in a branch for GPUs too, which they lack
    return _bind(equation.primitive, operands, params)


def float32_results(equation: Any, operands: Sequence[Any]) -> list[Any] | None:
    """Returns an equation's results in float32 for operands in float32; None if there is no such operation.

    Args:
      equation: an equation of a traced program.
      operands: its operands; those in lower precision are float32 here.
    """
    name, params = equation.primitive.name, equation.params
    if equation.primitive is TO_FEW_BITS:
        return [operands[0]]
    if name in PRODUCTS:
        params = {**params, "precision": _EXACT}
        if all(is_float(dtype_of(x)) for x in operands[:2]) and is_whole(params["preferred_element_type"]):
            params["preferred_element_type"] = np.dtype(np.float32)
    if name == "reduce_precision" and params["mantissa_bits"] < jnp.finfo(jnp.float32).nmant:
        return [operands[0]]
    if name in _OF_BITS or name.endswith(_FOREIGN):
        return None
    wide = {
        key: widened(value) if key in _DTYPES and value is not None and is_float(np.dtype(value)) else value
        for key, value in params.items()
    }
    try:
        if _holds_program(params) and any(is_low(getattr(v.aval, "dtype", None)) for v in equation.outvars):
            return _by_its_program(equation, operands)
        return _bind(equation.primitive, operands, wide)
    except (TypeError, ValueError, NotImplementedError):
        return None


def _bind(primitive: Any, operands: Sequence[Any], params: dict[str, Any]) -> list[Any]:
    if primitive.name == "psum_invariant":  # which wants to know what varies over the mesh, as only whole programs do
        return [lax.psum(x, params["axes"]) for x in operands]
    if primitive.name == "slice" and len(operands) > 1:  # the starts are operands
        sizes = np.subtract(params["limit_indices"], params["start_indices"])
        return [lax.dynamic_slice(operands[0], operands[1:], sizes)]
    results = primitive.bind(*operands, **primitive.get_bind_params(params))
    return list(results) if primitive.multiple_results else [results]


def magnitude_of_terms(equation: Any, operands: Sequence[Any]) -> Any:
    """Returns the sum of the magnitudes of an equation's terms; None if it is no sum.

    Args:
      equation: an equation of a traced program.
      operands: its operands in float32.
    """
    name = equation.primitive.name
    if name not in SUMS:
        return None
    magnitudes = [jnp.abs(x) if is_float(jnp.asarray(x).dtype) else x for x in operands]
    if name == "sub":
        return magnitudes[0] + magnitudes[1]
    results = float32_results(equation, magnitudes)
    return None if results is None else results[0]


def _holds_program(params: dict[str, Any]) -> bool:
    return "update_jaxpr" in params or "jaxpr" in params


def _by_its_program(equation: Any, operands: Sequence[Any]) -> list[Any] | None:
    """Binds a scatter or a reduction with a parameter that is a program for two numbers in lower precision."""
    params = equation.params
    if scatter := _SCATTERS.get(equation.primitive.name.replace("_", "-")):
        kept = ("dimension_numbers", "indices_are_sorted", "unique_indices", "mode")
        return [scatter(*operands, **{key: params[key] for key in kept})]
    count = len(operands) // 2
    values, starts = operands[:count], operands[count:]
    if equation.primitive.name == "reduce":
        return list(lax.reduce(values, starts, _of_scalars(params["jaxpr"]), params["dimensions"]))
    if equation.primitive.name == "reduce_window":
        kept = ("window_dimensions", "window_strides", "padding", "base_dilation", "window_dilation")
        program = _of_scalars(params["jaxpr"])
        return list(lax.reduce_window(values, starts, program, **{key: params[key] for key in kept}))
    return None


class _InFloat32(Reading[Any]):
    """Runs a program of a few scalars in float32."""

    def literal(self, atom: Any) -> jax.Array:
        return jnp.asarray(atom.val, widened(atom.aval.dtype))

    def bind(self, equation: Any, inputs: list[Any]) -> list[Any]:
        results = float32_results(equation, inputs)
        if results is None:
            raise NotImplementedError(equation.primitive.name)
        return results


def _of_scalars(jaxpr: Any) -> Callable[[Any, Any], Any]:
    """Returns a program of a few scalars in float32, as a function of the sums so far and the numbers to add."""

    def run(first: Any, second: Any) -> Any:
        results = _InFloat32().evaluate(jaxpr, [*jax.tree.leaves(first), *jax.tree.leaves(second)])
        return jax.tree.unflatten(jax.tree.structure(first), results)

    return run


_SCATTERS: dict[str, Callable[..., Any]] = {
    "scatter": lax.scatter,
    "scatter-add": lax.scatter_add,
    "scatter-sub": lax.scatter_sub,
    "scatter-mul": lax.scatter_mul,
    "scatter-min": lax.scatter_min,
    "scatter-max": lax.scatter_max,
}


def rounded(shadow: jax.Array, dtype: Any) -> jax.Array:
    """Returns finite numbers rounded to a dtype; those beyond its range become its largest number."""
    if shadow.dtype == dtype:
        return shadow
    if is_whole(dtype):
        return lax.convert_element_type(lax.round(shadow, lax.RoundingMethod.TO_NEAREST_EVEN), dtype)
    largest = float(jnp.finfo(dtype).max)
    clipped = jnp.where(jnp.isfinite(shadow), jnp.clip(shadow, -largest, largest), shadow)
    return lax.convert_element_type(clipped, dtype)


def is_measured(equation: Any) -> bool:
    """Returns whether an equation can lose digits, and so has a row; equations with programs have none."""
    name = equation.primitive.name
    if decides(equation):
        return True
    if name in _MOVES or bodies_of(equation) or not all(hasattr(v.aval, "dtype") for v in equation.outvars):
        return False
    if name == "convert_element_type":
        return is_low(equation.params["new_dtype"]) and dtype_of(equation.invars[0]) != equation.params["new_dtype"]
    return is_in_int8(equation) or any(is_float(dtype_of(variable)) for variable in equation.outvars)


def is_in_int8(equation: Any) -> bool:
    """Returns whether an equation rounds to int8 or is a product of such numbers; the shadow has floats for them."""
    is_product = equation.primitive.name in PRODUCTS and all(dtype_of(x) == np.int8 for x in equation.invars[:2])
    return is_product or (equation.primitive is TO_FEW_BITS and dtype_of(equation.outvars[0]) == np.int8)


def decides(equation: Any) -> bool:
    """Returns whether an equation has whole numbers or booleans of floats: an index, a bucket, a comparison."""
    is_of_floats = equation.primitive.name in _DECIDERS and any(is_float(dtype_of(x)) for x in equation.invars)
    return is_of_floats and decision_of(equation) is not None


def decision_of(equation: Any) -> int | None:
    """Returns the number of an equation's first result of whole numbers or booleans; None if there is none."""
    are_whole = (rounds_to_whole(equation) or is_whole(dtype_of(v)) for v in equation.outvars)
    return next((i for i, whole in enumerate(are_whole) if whole), None)


def rounds_to_whole(equation: Any) -> bool:
    """Returns whether an equation rounds floats to whole numbers, which stay floats."""
    return equation.primitive.name in _TO_WHOLE


def picks(equation: Any) -> bool:
    """Returns whether an equation compares or orders floats; operations that read its result read these."""
    is_cast = equation.primitive.name == "convert_element_type" and equation.params["new_dtype"] != np.bool_
    return decides(equation) and not is_cast and not rounds_to_whole(equation)


def is_discrete(equation: Any) -> bool:
    """Returns whether an equation decides about an index, a bucket or a place, not only between two numbers."""
    name = equation.primitive.name
    return decides(equation) and (name.endswith("_to") or name not in ("eq", "ne", "lt", "le", "gt", "ge"))


def count_rows(program: Any) -> int:
    """Returns the number of rows of a program, including those of the programs inside."""
    return sum(is_measured(place.equation) for place in walk(program, bodies_of))


def dtype_of(value: Any) -> Any:
    """Returns the dtype of an array or of a program's variable; None if it has none."""
    return getattr(getattr(value, "aval", value), "dtype", None)


_TF32, _BFLOAT16 = Rounding(10), Rounding(7)
_DEFAULT = (None, lax.Precision.DEFAULT)


def rounding_on(device: Any) -> Rounding | None:
    """Returns how a device rounds the float32 operands of products; None if it does not.

    Args:
      device: None, "cpu", "cuda", "tpu", or a device with a `platform`, such as a `GPU` or `TPU` of `jt.aot` or one of
        `jax.devices()`.

    Raises:
      ValueError: there is no such platform.

    Example:
      >>> rounding_on("cuda"), rounding_on("cpu")
      (Rounding(bits=10), None)
    """
    platform = getattr(device, "platform", device)
    if platform is None or platform == "cpu":
        return None
    if platform == "tpu":
        return _BFLOAT16
    if platform not in ("cuda", "gpu"):
        raise ValueError(
            f'device={device!r} must be "cpu", "cuda", "tpu", or a device, such as jt.aot.GPUS["H100-80GB"]'
        )
    capability = getattr(device, "capability", getattr(device, "compute_capability", "8.0"))
    major = capability[0] if isinstance(capability, tuple) else str(capability).partition(".")[0]
    return _TF32 if int(major) >= 8 else None


def rounding_text(rounding: Rounding | None) -> str:
    """Returns a sentence about a rounding; empty for None."""
    names = {_TF32: "TF32", _BFLOAT16: "bfloat16"}
    return (
        "" if rounding is None else f"Products of float32 operands round them to {names[rounding]}, as the device does."
    )


def with_rounding(program: ClosedJaxpr, rounding: Rounding | None) -> ClosedJaxpr:
    """Returns a program with its rounding to few bits as one operation each.

    Args:
      program: a traced program.
      rounding: how its products of float32 operands, at jax's default precision, round them; None if they do not.
    """
    return _rounded(program, rounding)


def _rounded(program: Any, rounding: Rounding | None) -> Any:
    """Returns a jaxpr, closed or open, with marks."""
    if isinstance(program, tuple):
        return tuple(_rounded(x, rounding) for x in program)
    jaxpr = opened(program)
    jaxpr = jaxpr.replace(eqns=[_marked(equation, rounding) for equation in jaxpr.eqns])
    return jaxpr if isinstance(program, Jaxpr) else program.replace(jaxpr=jaxpr)


def _marked(equation: Any, rounding: Rounding | None) -> Any:
    # Of what differentiating a loop moves out of it, a part that is not all of the rounding has the name too.
    if equation.params.get("name") == TO_FEW_BITS.name and _is_rounding(equation):
        return equation.replace(primitive=TO_FEW_BITS)
    equation = on_this_platform(equation)
    return equation.replace(params=_params(equation, rounding))


def _is_rounding(equation: Any) -> bool:
    shapes = [x.aval.shape for x in (*equation.invars[:1], *equation.outvars)]
    return len(shapes) == 2 and shapes[0] == shapes[1] and dtype_of(equation.outvars[0]) != np.float32


def _params(equation: Any, rounding: Rounding | None) -> dict[str, Any]:
    params = equation.params
    if equation.primitive.name in PRODUCTS and rounding is not None:
        known = _DEFAULT if rounding == _BFLOAT16 else (*_DEFAULT, lax.Precision.HIGH)
        is_rounded = any(dtype_of(atom) == np.float32 for atom in equation.invars[:2])
        if is_rounded and all(precision in known for precision in precisions_of(equation)):
            return {**params, "precision": rounding}
    held = {id(body) for body in bodies_of(equation)}
    within = {
        name: _rounded(value, rounding)
        for name, value in params.items()
        if id(value) in held or (isinstance(value, tuple) and value and all(id(x) in held for x in value))
    }
    return {**params, **within}
