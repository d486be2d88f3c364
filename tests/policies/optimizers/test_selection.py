"""`select_step` keeps what a skipped step must not change, whatever library it comes from."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from pytrees import assert_bitwise_equal

import jmp_train as jt

pytestmark = pytest.mark.quick

OPTIMIZER: Any = jt.with_loss_scale(optax.sgd(0.1), jt.torch_loss_scale(4.0))


def after_step(*, finite: bool) -> jt.policies.LossScaledState:
    grads = jnp.array([1.0, 1.0 if finite else jnp.inf])
    return OPTIMIZER.update(grads, OPTIMIZER.init(jnp.ones(2)), jnp.ones(2))[1]


class FlaxState(TrainState):
    batch_stats: Any


def test_a_whole_flax_state_is_one_tree() -> None:
    old = FlaxState.create(apply_fn=None, params={"w": jnp.ones(2)}, tx=OPTIMIZER, batch_stats=jnp.zeros(2))
    for finite in (True, False):
        grads = {"w": jnp.array([4.0, 8.0 if finite else jnp.nan])}
        new = old.apply_gradients(grads=grads).replace(batch_stats=jnp.full(2, 7.0))
        chosen = jt.select_step(new.opt_state, new, old)
        assert_bitwise_equal(chosen.batch_stats, new.batch_stats if finite else old.batch_stats)
        assert int(chosen.step) == int(finite)
        assert chosen.tx is OPTIMIZER


@pytest.mark.parametrize("finite", [True, False])
def test_an_equinox_model_and_its_state(finite: bool) -> None:
    class Model(eqx.Module):
        norm: eqx.nn.BatchNorm
        activation: Any
        rate: float

    norm = eqx.nn.BatchNorm(2, "batch", mode="batch")
    model, state = eqx.nn.make_with_state(Model)(norm, jax.nn.relu, 0.25)
    index: Any = model.norm.batch_state_index
    counters = jax.tree.map(lambda x: x + jnp.asarray(1, x.dtype), state.get(index))
    new_state = jax.tree.map(lambda x: x, state).set(index, counters)  # of a copy: `set` ends a state
    new = eqx.tree_at(lambda m: m.norm.weight, model, jnp.full(2, 7.0))
    chosen, chosen_state = jt.select_step(after_step(finite=finite), (new, new_state), (model, state))
    assert_bitwise_equal(chosen.norm.weight, new.norm.weight if finite else model.norm.weight)
    assert (chosen.activation, chosen.rate) == (jax.nn.relu, 0.25)
    assert type(chosen.rate) is float
    assert_bitwise_equal(chosen_state.get(index), counters if finite else state.get(index))


@pytest.mark.parametrize("finite", [True, False])
def test_nnx_state_with_its_random_keys(finite: bool) -> None:
    def states(seed: int) -> Any:
        class Model(nnx.Module):
            def __init__(self, rngs: nnx.Rngs):
                self.norm = nnx.BatchNorm(2, rngs=rngs)
                self.dropout = nnx.Dropout(0.5, rngs=rngs)

        model = Model(nnx.Rngs(seed))
        model.norm.mean[...] = jnp.full(2, float(seed))
        return nnx.state(model)

    new, old = states(1), states(2)
    chosen = jax.jit(jt.select_step)(after_step(finite=finite), new, old)
    assert_bitwise_equal(chosen, new if finite else old)
    assert type(chosen["norm"]["mean"]) is nnx.BatchStat


def test_the_decision_of_an_nnx_optimizer() -> None:
    model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, OPTIMIZER, wrt=nnx.Param)
    for bad in (1.0, jnp.nan):
        grads = jax.tree.map(lambda x, bad=bad: jnp.full_like(x, bad), nnx.state(model, nnx.Param))
        optimizer.update(model, grads)
        chosen = jt.select_step(optimizer.opt_state, jnp.array(1), jnp.array(0))
        assert int(chosen) == (bad == 1.0)


def test_what_does_not_fit_is_named() -> None:
    state = after_step(finite=True)
    with pytest.raises(TypeError, match=r"leaf 'a/b' is float16\[2\] in one tree and float32\[2\]"):
        jt.select_step(state, {"a": {"b": jnp.ones(2, jnp.float16)}}, {"a": {"b": jnp.ones(2)}})
    with pytest.raises(ValueError, match="new and old must have the same structure, got new"):
        jt.select_step(state, {"a": jnp.ones(2)}, {"b": jnp.ones(2)})
    with pytest.raises(ValueError, match="opt_state has no loss scale"):
        jt.select_step(optax.sgd(0.1).init(jnp.ones(2)), 1, 2)
    with pytest.raises(ValueError, match="opt_state has 2 loss scales"):
        jt.select_step((state, state), 1, 2)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        (optax.MultiSteps(OPTIMIZER, 2).gradient_transformation(), r"MultiSteps.*around with_loss"),
        (optax.chain(optax.apply_if_finite(OPTIMIZER, 3)), r"apply_if_finite, at '0', around"),
    ],
    ids=["multi_steps", "apply_if_finite"],
)
def test_what_hides_steps_from_the_loss_scale_is_refused(optimizer: Any, message: str) -> None:
    opt_state = optimizer.init(jnp.ones(2))
    with pytest.raises(ValueError, match=message):
        jt.select_step(opt_state, jnp.ones(()), jnp.ones(()))
    with (
        jax.numpy_dtype_promotion("standard"),  # MultiSteps multiplies booleans with floats
        pytest.raises(ValueError, match="put with_loss_scale outside"),
    ):
        state = jt.FlaxTrainState.create(apply_fn=None, params={"w": jnp.ones(2)}, tx=optimizer)
        state.apply_gradients(grads={"w": jnp.ones(2)})
