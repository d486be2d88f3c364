import json
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jmp_train.policies.autocasting.explain import AutocastReport, OperationReport, explain_autocast
from jmp_train.policies.autocasting.region import Cause
from jmp_train.policies.autocasting.rules import TORCH_CUDA, AutocastRules
from jmp_train.policies.autocasting.transform import autocast, autocast_as

pytestmark = pytest.mark.quick

X = jax.ShapeDtypeStruct((4, 8), jnp.float32)
W = jax.ShapeDtypeStruct((8, 16), jnp.float32)


def model(x: jax.Array, w: jax.Array) -> jax.Array:
    with jax.named_scope("encoder"):
        y = jnp.tanh(x @ w)
    return jax.nn.logsumexp(y, axis=-1).sum()


def row(report: AutocastReport, operation: str) -> OperationReport:
    return next(row for row in report.operations if row.operation == operation)


def test_each_operation_has_its_dtypes_rule_path_and_source() -> None:
    report = explain_autocast(model, X, W)
    product = row(report, "dot_general")
    assert (product.rule, product.reason) == ("lower", "primitive 'dot_general'")
    assert (product.dtypes_in, product.dtypes_out) == (("float16", "float16"), ("float16",))
    assert product.path == "encoder"
    line = model.__code__.co_firstlineno + 2
    assert product.source == f"{__file__}:{line}"
    assert row(report, "exp").dtypes_out == ("float32",)
    assert row(report, "tanh").rule == "promote"
    assert "log" in {row.operation for row in report.operations}


def test_it_takes_the_rules_of_an_autocast() -> None:
    rules = TORCH_CUDA.replace(paths={"encoder": "float32"})
    report = explain_autocast(autocast(model, jnp.bfloat16, rules=rules), X, W)
    assert row(report, "dot_general").reason == "path 'encoder'"
    assert row(report, "dot_general").dtypes_out == ("float32",)
    fixed = explain_autocast(autocast(autocast_as("float32")(model)), X, W)
    assert row(fixed, "dot_general").reason == "autocast_as"
    with pytest.raises(ValueError, match="enabled=False: there is nothing to explain"):
        explain_autocast(autocast(model, enabled=False), X, W)


def test_flops_are_those_of_the_products_times_the_iterations_of_a_scan() -> None:
    def loop(x: jax.Array, w: jax.Array) -> jax.Array:
        return lax.scan(lambda c, _: (c, x @ w), 0.0, None, length=5)[1]

    report = explain_autocast(loop, X, W)
    assert row(report, "dot_general").flops == 5 * 2 * 4 * 8 * 16
    assert report.half_flops_share == 1
    kernel = jax.ShapeDtypeStruct((3, 3, 2, 6), jnp.float32)
    image = jax.ShapeDtypeStruct((1, 8, 8, 2), jnp.float32)
    report = explain_autocast(
        lambda x, k: lax.conv_general_dilated(x, k, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")),
        image,
        kernel,
    )
    assert row(report, "conv_general_dilated").flops == 2 * (8 * 8 * 6) * (3 * 3 * 2)


def test_the_flops_of_what_is_not_entered_count() -> None:
    @jax.custom_batching.custom_vmap
    def own(x: jax.Array, w: jax.Array) -> jax.Array:
        return lax.fori_loop(0, 3, lambda _, y: y + x @ w, jnp.zeros((4, 16)))

    own.def_vmap(lambda size, batched, x, w: (x @ w, True))
    report = explain_autocast(own, X, W)
    flops = row(report, "custom_vmap_call").flops
    assert flops == pytest.approx(3 * 2 * 4 * 8 * 16, rel=0.1)
    assert report.half_flops_share == 0


def test_the_source_is_the_users_line() -> None:
    def fn(x: jax.Array) -> jax.Array:
        return jax.nn.relu(x)

    report = explain_autocast(fn, X)
    assert row(report, "max").source == f"{__file__}:{fn.__code__.co_firstlineno + 1}"
    wrapped = explain_autocast(jax.jit(autocast(fn, jnp.bfloat16)), X)
    assert row(wrapped, "custom_jvp_call").reason == "decided by an inner region"


def test_bytes_saved_for_the_gradient() -> None:
    report = explain_autocast(lambda x, w: (x @ w).sum(), X, W)
    assert report.residual_bytes_float32 == 4 * (4 * 8 + 8 * 16)
    assert report.residual_bytes_autocast == 2 * (4 * 8 + 8 * 16)


def test_what_is_not_entered_is_said() -> None:
    @jax.custom_vjp
    def own(x: jax.Array) -> jax.Array:
        return x * 2

    own.defvjp(lambda x: (x * 2, None), lambda _, g: (g,))
    report = explain_autocast(own, X)
    assert row(report, "custom_vjp_call").reason == "custom_vjp_call is not entered"

    def host(x: jax.Array) -> jax.Array:
        return jax.pure_callback(np.sin, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    report = explain_autocast(host, X)
    assert row(report, "pure_callback").rule == "keep"
    assert report.residual_bytes_float32 is None
    assert str(report).endswith("it has no gradient")


def test_rows_are_for_machines_and_the_table_for_people() -> None:
    report = explain_autocast(model, X, W)
    rows = json.loads(json.dumps(report.rows()))
    assert rows[0]["operation"] == "dot_general"
    lines = str(report).splitlines()
    assert lines[0].split() == [
        "operation", "in", "out", "rule", "decided", "by", "path", "source",
    ]  # fmt: skip
    assert "float16 float16" in lines[1]
    assert lines[-2].endswith("% of the flops in half precision")
    assert lines[-1].startswith("saved for the gradient: ")


def test_arrays_and_other_arguments() -> None:
    report = explain_autocast(lambda x, n, key=None: (x @ x.T * n, key), jnp.ones((2, 3)), 2, key="k")
    assert row(report, "dot_general").dtypes_out == ("float16",)


SQUARE = jax.ShapeDtypeStruct((4, 4), jnp.float32)


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
    rows = explain_autocast(autocast(fn, rules=rules), SQUARE).operations
    assert text in {row.reason for row in rows}, [row.reason for row in rows]
