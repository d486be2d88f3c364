"""Complex networks: nothing is half, which warnings, reasons and fractions of the flops say."""

import jax
import jax.numpy as jnp
import optax
import pytest
from jax import lax

import jmp_train as jt
from jmp_train.policies.autocasting import half_share
from jmp_train.steps import step_costs

pytestmark = pytest.mark.quick

X = jnp.ones((4, 4))
Z = lax.complex(X, X / 2)
LINE = r"test_complex\.py:\d+: dot_general of complex64\[4,4\] and complex64\[4,4\]"


def network(z: jax.Array, w: jax.Array) -> jax.Array:
    return jnp.abs(jnp.tanh(z @ w) @ w).sum()


def both(x: jax.Array, z: jax.Array) -> jax.Array:
    return (x @ x).sum() + jnp.abs(z @ z).sum()


def test_a_complex_network_is_warned_of_with_its_lines_and_the_reason() -> None:
    message = rf"(?s)^100% of the flops of products stay in float32 under autocast.*{LINE}, .*have no half type"
    with pytest.warns(jt.policies.Float32ProductsWarning, match=message) as warned:
        jt.autocast(network)(Z, Z)
    assert "apply_policy" not in str(warned[0].message)
    with pytest.warns(jt.policies.Float32ProductsWarning, match=rf"(?s)^100%.*the policy.*{LINE}.*have no half type"):
        jt.apply_policy(network, "mixed_bfloat16")(Z, Z)
    report = jt.explain_autocast(network, Z, Z)
    products = [row for row in report.operations if row.operation == "dot_general"]
    assert {(row.rule, row.reason) for row in products} == {("keep", "complex numbers have no half type")}
    assert report.half_flops_share == report.half_elements_share == 0


def test_those_that_should_be_float32_are_not_warned_of() -> None:
    wanted = jt.autocast_as("float32")(network)
    jt.autocast(wanted)(Z, Z)
    jt.autocast(network, rules=jt.TORCH_CUDA.replace(paths={"": "float32"}))(Z, Z)
    (row,) = jt.explain_autocast(jt.autocast_as("float32")(lambda z: z @ z), Z).operations
    assert (row.rule, row.reason) == ("float32", "autocast_as")


def test_a_complex_product_costs_four_real_ones() -> None:
    def flops(fn, *args) -> int:
        return sum(row.flops for row in jt.explain_autocast(fn, *args).operations)

    numbers = ("NHWC", "HWIO", "NHWC")
    conv = lambda x, k: lax.conv_general_dilated(x, k, (1, 1), "SAME", dimension_numbers=numbers)
    ragged = lambda x, w: lax.ragged_dot(x, w, jnp.array([1, 3]))
    image, kernel = jnp.ones((1, 4, 4, 2)), jnp.ones((3, 3, 2, 2))
    for fn, args in ((jnp.matmul, (X, X)), (conv, (image, kernel)), (ragged, (X, jnp.ones((2, 4, 4))))):
        assert flops(fn, *(lax.complex(x, x) for x in args)) == 4 * flops(fn, *args)
    with pytest.warns(jt.policies.Float32ProductsWarning, match="^80%"):
        jt.autocast(both)(X, Z)
    products = [row for row in jt.explain_autocast(both, X, Z).operations if row.operation == "dot_general"]
    assert half_share(products) == 0.2


def test_the_share_of_a_step_counts_complex_products() -> None:
    def loss_fn(params: dict[str, jax.Array], batch: jax.Array) -> jax.Array:
        z = lax.complex(params["re"], params["im"])
        return jnp.abs(z @ z).mean() + (batch @ params["re"]).mean()

    optimizer = jt.with_loss_scale(optax.sgd(0.1), jt.torch_loss_scale())
    params = {name: jnp.ones((64, 64)) for name in ("re", "im")}
    state = jt.TrainState.create(params, optimizer)
    step = jt.train_step(jt.stateless(loss_fn), optimizer, policy="autocast_float16")
    with pytest.warns(jt.policies.Float32ProductsWarning, match="^80%"):
        traced = jax.jit(step).trace(state, jnp.ones((64, 64)))
    # one real product in both passes (without the gradient of the batch), and a complex one with both gradients
    assert step_costs(traced, state).half_flops_share == pytest.approx(2 / (2 + 3 * 4), rel=0.1)
