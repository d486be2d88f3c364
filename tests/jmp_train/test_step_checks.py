"""Arguments of a step that do not fit together are named before anything is trained."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from helpers import relaxed

import jmp_train as jt

PARAMS = {"w": jnp.ones(3)}
BATCH = jnp.full((4, 3), 0.5)


def loss_fn(params: Any, batch: jax.Array) -> jax.Array:
    return ((batch @ params["w"].astype(batch.dtype)).astype(jnp.float32) ** 2).mean()


def scaled(inner: Any = None, **kwargs: Any) -> Any:
    return jt.with_loss_scale(inner or optax.sgd(0.1), jt.torch_loss_scale(256.0, **kwargs))


def run(optimizer: Any, state: Any, loss: Any = None) -> Any:
    return jt.train_step(loss or jt.stateless(loss_fn), optimizer)(state, BATCH)


# --- the optimizer's state is the optimizer's -------------------------------------------------


@pytest.mark.parametrize(
    ("made_for", "stepped_with", "message"),
    [
        # The state has two fields, as a chain of two has: it moved 256 times too far.
        (
            jt.with_master_weights(scaled()),
            optax.sgd(0.1),
            "state.opt_state has a loss scale, the step's optimizer has none",
        ),
        (
            jt.with_master_weights(optax.sgd(0.1)),
            optax.sgd(0.1),
            "state.opt_state has master weights, the step's optimizer has none",
        ),
        (optax.sgd(0.1), scaled(), "the step's optimizer has a loss scale, state.opt_state has no"),
        (scaled(), jt.with_master_weights(scaled()), "optimizer has master weights, state.opt_st"),
        (
            relaxed(optax.adam(0.1)),
            optax.sgd(0.1, momentum=0.9),
            r"it has '0/count', '0/mu/w', '0/nu/w' that .* lacks '0/trace/w'; train_step and Train",
        ),
        (
            scaled(optax.sgd(0.1, momentum=0.9)),
            scaled(),
            r"it has 'inner_state/0/trace/w' that the step's optimizer has not, and lacks nothing",
        ),
    ],
)
def test_another_optimizers_state_is_refused(
    made_for: Any, stepped_with: Any, message: str
) -> None:
    state = jt.TrainState.create(PARAMS, made_for)
    with pytest.raises(ValueError, match=message):
        run(stepped_with, state)
    step = jax.jit(jt.train_step(jt.stateless(loss_fn), stepped_with))
    with pytest.raises(ValueError, match=message):
        step(state, BATCH)


def test_a_loss_scale_with_other_settings_stays_the_states() -> None:
    state = jt.TrainState.create(PARAMS, scaled(growth_interval=1))
    after, metrics = run(scaled(growth_interval=2000), state)
    assert float(metrics["loss_scale"]) == 512
    assert float(after.params["w"][0]) == pytest.approx(1 - 0.1 * 2 * 1.5 * 0.5)


def test_an_optimizer_whose_init_looks_at_numbers_trains() -> None:
    sgd = optax.with_extra_args_support(optax.sgd(0.1, momentum=0.9))

    def init(params: Any) -> Any:
        assert float(params["w"].sum()) > 0
        return sgd.init(params)

    optimizer = optax.GradientTransformationExtraArgs(init, sgd.update)
    state, _ = jax.jit(jt.train_step(jt.stateless(loss_fn), optimizer))(
        jt.TrainState.create(PARAMS, optimizer), BATCH
    )
    assert float(state.params["w"][0]) == pytest.approx(1 - 0.1 * 2 * 1.5 * 0.5)
