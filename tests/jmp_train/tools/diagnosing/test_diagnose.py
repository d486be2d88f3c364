"""What `diagnose` finds in small functions, in each direction and within each primitive that holds programs."""

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax
from promotion import promoting

import jmp_train as jt

pytestmark = pytest.mark.quick

F16, BF16 = jnp.float16, jnp.bfloat16


def squares(x: jax.Array) -> jax.Array:
    return jnp.sum(x * x)  # overflows


def line_of(problem: jt.tools.Problem) -> str:
    return problem.code.partition("#")[0].strip()


def jitted(x: jax.Array) -> jax.Array:
    return jax.jit(squares)(x)


def scanned(x: jax.Array) -> jax.Array:
    return lax.scan(lambda total, row: (total + squares(row), None), F16(0), x[None])[0]


def looped(x: jax.Array) -> jax.Array:
    return lax.fori_loop(0, x.size - 2, lambda i, total: total + squares(x), F16(0))


def branched(x: jax.Array) -> jax.Array:
    return lax.cond(x[0] > 0, squares, lambda x: x[0], x)


def rematerialized(x: jax.Array) -> jax.Array:
    return jax.checkpoint(squares)(x)


def vmapped(x: jax.Array) -> jax.Array:
    return jax.vmap(squares)(x[None]).sum()


@jax.custom_jvp
def custom(x: jax.Array) -> jax.Array:
    return squares(x)


custom.defjvps(lambda tangent, out, x: tangent.sum())


@jax.custom_vjp
def custom_back(x: jax.Array) -> jax.Array:
    return squares(x)


custom_back.defvjp(lambda x: (squares(x), x), lambda x, g: (g * x,))

ROUTES = (squares, jitted, scanned, looped, branched, rematerialized, vmapped, custom, custom_back)


@pytest.mark.quick_cases(5)
@pytest.mark.parametrize("fn", ROUTES, ids=lambda fn: fn.__name__)
def test_an_overflow_is_found_within_whatever_holds_it(fn: Callable[[jax.Array], jax.Array]) -> None:
    report = jt.diagnose(fn, jnp.full(3, 300.0, F16))
    problem = report.problems[0]
    assert (problem.severity, problem.kind, problem.direction) == ("problem", "overflow", "forward")
    assert line_of(problem) == "return jnp.sum(x * x)"
    assert problem.primitive in ("mul", "square")
    assert problem.file.endswith("test_diagnose.py")
    assert max(map(len, str(report).splitlines())) <= 100


def test_the_measures_of_a_row() -> None:
    x = jnp.array([300.0, 1e-4, 1e-3, 2.0], F16)
    (row,) = jt.diagnose(lambda x: x * x, x).rows
    assert (row.primitive, row.dtype, row.shape, row.runs) == ("mul", "float16", (4,), 1)
    assert (row.overflowed, row.flushed, row.subnormal, row.infinite, row.nan) == (0.25, 0.25, 0.25, 0.25, 0.0)
    exact = np.asarray(x, np.float64) ** 2
    assert row.largest == pytest.approx(exact.max())
    assert row.smallest == pytest.approx(exact.min())
    # Elements that overflow have no error that could be added.
    error = np.abs(np.asarray(x * x, np.float64) - exact)[1:].sum() / exact.sum()
    assert row.local_error == pytest.approx(error, rel=0.01) == row.inherited_error


def test_iterations_of_a_loop_are_counted_together() -> None:
    def run(x: jax.Array) -> jax.Array:
        return lax.scan(lambda total, y: (total * y, None), x, jnp.array([2.0, 300.0, 300.0, 1.0], F16))[0]

    (row,) = jt.diagnose(run, F16(1)).rows
    assert (row.runs, row.overflowed) == (4, 0.25)  # in the third; what the fourth is given counts as its largest


def test_the_local_error_is_apart_from_the_inherited_one() -> None:
    def run(x: jax.Array) -> jax.Array:
        return ((x + 2048) - 2048) * 3

    add, sub, mul = jt.diagnose(run, jnp.linspace(0, 1, 64, dtype=F16)).rows
    assert add.local_error < 1e-3
    assert mul.local_error < 1e-3  # which is not guilty of what it inherits
    assert mul.inherited_error > 0.1
    assert sub.local_error > 0.1


def test_infinities_of_a_loss_scale_are_told_apart() -> None:
    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.sum((w * x).astype(jnp.float32))

    def problems(scale: jt.LossScale) -> tuple[jt.tools.Problem, ...]:
        optimizer = jt.with_loss_scale(optax.sgd(0.1), scale)
        step = jt.train_step(jt.stateless(loss), optimizer, policy="mixed_float16")
        return jt.diagnose(step, jt.TrainState.create(jnp.ones(3), optimizer), jnp.full(3, 8.0)).problems

    for scale, severity in ((jt.torch_loss_scale(2.0**16), "note"), (jt.StaticLossScale(2.0**16), "problem")):
        problem, *_ = problems(scale)
        assert (problem.severity, problem.kind, problem.direction) == (severity, "overflow", "backward")
        assert problem.remedy.action == "loss scale"
        assert problem.remedy.value is not None
        assert problems(jt.StaticLossScale(problem.remedy.value)) == ()


def test_a_nan_in_the_arguments_is_named_and_not_blamed_on_what_reads_it() -> None:
    report = jt.diagnose(lambda batch: jnp.tanh(batch["x"]) * 2, {"x": jnp.array([jnp.nan, 1.0], F16)})
    assert [(p.severity, p.evidence) for p in report.problems] == [("problem", "the argument '0/x' is not finite")]
    mask = jt.diagnose(lambda mask: jnp.exp(mask + 1), jnp.array([-jnp.inf, 0.0], F16))
    assert [problem.severity for problem in mask.problems] == ["note"]


def test_an_infinity_in_the_data_is_not_blamed_on_a_constant_that_is_infinite() -> None:
    def loss(params: jax.Array, batch: jax.Array) -> jax.Array:
        return jax.nn.log_softmax(batch @ params)[:, 0].mean()

    report = jt.diagnose(loss, jnp.ones((3, 2), F16), jnp.ones((4, 3), F16).at[0, 0].set(jnp.inf))
    assert [(p.severity, p.evidence) for p in report.problems] == [("problem", "the argument '1' is not finite")]


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: jt.diagnose(jnp.sin, 1.0, steps=0), ValueError, "steps=0 must be an integer of at least 1"),
        (lambda: jt.diagnose(jnp.sum, jnp.ones(2), steps=2), TypeError, "steps above 1 need a fn whose first result"),
        (
            lambda: jt.diagnose(jnp.sin, jax.ShapeDtypeStruct((2,), F16)),
            TypeError,
            "args '0' is a ShapeDtypeStruct; diagnose needs arrays with values",
        ),
        (
            lambda: jax.jit(lambda x: jt.diagnose(jnp.sin, x))(jnp.ones(2)),
            TypeError,
            "needs concrete values; call it outside of transforms such as jax.jit",
        ),
    ],
)
def test_errors(call: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=re.escape(message)):
        call()


def test_foreign_code_runs_once_and_is_taken_as_exact() -> None:
    calls = []

    def double(x: np.ndarray) -> np.ndarray:
        calls.append(x)
        return x * np.float16(2)

    def run(x: jax.Array) -> jax.Array:
        return jax.pure_callback(double, jax.ShapeDtypeStruct((2,), F16), x * 300) * 300

    report = jt.diagnose(run, jnp.full(2, 3.0, F16))
    assert len(calls) == 1
    assert [(row.primitive, row.local_error > 0) for row in report.rows[:2]] == [
        ("mul", False),
        ("pure_callback", False),
    ]
    assert [problem.primitive for problem in report.problems] == ["mul"]


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize(
    ("fn", "args"),
    [
        (lambda key: jax.random.normal(key, (4,), BF16) * 2, (jax.random.key(0),)),
        (lambda x: jnp.fft.fft(x).real.astype(F16), (jnp.ones(8),)),
        (lambda x: x + 1, (jnp.ones(0, F16),)),
        (lambda x, n: x[:n] * 2, (jnp.ones(9, F16), 4)),
        (lambda x: jnp.sort(x)[jnp.argsort(-x)], (jnp.arange(4, dtype=BF16),)),
    ],
)
def test_unusual_values_have_no_problem(fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
    assert jt.diagnose(fn, *args).problems == ()


def test_float8_is_lower_precision_too() -> None:
    problem, *_ = jt.diagnose(
        lambda x: x.astype(jnp.float8_e4m3fn).astype(jnp.float32) * 2, jnp.full(3, 1000.0)
    ).problems
    assert (problem.kind, problem.primitive) == ("overflow", "convert_element_type")


@pytest.mark.full
def test_an_epsilon_that_is_zero_in_float32_too_is_no_problem() -> None:
    optimizer = optax.adam(1e-3)
    train = promoting(jt.train_step(jt.stateless(lambda w, x: jnp.mean((x @ w) ** 2)), optimizer))
    state = jt.TrainState.create(jnp.full((4, 3), 0.1, BF16), optimizer)
    report = jt.diagnose(train, state, jnp.ones((8, 4), BF16))
    assert not [problem for problem in report.problems if "eps" in problem.evidence]


@pytest.mark.full
def test_what_a_step_does_to_nnx_objects_is_looked_at_and_undone() -> None:
    model = nnx.Linear(4, 3, dtype=BF16, param_dtype=BF16, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.sgd(1e-4), wrt=nnx.Param)

    @nnx.jit
    def step(model: nnx.Linear, optimizer: nnx.Optimizer[Any], x: jax.Array) -> jax.Array:
        loss, grads = nnx.value_and_grad(lambda model: jnp.mean(model(x).astype(jnp.float32) ** 2))(model)
        optimizer.update(model, grads)
        return loss

    before = jax.tree.map(jnp.copy, nnx.state((model, optimizer)))
    (problem, *_) = jt.diagnose(promoting(step), model, optimizer, jnp.ones((8, 4), BF16)).problems
    assert (problem.kind, problem.direction) == ("stagnation", "update")
    assert "'0/0/kernel' stay the same" in problem.evidence
    jax.tree.map(np.testing.assert_array_equal, before, nnx.state((model, optimizer)))


@pytest.mark.filterwarnings("ignore:overflow encountered in cast:RuntimeWarning")  # which is the fault
def test_a_fill_value_that_half_precision_makes_infinite_is_named() -> None:
    def added(scores: jax.Array, mask: jax.Array) -> jax.Array:
        scores = scores + (1 - mask).astype(scores.dtype) * -1e9
        return jax.nn.softmax(scores.astype(jnp.float32), -1)

    mask = jnp.tril(jnp.ones((4, 4), F16))
    (problem,) = jt.diagnose(promoting(added), jnp.ones((4, 4), F16), mask).problems
    assert (problem.kind, problem.remedy.value) == ("invalid mask", -32752)
    assert problem.evidence.startswith("the constant 1e9 is infinite in float16, and times 0 it is NaN: 62.50% of mul")

    def filled(scores: jax.Array, mask: jax.Array) -> jax.Array:
        return jax.nn.softmax(jnp.where(mask > 0, scores, -jnp.inf).astype(jnp.float32), -1)

    (problem,) = jt.diagnose(promoting(filled), jnp.ones((4, 4), F16), mask.at[0].set(0)).problems
    assert (problem.kind, problem.remedy.value) == ("invalid mask", -65504)


@pytest.mark.parametrize(
    ("fn", "evidence"),
    [
        (
            lambda x: lax.scan(lambda total, v: (total + v, None), BF16(0), x)[0],
            "adds in 600 iterations changes nothing",
        ),
        (lambda x: jax.ops.segment_sum(x, jnp.zeros(600, int), 1), "adds up is lost"),
    ],
    ids=["loop", "segment"],
)
def test_a_running_sum_that_stagnates_is_found(fn: Callable[[jax.Array], jax.Array], evidence: str) -> None:
    """Of 600 ones, bfloat16 adds 256 and loses the other 344."""
    (problem,) = jt.diagnose(fn, jnp.ones(600, BF16)).problems
    assert (problem.severity, problem.kind) == ("problem", "stagnation")
    assert problem.evidence.startswith(f"{344 / 600:.1%} of what ") and problem.evidence.endswith(evidence)


@pytest.mark.parametrize(
    ("ids", "severity", "evidence"),
    [
        ([257, 601, 1003, 2009], "note", "100.0% of whole numbers up to 2009 are rounded in bfloat16 ("),
        (
            [512, 513, 514, 515],
            "problem",
            "75.0% of whole numbers up to 515 are rounded in bfloat16, 50.0% become their",
        ),
    ],
)
def test_whole_numbers_are_a_problem_where_two_become_one(ids: list[int], severity: str, evidence: str) -> None:
    """Bfloat16 has every second number up to 512, and every fourth up to 1,024."""
    (problem,) = jt.diagnose(lambda ids: ids.astype(BF16) * BF16(2), jnp.array(ids)).problems
    assert (problem.severity, problem.kind) == (severity, "integer precision lost")
    assert problem.evidence.startswith(evidence)


def test_debugging_of_nan_and_infinities_does_not_stop_a_diagnosis() -> None:
    x = jnp.full(4, 300.0, jnp.float16)
    with jax.debug_infs(True), jax.debug_nans(True):
        assert not jt.diagnose(jnp.sqrt, x).problems
        (problem,) = jt.diagnose(lambda x: x * x - x * x, x).problems
    assert problem.kind == "overflow"
