"""Each cause of a decision, with the text that reports show."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from jmp_train.policies.autocasting.explain import explain_autocast
from jmp_train.policies.autocasting.reasons import Cause
from jmp_train.policies.autocasting.rules import TORCH_CUDA, AutocastRules
from jmp_train.policies.autocasting.transform import autocast, autocast_as

pytestmark = pytest.mark.quick

X = jax.ShapeDtypeStruct((4, 4), jnp.float32)


def product(x: Any) -> Any:
    return x @ x


def exactly(precision: Any) -> Callable[[Any], Any]:
    return lambda x: jnp.dot(x, x, precision=precision)


def on_platform(x: Any) -> Any:
    return lax.platform_dependent(x, cpu=product, default=product)


def reduced(x: Any) -> Any:
    return lax.reduce_window(product(x), jnp.float32(0), lambda a, b: a + b * 2, (2, 2), (1, 1), "SAME")


def named(x: Any) -> Any:
    return x + 1


def with_rules(**rules: Any) -> AutocastRules:
    return TORCH_CUDA.replace(**rules)


def of_activations(x: Any) -> Any:
    scores = jnp.exp(x).reshape(2, 2, 4)
    return jnp.einsum("bij,bkj->bik", scores, scores)


in_half = with_rules(primitives={"reduce_window": "lower"})
SHOWN: dict[Cause, tuple[str, Callable[[Any], Any], AutocastRules]] = {
    Cause.OPERATION: ("operation '@.*:'", product, with_rules(operations={"@.*:": "lower"})),
    Cause.PATH: ("path '.*'", product, with_rules(paths={".*": "float32"})),
    Cause.FUNCTION: ("function 'named'", jax.jit(named), with_rules(functions={"named": "float32"})),
    Cause.MODULE: ("function of jax.numpy.linalg", jnp.linalg.cholesky, TORCH_CUDA),
    Cause.WITHIN: ("within a function of rule 'lower'", jax.jit(named), with_rules(functions={"named": "lower"})),
    Cause.PRIMITIVE: ("primitive 'dot_general'", product, TORCH_CUDA),
    Cause.AUTOCAST_AS: ("autocast_as", autocast_as("float32")(product), TORCH_CUDA),
    Cause.INNER_REGION: ("decided by an inner region", lambda x: autocast(product)(x), TORCH_CUDA),
    Cause.CONVERSION: ("explicit conversion", lambda x: x.astype(jnp.bfloat16), TORCH_CUDA),
    Cause.EACH_OPERAND: ("each operand by itself", jnp.sort, TORCH_CUDA),
    Cause.ELEMENTWISE: ("elementwise", jnp.abs, TORCH_CUDA),
    Cause.HIGHEST: ("precision=HIGHEST", exactly("highest"), TORCH_CUDA),
    Cause.INNER_PRODUCT: ("inner product", lambda x: jnp.vdot(x, x + 1), TORCH_CUDA),
    Cause.NEAR_A_CONSTANT: ("subtracted from a constant", lambda x: 1 - jax.nn.sigmoid(product(x)), TORCH_CUDA),
    Cause.NOT_ENTERED: ("cond is not entered", on_platform, TORCH_CUDA),
    Cause.NOT_KNOWN: ("reduce_precision is not known", lambda x: lax.reduce_precision(x, 5, 10), TORCH_CUDA),
    Cause.OUTER_PRODUCT: ("outer product", lambda x: x[:, :1] @ x[:1], TORCH_CUDA),
    Cause.OWN_PRECISION: ("its precision is spelled out", exactly(lax.DotAlgorithmPreset.F32_F32_F32), TORCH_CUDA),
    Cause.SQUARE: ("a square", lambda x: product(x) ** 2, AutocastRules(primitives=(("dot_general", "lower"),))),
    Cause.TYPED_BODY: ("its body is typed", reduced, in_half),
    Cause.ACTIVATIONS: ("no operand is a weight", of_activations, with_rules(paths={".*": "fp8"})),
    Cause.COMPLEX: ("complex numbers have no half type", lambda x: product(lax.complex(x, x)), TORCH_CUDA),
    Cause.INTEGERS: ("operand from integers", lambda x: jnp.arange(5000.0) @ jnp.tile(x, (1250, 1)), TORCH_CUDA),
    Cause.UNTOUCHED: (
        "no operand that autocast touches",
        lambda x: product(x).shape[0] + lax.iota("int32", 4),
        TORCH_CUDA,
    ),
}


@pytest.mark.parametrize(
    "cause", [cause for cause in Cause if cause is not Cause.NO_RULE], ids=lambda cause: cause.name
)
def test_reports_show_the_text_of_each_cause(cause: Cause) -> None:
    text, fn, rules = SHOWN[cause]
    rows = explain_autocast(autocast(fn, rules=rules), X).operations
    assert text in {row.reason for row in rows}, [row.reason for row in rows]
