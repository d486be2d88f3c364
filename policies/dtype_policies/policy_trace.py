"""Traces a function under a half policy, and lists its operations with the reasons why some are in float32.

Every float32 value has an origin: an argument that the policy does not cast, a constant, a line that
created it, or a cast of a half-precision value. Promotion casts a half-precision value because of the other operand.
So among several origins, the one that is not such a cast is to blame.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import compress
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, JaxprEqn

from jmp_train.policies.autocasting import (
    DECIDED,
    HALVES,
    PRODUCTS,
    FlatCall,
    argument_names,
    flops_of,
    is_complex,
    is_exact,
    is_float32,
    traced_dtype,
    user_line_of,
    variables_read,
)
from jmp_train.policies.dtype_policies.policy import AutocastPolicy, PathPolicy, Policy
from jmp_train.policies.programs import ABSTRACTLY, Place, Reading, While, repeats_of
from jmp_train.policies.pytrees import cast_for_call, named_leaves, with_overwritten


@dataclasses.dataclass(frozen=True)
class FloatOrigin:
    """The reason why a value has more than 16 bits.

    Attributes:
      what: a description of it.
      equations: the equation that created it, after its callers; () for arguments.
      was_half: True if it is a cast of a half-precision value.
      of_policy: True if it is computed only from parameters that the policy keeps in float32.
    """

    what: str
    equations: tuple[Any, ...] = ()
    was_half: bool = False
    of_policy: bool = False

    @property
    def line(self) -> str:
        """The user's line; "" for arguments."""
        return user_line_of(self.equations)

    def __str__(self) -> str:
        return f"{self.what} at {line}" if (line := self.line) else self.what


@dataclasses.dataclass(frozen=True)
class TracedOperation(Place):
    """An operation of a traced program, where it is.

    Attributes:
      origins: origins of its operands; None for half-precision values, other types and numbers in the code.
    """

    origins: tuple[FloatOrigin | None, ...] = ()

    @property
    def is_product(self) -> bool:
        """True for a matrix product or a convolution of floats."""
        return self.equation.primitive.name in PRODUCTS and (self.is_float32 or self.in_half)

    @property
    def is_float32(self) -> bool:
        """True if it reads floats of more than 16 bits."""
        return any(map(is_float32, self.equation.invars))

    @property
    def in_half(self) -> bool:
        """True if it computes in half precision or in 8 bits."""
        dtypes = [dtype for atom in self.equation.invars if (dtype := traced_dtype(atom)) is not None]
        return any(jnp.issubdtype(dtype, jnp.floating) for dtype in dtypes) and not self.is_float32

    @property
    def as_asked(self) -> bool:
        """True if the user requested float32: by a rule for a parameter, `autocast_as`, or its precision."""
        return (
            any(origin is not None and origin.of_policy for origin in self.origins)
            or DECIDED in self.path
            or is_exact(self.equation)
        )

    @property
    def flops(self) -> int:
        """The number of floating-point operations in all iterations of the loops together."""
        return self.repeats * flops_of(self.equation)

    @property
    def origin(self) -> FloatOrigin | None:
        """The origin to blame for float32, if it is known."""
        return _to_blame(self.origins)


def traced_operations(
    jaxpr: ClosedJaxpr, origins: Sequence[FloatOrigin | None], constants: Mapping[int, FloatOrigin] | None = None
) -> list[TracedOperation]:
    """Returns the operations of a program in order, including those within loops and branches.

    Args:
      jaxpr: a closed jaxpr.
      origins: origins of its arguments; None for those that are not float32.
      constants: origins of arrays that it closes over, by their ids.
    """
    found: list[TracedOperation] = []
    _Operations(found, constants or {}).evaluate(jaxpr, origins)
    return found


@dataclasses.dataclass(frozen=True)
class _Operations(Reading[FloatOrigin | None]):
    """Lists operations; a value is its origin.

    Attributes:
      found: the operations so far.
      closed_over: origins of known constants, by their ids.
      callers: the equations in whose bodies it is, the outermost first.
      repeats: how many times the loops around it run it.
    """

    found: list[TracedOperation]
    closed_over: Mapping[int, FloatOrigin]
    callers: tuple[Any, ...] = ()
    repeats: int = 1

    table = ABSTRACTLY

    def within(self, equation: Any) -> "_Operations":
        callers, repeats = (*self.callers, equation), self.repeats * repeats_of(equation)
        return dataclasses.replace(self, callers=callers, repeats=repeats)

    def trial(self) -> "_Operations":
        return dataclasses.replace(self, found=[])

    def constant(self, array: Any) -> FloatOrigin | None:
        if not is_float32(array):
            return None
        return self.closed_over.get(id(array)) or FloatOrigin(f"a closed-over {jax.typeof(array).str_short()}")

    def literal(self, atom: Any) -> FloatOrigin | None:
        return super().literal(atom) if getattr(atom.aval, "shape", ()) else None

    def joined(self, values: Sequence[FloatOrigin | None]) -> FloatOrigin | None:
        return _to_blame(values)

    def enter(self, equation: Any, inputs: list[FloatOrigin | None]) -> Sequence[FloatOrigin | None] | None:
        outputs = super().enter(equation, inputs)
        if equation.primitive.name == "while":
            loop = While.of(equation)
            consts, _, carry = loop.split(inputs)
            self.within(equation).evaluate(loop.condition, [*consts, *carry])
        return outputs

    def bind(self, equation: Any, inputs: list[FloatOrigin | None]) -> list[FloatOrigin | None]:
        self.found.append(TracedOperation(equation, self.callers, self.repeats, tuple(inputs)))
        return [
            _result_origin(equation, self.callers, inputs, traced_dtype(variable)) if is_float32(variable) else None
            for variable in equation.outvars
        ]


def _result_origin(
    equation: JaxprEqn, callers: tuple[Any, ...], inputs: Sequence[FloatOrigin | None], dtype: Any
) -> FloatOrigin:
    """Returns the origin of an equation's result of a float32 dtype."""
    read = variables_read(equation)
    blamed = _to_blame(inputs)
    if blamed is not None:
        of_policy = all(
            origin is not None and origin.of_policy
            for atom, origin in zip(equation.invars, inputs, strict=True)
            if not isinstance(atom, jex.Literal)
        )
        return dataclasses.replace(blamed, of_policy=of_policy)
    half = next((traced_dtype(atom) for atom in read if traced_dtype(atom) in HALVES), None)
    name = equation.primitive.name
    if half is not None and name == "convert_element_type":
        return FloatOrigin(f"cast from {half} to {dtype}", (*callers, equation), was_half=True)
    what = f"{dtype} made by {name}" if half is None else f"the {dtype} result of {name}"
    return FloatOrigin(what, (*callers, equation))


def _to_blame(origins: Sequence[FloatOrigin | None]) -> FloatOrigin | None:
    known = [origin for origin in origins if origin is not None]
    return next((origin for origin in known if not origin.was_half), next(iter(known), None))


@contextlib.contextmanager
def cast_arguments(
    policy: Policy | PathPolicy, args: tuple[Any, ...], kwargs: dict[str, Any], also: Collection[int] = frozenset()
) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Yields a call's arguments in the compute dtype; the first one holds the parameters.

    In nnx objects, it casts the `nnx.Param`s, and the variables with ids in `also`.
    """
    if not args and policy is not policy.default:
        raise TypeError("a policy_by_path needs the parameters as the first positional argument")

    def cast(call: tuple[tuple[Any, ...], dict[str, Any]]) -> Any:
        args, kwargs = call
        inputs, kwargs = policy.default.cast_to_compute((args[1:], kwargs))
        params = [with_overwritten(policy.cast_to_compute(x), x) for x in args[:1]]
        return (*params, *inputs), kwargs

    with cast_for_call((args, kwargs), cast, also) as call:
        yield call


def compute_dtypes(policy: Policy | PathPolicy) -> list[np.dtype]:
    """Returns the compute dtypes of a policy and of its rules for single parameters."""
    rules = [rule for _, rule in policy.rules] if isinstance(policy, PathPolicy) else []
    return [np.dtype(p.compute_dtype) for p in (policy.default, *rules)]


def computes_in_float16(policy: Policy | PathPolicy) -> bool:
    """Returns whether a policy computes anything in float16, by autocast or by casts."""
    if isinstance(policy.default, AutocastPolicy) and policy.default.autocast_dtype == np.float16:
        return True
    return np.float16 in compute_dtypes(policy)


def operations_under(
    fn: Callable[..., Any],
    policy: Policy | PathPolicy | None,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    *,
    uncast: Sequence[Any] = (),
    names: Sequence[str] | None = None,
) -> list[TracedOperation]:
    """Returns the operations of `fn(*args, *uncast, **kwargs)`, with the arguments cast by a policy.

    Args:
      fn: the function; a path policy follows its first argument.
      policy: None casts nothing.
      args: pytrees; `jax.ShapeDtypeStruct` works in place of arrays, and other leaves are passed on.
      kwargs: keyword arguments, likewise.
      uncast: further arguments, which no policy casts.
      names: names of the arguments, for reports; None takes the function's own.

    Raises:
      Exception: any error of `fn` during tracing.
    """
    names = argument_names(fn, len(args)) if names is None else names
    call = FlatCall(((*args, *uncast), kwargs), {})

    def cast(given: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if policy is None:
            return given, kwargs
        with cast_arguments(policy, given[: len(args)], kwargs) as (inputs, keywords):
            return jax.tree.leaves(((*inputs, *given[len(args) :]), keywords))

    avals = jax.make_jaxpr(call.of_arrays(cast))(*call.avals).out_avals
    jaxpr = jax.make_jaxpr(call.of_arrays(lambda given, kwargs: fn(*given, **kwargs)))(*avals)
    leaves = arguments_of(names, (*args, *uncast), kwargs)
    paths = [path for path, _ in compress(leaves, call.are_arrays)]
    return traced_operations(jaxpr, origins_of(paths, jaxpr, names[:1]))


def arguments_of(
    names: Sequence[str], args: Sequence[Any], kwargs: dict[str, Any], is_leaf: Callable[[Any], bool] | None = None
) -> list[tuple[str, Any]]:
    """Returns (path, leaf) of the arguments of a call, each path with the name of the argument."""
    pairs = (*zip(names[: len(args)], args, strict=True), *sorted(kwargs.items()))
    return [leaf for name, x in pairs for leaf in named_leaves({name: x}, is_leaf)]


def origins_of(paths: Sequence[str], jaxpr: ClosedJaxpr, parameters: Sequence[str]) -> list[FloatOrigin | None]:
    """Returns the origins of a program's arguments, given their paths and the name of the argument with parameters."""
    prefixes = tuple(f"{name}/" for name in parameters)
    return [
        uncast_origin(path, of_policy=f"{path}/".startswith(prefixes) and not is_complex(x)) if is_float32(x) else None
        for path, x in zip(paths, jaxpr.jaxpr.invars, strict=True)
    ]


def uncast_origin(path: str, *, of_policy: bool = False) -> FloatOrigin:
    """Returns the origin of an argument that a policy does not cast."""
    return FloatOrigin(f"{path!r}, which the policy does not cast", of_policy=of_policy)
