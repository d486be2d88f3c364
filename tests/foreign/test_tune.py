"""`tune` on losses that others wrote: it sees the program, and what it finds holds under autocast itself."""

import importlib
from collections.abc import Callable, Iterable
from typing import Any

import jax
import pytest
from flax import nnx
from healthy_models import MODELS, Model, gan

import jmp_train as jt

pytestmark = pytest.mark.full

KEY = jax.random.key(0)
Loss = tuple[Callable[..., Any], tuple[Any, ...]]


def script_of(name: str) -> Any:
    return importlib.import_module(f"test_{name}")


def params_of(script: Any) -> Any:
    return script.script(True).state.params


def equinox_diffusion() -> Loss:
    script = script_of("equinox_diffusion")
    return script.batch_loss_fn, (*script.model_and_data(), 10.0, KEY)


def equinox_generator() -> Loss:
    script = script_of("equinox_gan")
    (generator, g_state), (discriminator, d_state) = script.models()
    noise = jax.random.normal(KEY, (8, script.LATENTS, 1, 1))
    return script.generator_loss, (generator, (g_state, d_state), discriminator, noise)


def equinox_discriminator() -> Loss:
    script = script_of("equinox_gan")
    (generator, g_state), (discriminator, d_state) = script.models()
    fake, _ = script.batched(generator, jax.random.normal(KEY, (8, script.LATENTS, 1, 1)), g_state)
    return script.discriminator_loss, (discriminator, d_state, fake, script.real_images())


def haiku_transformer() -> Loss:
    script = script_of("haiku_transformer")
    return script.loss_fn, (script.script(True).state["params"], jax.random.PRNGKey(0), script.sequences())


def imagenet() -> Loss:
    script = script_of("imagenet")
    variables = script.initialized()
    return script.loss_fn, (variables["params"], variables["batch_stats"], script.images())


def lm1b() -> Loss:
    script = script_of("lm1b")
    return script.loss_fn, (params_of(script), script.packed_batch(), jax.random.PRNGKey(0))


def nanodo() -> Loss:
    script = script_of("nanodo")
    return script.loss_fn, (params_of(script), script.tokens())


def nnx_mnist() -> Loss:
    script = script_of("nnx_mnist")
    return script.loss_fn, (script.CNN(rngs=nnx.Rngs(0)), script.digits())


def ogbg() -> Loss:
    script = script_of("ogbg")
    return script.loss_fn, (params_of(script), script.molecules())


def ppo() -> Loss:
    script = script_of("ppo")
    return script.loss_fn, (params_of(script), script.trajectories())


def seq2seq() -> Loss:
    script = script_of("seq2seq")
    return script.loss_fn, (params_of(script), script.additions(), jax.random.PRNGKey(0))


def vae() -> Loss:
    script = script_of("vae")
    return script.loss_fn, (params_of(script), script.digits(), KEY)


def wmt() -> Loss:
    script = script_of("wmt")
    return script.loss_fn, (params_of(script), None, script.padded_batch(), KEY)


LOSSES = (
    equinox_diffusion,
    equinox_generator,
    equinox_discriminator,
    haiku_transformer,
    imagenet,
    lm1b,
    nanodo,
    nnx_mnist,
    ogbg,
    ppo,
    seq2seq,
    vae,
    wmt,
)


def cases(makers: Iterable[Callable[[], Any]]) -> list[Any]:
    """Returns each model in each half type."""
    return [
        pytest.param(make, dtype, id=f"{make.__name__}-{dtype}") for make in makers for dtype in ("float16", "bfloat16")
    ]


def assert_all_is_half(tuned: jt.tuning.TunedRules, least_choices: int) -> None:
    """Asserts that nothing needs float32, as of models that float16 with a loss scale is known to train."""
    assert tuned.choices > least_choices, tuned
    assert tuned.complete
    assert tuned.verification.passed, tuned
    assert tuned.entries == (), tuned
    table, by_rules = tuned.half_flops
    assert by_rules >= table - 1e-6


@pytest.mark.parametrize(("loss", "dtype"), cases(LOSSES))
def test_losses_of_scripts(loss: Callable[[], Loss], dtype: str) -> None:
    loss_fn, args = loss()
    assert_all_is_half(jt.tune(loss_fn, [args], dtype=dtype), 10)


@pytest.mark.parametrize(("make", "dtype"), cases(make for make in MODELS if make is not gan))  # whose step is its own
def test_steps_that_half_precision_does_not_harm(make: Callable[[], Model], dtype: str) -> None:
    model = make()
    step, state = model.training(None, jt.torch_loss_scale(2.0**12))
    tuned = jt.tune(step, [(state, model.batch)], dtype=dtype, steps=5)
    assert_all_is_half(tuned, 5)
    exact, half = tuned.verification.float32_losses, tuned.verification.tuned_losses
    assert len(exact) == len(half) == 5
    assert half == pytest.approx(exact, rel=0.01)
    assert exact[-1] < exact[0]
