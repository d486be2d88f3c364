"""Warns of float32 products, of those that jaxlib computes wrong on CPUs, and of rules that apply to no operation.

Products stay in float32 if autocast does not enter their program. XLA:CPU of jaxlib 0.11 and 0.12 passes chains of
convolutions to YNNPACK as one fusion. In bfloat16, some of these fusions never write their results, and the compiled
code reads uninitialized memory; a flag avoids the fault.
"""

import functools
import itertools
import os
import re
import sysconfig
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib.metadata import version
from typing import Any, NamedTuple

import jax
from jax import lax

from jmp_train.policies.autocasting.decisions import can_take
from jmp_train.policies.autocasting.known_names import is_function_of_jax, nearest
from jmp_train.policies.autocasting.operations import flops_of, held_jaxprs, is_float32
from jmp_train.policies.autocasting.primitives import ENTERED, PRODUCTS, is_complex, precisions_of
from jmp_train.policies.autocasting.region import DECIDED, Cause, Decision, Region
from jmp_train.policies.autocasting.rules import (
    APEX_O1,
    MOSTLY_HALF,
    TORCH_CPU,
    TORCH_CUDA,
)
from jmp_train.policies.autocasting.source_lines import address_of, is_of_jax, is_of_package, user_line_of, warn_user
from jmp_train.policies.autocasting.values import traced_dtype
from jmp_train.policies.programs import Place, programs_in, repeats_of, walk

FUSION_FLAG = "--xla_cpu_experimental_ynn_fusion_type="
_FIRST, _FIRST_UNKNOWN = (0, 11), (0, 13)
_TOLERATED_SHARE = 0.1
_LINES = 3
_COMPLEX_WAY = "Products of their real and imaginary parts can run in half precision."
_NOT_ENTERED = (Cause.NOT_ENTERED, Cause.NOT_KNOWN, Cause.TYPED_BODY)
_GRADIENTS = frozenset(("value_and_grad_f", "vjp", "linearize"))  # functions of jax around the differentiated one
_STANDARD_LIBRARY = (sysconfig.get_path("stdlib"), "<frozen", sysconfig.get_path("purelib"))
_EXACT = frozenset(("custom_linear_solve",))  # every table runs solvers in float32
_WHY = {
    "pallas_call": "a Pallas kernel, which computes in the dtypes that it was written for",
    "custom_vjp_call": "a custom_vjp that autocast cannot enter",
    "custom_vmap_call": "a custom_vmap, which autocast does not enter",
    "cond": "a platform_dependent, which autocast does not enter",
}


class TracedProduct(NamedTuple):
    """A matrix product or a convolution of a traced function.

    Attributes:
      equations: the equations around it, the outermost first, and its own.
      path: the path of modules and scopes.
      flops: the floating-point operations in all iterations of the loops around it.
      dtypes: the dtypes of its operands.
      why: if it is in float32 and nothing asks for that, what returns the reason, given the user's line; or None.
    """

    equations: tuple[Any, ...]
    path: str
    flops: int
    dtypes: tuple[str, ...]
    why: Callable[[str], str] | None = None

    def __str__(self) -> str:
        line, equation, why = user_line_of(self.equations), self.equations[-1], self.why
        shapes = " and ".join(atom.aval.str_short() for atom in equation.invars[:2])
        text = f"{line}: {equation.primitive.name} of {shapes}" + (f" in {self.path}" if self.path else "")
        return text + (why(line) if why else "")


class CpuConvolutionWarning(UserWarning):
    """This jaxlib may compute bfloat16 convolutions wrong on a CPU.

    `autocast` warns whenever it traces one; `train_step`, `scaled_value_and_grad` and `apply_policy` do when they are
    first traced.
    `XLA_FLAGS=--xla_cpu_experimental_ynn_fusion_type=`, set before jax starts, turns off the faulty fusion and this
    warning.

    Example:
      >>> import warnings
      >>> import jmp_train as jt
      >>> warnings.filterwarnings("error", category=jt.policies.CpuConvolutionWarning)
    """


def is_faulty(jaxlib: tuple[int, ...], xla_flags: str) -> bool:
    """Returns whether a jaxlib has the fault and no flag turns it off.

    Args:
      jaxlib: the version, such as (0, 12, 0).
      xla_flags: the value of the environment variable `XLA_FLAGS`.

    Example:
      >>> is_faulty((0, 12, 0), ""), is_faulty((0, 12, 0), FUSION_FLAG), is_faulty((0, 10, 2), "")
      (True, False, False)
    """
    return _FIRST <= jaxlib < _FIRST_UNKNOWN and FUSION_FLAG not in xla_flags


def is_at_risk() -> bool:
    """Returns whether the program that is being traced runs on CPUs, with a jaxlib that has the fault."""
    faulty = is_faulty(_jaxlib(), os.environ.get("XLA_FLAGS", ""))
    return faulty and jax.default_backend() == "cpu"  # starts the devices if tracing has not


def warn_of_convolutions(products: Iterable[TracedProduct]) -> None:
    """Warns of bfloat16 convolutions on CPUs if this jaxlib has the fault."""
    found = (x.equations[-1].primitive.name == "conv_general_dilated" and "bfloat16" in x.dtypes for x in products)
    if is_at_risk() and any(found):
        warn_user(
            f"jaxlib {version('jaxlib')} leaves results of some bfloat16 convolutions unwritten on CPUs: "
            f"set XLA_FLAGS={FUSION_FLAG} in the environment before jax starts",
            CpuConvolutionWarning,
        )


@functools.cache
def _jaxlib() -> tuple[int, ...]:
    return tuple(int(part) for part in version("jaxlib").split(".")[:3] if part.isdecimal())


class Float32ProductsWarning(UserWarning):
    """A half policy, or autocast, leaves more than a tenth of the flops of products in float32.

    `train_step`, `scaled_value_and_grad`, `apply_policy` and `autocast` warn when they are first traced;
    `explain_policy` and `explain_autocast` show all operations. If the product should stay in float32, use one of the
    following: a rule of `policy_by_path` for the parameter, `autocast_as("float32")` around the product, or
    `precision=HIGHEST` as its argument. Or filter the warning. Autocast does not warn of products that its rules make
    float32.

    Example:
      >>> import warnings
      >>> import jmp_train as jt
      >>> warnings.filterwarnings("ignore", category=jt.policies.Float32ProductsWarning)
    """


class InnerGradientWarning(UserWarning):
    """A gradient is taken inside of `autocast` or a half policy, and runs in float16 without a scale.

    The loss scale of the step multiplies the outer loss only. Elements of the inner gradient below 6e-8 become 0, and
    those below 6e-5 lose digits. `autocast`, `apply_policy` and steps warn when they are first traced. Use
    `jt.scaled_grad(fn)` in place of `jax.grad(fn)`, or bfloat16. Filter the warning if you scale the gradient yourself.

    Example:
      >>> import warnings
      >>> import jmp_train as jt
      >>> warnings.filterwarnings("ignore", category=jt.policies.InnerGradientWarning)
    """


def warn_of_products(products: Sequence[TracedProduct], half: str, under: str, *, way: str, report: str) -> None:
    """Warns of products left in float32, and of gradients taken in float16, on the first trace of a function.

    Args:
      products: its products and convolutions.
      half: the name of the half type.
      under: the policy or transformation that lowers them.
      way: how to run those left in float32 in half precision, unless all are complex.
      report: the function that shows all operations.
    """
    left = [product for product in products if product.why is not None]
    share = sum(x.flops for x in left) / max(1, sum(x.flops for x in products))
    if share > _TOLERATED_SHARE:
        lines = list(dict.fromkeys(map(str, left)))
        more = [f"and {len(lines) - _LINES} more"] if len(lines) > _LINES else []
        shown = "\n  ".join([*lines[:_LINES], *more])
        are_complex = all(any(map(is_complex, x.equations[-1].invars)) for x in left)
        warn_user(
            f"{share:.0%} of the flops of products stay in float32 under {under}:\n  {shown}\n"
            f"{_COMPLEX_WAY if are_complex else way} {report} shows all operations.",
            Float32ProductsWarning,
        )
    _warn_of_inner_gradients((x.equations for x in products if half in x.dtypes), half, under)


def is_exact(equation: Any) -> bool:
    """Returns whether a product requests the highest precision itself, not through jax's configuration."""
    if jax.config.jax_default_matmul_precision is not None:  # pyright: ignore[reportAttributeAccessIssue]
        return False
    return lax.Precision.HIGHEST in precisions_of(equation)


def products_of(decision: Decision) -> Iterator[TracedProduct]:
    """Yields the product that a decision is on, or those of a program that autocast does not enter."""
    equation, cause = decision.equation, decision.reason.cause
    name, equations = equation.primitive.name, (*decision.callers, equation)
    if name in PRODUCTS:
        why = (lambda _: f", {Cause.COMPLEX.value}") if cause is Cause.COMPLEX else None
        yield TracedProduct(equations, decision.path, decision.repeats * flops_of(equation), decision.dtypes_in, why)
    if decision.rule == "keep" and cause in _NOT_ENTERED and name not in _EXACT:
        text = _WHY.get(name, f"{name}, which autocast does not enter")
        repeats = decision.repeats * repeats_of(equation)
        held = (walk(body, callers=equations, repeats=repeats) for body in programs_in(equation))
        for place in itertools.chain.from_iterable(held):
            inner = place.equation
            if inner.primitive.name in PRODUCTS:
                why = (lambda _: f", in {text}") if _is_left(inner) else None
                flops, dtypes = place.repeats * flops_of(inner), tuple(str(traced_dtype(x)) for x in inner.invars)
                yield TracedProduct(place.equations, decision.path, flops, dtypes, why)


def _is_left(product: Any) -> bool:
    """Returns whether a product is in float32 and nothing asks for that."""
    is_asked_for = is_exact(product) or DECIDED in str(product.source_info.name_stack)
    return not is_asked_for and any(map(is_float32, product.invars))


def _warn_of_inner_gradients(products: Iterable[Sequence[Any]], half: str, under: str) -> None:
    """Warns at the line of the first gradient that runs in float16, unless a function of this package takes it.

    Args:
      products: products in half precision, each as the equations around it, the outermost first, and its own.
      half: the name of the half type.
      under: the name of the policy or transformation that lowers them.
    """
    if half != "float16":
        return
    for equations in products:
        if not any("transpose(" in str(equation.source_info.name_stack) for equation in equations):
            continue
        if place := _line_of_gradient(equations):
            warnings.warn_explicit(
                f"the gradient taken at {place[0]}:{place[1]} runs in float16 under {under}, and the loss scale does "
                "not reach it: elements below 6e-8 become 0. Use jt.scaled_grad(fn) for jax.grad(fn), or bfloat16",
                InnerGradientWarning,
                *place,
            )
            return


def _line_of_gradient(equations: Sequence[Any]) -> tuple[str, int] | None:
    """Returns file and line of the user's call of `jax.grad` or its kin; None if there is none, or it is of ours."""
    tracebacks = (equation.source_info.traceback for equation in reversed(equations))
    frames = [frame for traceback in tracebacks if traceback is not None for frame in traceback.frames]
    found = False
    for frame in frames:
        file = frame.file_name
        if is_of_jax(file):
            found = found or frame.function_name.rsplit(".", 1)[-1] in _GRADIENTS
        elif found and is_of_package(file):
            return None
        elif found and not file.startswith(_STANDARD_LIBRARY):
            return file, frame.line_num
    return None


_SHOWN = 3
_TABLES = (TORCH_CUDA, TORCH_CPU, APEX_O1, MOSTLY_HALF)
_SHIPPED = frozenset(name for rules in _TABLES for name, _ in rules.functions)
_SHIPPED_PRIMITIVES = frozenset(entry for rules in _TABLES for entry in rules.primitives)


class UnmetRulesWarning(UserWarning):
    """Entries of autocast rules apply to no operation: their names are wrong, or the function has changed.

    Or no operation that they match can take the rule, such as `fp8` for a path with attention's products only.

    `autocast` warns when it first traces the function, and so do `train_step` and `apply_policy` if they use rules.
    `explain_autocast` lists all such entries. Names of `primitives` and of jax's `functions` may match nothing. If
    several models share a table, filter the warning.

    Example:
      >>> import warnings
      >>> import jmp_train as jt
      >>> warnings.filterwarnings("ignore", category=jt.policies.UnmetRulesWarning)
    """


def unmet_entries(region: Region) -> tuple[str, ...]:
    """Returns the entries that apply to no operation, as text: the table, the name and the nearest name.

    After these come entries that match only operations that cannot run by their rule.

    Args:
      region: an autocast region that has run, with the traced functions.
    """
    rules, programs = region.rules, region.programs or ()
    kept = {id(equation) for equation in region.refused or ()}
    tables = {
        "paths": rules.paths,
        "operations": rules.operations,
        "functions": [entry for entry in rules.functions if entry[0] not in _SHIPPED],
        "primitives": [entry for entry in rules.primitives if entry not in _SHIPPED_PRIMITIVES],
    }
    places = [place for program in programs for place in walk(program, held_jaxprs)] if any(tables.values()) else []
    unmet, refused = [], []
    for table, entries in tables.items():
        found = [(place.equation, _names(table, place)) for place in places] if entries else []
        for name, rule in entries:
            matches = re.compile(name).search if table in ("paths", "operations") else name.__eq__
            met = [equation for equation, names in found if any(map(matches, names))]
            operations = [equation for equation in met if equation.primitive.name not in ENTERED]
            taking = (x for x in operations if id(x) not in kept and can_take(rule, x, region.recipe))
            if not met and table != "primitives" and not (table == "functions" and is_function_of_jax(name)):
                unmet.append(_text(table, name, {known for _, names in found for known in names}))
            elif operations and rule in ("lower", "fp8") and next(taking, None) is None:
                refused.append(f"{table}: {name!r}: what it matches cannot be {rule!r}")
    return *unmet, *refused


def _names(table: str, place: Place) -> list[str]:
    """Returns the names of an equation by which the entries of a table match it."""
    match table:
        case "paths":
            return [place.path]
        case "functions":
            return [str(x.params["name"]) for x in place.equations if x.primitive.name in ("jit", "pjit")]
    if place.equation.primitive.name in ENTERED:
        return []
    return [place.equation.primitive.name if table == "primitives" else address_of(place.equations, place.path)]


def unmet_lines(unmet: Sequence[str]) -> list[str]:
    """Returns the last lines of a report, which list the unmet entries; no lines if there are none.

    Args:
      unmet: the result of `unmet_entries`.
    """
    head = ["entries of the rules that apply to no operation:"] if unmet else []
    return [*head, *(f"  {entry}" for entry in unmet)]


def warn_of_unmet(region: Region) -> None:
    """Warns of the entries that apply to no operation; takes the argument of `unmet_entries`."""
    unmet = unmet_entries(region)
    if not unmet:
        return
    more = f"\n  and {len(unmet) - _SHOWN} more" if len(unmet) > _SHOWN else ""
    entries = "1 entry of the autocast rules applies" if len(unmet) == 1 else f"{len(unmet)} entries of the rules apply"
    warn_user(
        f"{entries} to no operation of the function:\n  "
        + "\n  ".join(unmet[:_SHOWN])
        + f"{more}\nThe names are wrong, or the code has changed: correct them, or run tune again. explain_autocast "
        "prints the path and the line of each operation.",
        UnmetRulesWarning,
    )


def _text(table: str, name: str, known: Iterable[str]) -> str:
    """Returns an entry and the most similar name, shortened as rules usually write it."""
    like = nearest(_as_written(name), filter(None, map(_as_written, known)))
    return f"{table}: {name!r}" + (f"; the nearest is {like[0]!r}" if like else "")


def _as_written(text: str) -> str:
    """Returns a regular expression or an address as plain text, without folders."""
    plain = re.sub(r"\.\*|[\\^$]", "", text)
    head, at, place = plain.partition("@")
    return head + at + re.sub(r"(?:[^\s/]*/)+", "", place)
