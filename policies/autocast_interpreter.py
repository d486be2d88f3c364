"""Runs a traced function again, each operation in the precision that a table of rules gives it.

The function is traced for float32 in place of half inputs, so that literals are not rounded; then its
equations are bound one by one to the real values, which are cast to what the rule says. Values that
are made of literals alone are weak: they follow the dtype of what they meet, as Python numbers do.
"""

import contextlib
import dataclasses
import functools
import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
from jax import lax

from jmp_train.policies.autocast_rules import AutocastRules, Rule
from jmp_train.policies.literal_bounds import UNKNOWN, Bounds, fits, literal_bounds, result_bounds

# What runs under this name was decided by an inner region, and an outer one leaves it as it is.
DECIDED = "jmp_train.autocast"

_WIDTHS = (np.dtype(jnp.float16), np.dtype(jnp.bfloat16), np.dtype(np.float32))
_HALVES, _FLOAT32 = _WIDTHS[:2], _WIDTHS[2]


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


LAYOUT = _names(
    "reshape transpose broadcast_in_dim squeeze expand_dims rev slice copy copy_p stop_gradient "
    "pvary pcast"
)
_ADDITIONS = _names("add sub neg add_any")  # their gradients need neither inputs nor result
_ARITHMETIC = _ADDITIONS | {"mul", "div"}
# Elementwise and data-moving operations, whose floating operands have to agree.
_PROMOTE = _names(
    "rem max min sign abs floor ceil round is_finite tanh logistic erf erfc sqrt sin cos atan atan2 "
    "eq ne lt le gt ge select_n clamp concatenate pad stack split dynamic_slice "
    "dynamic_update_slice gather scatter reduce_max reduce_min argmax argmin cummax cummin top_k "
    "reduce_window_max reduce_window_min real imag tile exp exp2 expm1 log log1p log2 pow "
    "integer_pow square rsqrt cbrt erf_inv acos asin cosh sinh tan acosh asinh atanh reduce_sum "
    "reduce_prod cumsum cumprod cumlogsumexp reduce_window_sum"
)
_PRODUCTS = _names("dot_general conv_general_dilated ragged_dot_general")
# Elementwise operations whose gradient needs an input or the result.
_SAVES_ITS_INPUT = _names(
    "mul div exp exp2 expm1 log log1p log2 pow integer_pow square rsqrt cbrt erf_inv acos asin cosh "
    "sinh tan acosh asinh atanh"
)
_EACH = frozenset(("sort", "optimization_barrier"))  # operands of which each has its own dtype


class BannedOperationError(TypeError):
    """An operation that the rules ban; the message says what to do instead.

    Example:
      >>> import jax.numpy as jnp
      >>> from jmp_train.policies import TORCH_CUDA, autocast
      >>> rules = TORCH_CUDA.replace(banned={"fft": "take it outside"})
      >>> autocast(jnp.fft.fft, rules=rules)(jnp.ones(4))
      Traceback (most recent call last):
      jmp_train.policies.autocast_interpreter.BannedOperationError: autocast bans fft: take it outside
    """


@dataclasses.dataclass(slots=True)
class Value:
    """A value of the program that runs.

    Attributes:
      array: an array or tracer in the dtype that the rules gave it.
      weak: whether it is made of literals only.
      bounds: of weak values, their least and greatest magnitude.
      origin: of arguments and constants that were only moved about, their first size, else None.
      product: whether it is the result of a matrix product or convolution, perhaps moved about.
      scaled: whether it is the product, or quotient, of a half value.
      casts: the array in other dtypes, so that a parameter is cast once.
    """

    array: Any
    weak: bool = False
    bounds: Bounds = UNKNOWN
    origin: int | None = None
    product: bool = False
    scaled: bool = False
    casts: dict[Any, Any] = dataclasses.field(default_factory=dict)

    @property
    def dtype(self) -> Any:
        """The array's dtype."""
        return jnp.result_type(self.array) if not hasattr(self.array, "dtype") else self.array.dtype

    def to(self, dtype: Any) -> Any:
        """Returns the array in a dtype."""
        if self.dtype == dtype:
            return self.array
        if dtype not in self.casts:
            if isinstance(self.array, np.ndarray | np.generic):
                with np.errstate(over="ignore", invalid="ignore"):
                    self.casts[dtype] = np.asarray(self.array).astype(dtype)
            else:
                self.casts[dtype] = lax.convert_element_type(self.array, dtype)
        return self.casts[dtype]

    def inside(self) -> "Value":
        """Returns it for the body of a loop or branch, whose casts must not leak out."""
        return dataclasses.replace(self, casts=dict(self.casts))


@dataclasses.dataclass(frozen=True)
class Decision:
    """What was decided for one equation: a row of `explain_autocast`."""

    path: str
    rule: str
    reason: str
    equation: Any
    callers: tuple[Any, ...]
    repeats: int
    dtypes_in: tuple[str, ...]
    dtypes_out: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Region:
    """What holds throughout an autocast region.

    Attributes:
      half: the half type.
      rules: the table.
      handlers: by primitive, what enters those that hold programs; see `autocast_control`.
      path: of modules and scopes around what is interpreted now.
      forced: "lower" or "float32", where a rule gave that to all of the function interpreted now.
      callers: the equations in whose bodies it is, the outermost first.
      repeats: how often the body of the loops around it runs, where that is known.
      log: where decisions are noted, or None.
      constants: those of the programs so far, by identity.
    """

    half: Any
    rules: AutocastRules
    handlers: Mapping[str, "Handler"]
    path: str = ""
    forced: Rule | None = None
    callers: tuple[Any, ...] = ()
    repeats: int = 1
    log: list[Decision] | None = None
    constants: dict[int, Value] = dataclasses.field(default_factory=dict)

    def constant(self, array: Any) -> Value:
        """Returns a constant of some body as the same value each time."""
        return self.constants.setdefault(id(array), argument(array))

    def body(self) -> "Region":
        """Returns the region for the body of a loop or branch, whose casts must not leak out."""
        inside = {key: value.inside() for key, value in self.constants.items()}
        return dataclasses.replace(self, constants=inside)

    def within(self, equation: Any, scope: str) -> "Region":
        """Returns the region for the body of an equation in that scope."""
        callers = (*self.callers, equation)
        return dataclasses.replace(self, path=join(self.path, scope), callers=callers)

    def unlogged(self) -> "Region":
        """Returns the region for a trial run."""
        return dataclasses.replace(self, log=None)

    def decide(self, equation: Any, scope: str) -> tuple[Rule | None, str]:
        """Returns the rule of an equation, None where no table names it, and where it is from."""
        name = equation.primitive.name
        function = equation.params.get("name") if name in ("jit", "pjit") else None
        tables = _tables(self.rules)
        for banned in (name, function):
            if banned in tables.banned:
                raise BannedOperationError(f"autocast bans {banned}: {tables.banned[banned]}")
        if tables.paths:
            path = join(self.path, scope)
            for expression, rule in tables.paths:
                if expression.search(path):
                    return rule, f"path {expression.pattern!r}"
        if fixed := re.findall(rf"{re.escape(DECIDED)}:(\w+)", scope):
            return fixed[-1], "autocast_as"
        if function in tables.functions:
            return tables.functions[function], f"function {function!r}"
        if self.forced is not None:
            return self.forced, f"within a function of rule {self.forced!r}"
        if name in tables.primitives:
            return tables.primitives[name], f"primitive {name!r}"
        return None, "no rule"


# Returns an equation's results, or None where it has to be bound as it was traced.
Handler = Callable[[Region, Any, list[Value]], list[Value] | None]


@dataclasses.dataclass(frozen=True)
class _Tables:
    primitives: dict[str, Rule]
    functions: dict[Any, Rule]
    paths: tuple[tuple[re.Pattern[str], Rule], ...]
    banned: dict[Any, str]


@functools.lru_cache(maxsize=64)
def _tables(rules: AutocastRules) -> _Tables:
    return _Tables(
        dict(rules.primitives),
        dict(rules.functions),
        tuple((re.compile(expression), rule) for expression, rule in rules.paths),
        dict(rules.banned),
    )


def join(path: str, scope: str) -> str:
    """Returns a path and a scope in it as one path, without the names of transformations."""
    scope = re.sub(r"\b(?:jvp|transpose|vmap|rematted_computation|checkpoint)\(|\)", "", scope)
    return f"{path}/{scope}" if path and scope else path or scope


def eligible(dtype: Any) -> bool:
    """Whether autocast touches values of that dtype: float16, bfloat16 and float32."""
    return dtype in _WIDTHS


def traced_dtype(atom: Any) -> Any:
    """Returns the dtype that a variable or literal has in the traced program."""
    return getattr(atom.aval, "dtype", None)


def interpret(region: Region, jaxpr: Any, values: Sequence[Value]) -> list[Value]:
    """Runs a jaxpr by the rules of a region.

    Args:
      region: the region.
      jaxpr: a jaxpr, with its constants if it has any.
      values: its arguments.
    """
    opened, constants = getattr(jaxpr, "jaxpr", jaxpr), getattr(jaxpr, "consts", ())
    environment: dict[Any, Value] = {}
    for variable, constant in zip(opened.constvars, constants, strict=True):
        environment[variable] = region.constant(constant)
    environment.update(zip(opened.invars, values, strict=True))

    def read(atom: Any) -> Value:
        return _literal(atom) if isinstance(atom, jex.Literal) else environment[atom]

    in_float32 = wanted(region, opened, "float32", _ARITHMETIC | {"stop_gradient"})
    in_half = wanted(region, opened, "lower", LAYOUT | _ARITHMETIC | {"max", "tanh", "logistic"})
    in_half &= {
        atom for e in opened.eqns if e.primitive.name not in _ADDITIONS for atom in _read(e)
    }
    grouped = itertools.groupby(opened.eqns, key=lambda e: str(e.source_info.name_stack))
    for scope, equations in grouped:
        with jax.named_scope(scope) if scope else contextlib.nullcontext():
            for equation in equations:
                inputs = [read(atom) for atom in equation.invars]
                outputs = _run(region, equation, scope, inputs, in_float32)
                if equation.primitive.name in _ARITHMETIC:
                    (output,) = outputs
                    stored = equation.outvars[0] in in_half
                    outputs = [_of_arithmetic(region, equation, output, inputs, stored)]
                environment.update(zip(equation.outvars, outputs, strict=True))
    return [read(atom) for atom in opened.outvars]


def _read(equation: Any) -> list[Any]:
    """Returns the variables that an equation reads."""
    return [atom for atom in equation.invars if not isinstance(atom, jex.Literal)]


def argument(array: Any) -> Value:
    """Returns an argument or constant as a value."""
    return Value(array, origin=int(np.size(array)) if hasattr(array, "size") else None)


def _literal(atom: Any) -> Value:
    dtype = traced_dtype(atom)
    if dtype is None or not jnp.issubdtype(dtype, jnp.number):
        return Value(atom.val, weak=True)
    array = np.asarray(atom.val, dtype) if eligible(dtype) else atom.val
    return Value(array, weak=True, bounds=literal_bounds(atom.val))


def _run(
    region: Region, equation: Any, scope: str, inputs: list[Value], in_float32: set[Any]
) -> list[Value]:
    name = equation.primitive.name
    if DECIDED in scope.replace(f"{DECIDED}:", ""):
        rule, reason = "keep", "decided by an inner region"
    else:
        rule, reason = region.decide(equation, scope)
    if name in region.handlers and _is_entered(rule, equation):
        forced = rule if rule in ("lower", "float32") else region.forced
        inner = dataclasses.replace(region.within(equation, scope), forced=forced)
        outputs = region.handlers[name](inner, equation, inputs)
        if outputs is not None:
            return outputs
        rule, reason = "keep", f"{name} is not entered"
    dtypes, rule, reason = _settle(region, equation, inputs, rule, reason, in_float32)
    outputs = _execute(region, equation, inputs, dtypes, rule)
    if region.log is not None:
        used = [x.dtype if d is None else d for x, d in zip(inputs, dtypes, strict=True)]
        region.log.append(
            Decision(
                path=join(region.path, scope),
                rule=rule,
                reason=reason,
                equation=equation,
                callers=region.callers,
                repeats=region.repeats,
                dtypes_in=tuple(str(dtype) for dtype in used),
                dtypes_out=tuple(str(value.dtype) for value in outputs),
            )
        )
    return outputs


def _is_entered(rule: Rule | None, equation: Any) -> bool:
    """Whether a rule needs the program within to be run by rules, instead of as it was traced."""
    if rule == "float32":
        return any(traced_dtype(atom) in _HALVES for atom in equation.invars)
    return rule != "keep"


def _settle(
    region: Region,
    equation: Any,
    inputs: list[Value],
    rule: Rule | None,
    reason: str,
    in_float32: set[Any],
) -> tuple[list[Any], Rule, str]:
    """Returns the dtype of each operand, None for "as it is", and the rule and reason in the end."""
    name, atoms = equation.primitive.name, equation.invars
    touched = [eligible(traced_dtype(atom)) for atom in atoms]
    as_it_is = [None] * len(inputs)
    as_traced = [
        traced_dtype(atom) if touch else None for atom, touch in zip(atoms, touched, strict=True)
    ]
    if not any(touched) or not all(_touchable(atom) for atom in atoms):
        return as_traced, "keep", "no operand that autocast touches"
    if name == "convert_element_type" and rule in (None, "lower"):
        return as_it_is, "promote", "explicit conversion"
    if name in _EACH and rule is None:
        return as_it_is, "promote", "each operand by itself"
    if rule is None and name == "mul" and atoms[0] is atoms[1]:
        rule, reason = "float32", "a square"
    if rule is None:
        known = name in LAYOUT | _ARITHMETIC | _PROMOTE
        rule, reason = ("promote", "elementwise") if known else ("keep", f"{name} is not known")
    if rule == "lower" and not _can_lower(equation):
        rule, reason = "keep", "its precision is spelled out"
    if rule == "keep":
        return as_traced, rule, reason

    target = _FLOAT32 if rule == "float32" else region.half
    if rule == "promote":
        floats = [value for value, touch in zip(inputs, touched, strict=True) if touch]
        target = _common(region, equation, floats, in_float32)
    dtypes = [target if touch else None for touch in touched]
    if _holds_typed_body(equation) and dtypes != as_traced:
        return as_traced, "keep", "its body is typed"
    return dtypes, rule, reason


def _execute(
    region: Region, equation: Any, inputs: list[Value], dtypes: Sequence[Any], rule: Rule
) -> list[Value]:
    """Binds a first-order equation to its inputs in the dtypes that were settled."""
    name = equation.primitive.name
    if name == "convert_element_type":
        if rule == "float32" and equation.params["new_dtype"] in _HALVES:
            return [Value(inputs[0].to(_FLOAT32))]
        return [_convert(equation, inputs[0])]
    widened = any(
        value.dtype == region.half and not value.weak and dtype == _FLOAT32
        for value, dtype in zip(inputs, dtypes, strict=True)
    )
    params = _params(equation, next((d for d in dtypes if d is not None), None))
    if name in _SAVES_ITS_INPUT and widened:
        return [_recomputed(equation, inputs, params)]
    arrays = [
        value.array if dtype is None else value.to(dtype)
        for value, dtype in zip(inputs, dtypes, strict=True)
    ]
    return _bind(equation, arrays, inputs, params)


def _recomputed(equation: Any, inputs: Sequence[Value], params: dict[str, Any]) -> Value:
    """Binds in float32, so that not the widened but the half inputs are saved for the gradient."""

    @functools.partial(jax.checkpoint, prevent_cse=False)
    def run(*arrays: Any) -> Any:
        wide = [
            lax.convert_element_type(array, _FLOAT32) if eligible(traced_dtype(atom)) else array
            for array, atom in zip(arrays, equation.invars, strict=True)
        ]
        return equation.primitive.bind(*wide, **params)

    return Value(run(*(value.array for value in inputs)))


def _of_arithmetic(
    region: Region, equation: Any, output: Value, inputs: list[Value], stored: bool
) -> Value:
    """Rounds a float32 result of half values to half, if it is stored for the gradient."""
    of_half = any(x.dtype == region.half for x in inputs)
    if stored and output.dtype == _FLOAT32 and (of_half or any(x.scaled for x in inputs)):
        return Value(output.to(region.half))
    return dataclasses.replace(output, scaled=of_half and equation.primitive.name in ("mul", "div"))


def _touchable(atom: Any) -> bool:
    """Whether an operand is eligible or of a dtype that goes along with any float."""
    dtype = traced_dtype(atom)
    if dtype is None:
        return False
    return eligible(dtype) or not (
        jnp.issubdtype(dtype, jnp.inexact) or jnp.issubdtype(dtype, jax.dtypes.extended)
    )


def _can_lower(equation: Any) -> bool:
    precision = equation.params.get("precision")
    parts = precision if isinstance(precision, tuple) else (precision,)
    return all(part is None or isinstance(part, lax.Precision) for part in parts)


def _holds_typed_body(equation: Any) -> bool:
    """Whether it holds a program that computes, such as a reducer."""
    held = [x for name, x in equation.params.items() if "jaxpr" in name and x is not None]
    return any(getattr(jaxpr, "jaxpr", jaxpr).eqns for jaxpr in held)


def _common(region: Region, equation: Any, floats: list[Value], in_float32: set[Any]) -> Any:
    """Returns the dtype in which operands meet."""
    name = equation.primitive.name
    if name in _ARITHMETIC and all(out in in_float32 for out in equation.outvars):
        return _FLOAT32  # all that reads the result would cast it up
    if name == "add" and (bias := _bias_dtype(equation, floats)) is not None:
        return bias
    scales = name in ("mul", "div")
    if not all(fits(v.bounds, region.half, scales=scales) for v in floats if v.weak):
        return _FLOAT32
    strong = {value.dtype for value in floats if not value.weak}
    strong = strong or {value.dtype for value in floats}
    return strong.pop() if len(strong) == 1 else _FLOAT32


def _bias_dtype(equation: Any, floats: list[Value]) -> Any:
    """Returns a product's dtype if the other operand is its bias: a parameter that is broadcast."""
    size = int(np.prod(equation.outvars[0].aval.shape))
    for product, bias in (floats, floats[::-1]):
        if product.product and bias.origin is not None and bias.origin < size:
            return product.dtype
    return None


def _convert(equation: Any, value: Value) -> Value:
    source, dtype = traced_dtype(equation.invars[0]), equation.params["new_dtype"]
    if eligible(source) and source == dtype:  # it only makes a weak type strong
        return value
    if eligible(source) and eligible(dtype):
        return dataclasses.replace(value, array=value.to(dtype), casts={})
    (output,) = _bind(equation, [value.array], [value], equation.params)
    if source == np.bool_:
        return dataclasses.replace(output, weak=True, bounds=(0.0, 1.0))  # a mask
    return output


def _params(equation: Any, dtype: Any) -> dict[str, Any]:
    """Returns the parameters of an equation whose operands have become of a dtype."""
    params = equation.params
    preferred = params.get("preferred_element_type")
    if preferred is None or dtype is None or not eligible(np.dtype(preferred)):
        return params
    asked_for_wider = (
        jnp.promote_types(*(traced_dtype(x) for x in equation.invars[:2])) != preferred
    )
    return params if asked_for_wider else {**params, "preferred_element_type": dtype}


def _bind(
    equation: Any, arrays: Sequence[Any], inputs: Sequence[Value], params: dict[str, Any]
) -> list[Value]:
    primitive = equation.primitive
    results = (
        primitive.bind(*arrays, **primitive.get_bind_params(params))
        if _is_call(equation)
        else primitive.bind(*arrays, **params)
    )
    results = results if primitive.multiple_results else [results]
    layout = primitive.name in LAYOUT
    floats = [v for v, a in zip(inputs, equation.invars, strict=True) if eligible(traced_dtype(a))]
    weak = bool(inputs) and all(value.weak for value in floats or inputs)
    return [
        Value(
            result,
            weak=weak,
            bounds=result_bounds(equation, [v.bounds for v in inputs]) if weak else UNKNOWN,
            origin=inputs[0].origin if layout else None,
            product=inputs[0].product if layout else primitive.name in _PRODUCTS,
        )
        for result in results
    ]


def _is_call(equation: Any) -> bool:
    return equation.primitive.name in ("custom_jvp_call", "custom_vjp_call")


def wanted(
    region: Region,
    jaxpr: Any,
    rule: Rule,
    through: frozenset[str],
    results: frozenset[Any] = frozenset(),
) -> set[Any]:
    """Returns the variables whose every reader computes by a rule, however they get there.

    Args:
      region: the region.
      jaxpr: the program.
      rule: "float32" or "lower".
      through: the primitives whose inputs are wanted as their results are.
      results: those of the program's results that are wanted so.
    """
    opened, tables = getattr(jaxpr, "jaxpr", jaxpr), _tables(region.rules)
    if tables.paths:
        return set()
    readers: dict[Any, list[Any]] = {}
    for equation in opened.eqns:
        for variable in _read(equation):
            readers.setdefault(variable, []).append(equation)
    visible = {atom for atom in opened.outvars if not isinstance(atom, jex.Literal)} - results
    found: set[Any] = set(results)

    def fits(variable: Any, reader: Any) -> bool:
        name, params = reader.primitive.name, reader.params
        if DECIDED in str(reader.source_info.name_stack):
            return False
        if name in ("jit", "pjit", "custom_jvp_call"):
            if params.get("name") in tables.functions:
                return False
            body = params["jaxpr"] if name != "custom_jvp_call" else params["call_jaxpr"]
            inside = getattr(body, "jaxpr", body)
            pairs = zip(inside.outvars, reader.outvars, strict=True)
            outs = frozenset(
                inner
                for inner, outer in pairs
                if outer in found and not isinstance(inner, jex.Literal)
            )
            inner = wanted(region, body, rule, through, outs)
            pairs = zip(reader.invars, inside.invars, strict=True)
            return all(position in inner for atom, position in pairs if atom is variable)
        if name in through:
            return all(result in found for result in reader.outvars)
        return tables.primitives.get(name) == rule

    for variable in itertools.chain(
        *(equation.outvars for equation in reversed(opened.eqns)), opened.invars
    ):
        read_by = readers.get(variable, [])
        if read_by and variable not in visible and all(fits(variable, x) for x in read_by):
            found.add(variable)
    return found
