"""Warns if a policy's half compute dtype does not reach the matrix products and convolutions."""

import contextlib
import dataclasses
import functools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from jax.extend.core import ClosedJaxpr

from jmp_train.policies.autocasting import (
    Cause,
    TracedProduct,
    argument_names,
    is_at_risk,
    is_complex,
    is_trying,
    traced_dtype,
    warn_of_convolutions,
    warn_of_products,
    warn_user,
)
from jmp_train.policies.dtype_policies.collapsed_values import check_narrowed, warn_of_collapse
from jmp_train.policies.dtype_policies.float32_sums import in_module, program_read
from jmp_train.policies.dtype_policies.policy import AutocastPolicy, PathPolicy, Policy
from jmp_train.policies.dtype_policies.policy_trace import (
    TracedOperation,
    arguments_of,
    compute_dtypes,
    computes_in_float16,
    operations_under,
    origins_of,
    traced_operations,
    uncast_origin,
)
from jmp_train.policies.pytrees import has_tracers, is_array, is_nnx
from jmp_train.policies.types import PyTree


class MissingLossScaleWarning(UserWarning):
    """A training step computes in float16 and its optimizer has no loss scale.

    Then gradients below 6e-8 become 0, and steps that overflow are not skipped. `train_step` warns on its first call.
    If this is intended, use `with_loss_scale(optimizer, NoOpLossScale())`, or filter the warning.

    Example:
      >>> import warnings
      >>> import jmp_train as jt
      >>> warnings.filterwarnings("ignore", category=jt.policies.MissingLossScaleWarning)
    """


_IS_EXPLAINED = "_jmp_train_explained_its_dtypes"
_HALF_TYPE, _FLOAT32_TYPE = re.compile(r"\bb?f(loat)?16\b"), re.compile(r"\bf(loat)?(32|64)\b")


@contextlib.contextmanager
def mixed_dtypes_explained(policy: Policy | PathPolicy | None) -> Iterator[None]:
    """Adds a remedy to errors within this context about half-precision arrays mixed with float32 ones."""
    try:
        yield
    except (TypeError, ValueError) as error:
        text, is_explained = str(error), hasattr(error, _IS_EXPLAINED)  # by an inner policy
        if not is_explained and computes_in_half(policy) and _HALF_TYPE.search(text) and _FLOAT32_TYPE.search(text):
            assert policy is not None
            setattr(error, _IS_EXPLAINED, True)
            half = _half_name(policy)
            error.add_note(
                f"The policy {_text(policy)} casts the arguments to {half}. It does not cast a model state, nor arrays "
                "that the function creates or closes over, such as the first carry of a loop or an RNN, or one branch "
                "of a cond. "
                f'policy="autocast_{half}" runs the function as it is, and gives branches and carries a common dtype. '
                "Or create those arrays in the dtype of the inputs: carry = jax.tree.map(lambda c: c.astype(x.dtype), "
                "carry)."
            )
        raise


@dataclasses.dataclass
class FirstTrace:
    """Checks a function on its first trace, and warns; on retraces it does nothing.

    Attributes:
      seen: True after the first trace.
      values_seen: True after the values of inputs were checked.
      scale_missed: True after the warning that there is no loss scale.
    """

    seen: bool = False
    values_seen: bool = False
    scale_missed: bool = False

    @classmethod
    def past(cls) -> "FirstTrace":
        """Returns an instance that never warns, for uses other than the user's own training."""
        return cls(seen=True, values_seen=True, scale_missed=True)

    def look_at_values(self, inputs: Mapping[str, PyTree], policy: Policy | PathPolicy | None) -> None:
        """Warns if values of inputs collapse, and refuses integers that JAX would truncate; see `check_narrowed`.

        The values of traced arrays are not known.
        """
        check_narrowed(inputs, "the call", floats=not self.values_seen)
        if policy is None or self.values_seen or not computes_in_half(policy) or has_tracers(inputs):
            return
        self.values_seen = True
        warn_of_collapse(inputs, policy)

    def miss_loss_scale(self, policy: Policy | PathPolicy | None) -> None:
        """Warns if a policy computes in float16; call it if the optimizer has no loss scale."""
        if self.scale_missed or policy is None or not computes_in_float16(policy):
            return
        self.scale_missed = True
        warn_user(
            f"the policy {_text(policy)} computes in float16 and the optimizer has no loss scale: gradients below 6e-8 "
            "become 0, and steps whose gradients overflow are not skipped. Use jt.with_loss_scale(optimizer, "
            "jt.torch_loss_scale()), or jt.with_loss_scale(optimizer, jt.NoOpLossScale()) if you want no scale",
            MissingLossScaleWarning,
        )

    @contextlib.contextmanager
    def look(
        self,
        fn: Callable[..., Any],
        policy: Policy | PathPolicy | None,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        *,
        uncast: Sequence[Any] = (),
        names: Sequence[str] | None = None,
        mode: str | None = None,
    ) -> Iterator[None]:
        """Warns of float32 products, inner gradients and bfloat16 convolutions of `fn`, called within this context.

        It takes the arguments of `operations_under`. The program is the one that `with_float32_sums` traces to run it;
        only if there is none, or nnx objects are among the arguments, the function is traced once more. `mode` is the
        AMP mode of the policy, if there is one.
        """
        if self.seen or in_module() or not (computes_in_half(policy) or _convolves(policy)):
            yield
            return
        self.seen = True
        names = argument_names(fn, len(args)) if names is None else names
        self.look_at_values(dict(zip(names[1:], args[1:], strict=False)), policy)
        constants = {id(x): uncast_origin(path) for path, x in arguments_of(names[len(args) :], uncast, {})}
        operations: list[TracedOperation] | None = None

        def read(jaxpr: ClosedJaxpr, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            nonlocal operations
            paths = [path for path, x in arguments_of(names, args, kwargs, is_nnx) if is_array(x)]
            if len(paths) == len(jaxpr.in_avals):  # not if nnx objects hold further ones
                operations = traced_operations(jaxpr, origins_of(paths, jaxpr, names[:1]), constants)

        runs_as_it_is = policy is None or is_trying()  # without `with_float32_sums`
        with program_read(None if runs_as_it_is else read):
            yield
        if operations is None:
            try:
                operations = operations_under(fn, policy, args, kwargs, uncast=uncast, names=names)
            except Exception:  # noqa: BLE001  # the call itself came before this, and needed no trace
                return
        products = [_product(operation) for operation in operations if operation.is_product]
        warn_of_convolutions(products)
        if policy is not None and computes_in_half(policy):
            half, under = _half_name(policy), f"the policy {_text(policy)}" if mode is None else f"AMP mode {mode}"
            way = f'policy="autocast_{half}"' if mode is None else 'Mode "torch"'
            way += f" runs them in half precision without changes to the code. Or give the layers dtype={half}, and "
            way += "create arrays in the dtype of the inputs."
            warn_of_products(products, half, under, way=way, report="explain_policy")


def _convolves(policy: Policy | PathPolicy | None) -> bool:
    """Returns whether to check the convolutions under a policy here; autocast checks its own."""
    return not (policy and isinstance(policy.default, AutocastPolicy)) and is_at_risk()


def _product(operation: TracedOperation) -> TracedProduct:
    """Returns a product, for the warnings."""
    is_left = operation.is_float32 and not operation.as_asked
    dtypes = tuple(str(traced_dtype(atom)) for atom in operation.equation.invars)
    why = functools.partial(_reason, operation) if is_left else None
    return TracedProduct(operation.equations, operation.path, operation.flops, dtypes, why)


def _reason(product: TracedOperation, line: str) -> str:
    """Returns the reason why a product at a line is in float32: the original float32 value, not a cast to match it."""
    origin = product.origin
    if any(map(is_complex, product.equation.invars)):
        return f": {Cause.COMPLEX.value}"
    if origin is None:
        return ""
    if not origin.was_half:
        return f": because of {origin}"
    earlier = [o for o in product.origins if o is not None and o.line != line]
    return f": {earlier[0]}" if earlier else f": {origin.what} there"


def _half_name(policy: Policy | PathPolicy) -> str:
    return next(dtype.name for dtype in compute_dtypes(policy) if dtype.itemsize == 2)


def _text(policy: Policy | PathPolicy) -> str:
    if isinstance(policy, PathPolicy):
        return f"by path, {policy.default} by default"
    return str(policy)


def computes_in_half(policy: Policy | PathPolicy | None) -> bool:
    """Returns whether a policy passes parameters or inputs in half precision, unlike autocast."""
    if policy is None or isinstance(policy.default, AutocastPolicy):
        return False
    return any(dtype.itemsize == 2 for dtype in compute_dtypes(policy))
