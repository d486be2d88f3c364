"""`nnx_value_and_grad` beside nnx's own, and a step that is skipped with all state as it was."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jmp_train as jt

pytestmark = pytest.mark.quick

X = jnp.asarray(np.random.default_rng(0).normal(size=(8, 3)), jnp.float32)
SCALE = jt.StaticLossScale(64.0)


@pytest.fixture(autouse=True)
def promotion() -> Iterator[None]:
    with jax.numpy_dtype_promotion("standard"):  # flax asks for it
        yield


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.linear = nnx.Linear(3, 4, rngs=rngs)
        self.norm = nnx.BatchNorm(4, momentum=0.5, rngs=rngs)
        self.dropout: Any = nnx.Dropout(0.5, rngs=rngs)
        self.head = nnx.Linear(4, 1, rngs=rngs)
        self.calls = jnp.zeros((), jnp.int32)

    def __call__(self, x: jax.Array) -> jax.Array:
        self.calls = self.calls + 1
        y = self.norm(self.linear(x)).astype(x.dtype)  # BatchNorm returns float32
        return self.head(self.dropout(nnx.relu(y)))


def net() -> Net:
    return Net(nnx.Rngs(0))


def loss_fn(net: Net, x: jax.Array) -> jax.Array:
    return jnp.mean(net(x).astype(jnp.float32) ** 2)


def with_aux(net: Net, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    y = net(x)
    return jnp.mean(y.astype(jnp.float32) ** 2), y


def arrays(tree: Any) -> dict[str, np.ndarray]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {
        jax.tree_util.keystr(path): np.asarray(
            jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
        )
        for path, x in leaves
        if isinstance(x, jax.Array)
    }


def assert_close(found: Any, expected: Any, tolerance: float) -> None:
    found, expected = arrays(found), arrays(expected)
    assert found.keys() == expected.keys()
    for path, x in expected.items():
        np.testing.assert_allclose(found[path], x, rtol=tolerance, atol=tolerance, err_msg=path)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(("policy", "tolerance"), [(None, 1e-6), ("mixed_float16", 0.02), ("autocast_float16", 0.02)])
def test_gradients_are_those_of_nnx_times_the_scale(policy: str | None, tolerance: float) -> None:
    ours, theirs = net(), net()
    fn = nnx.jit(jt.nnx_value_and_grad(with_aux, policy, has_aux=True))
    (loss, aux), grads = fn(SCALE, ours, x=X)
    (expected, expected_aux), expected_grads = nnx.jit(nnx.value_and_grad(with_aux, has_aux=True))(theirs, X)
    assert (loss.dtype, aux.dtype) == (jnp.float32, jnp.float32)
    assert {x.dtype.name for x in jax.tree.leaves(grads)} == {"float32"}
    assert jax.tree.structure(grads) == jax.tree.structure(expected_grads)
    np.testing.assert_allclose(loss, expected, rtol=tolerance)
    np.testing.assert_allclose(aux, expected_aux, atol=tolerance)
    assert_close(SCALE.unscale(grads), expected_grads, tolerance)
    assert_close(nnx.state(ours), nnx.state(theirs), tolerance)
    assert ours.calls == 1


@pytest.mark.full
def test_argnums_are_those_of_nnx() -> None:
    class Gain(nnx.Variable):
        pass

    class Scaled(nnx.Module):
        def __init__(self) -> None:
            self.gain, self.offset = Gain(jnp.ones(3)), nnx.Param(jnp.ones(3))

    def run(scaled: Scaled, x: jax.Array) -> jax.Array:
        seen.append((scaled.gain[...].dtype.name, x.dtype.name))
        return jnp.sum((x * scaled.gain[...] + scaled.offset[...]).astype(jnp.float32))

    for argnums in (0, 1, (0, 1), nnx.DiffState(0, Gain), (nnx.DiffState(0, Gain), 1)):
        seen: list[Any] = []
        _, grads = jt.nnx_value_and_grad(run, "mixed_float16", argnums=argnums)(SCALE, Scaled(), X)
        state = argnums if isinstance(argnums, nnx.DiffState) else argnums == (0, 1) or argnums
        gain = "float16" if not isinstance(state, bool | int) else "float32"
        assert set(seen[-1:]) == {(gain, "float16")}
        _, expected = nnx.value_and_grad(run, argnums=argnums)(Scaled(), X)
        assert jax.tree.structure(grads) == jax.tree.structure(expected)
        assert_close(SCALE.unscale(grads), expected, 0.01)


@pytest.mark.full
def test_tree_mode() -> None:
    def run(kernel: nnx.Param, norm: nnx.BatchNorm, x: jax.Array) -> jax.Array:
        return jnp.mean(norm(x @ kernel[...]).astype(jnp.float32) ** 2)

    norms = [nnx.BatchNorm(3, rngs=nnx.Rngs(0)) for _ in range(2)]
    kernel = nnx.Param(jnp.eye(3))
    fn = jt.nnx_value_and_grad(run, "autocast_float16", graph=False)
    _, grads = fn(SCALE, kernel, norms[0], X)
    _, expected = nnx.value_and_grad(run, graph=False)(kernel, norms[1], X)
    assert_close(SCALE.unscale(grads), expected, 0.01)
    assert_close(norms[0], norms[1], 0.01)


@pytest.mark.full
def test_each_of_several_losses_has_a_scale_and_gradients_of_its_own() -> None:
    scales = jt.policies.PerLossScale((jt.StaticLossScale(2.0), jt.StaticLossScale(8.0)))

    def two(net: Net, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        y = net(x)
        return jnp.mean(y), jnp.mean(y**2)

    ours, theirs = net(), net()
    losses, grads = nnx.jit(jt.nnx_value_and_grad(two))(scales, ours, X)
    for number in (0, 1):
        theirs = net()
        loss, expected = nnx.value_and_grad(lambda net, x, n=number: two(net, x)[n])(theirs, X)
        np.testing.assert_allclose(losses[number], loss, rtol=1e-5)
        assert_close(scales.loss_scales[number].unscale(grads[number]), expected, 1e-5)
    assert_close(nnx.state(ours), nnx.state(theirs), 1e-5)  # as after one call


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("policy", ["mixed_float16", "autocast_float16"])
def test_a_skipped_step_leaves_all_state_and_training_goes_on(policy: str) -> None:
    model = net()
    optimizer = nnx.Optimizer(
        model, jt.with_loss_scale(optax.adam(1e-2), jt.torch_loss_scale(init_scale=2.0**10)), wrt=nnx.Param
    )

    @nnx.jit
    def step(model: Net, optimizer: nnx.Optimizer, x: jax.Array) -> jax.Array:
        value_and_grad = jt.nnx_value_and_grad(loss_fn, policy)
        loss, grads = value_and_grad(jt.get_loss_scale(optimizer), model, x)
        optimizer.update(model, grads)
        return loss

    losses = [step(model, optimizer, X) for _ in range(8)]
    kept = nnx.Not(nnx.RngState)
    before = arrays(nnx.state(model, kept))
    moments, calls = arrays(optimizer.opt_state.inner_state), int(model.calls)
    drawn = int(model.dropout.rngs.count[...])
    step(model, optimizer, X.at[0, 0].set(jnp.inf))
    after = arrays(nnx.state(model, kept))
    assert before.keys() == after.keys()
    for path, x in before.items():
        assert after[path].tobytes() == x.tobytes(), path
    for path, x in arrays(optimizer.opt_state.inner_state).items():
        assert moments[path].tobytes() == x.tobytes(), path
    assert float(jt.get_loss_scale(optimizer).loss_scale) == 2.0**9
    assert (int(model.calls), int(model.dropout.rngs.count[...])) == (calls, drawn + 1)
    losses += [step(model, optimizer, X) for _ in range(24)]
    assert np.all(np.isfinite(losses))
    assert np.mean(losses[-4:]) < 0.7 * np.mean(losses[:4])


def test_wrong_arguments_are_named() -> None:
    with pytest.raises(TypeError, match="loss_scale must be a LossScale, got a Net"):
        jt.nnx_value_and_grad(loss_fn)(net(), X)
    with pytest.raises(TypeError, match=r"floating scalar as loss, got float32\[8, 1\]"):
        jt.nnx_value_and_grad(lambda net, x: net(x))(SCALE, net(), X)
    with pytest.raises(TypeError, match=r"nnx module Net, whose statistics and random keys are not"):
        jt.scaled_value_and_grad(loss_fn)(SCALE, net(), X)
