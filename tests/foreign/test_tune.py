"""`tune` on losses that others wrote: it sees the program, and what it finds holds under autocast itself."""

import importlib
import pkgutil
from collections.abc import Callable

import pytest
import training_scripts
from healthy_models import MODELS, Model, gan
from training_scripts import equinox_gan

import jmp_train as jt

pytestmark = pytest.mark.full

SCRIPTS = {
    found.name: importlib.import_module(f"training_scripts.{found.name}")
    for found in pkgutil.iter_modules(training_scripts.__path__)
}
# Each loss, with a function that returns its arguments.
LOSSES = {name: (script.loss_fn, script.loss_args) for name, script in SCRIPTS.items()}
LOSSES["equinox_discriminator"] = (equinox_gan.discriminator_loss, equinox_gan.discriminator_args)


def assert_all_is_half(tuned: jt.tuning.TunedRules, least_choices: int) -> None:
    """Asserts that nothing needs float32, as of models that float16 with a loss scale is known to train."""
    assert tuned.choices > least_choices, tuned
    assert tuned.complete
    assert tuned.verification.passed, tuned
    assert tuned.entries == (), tuned
    table, by_rules = tuned.half_flops
    assert by_rules >= table - 1e-6


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", LOSSES)
def test_losses_of_scripts(name: str, dtype: str) -> None:
    loss_fn, make_args = LOSSES[name]
    assert_all_is_half(jt.tune(loss_fn, [make_args()], dtype=dtype), 10)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("make", [make for make in MODELS if make is not gan], ids=lambda make: make.__name__)
def test_steps_that_half_precision_does_not_harm(make: Callable[[], Model], dtype: str) -> None:
    model = make()
    step, state = model.training(None, jt.torch_loss_scale(2.0**12))
    tuned = jt.tune(step, [(state, model.batch)], dtype=dtype, steps=5)
    assert_all_is_half(tuned, 5)
    exact, half = tuned.verification.float32_losses, tuned.verification.tuned_losses
    assert len(exact) == len(half) == 5
    assert half == pytest.approx(exact, rel=0.01)
    assert exact[-1] < exact[0]
