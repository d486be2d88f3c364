"""Random programs under autocast: their values and gradients beside float64, their dtypes, nesting."""

import functools
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st
from jax import lax
from promotion import promoting

from jmp_train.policies.autocasting.rules import APEX_O1, TORCH_CPU, TORCH_CUDA, AutocastRules
from jmp_train.policies.autocasting.transform import autocast, autocast_as
from jmp_train.policies.programs import walk

pytestmark = pytest.mark.full

Array = Any
State = tuple[Array, ...]

SLOTS, SIDE = 3, 4
# Two programs have the same roundings if their loops are made as jax makes them by default, and not as conftest asks.
OPTIONS = {"xla_cpu_use_fusion_emitters": True} if jax.__version_info__ < (0, 11) else {}
PLANTED = 4.0  # a power of two, so that it costs no rounding
HALVES = ("float16", "bfloat16")
RULES = {"TORCH_CUDA": TORCH_CUDA, "TORCH_CPU": TORCH_CPU, "APEX_O1": APEX_O1}

CONSTANT = np.random.default_rng(0).uniform(-1, 1, (SIDE, SIDE))
KERNEL = np.random.default_rng(1).uniform(-1, 1, (3, SIDE, SIDE))
MASK = np.array(CONSTANT > 0)
ORDER = np.array([2, 0, 3, 1], np.int32)
GROUPS = np.array([0, 1, 1, 3], np.int32)


class Step(NamedTuple):
    """Replaces slot `a` by `op` of slots `a` and `b`, or all slots by what control flow makes."""

    op: str
    a: int
    b: int
    iterations: int
    bodies: tuple[tuple["Step", ...], ...]


Program = tuple[Step, ...]


@functools.cache
def in_dtype(constant: str, dtype: Any) -> Array:
    """Returns the same array each time, as a parameter that a program closes over is."""
    with jax.ensure_compile_time_eval():
        return jnp.asarray({"matrix": CONSTANT, "kernel": KERNEL}[constant], dtype)


def spread(x: Array) -> Array:
    return jnp.broadcast_to(x, (SIDE, SIDE))


def convolved(a: Array, _: Array) -> Array:
    dims = ("NWC", "WIO", "NWC")
    kernel = in_dtype("kernel", a.dtype)
    return lax.conv_general_dilated(a[None], kernel, (1,), "SAME", dimension_numbers=dims)[0] / 12


def attended(a: Array, b: Array) -> Array:
    query, key = a[None, :, None, :], b[None, :, None, :]
    return jax.nn.dot_product_attention(query, key, key)[0, :, 0] / 5


def through_float16(a: Array, b: Array) -> Array:
    if a.dtype == jnp.float64:
        return jnp.tanh(a @ b / 8)
    return jnp.tanh(a.astype(jnp.float16) @ b.astype(jnp.float16) / 8).astype(a.dtype)


def shifted(a: Array, b: Array) -> Array:
    row = jnp.sum(jnp.arange(2))
    return lax.dynamic_update_slice(a, lax.dynamic_slice(b, (row, 0), (2, SIDE)), (1, 0))


# All map [-1, 1] into itself and lengthen no difference, in the largest element's sense.
SMOOTH: dict[str, Callable[[Array, Array], Array]] = {
    "matmul": lambda a, b: a @ b / 8,
    "einsum": lambda a, b: jnp.einsum("ij,kj->ik", a, b) / 8,
    "dense": lambda a, b: a @ in_dtype("matrix", a.dtype) / 8 + b[0] / 2,
    "preferred_type": lambda a, b: jnp.matmul(a, b, preferred_element_type=a.dtype) / 8,
    "convolution": convolved,
    "attention": attended,
    "add": lambda a, b: (a + b) / 2,
    "sub": lambda a, b: (a - b) / 2,
    "mul": lambda a, b: a * b / 2,
    "square": lambda a, _: a * a / 2,
    "cube": lambda a, _: a**3 / 3,
    "div": lambda a, b: a / (3 + b),
    "reciprocal": lambda a, _: jnp.reciprocal(2 + a),
    "tanh": lambda a, _: jnp.tanh(a),
    "gelu": lambda a, _: jax.nn.gelu(a) * 0.8,
    "silu": lambda a, _: jax.nn.silu(a) * 0.8,
    "exp": lambda a, _: jnp.exp(a - 1),
    "log1p": lambda a, _: jnp.log1p(a * a),
    "sqrt": lambda a, _: jnp.sqrt(0.75 * a * a + 0.25),
    "rsqrt": lambda a, _: lax.rsqrt(2 + a),
    "softmax": lambda a, _: jax.nn.softmax(a),
    "masked": lambda a, _: jax.nn.softmax(jnp.where(MASK, a, -1e9)),
    "log_softmax": lambda a, _: jax.nn.log_softmax(a) / 4,
    "logsumexp": lambda a, _: spread(jax.nn.logsumexp(a, -1, keepdims=True)) / 3,
    "sum": lambda a, _: spread(jnp.sum(a, 0)) / 4,
    "mean": lambda a, b: spread(jnp.mean(a)) / 2 + b / 2,
    "var": lambda a, _: spread(jnp.var(a, 1, keepdims=True)) / 4,
    "norm": lambda a, _: spread(jnp.linalg.norm(2 + a, axis=1, keepdims=True)) / 8,
    "standardize": lambda a, _: jax.nn.standardize(a, epsilon=1.0) / 6,
    "cumsum": lambda a, _: jnp.cumsum(a, 1) / 4,
    "half": through_float16,
    "gather": lambda a, _: a[ORDER].T,
    "concatenate": lambda a, b: jnp.concatenate([a[2:], b[:2]]),
    "shift": shifted,
    "scatter_add": lambda a, b: a.at[GROUPS].add(b) / 3,
    "segment_sum": lambda a, _: jax.ops.segment_sum(a, GROUPS, SIDE) / 2,
    "where": lambda a, b: jnp.where(MASK, a, b),
    "integers": lambda a, _: a * (jnp.cumsum(jnp.arange(SIDE)) % 5).astype(a.dtype) / 4,
    "one_hot": lambda a, _: jax.nn.one_hot(ORDER, SIDE, dtype=a.dtype) @ a,
    "stop_gradient": lambda a, b: (a + lax.stop_gradient(b)) / 2,
}  # fmt: skip

KINKED: dict[str, Callable[[Array, Array], Array]] = {
    "maximum": jnp.maximum,
    "selected": lambda a, b: jnp.where(a > b, a, b),
    "abs": lambda a, _: jnp.abs(a),
    "relu": lambda a, _: jax.nn.relu(a),
    "clip": lambda a, _: jnp.clip(a, -0.5, 0.5),
    "sort": lambda a, _: jnp.sort(a, 1),
    "top_k": lambda a, _: lax.top_k(a, SIDE)[0],
    "max": lambda a, _: spread(jnp.max(a, 1, keepdims=True)),
}

Body = Callable[..., State]


def scanned(step: Step, body: Body, state: State) -> State:
    def iteration(carry: State, x: Array) -> tuple[State, Array]:
        carry = body(carry[0], (carry[1] + x) / 2, *carry[2:])
        return carry, carry[step.a]

    xs = jnp.stack([in_dtype("matrix", state[0].dtype)] * step.iterations)
    carry, ys = lax.scan(iteration, state, xs, reverse=step.a == 0)
    return (*carry[:-1], ys[step.b % step.iterations])


def looped(step: Step, body: Body, state: State) -> State:
    def proceed(carry: tuple[Array, State]) -> Array:
        return (carry[0] < step.iterations) & (jnp.sum(carry[1][step.a]) > -100)

    return lax.while_loop(proceed, lambda c: (c[0] + 1, body(*c[1])), (0, state))[1]


def switched(step: Step, state: State) -> State:
    branches = [functools.partial(run, body) for body in step.bodies]
    certain = jnp.int32(step.iterations) * (jnp.sum(state[step.a]) > -100).astype(jnp.int32)
    if len(branches) == 2:
        return lax.cond(certain > 1, *branches, *state)
    return lax.switch(certain - 1, branches, *state)


def mapped(_: Step, body: Body, state: State) -> State:
    both = jax.vmap(body)(*(jnp.stack([x, x[::-1]]) for x in state))
    return tuple((x[0] + x[1]) / 2 for x in both)


def with_jvp(factor: float, _: Step, body: Body, state: State) -> State:
    function = jax.custom_jvp(body)

    @function.defjvp
    def tangents(primals: State, tangents: State) -> tuple[State, State]:
        outputs, results = jax.jvp(body, primals, tangents)
        return outputs, tuple(factor * t for t in results)

    return function(*state)


def with_vjp(factor: float, _: Step, body: Body, state: State) -> State:
    function = jax.custom_vjp(body)

    def backward(state: State, cotangents: State) -> State:
        return tuple(factor * g for g in jax.vjp(body, *state)[1](cotangents))

    function.defvjp(lambda *state: (body(*state), state), backward)
    with jax.named_scope("exempt"):
        return function(*state)


def exempt(wrap: Callable[[Body], Body]) -> Callable[[Step, Body, State], State]:
    def call(_: Step, body: Body, state: State) -> State:
        with jax.named_scope("exempt"):
            return wrap(body)(*state)

    return call


def region_within(_: Step, body: Body, state: State) -> State:
    with jax.named_scope("exempt"):
        results = autocast(body, rules=TORCH_CPU)(*state)
    return tuple(new.astype(old.dtype) for new, old in zip(results, state, strict=True))


CHECKPOINTS = jax.checkpoint_policies
NESTED: dict[str, Callable[[Step, Body, State], State]] = {
    "jit": lambda _, body, state: jax.jit(body)(*state),
    "scan": scanned,
    "fori": lambda step, body, state: lax.fori_loop(0, step.iterations, lambda _, c: body(*c), state),
    "vmap": mapped,
    "checkpoint": lambda _, body, state: jax.checkpoint(body)(*state),
    "dots_saved": lambda _, body, state: jax.checkpoint(body, policy=CHECKPOINTS.dots_saveable)(*state),
    "custom_jvp": functools.partial(with_jvp, 1.0),
    "custom_vjp": functools.partial(with_vjp, 1.0),
    "planted_vjp": functools.partial(with_vjp, PLANTED),
    "planted_jvp": functools.partial(with_jvp, PLANTED),
    "disabled": exempt(lambda body: autocast(body, enabled=False)),
    "as_float32": exempt(autocast_as("float32")),
    "as_lower": exempt(autocast_as("lower")),
    "as_keep": exempt(autocast_as("keep")),
    "region": region_within,
}
REPEATED = ("scan", "fori", "while")


def run(program: Program, *state: Array) -> State:
    """Runs a program, in the dtype of its arguments."""
    for step in program:
        if step.op == "switch":
            state = switched(step, state)
        elif step.bodies:
            control = {**NESTED, "while": looped}[step.op]
            state = control(step, functools.partial(run, step.bodies[0]), state)
        else:
            result = {**SMOOTH, **KINKED}[step.op](state[step.a], state[step.b])
            state = (*state[: step.a], result, *state[step.a + 1 :])
    return state


def executed(program: Program) -> int:
    """Returns an upper bound of how many operations run."""
    return sum(
        (step.iterations if step.op in REPEATED else 1) * (1 + max((executed(body) for body in step.bodies), default=0))
        for step in program
    )


def planted(program: Program) -> float:
    """Returns a bound of the factor by which planted gradients exceed the true ones."""
    product = 1.0
    for step in program:
        inner = max((planted(body) for body in step.bodies), default=1.0)
        inner *= PLANTED if step.op.startswith("planted") else 1.0
        product *= inner ** (step.iterations if step.op in REPEATED else 1)
    return product


def programs(simple: list[str], control: list[str], depth: int = 3) -> st.SearchStrategy[Program]:
    slot, iterations = st.integers(0, SLOTS - 1), st.integers(1, 3)
    step = st.builds(Step, st.sampled_from(simple), slot, slot, iterations, st.just(()))
    if depth > 1:
        body = programs(simple, control, depth - 1)

        def controlled(op: str) -> st.SearchStrategy[Step]:
            count = st.integers(2, 3) if op == "switch" else st.just(1)
            bodies = count.flatmap(lambda n: st.tuples(*[body] * n))
            return st.builds(Step, st.just(op), slot, slot, iterations, bodies)

        step |= st.sampled_from(control).flatmap(controlled)
    return st.lists(step, min_size=1, max_size=3).map(tuple)


def nested(*ops: str) -> Program:
    """Returns a program of one operation within others."""
    *outer, inner = ops
    program = (Step(inner, 0, 1, 2, ()),)
    for op in reversed(outer):
        program = (Step(op, 0, 1, 2, (program,)),)
    return program


# Programs that once failed.
BATCHED_CONDITION = nested("vmap", "while", "tanh")
RULE_WITH_INTEGERS = nested("custom_jvp", "one_hot")
LOWERED_RULE_WITH_A_CONSTANT = nested("as_lower", "custom_vjp", "dense")
NAN_IN_HALF = nested("as_lower", "var")
RULE_WITH_A_SHARED_CONSTANT = nested("dense") + nested("custom_jvp", "dense")

every_program = programs([*SMOOTH, *KINKED], [*NESTED, "switch", "while"])
smooth_program = programs([*SMOOTH], [*NESTED, "switch"])
halves = st.sampled_from(HALVES)
tables = st.sampled_from([*RULES])
seeds = st.integers(0, 9)


def checks(examples: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    slow = [HealthCheck.filter_too_much, HealthCheck.too_slow]
    return settings(max_examples=examples, deadline=None, derandomize=True, suppress_health_check=slow)


def inputs(seed: int, dtypes: tuple[str, ...] = ("float32",) * SLOTS) -> State:
    arrays = np.random.default_rng(seed).uniform(-1, 1, (SLOTS, SIDE, SIDE))
    return tuple(jnp.asarray(x, dtype) for x, dtype in zip(arrays, dtypes, strict=True))


def in_float64(fn: Callable[..., State], state: State) -> list[np.ndarray]:
    arrays = [np.asarray(x, np.float64) for x in state]
    with jax.enable_x64(True):
        return [np.asarray(x) for x in jax.jit(promoting(fn))(*map(jnp.asarray, arrays))]


def assert_near(actual: State, expected: list[np.ndarray], tolerance: float) -> None:
    for ours, wanted in zip(actual, expected, strict=True):
        np.testing.assert_allclose(np.asarray(ours, np.float64), wanted, rtol=0, atol=tolerance)


def mean(fn: Callable[..., State]) -> Callable[..., Array]:
    def loss(*state: Array) -> Array:
        dtype = jnp.promote_types(state[0].dtype, jnp.float32)
        return sum((jnp.mean(x.astype(dtype)) for x in fn(*state)), jnp.zeros((), dtype)) / SLOTS

    return loss


def float_inputs(equation: Any) -> set[str]:
    dtypes = [getattr(atom.aval, "dtype", None) for atom in equation.invars]
    return {d.name for d in dtypes if d is not None and jnp.issubdtype(d, jnp.floating)}


PRODUCTS = ("dot_general", "conv_general_dilated")
SUMS = ("reduce_sum", "cumsum", "scatter-add")
TRANSCENDENTAL = ("exp", "exp2", "log", "log1p", "rsqrt", "integer_pow", "square", "pow")


def text_of(fn: Callable[..., Any], state: State) -> str:
    return re.sub(r"0x[0-9a-f]+", "", str(jax.make_jaxpr(fn)(*state)))


def tolerance(program: Program, half: str) -> float:
    """Returns four roundings an operation, of which none makes the errors before it larger."""
    return 4 * float(jnp.finfo(half).eps) * (1 + executed(program))


def gradient_tolerance(program: Program, half: str) -> float:
    """Returns the same for the sum of a gradient's errors: each operation adds those before it."""
    return tolerance(program, half) * (1 + executed(program)) * planted(program)


def computed(fn: Callable[..., Any], state: State) -> list[tuple[str, list[str], list[str]]]:
    """Returns the operations but for conversions, of which a second region may need fewer.

    Nor are the `jit`s counted in which operations stand: jax 0.12 has another number of them.
    """
    return [
        (
            equation.primitive.name,
            sorted(str(getattr(atom.aval, "dtype", None)) for atom in equation.invars),
            [str(getattr(atom.aval, "dtype", None)) for atom in equation.outvars],
        )
        for equation in (place.equation for place in walk(jax.make_jaxpr(fn)(*state)))
        if equation.primitive.name not in ("convert_element_type", "jit")
    ]


@checks(20)
@given(every_program, halves, tables, seeds, st.tuples(*[st.booleans()] * SLOTS))
@example(BATCHED_CONDITION, "float16", "TORCH_CUDA", 0, (False,) * SLOTS)
def test_results_are_near_float64(
    program: Program, half: str, rules: str, seed: int, in_half: tuple[bool, ...]
) -> None:
    assume(executed(program) <= 40)
    state = inputs(seed, tuple(half if low else "float32" for low in in_half))
    fn = autocast(functools.partial(run, program), half, rules=RULES[rules])
    results = jax.jit(fn)(*state)
    expected = in_float64(functools.partial(run, program), state)
    assert_near(results, expected, tolerance(program, half))
    assert {x.dtype.name for x in results} <= {half, "float32"}


@checks(6)
@given(every_program, halves, tables, seeds)
def test_compiled_and_op_by_op_agree(program: Program, half: str, rules: str, seed: int) -> None:
    assume(executed(program) <= 20)
    state = inputs(seed)
    fn = autocast(functools.partial(run, program), half, rules=RULES[rules])
    eager, compiled = fn(*state), jax.jit(fn)(*state)
    assert [x.dtype for x in eager] == [x.dtype for x in compiled]
    expected = [np.asarray(x, np.float64) for x in eager]
    assert_near(compiled, expected, tolerance(program, half))


@checks(12)
@given(smooth_program, halves, tables, seeds)
@example(LOWERED_RULE_WITH_A_CONSTANT, "float16", "TORCH_CUDA", 0)
@example(RULE_WITH_INTEGERS, "bfloat16", "TORCH_CUDA", 0)
@example(RULE_WITH_A_SHARED_CONSTANT, "float16", "TORCH_CUDA", 0)
def test_gradients_are_near_float64(program: Program, half: str, rules: str, seed: int) -> None:
    assume(executed(program) <= 12 and planted(program) <= PLANTED)
    plain, state = functools.partial(run, program), inputs(seed)
    fn = autocast(plain, half, rules=RULES[rules])
    grads = jax.jit(jax.grad(jax.jit(mean(fn)), (0, 1, 2)))(*state)
    expected = in_float64(jax.grad(mean(plain), (0, 1, 2)), state)
    assert {grad.dtype.name for grad in grads} == {"float32"}
    error = sum(np.abs(np.asarray(g) - e).sum() for g, e in zip(grads, expected, strict=True))
    assert error <= gradient_tolerance(program, half)


@checks(12)
@given(smooth_program, seeds)
@example(RULE_WITH_INTEGERS, 0)
def test_where_all_is_float32_only_its_roundings_are_left(program: Program, seed: int) -> None:
    assume(executed(program) <= 60 and not re.search("half|region|as_lower", str(program)))
    plain, state = functools.partial(run, program), inputs(seed)
    fn = autocast(plain, rules=AutocastRules())
    results, grads = jax.jit(lambda *x: (fn(*x), jax.grad(mean(fn), (0, 1, 2))(*x)))(*state)
    assert_near(results, in_float64(plain, state), tolerance(program, "float32"))
    expected = in_float64(jax.grad(mean(plain), (0, 1, 2)), state)
    assert_near(grads, expected, gradient_tolerance(program, "float32"))


@checks(8)
@given(smooth_program, halves, tables, seeds, st.sampled_from(["planted_vjp", "planted_jvp"]))
def test_a_planted_gradient_survives_exactly(program: Program, half: str, rules: str, seed: int, plant: str) -> None:
    assume(executed(program) <= 20)

    def gradient(op: str) -> State:
        planted = (Step(op, 0, 0, 1, ((),)), *program)
        fn = autocast(functools.partial(run, planted), half, rules=RULES[rules])
        run_gradient = jax.jit(jax.grad(mean(fn), (0, 1, 2)), compiler_options=OPTIONS)
        return run_gradient(*inputs(seed))

    true = gradient(plant.replace("planted", "custom"))
    for ours, expected in zip(gradient(plant), true, strict=True):
        np.testing.assert_array_equal(ours, PLANTED * expected)


@checks(150)
@given(every_program, halves, tables)
@example(BATCHED_CONDITION, "float16", "TORCH_CUDA")
@example(RULE_WITH_INTEGERS, "float16", "TORCH_CUDA")
def test_operations_run_in_the_dtypes_of_the_rules(program: Program, half: str, rules: str) -> None:
    fn = autocast(functools.partial(run, program), half, rules=RULES[rules])
    jaxpr = jax.make_jaxpr(fn)(*inputs(0))
    in_float32 = SUMS if rules == "TORCH_CPU" else SUMS + TRANSCENDENTAL
    for place in walk(jaxpr):
        equation = place.equation
        name, dtypes = equation.primitive.name, float_inputs(equation)
        if "exempt" in place.path or not dtypes:
            continue
        if name in PRODUCTS:
            assert dtypes == {half}, equation
        if name in in_float32:
            assert dtypes == {"float32"}, equation


@checks(60)
@given(every_program, st.sampled_from(["float32", *HALVES]))
def test_disabled_is_the_plain_program(program: Program, dtype: str) -> None:
    plain, state = promoting(functools.partial(run, program)), inputs(0, (dtype,) * SLOTS)
    assert text_of(autocast(plain, enabled=False), state) == text_of(plain, state)


@checks(60)
@given(every_program, halves, tables)
@example(NAN_IN_HALF, "bfloat16", "TORCH_CUDA")
def test_twice_is_once(program: Program, half: str, rules: str) -> None:
    state, table = inputs(0), RULES[rules]
    once = autocast(functools.partial(run, program), half, rules=table)
    again = autocast(lambda *state: once(*state), half, rules=table)
    other = autocast(lambda *state: once(*state), rules=APEX_O1)
    assert text_of(autocast(once, half, rules=table), state) == text_of(once, state)
    for twice in (again, other):
        assert computed(twice, state) == computed(once, state)
