"""What `tune` finds, in which cases it refuses, and that it says the same each time."""

from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training import train_state
from promotion import promoting, relaxed

import jmp_train as jt
from jmp_train.tools.tuning.tuned_functions import steps_taken

pytestmark = pytest.mark.quick

F32 = jnp.float32
KEY = jax.random.key(0)


def params_of(*shapes: tuple[int, ...]) -> list[jax.Array]:
    return [0.5 * jax.random.normal(jax.random.fold_in(KEY, i), shape) for i, shape in enumerate(shapes)]


def loss_fn(params: Any, x: Any) -> Any:
    first, second = params
    h = jnp.tanh(x @ first)
    with jax.named_scope("norm"):
        h = h * 300
        h = h / jnp.sqrt((h * h).mean(-1, keepdims=True) / 4)  # 300 ** 2 is beyond float16
    return jnp.mean((h @ second) ** 2)


def bad_loss_fn(params: Any, x: Any) -> Any:
    first, second = params
    h = jnp.tanh(x @ first)
    with jax.named_scope("norm"):
        h = h * 300
        h = h * (jnp.sqrt(jnp.sqrt(h**4).mean(-1, keepdims=True)) / 9e4)
    return jnp.mean((h @ second) ** 2)


@pytest.fixture(scope="module")
def examples() -> list[tuple[Any, ...]]:
    params = params_of((4, 8), (8, 2))
    return [(params, jax.random.normal(jax.random.fold_in(KEY, 10 + i), (16, 4))) for i in range(3)]


@pytest.fixture(scope="module")
def tuned(examples: list[tuple[Any, ...]]) -> jt.tuning.TunedRules:
    return jt.tune(bad_loss_fn, examples)


def test_it_finds_the_operation(tuned: jt.tuning.TunedRules) -> None:
    (entry,) = tuned.entries
    assert (entry.path, entry.primitives, entry.operations) == ("norm", ("integer_pow",), 1)
    assert entry.why.startswith("48% of its values overflow")
    assert entry.why.endswith("without it: not finite")
    assert entry.line.endswith(f"test_tuner.py:{bad_loss_fn.__code__.co_firstlineno + 5}")
    assert tuned.complete
    assert tuned.verification.passed
    assert tuned.verification.held_out == 1


def test_its_rules_are_for_autocast(tuned: jt.tuning.TunedRules, examples: list[tuple[Any, ...]]) -> None:
    for rules, is_finite in ((tuned.rules, True), (jt.MOSTLY_HALF, False)):
        grads = jax.grad(jt.autocast(bad_loss_fn, jnp.float16, rules=rules))(*examples[0])
        assert all(bool(jnp.isfinite(x).all()) for x in grads) == is_finite
    assert tuned.half_flops[1] >= tuned.half_flops[0] > 0.5
    assert tuned.half_elements[1] > tuned.half_elements[0]


@pytest.mark.full
def test_the_same_arguments_give_the_same_rules(tuned: jt.tuning.TunedRules, examples: list[tuple[Any, ...]]) -> None:
    again = jt.tune(bad_loss_fn, examples)
    assert (again.rules, again.trials, again.entries) == (tuned.rules, tuned.trials, tuned.entries)


@pytest.mark.full
def test_a_model_that_can_be_half_has_no_entry(examples: list[tuple[Any, ...]]) -> None:
    tuned = jt.tune(loss_fn, examples[:1])
    assert tuned.entries == ()
    assert tuned.trials <= 2  # with the loss scale that training begins with, and with that where it settles
    assert tuned.rules == jt.MOSTLY_HALF
    assert tuned.verification.held_out == 0
    assert tuned.code() == "rules = jt.MOSTLY_HALF"


@pytest.mark.full
def test_a_smaller_tolerance_keeps_more_in_float32(examples: list[tuple[Any, ...]]) -> None:
    tuned = jt.tune(loss_fn, examples[:2], tolerance=1e-5)
    assert tuned.entries
    assert tuned.verification.errors.gradient <= 1e-5
    kept = {name for entry in tuned.entries for name in entry.primitives}
    assert "dot_general" in kept


@pytest.mark.full
def test_bfloat16(examples: list[tuple[Any, ...]]) -> None:
    tuned = jt.tune(bad_loss_fn, examples, dtype="bfloat16")
    assert (tuned.entries, tuned.dtype, tuned.loss_scale) == ((), "bfloat16", 1.0)


@pytest.mark.full
def test_a_criterion_of_the_users_own(examples: list[tuple[Any, ...]]) -> None:
    def first_gradient_is_close(outcome: Any, exact: Any) -> Any:
        return jnp.allclose(outcome.gradients["0"], exact.gradients["0"], rtol=1e-4, atol=1e-6)

    found = jt.tune(loss_fn, examples[:1], tolerance=first_gradient_is_close)
    assert found.entries
    assert all(entry.without is None or not entry.without.accepted for entry in found.entries)


def test_an_interrupt_returns_the_best_so_far(examples: list[tuple[Any, ...]]) -> None:
    def interrupt(trials: int, text: str) -> None:
        assert text
        if trials == 4:
            raise KeyboardInterrupt

    stopped = jt.tune(loss_fn, examples[:1], tolerance=1e-5, progress=interrupt)
    assert (stopped.complete, stopped.trials) == (False, 4)
    assert stopped.verification.passed
    assert "the search was stopped" in str(stopped)


@pytest.mark.full
def test_a_function_that_is_no_loss(examples: list[tuple[Any, ...]]) -> None:
    def normalized(x: Any) -> Any:
        h = x * 300 @ jnp.eye(4)
        return h / jnp.sqrt(jnp.sqrt(h**4).sum(-1, keepdims=True)), jnp.argmax(h, -1)

    tuned = jt.tune(normalized, [(x,) for _, x in examples])
    assert [entry.primitives for entry in tuned.entries] == [("integer_pow",)]
    assert tuned.verification.errors.gradient == 0


@pytest.mark.full
def test_loops_and_branches(examples: list[tuple[Any, ...]]) -> None:
    def fn(params: Any, x: Any) -> Any:
        def body(h: Any, _: Any) -> Any:
            return jnp.tanh(h @ params[0][:, :4]), jnp.sqrt((100 * h @ params[0]) ** 4)

        h, squares = jax.lax.scan(jax.checkpoint(body), x, None, length=3)
        return (
            jax.lax.cond(x.sum() > 0, jnp.mean, jnp.max, squares)
            + jax.lax.fori_loop(0, 2, lambda _, h: jnp.tanh(h), h).mean()
        )

    tuned = jt.tune(fn, examples)
    assert [entry.primitives for entry in tuned.entries] == [("integer_pow",)]
    assert tuned.verification.passed


def test_a_loop_without_a_derivative(examples: list[tuple[Any, ...]]) -> None:
    def fn(x: Any) -> Any:
        def body(h: Any) -> Any:
            return jnp.sqrt(jnp.sqrt((300 * h @ jnp.eye(4)) ** 4)) / 300

        return jax.lax.while_loop(lambda h: h.max() > 0.1, lambda h: 0.5 * body(h), jnp.tanh(x))

    tuned = jt.tune(fn, [(x,) for _, x in examples[:1]])
    assert [entry.primitives for entry in tuned.entries] == [("integer_pow",)]


@pytest.mark.full
def test_an_equinox_module(examples: list[tuple[Any, ...]]) -> None:
    model = eqx.nn.MLP(4, 2, 8, 1, activation=jax.nn.gelu, key=KEY)

    def fn(model: Any, x: Any) -> Any:
        y = jax.vmap(model)(x)
        return jnp.sqrt((300 * y) ** 4).mean(), y

    tuned = jt.tune(promoting(fn), [(model, x) for _, x in examples])
    assert [entry.primitives for entry in tuned.entries] == [("integer_pow",)]


@pytest.mark.full
def test_an_nnx_module_stays_as_it_was(examples: list[tuple[Any, ...]]) -> None:
    class Model(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.linear = nnx.Linear(4, 8, rngs=rngs)
            self.norm = nnx.BatchNorm(8, rngs=rngs)
            self.dropout = nnx.Dropout(0.5, rngs=rngs)

        def __call__(self, x: Any) -> Any:
            return self.dropout(self.norm(self.linear(x)))

    model = promoting(Model)(nnx.Rngs(0))
    before = [np.asarray(x) for x in jax.tree.leaves(nnx.state(model, nnx.Any(nnx.Param, nnx.BatchStat)))]

    def fn(model: Any, x: Any) -> Any:
        return jnp.sqrt((300 * model(x)) ** 4).mean()

    tuned = jt.tune(promoting(fn), [(model, x) for _, x in examples])
    assert [entry.primitives for entry in tuned.entries] == [("integer_pow",)]
    after = jax.tree.leaves(nnx.state(model, nnx.Any(nnx.Param, nnx.BatchStat)))
    jax.tree.map(np.testing.assert_array_equal, before, after)


def step_of(fn: Any, **options: Any) -> tuple[jt.steps.TrainStep, jt.TrainState]:
    optimizer = jt.with_loss_scale(optax.sgd(0.05), jt.torch_loss_scale())
    step = jt.train_step(jt.stateless(fn), optimizer, policy="mixed_float16", **options)
    return step, jt.TrainState.create(params_of((4, 8), (8, 2)), optimizer)


@pytest.mark.full
@pytest.mark.parametrize("accumulate_steps", [1, 2])
def test_a_train_step(examples: list[tuple[Any, ...]], accumulate_steps: int) -> None:
    step, state = step_of(bad_loss_fn, accumulate_steps=accumulate_steps)
    tuned = jt.tune(step, [(state, x) for _, x in examples], steps=6)
    assert [entry.primitives for entry in tuned.entries] == [("integer_pow",)]
    losses = tuned.verification.float32_losses, tuned.verification.tuned_losses
    assert len(losses[0]) == 6
    np.testing.assert_allclose(*losses, rtol=2e-2)
    assert losses[0][-1] < losses[0][0]
    assert tuned.steps_taken == 0


def test_the_steps_that_were_taken_are_counted() -> None:
    """Of a step with a loss scale, flax's states, and a state of one's own whose optimizer counts."""
    params, adam = {"count": jnp.ones(2)}, relaxed(optax.adam(1e-3))
    scaled = jt.with_loss_scale(optax.sgd(0.1), jt.torch_loss_scale())
    step = jax.jit(jt.train_step(jt.stateless(lambda params, x: (params["count"] * x).sum()), scaled))
    fresh = jt.TrainState.create(params, scaled)
    skipped, _ = step(fresh, jnp.full(2, jnp.inf))
    taken, _ = step(skipped, jnp.ones(2))
    assert [steps_taken([(state, 0)]) for state in (fresh, skipped, taken)] == [0, 0, 1]
    assert steps_taken([(taken, 0), (skipped, 0)]) == 0
    assert steps_taken([(jax.tree.map(lambda x: jnp.stack([x, x]), taken),)]) is None  # of several models
    flax_state = train_state.TrainState.create(apply_fn=None, params=params, tx=optax.sgd(0.1))
    own = TrainingState(params, adam.update(params, adam.init(params), params)[1])
    found = [steps_taken([(x,)]) for x in (flax_state, flax_state.apply_gradients(grads=params), own, params)]
    assert found == [0, 1, 1, None]
    model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, adam, wrt=nnx.Param)
    optimizer.update(model, nnx.state(model, nnx.Param))
    assert steps_taken([(model, optimizer, 0)]) == 1


def steep(params: Any, x: jax.Array) -> jax.Array:
    y = 400.0 * (400.0 * (x @ params["w"]))  # beyond float16's range, and so are gradients of 1e10
    return (y * y).mean()


@pytest.mark.parametrize(
    ("loss_scale", "scales", "kept"),
    [
        (jt.torch_loss_scale(), (2.0**-40, 2.0**-16), {"mul"}),
        pytest.param(jt.deepspeed_loss_scale(), (1.0, 2.0**16), {"dot_general"}, marks=pytest.mark.full),
        pytest.param(jt.StaticLossScale(2.0**-20), (2.0**-20, 2.0**-20), {"mul"}, marks=pytest.mark.full),
        pytest.param(jt.StaticLossScale(16.0), (16.0, 16.0), {"dot_general"}, marks=pytest.mark.full),
        pytest.param(jt.NoOpLossScale(), (1.0, 1.0), {"dot_general"}, marks=pytest.mark.full),
    ],
    ids=["without floor", "floor 1", "static", "static and too large", "none"],
)
def test_the_loss_scale_is_one_that_training_can_reach(loss_scale: Any, scales: Any, kept: set[str]) -> None:
    optimizer = jt.with_loss_scale(optax.sgd(1e-12), loss_scale)
    state = jt.TrainState.create({"w": jax.random.normal(jax.random.key(0), (4, 8))}, optimizer)
    step = jt.train_step(jt.stateless(steep), optimizer)
    tuned = jt.tune(step, [(state, jax.random.normal(jax.random.key(seed), (8, 4))) for seed in range(2)], steps=2)
    assert scales[0] <= tuned.loss_scale <= scales[1]
    assert {name for entry in tuned.entries for name in entry.primitives} == kept
    assert ("gradients fit float16 only with a loss scale of" in str(tuned)) == (tuned.loss_scale < 1)
    assert tuned.verification.passed
    np.testing.assert_allclose(tuned.verification.tuned_losses, tuned.verification.float32_losses, rtol=1e-2)


class TrainingState(NamedTuple):
    params: Any
    opt_state: Any


def refuse(error: type[Exception], message: str, *args: Any, **options: Any) -> None:
    with pytest.raises(error, match=message):
        jt.tune(*args, **options)


def test_bad_arguments_are_named(examples: list[tuple[Any, ...]]) -> None:
    params, x = examples[0]
    refuse(TypeError, "fn must be a function or a TrainStep, got 3", 3, examples)
    refuse(ValueError, "examples is empty", loss_fn, [])
    refuse(TypeError, r"examples\[0\] must be a tuple of arguments, got list", loss_fn, [[params, x]])
    sizes = r"examples\[1\] '1' is float32\[8, 4\], and float32\[16, 4\]"
    refuse(ValueError, sizes, loss_fn, [(params, x), (params, x[:8])])
    refuse(ValueError, r"examples\[1\] has another structure", loss_fn, [(params, x), (params, {"x": x})])
    refuse(ValueError, "budget=0 must be an integer of at least 1", loss_fn, examples, budget=0)
    refuse(ValueError, "steps=2 needs a TrainStep", loss_fn, examples, steps=2)
    refuse(ValueError, "dtype", loss_fn, examples, dtype="float32")
    refuse(ValueError, "loss_scale=0 must be a positive number", loss_fn, examples, loss_scale=0)
    refuse(TypeError, "tolerance must be a Tolerance, .* got 'low'", loss_fn, examples, tolerance="low")
    refuse(ValueError, "tolerance=0 must be a positive number", loss_fn, examples, tolerance=0)
    step, _ = step_of(loss_fn)
    refuse(TypeError, r"examples\[0\] must be a TrainState and a batch", step, examples)


def test_what_is_not_finite_in_float32_is_refused(examples: list[tuple[Any, ...]]) -> None:
    params, x = examples[0]
    refuse(ValueError, r"examples\[0\]: result 0 is not finite in float32", loss_fn, [(params, x * jnp.inf)])
    fn = lambda params, x: jnp.sqrt(jnp.sum(0 * (x @ params[0])))
    refuse(ValueError, r"examples\[0\]: the gradient of '0' is not finite", fn, [(params, x)])


def test_an_autocast_is_refused(examples: list[tuple[Any, ...]]) -> None:
    half_loss = jt.autocast(loss_fn)
    refuse(TypeError, r"fn is an autocast\(...\) already: pass the plain function", half_loss, examples)
    _, state = step_of(loss_fn)
    step = jt.train_step(jt.autocast(jt.stateless(loss_fn)), optax.sgd(0.1))
    message = r"the loss_fn of the step is an autocast\(...\) already"
    refuse(TypeError, message, step, [(state, x) for _, x in examples])


@pytest.mark.parametrize("wrap", [lambda fn: jax.jit(fn), lambda fn: lambda *args: fn(*args)], ids=["jit", "lambda"])
def test_an_autocast_within_a_function_is_refused(wrap: Any, examples: list[tuple[Any, ...]]) -> None:
    message = r"no operation of fn could be float16: .* An autocast\(...\) within it decides already"
    refuse(ValueError, message, wrap(jt.autocast(loss_fn)), examples)
    step, state = step_of(jt.autocast(loss_fn))
    refuse(ValueError, message, step, [(state, x) for _, x in examples])


def test_a_function_without_choices_is_refused(examples: list[tuple[Any, ...]]) -> None:
    fn = lambda params, x: jnp.sum(jnp.exp(params[0])) + jnp.mean(x)
    message = "no operation of fn could be bfloat16: .* It has reduce_sum, exp, div, .*, and no matrix product"
    refuse(ValueError, message, fn, examples, dtype="bfloat16")


def test_what_no_choice_mends_is_refused(examples: list[tuple[Any, ...]]) -> None:
    message = "even if all operations run in float32 the tolerance is exceeded"
    refuse(ValueError, message, loss_fn, examples, tolerance=lambda outcome, exact: False)


@pytest.mark.parametrize("name", ["loss", "gradient", "leaf", "cosine", "sensitivity"])
def test_a_tolerance_checks_its_numbers(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name}=-2 must be a"):
        jt.tuning.Tolerance(**{name: -2})


@pytest.mark.full
def test_debugging_of_infinities_does_not_stop_the_trials() -> None:
    with jax.debug_infs(True):
        tuned = jt.tune(lambda w, x: jnp.mean((x @ w) ** 3), [(jnp.full((8, 8), 10.0), jnp.full((4, 8), 1.0))])
    assert [entry.primitives for entry in tuned.entries] == [("integer_pow",)]
