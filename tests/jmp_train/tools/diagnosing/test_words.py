"""A report says in the user's words what is wrong: arguments, the loss, updates, functions, and what comes first."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from jax.sharding import PartitionSpec as P
from planting import harmful

import jmp_train as jt

pytestmark = [pytest.mark.quick, pytest.mark.filterwarnings("ignore::jmp_train.policies.MissingLossScaleWarning")]

F16, BF16 = jnp.float16, jnp.bfloat16
PARAMS = {"gain": jnp.full((1,), 1e6), "w": jax.random.normal(jax.random.key(0), (4, 1))}
X = jax.random.normal(jax.random.key(1), (8, 4))


def diagnosed(fn: Any, *args: Any) -> jt.tools.NumericsReport:
    """Returns the report of a function in which dtypes promote."""
    with jax.numpy_dtype_promotion("standard"):
        return jt.diagnose(fn, *args)


def training(loss_fn: Any, params: Any, policy: Any, scale: jt.LossScale | None = None) -> Any:
    """Returns a train step in a policy, with its first state."""
    optimizer: Any = optax.sgd(0.1, momentum=0.9)
    optimizer = optimizer if scale is None else jt.with_loss_scale(optimizer, scale)
    step = jt.train_step(jt.stateless(loss_fn), optimizer, policy=policy)
    return step, jt.TrainState.create(params, optimizer)


def gradients_of(step: Any, state: Any, batch: Any) -> Any:
    """Returns the gradients of a step, which are its optimizer's first momentum."""
    with jax.numpy_dtype_promotion("standard"):
        return optax.tree.get(step(state, batch)[0].opt_state, "trace")["w"]


def regression(params: Any, batch: Any) -> jax.Array:
    return jnp.mean((batch["x"] @ params["w"] - batch["y"]).astype(jnp.float32) ** 2) * 1e-3


def test_a_target_that_overflows_in_the_policys_cast_is_named_by_its_path_and_kept_in_float32() -> None:
    batch = {"x": X, "y": 70000.0 + jnp.arange(8.0)[:, None]}
    step, state = training(regression, {"w": PARAMS["w"]}, "mixed_float16")
    report = diagnosed(step, state, batch)
    (problem,) = harmful(report)
    assert (problem.kind, problem.subject, problem.line, problem.file) == ("overflow", "the argument '1/y'", 0, "")
    assert "keep '1/y' in float32: policy=\"autocast_float16\"" in problem.remedy.text
    assert "jt.apply_policy(model, policy)" in problem.remedy.text
    assert "problem: overflow, forward pass, the argument '1/y'" in str(report)

    half = jt.apply_policy(lambda params, x: x @ params["w"], "mixed_float16")

    def on_the_model_alone(params: Any, batch: Any) -> jax.Array:
        return jnp.mean((half(params, batch["x"]) - batch["y"]) ** 2) * 1e-3

    float32, state = training(regression, {"w": PARAMS["w"]}, "float32")
    expected = gradients_of(float32, state, batch)
    for loss_fn, policy in ((regression, "autocast_float16"), (on_the_model_alone, None)):
        step, state = training(loss_fn, {"w": PARAMS["w"]}, policy)
        np.testing.assert_allclose(gradients_of(step, state, batch), expected, rtol=0.02)


@pytest.mark.full
def test_a_parameter_and_data_that_a_policys_cast_loses_are_each_named() -> None:
    def loss_fn(params: Any, batch: Any) -> jax.Array:
        return jnp.mean((batch["x"] @ params["w"] * params["gain"] / batch["std"]).astype(jnp.float32) ** 2)

    batch = {"x": X, "std": jnp.full((1,), 1e-9)}
    step, state = training(loss_fn, PARAMS, "mixed_float16")
    found = {problem.subject: problem for problem in harmful(diagnosed(step, state, batch)) if problem.subject}
    assert {name: problem.kind for name, problem in found.items()} == {
        "the argument '0/params/gain'": "overflow",
        "the argument '1/std'": "underflow",
    }
    assert (
        'jt.policy_by_path({"gain$": "float32"}, default=policy)' in found["the argument '0/params/gain'"].remedy.text
    )
    by_path = jt.policy_by_path({"gain$": "float32"}, default="mixed_float16")
    step, state = training(loss_fn, PARAMS, by_path)
    assert "the argument '0/params/gain'" not in [p.subject for p in diagnosed(step, state, batch).problems]


@pytest.mark.full
def test_values_that_a_cast_makes_one_number_are_a_problem_where_that_harms() -> None:
    def standardized(x: jax.Array) -> Any:
        x = x - 1000
        return {"h": x / 2}

    x = 1000 + X
    report = diagnosed(jt.apply_policy(standardized, "mixed_bfloat16"), x)
    first, *_ = report.problems
    assert (first.severity, first.kind, first.subject) == ("problem", "values collapse", "the argument '0'")
    assert "distinct numbers from" in first.evidence
    (note,) = diagnosed(jt.apply_policy(lambda x: {"h": x * 2}, "mixed_bfloat16"), x).problems
    assert (note.severity, note.kind, note.remedy.action) == ("note", "values collapse", "argument")


def test_the_users_own_cast_is_shown_with_the_argument() -> None:
    def own(batch: Any) -> jax.Array:
        batch = jax.tree.map(lambda x: x.astype(F16), batch)
        return batch["x"] / batch["std"]

    first, *_ = diagnosed(own, {"x": X[:1], "std": jnp.full((4,), 1e-9)}).problems
    assert (first.code, first.kind) == ("batch = jax.tree.map(lambda x: x.astype(F16), batch)", "underflow")
    assert first.evidence.endswith("(the argument '0/std')")


@pytest.mark.full
def test_updates_and_losses_are_named_where_no_line_of_the_users_makes_them() -> None:
    params = {"a": jnp.ones(4, BF16), "b": jnp.ones(4, BF16)}
    step, state = training(lambda p, x: jnp.mean((x * (p["a"] + p["b"])) ** 2) * 1e-4, params, None)
    (problem,) = harmful(diagnosed(step, state, X.astype(BF16)))
    assert (problem.kind, problem.subject[: len("the update of '0/params/")]) == (
        "stagnation",
        "the update of '0/params/",
    )
    assert "of '0/params/a' and of 1 more leaf stay the same bfloat16" in problem.evidence

    def half_loss(params: Any, x: jax.Array) -> jax.Array:
        return jnp.mean(x @ params["w"])

    step, state = training(half_loss, {"w": PARAMS["w"]}, "mixed_float16", jt.torch_loss_scale())
    report = diagnosed(step, state, X)
    first, *_ = report.problems
    assert (first.kind, first.subject) == ("overflow", "the derivative of the loss")
    assert first.remedy.text.startswith("return the loss in float32, or a loss scale of ")
    assert "jmp_train" not in str(report)
    assert "contextlib" not in str(report)


LAYER = nn.LayerNorm(use_bias=False, use_scale=False, dtype=F16, force_float32_reductions=False)
LARGE = 1000 * jnp.arange(8, dtype=F16)


@pytest.mark.parametrize(
    ("fn", "named"),
    [
        (lambda x: jax.nn.gelu(x) * 2, "gelu's x**3"),
        (lambda x: jnp.log(jax.nn.softmax(x / 100)), "softmax's div"),
        pytest.param(lambda x: x / jnp.linalg.norm(x), "norm's mul", marks=pytest.mark.full),
        (lambda x: LAYER.apply({}, x[None]), "LayerNorm's square"),
        (lambda x: x**2, "% of x**2"),
        (lambda x: x * x, "% of mul"),
        pytest.param(lambda x: optax.safe_norm(x, 1e-3) * x, "safe_norm's mul", marks=pytest.mark.full),
    ],
)
def test_what_the_user_called_is_named(fn: Callable[..., Any], named: str) -> None:
    assert named in diagnosed(fn, LARGE).problems[0].evidence


def test_the_first_lines_say_which_problem_makes_the_gradients_infinite() -> None:
    def loss_fn(w: jax.Array, x: jax.Array) -> jax.Array:
        harmless = jnp.tanh(x * x * 100)
        scores = jnp.exp(harmless * w * 12)  # the first infinity that goes on
        return jnp.sum(scores / jnp.sum(scores)).astype(jnp.float32)

    report = diagnosed(jax.value_and_grad(loss_fn), jnp.ones(4, F16), 100 * jnp.ones(4, F16))
    line = loss_fn.__code__.co_firstlineno
    assert f"Gradients are not finite, which begins with the overflow at {__file__}"[:60] in report.explanation
    assert report.explanation.endswith(f"test_words.py:{line + 2}.")
    assert str(report).splitlines()[1].startswith("Gradients are not finite, which begins with")
    assert f":{line + 1}" in str(report)  # the square, which is a problem of its own or a note
    assert diagnosed(jax.value_and_grad(loss_fn), jnp.zeros(4, F16), jnp.ones(4, F16)).explanation == ""


@pytest.mark.parametrize("lost", [pytest.param("params", marks=pytest.mark.full), "moments", "nothing"])
def test_a_state_that_was_lost_before_is_said_first(lost: str) -> None:
    batch = {"x": X, "y": X[:, :1]}
    params = {"w": PARAMS["w"] * (jnp.nan if lost == "params" else 1)}
    step, state = training(regression, params, "mixed_float16", jt.DynamicLossScale(jnp.float32(1.0)))
    if lost == "nothing":
        state, _ = jax.jit(step)(state, batch | {"x": X * jnp.nan})
        said = "The loss scale at '0/opt_state' is at its floor of 1, and the last step was skipped."
        assert diagnosed(step, state, batch).explanation == said
        return
    if lost == "moments":
        state = dataclasses.replace(
            state, opt_state=jax.tree.map(lambda x: x * jnp.nan if x.ndim else x, state.opt_state)
        )
    path = {"params": "0/params/w", "moments": "0/opt_state/inner_state/0/trace/w"}[lost]
    report = diagnosed(step, state, batch)
    assert report.explanation == f"The state is lost before this run: {path!r} is not finite."
    (problem,) = harmful(report)
    assert (problem.kind, problem.subject, problem.line) == ("NaN made", f"the argument {path!r}", 0)
    assert "go back to a state that is finite" in problem.remedy.text


MESH = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))


def own_step(reduce: Callable[[Any], Any]) -> Callable[..., Any]:
    """Returns a data-parallel step in a shard_map of the user's own."""

    def step(w: jax.Array, x: jax.Array) -> jax.Array:
        grads = jax.grad(lambda w: jnp.sum((x.astype(F16) @ w.astype(F16)).astype(jnp.float32)) * 300)(w)
        return w - 1e-3 * reduce(grads.astype(F16))

    return jax.jit(jax.shard_map(step, mesh=MESH, in_specs=(P(), P("data")), out_specs=P(), check_vma=False))


def test_a_nan_in_the_code_that_nothing_takes_is_not_blamed() -> None:
    def root(x: jax.Array, count: jax.Array) -> jax.Array:
        mean = jnp.where(count > 0, jnp.sum(x) / count, F16(jnp.nan))
        return jnp.sqrt(mean - 4)  # of a negative number

    report = diagnosed(root, jnp.ones(4, F16), F16(4))
    assert [(problem.kind, problem.primitive) for problem in report.problems] == [("NaN made", "sqrt")]


@pytest.mark.full
def test_a_sum_over_devices_in_half_precision_is_to_be_in_float32() -> None:
    args = PARAMS["w"], jnp.full((8, 4), 60.0)
    (problem, *_) = diagnosed(own_step(lambda g: jax.lax.pmean(g, "data")), *args).problems
    assert (problem.kind, problem.direction, problem.remedy.action) == ("overflow", "update", "reduction")
    assert "jax.lax.psum(x.astype(jnp.float32), axis), or jt.reduce_gradients(grads, (axis,))" in problem.remedy.text
    assert not diagnosed(own_step(lambda g: jt.reduce_gradients(g, ("data",))), *args).problems


@pytest.mark.full
def test_a_step_in_a_shard_map_of_the_users_own_is_seen_into() -> None:
    def network(w: jax.Array, x: jax.Array) -> jax.Array:
        h = 400 * (x @ w)
        return h / jnp.sqrt(jnp.mean(h * h, -1, keepdims=True))

    def steps(network: Callable[..., Any]) -> Callable[..., Any]:
        def own(w: jax.Array, x: jax.Array) -> jax.Array:
            grads = jax.grad(lambda w: jnp.mean((network(w, x).astype(jnp.float32) - 1) ** 2) * 1e4)(w)
            return w - 1e-3 * jax.lax.pmean(grads, "data")

        return jax.jit(jax.shard_map(own, mesh=MESH, in_specs=(P(), P("data")), out_specs=P(), check_vma=False))

    args = jax.random.normal(jax.random.key(0), (4, 4)), X
    report = diagnosed(steps(jt.apply_policy(network, "mixed_float16")), *args)
    first, *_ = report.problems
    assert first.code == "return h / jnp.sqrt(jnp.mean(h * h, -1, keepdims=True))"
    assert "mul" in dict(first.remedy.rules.primitives)
    assert not first.remedy.rules.functions  # "own" would be the whole step
    mended = jt.autocast(network, F16, rules=report.rules)
    assert not harmful(diagnosed(steps(mended), *args))


def test_rules_that_are_proposed_under_autocast_mend_it() -> None:
    layer = nn.Dense(2, use_bias=False)
    params = {"params": {"kernel": jnp.full((8, 2), 100.0)}}

    def run(x: jax.Array) -> Any:
        return {"h": jnp.tanh(jnp.asarray(layer.apply(params, x)).astype(jnp.float32) * 1e-7)}

    (problem,) = harmful(diagnosed(jt.autocast(run, F16), LARGE[None]))
    assert (problem.kind, problem.path) == ("overflow", "Dense")  # without a scope of autocast's own
    mended = jt.autocast(run, F16, rules=jt.TORCH_CUDA.replace(paths=dict(problem.remedy.rules.paths)))
    assert not harmful(diagnosed(mended, LARGE[None]))


def test_an_infinity_that_float32_has_too_is_not_explained() -> None:
    report = diagnosed(lambda x: {"best": jnp.min(x, initial=jnp.inf) + jnp.inf, "h": x * 2}, jnp.ones(4, F16))
    assert (report.problems, report.explanation) == ((), "")
