"""Public training scripts: which products run in half precision, how they learn, what a skipped step leaves."""

import dataclasses
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scripts import assert_learns_alike, assert_skips, overflowing, products_in_half, share_by_autocast, share_by_policy
from training_scripts import (
    equinox_diffusion,
    equinox_gan,
    haiku_transformer,
    imagenet,
    nanodo,
    nnx_mnist,
    ogbg,
    ppo,
    seq2seq,
    vae,
)

import jmp_train as jt

pytestmark = pytest.mark.full


@dataclasses.dataclass(frozen=True)
class Expected:
    """What is known of a script.

    Attributes:
      by_policy: the share of its products in half under `mixed_float16`, or a part of the message that refuses it.
      tolerance: of its losses in half, relative to the first one.
      goes_on: a regular expression of the paths of leaves which a skipped step changes.
      updates: how often a step calls the optimizer.
    """

    by_policy: float | str
    tolerance: float
    goes_on: str = r"^\.step$"
    updates: int = 1


LESS_THAN_HALF: Any = pytest.approx(0.25, abs=0.2499)
SCRIPTS: dict[ModuleType, Expected] = {
    # The noise is float32, and so is what it is added to: equinox's convolutions want one dtype.
    equinox_diffusion: Expected("requires arguments to have the same dtypes", 5e-3, r"^\[1\]$"),
    equinox_gan: Expected(1, 2e-2, r"^\[3\]$"),
    # With jax 0.12 one loss of twenty is 0.6 % off.
    haiku_transformer: Expected(1, 1e-2, r"^\['(step|rng)'\]$"),
    imagenet: Expected(0, 1e-2),
    # On some CPUs the last losses are 0.6 % of the first one apart.
    nanodo: Expected(0, 1e-2, "a^"),
    # nnx.Optimizer's step, the dropouts' counts and the metrics go on.
    nnx_mnist: Expected(LESS_THAN_HALF, 1e-2, r"^\[1\]$|\['rngs'\]\['count'\]|^\[0\]\[1\]"),
    # The ones in the globals are float32, and so is all that they are concatenated with.
    ogbg: Expected(LESS_THAN_HALF, 1e-2),
    ppo: Expected(0, 5e-3, updates=2),
    # The first prediction of the decoder is half, the next ones are as `one_hot` makes them.
    seq2seq: Expected("scan body function carry input and carry output", 2e-3),
    # flax follows the input where no dtype is set; the noise makes the code float32: 3 of 5.
    vae: Expected(3 / 5, 2e-3),
}


def name_of(script: ModuleType) -> str:
    return script.__name__.rpartition(".")[2]


@pytest.mark.parametrize("script", SCRIPTS, ids=name_of)
def test_products_in_half(script: Any) -> None:
    args, expected = script.loss_args(), SCRIPTS[script].by_policy
    assert share_by_autocast(script.loss_fn, *args) == 1
    if isinstance(expected, str):
        half_loss = jt.apply_policy(script.loss_fn, jt.get_policy("mixed_float16"))
        with pytest.raises(TypeError, match=expected) as raised:
            half_loss(*args)
        assert 'policy="autocast_float16" runs the function as it is' in raised.value.__notes__[-1]
    else:
        assert share_by_policy(script.loss_fn, *args) == expected


@pytest.mark.parametrize("script", SCRIPTS, ids=name_of)
def test_it_learns_as_in_float32(script: Any) -> None:
    expected = SCRIPTS[script]
    assert_learns_alike(script.script(True), script.script(False), expected.tolerance, updates_a_step=expected.updates)


@pytest.mark.parametrize("script", [x for x in SCRIPTS if x not in (equinox_gan, imagenet, nnx_mnist)], ids=name_of)
def test_an_overflow_is_skipped(script: Any) -> None:
    half, expected = script.script(True), SCRIPTS[script]
    assert_skips(half, overflowing(half.state), goes_on=expected.goes_on, skips=expected.updates)


def test_an_infinite_pixel_leaves_batch_statistics_as_they_were() -> None:
    half = nnx_mnist.script(True)
    bad = {**half.batch, "image": half.batch["image"].at[0].set(jnp.inf)}
    assert_skips(half, half.state, bad, goes_on=SCRIPTS[nnx_mnist].goes_on)


def test_an_overflow_on_one_device_is_skipped_by_all_with_their_batch_statistics() -> None:
    half = imagenet.script(True)
    state, _ = half.step(half.state, half.batch)  # each device has statistics of its own by now
    stats = jax.tree.leaves(state.batch_stats)
    assert any(np.any(x[0] != x[1]) for x in stats)
    huge = {**half.batch, "image": half.batch["image"].at[1, 0].set(1e30)}
    assert_skips(half, state, huge, goes_on=SCRIPTS[imagenet].goes_on)
    assert all(np.all(np.isfinite(x)) for x in stats)


def test_an_overflow_of_both_models_is_skipped_with_their_states() -> None:
    half = equinox_gan.script(True)
    models, states, opt_states, key = half.state
    huge = tuple(overflowing(opt_state) for opt_state in opt_states)
    assert_skips(half, (models, states, huge, key), goes_on=SCRIPTS[equinox_gan].goes_on)


def test_an_overflow_of_the_discriminator_alone_does_not_stop_the_generator() -> None:
    half = equinox_gan.script(True)
    (models, states, opt_states, _), _ = half.step(half.state, half.batch.at[0].set(jnp.inf))
    assert [bool(opt_state.last_finite) for opt_state in opt_states] == [True, False]
    arrays = [x for x in jax.tree.leaves((models, states)) if isinstance(x, jax.Array)]
    assert all(bool(jnp.isfinite(x).all()) for x in arrays)


def test_every_device_has_a_part_of_the_state_that_is_skipped() -> None:
    state = nanodo.script(True).state
    sharded = [x for x in jax.tree.leaves((state.params, state.opt_state)) if x.ndim > 1]
    assert len(sharded) == 8 * 4  # parameters, gradients accumulated and two moments
    assert not any(x.sharding.is_fully_replicated for x in sharded)


def test_haikus_own_policy_decides_whether_products_are_in_half() -> None:
    args = haiku_transformer.loss_args()
    with haiku_transformer.mixed_precision():
        assert products_in_half(haiku_transformer.loss_fn, *args) == 1
    assert products_in_half(haiku_transformer.loss_fn, *args) == 0
