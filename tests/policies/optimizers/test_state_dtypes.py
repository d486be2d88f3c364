"""Moments in few bits: as float32 on average, in any nesting, and untouched by what does not step."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from optax import contrib
from promotion import relaxed
from pytrees import assert_bitwise_equal

import jmp_train as jt
from jmp_train.policies import StateDtypesState
from jmp_train.policies.optimizers import ParamsOptimizer
from jmp_train.policies.optimizers.stored_parameters import StoringOptimizer
from jmp_train.policies.quantizing import BlockQuantized, dequantize, quantize, requantize, round_to

pytestmark = [pytest.mark.quick, pytest.mark.newest]

PARAMS = {"w": jnp.asarray(np.random.default_rng(0).normal(size=(8, 32)), jnp.float32), "b": jnp.zeros(32)}
BOTH = {"mu": "int8", "nu": "uint8"}
MASK = {"w": True, "b": False}
ADAM = optax.adam(0.1)


def adam(rate: float = 1e-2) -> Any:
    return relaxed(optax.adam(rate))


def small(optimizer: Any, dtypes: Any, **options: Any) -> Any:
    """Returns the wrapped optimizer, with `w` large enough and `b` not."""
    return jt.with_state_dtypes(optimizer, dtypes, **{"min_size": 256, "block_size": 64, **options})


def loss_fn(params: Any, batch: Any) -> jax.Array:
    return ((jnp.tanh(batch @ params["w"]) + params["b"] - 1).astype(jnp.float32) ** 2).mean()


def batch_of(seed: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=(4, 8)), jnp.float32)


def second_moments(dtypes: Any, b2: float, before: float, after: float, steps: int, rounding: str) -> np.ndarray:
    """Returns Adam's second moments of 2,048 parameters whose gradients change after a third of the steps."""
    optimizer: Any = optax.adam(1e-3, b2=b2)
    optimizer = jt.with_state_dtypes(optimizer, dtypes, rounding=rounding, min_size=1) if dtypes else optimizer
    params = jnp.zeros(2048)

    def step(state: Any, number: jax.Array) -> Any:
        grads = jnp.full(2048, jnp.where(number < steps // 3, before, after))
        with jax.numpy_dtype_promotion("standard"):
            return optimizer.update(grads, state, params)[1], None

    state, _ = jax.jit(lambda state: jax.lax.scan(step, state, jnp.arange(steps)))(optimizer.init(params))
    return np.asarray(optax.tree.get(jt.policies.decode_opt_state(state), "nu"))


@pytest.mark.full
def test_the_second_moment_follows_where_the_nearest_is_stuck() -> None:
    """The known figures: gradients that fall tenfold after 1,000 steps, beta2 0.999."""

    def found(dtypes: dict[str, str], rounding: str) -> float:
        return float(second_moments(dtypes, 0.999, 1.0, 0.1, 3000, rounding).mean())

    exact = found({}, "nearest")
    assert exact == pytest.approx(0.0941, abs=5e-5)
    assert found({"nu": "bfloat16"}, "nearest") == pytest.approx(0.25, abs=5e-5)
    assert found({"nu": "bfloat16"}, "stochastic") == pytest.approx(0.0941, abs=5e-4)
    assert found({"nu": "uint8"}, "stochastic") == pytest.approx(exact, rel=3e-3)


@pytest.mark.full
@settings(max_examples=5, deadline=None)
@given(decay=st.floats(5e-4, 1e-2), fall=st.floats(2, 100), dtype=st.sampled_from(["bfloat16", "uint8"]))
def test_it_follows_whatever_the_decay(decay: float, fall: float, dtype: str) -> None:
    b2, steps = 1 - decay, int(3 / decay)
    exact = second_moments({}, b2, 1.0, 1 / fall, steps, "nearest").mean()
    values = second_moments({"nu": dtype}, b2, 1.0, 1 / fall, steps, "stochastic")
    # Each step adds noise of at most half a part in 128, of which the decay forgets all but 1 / (2 decay) steps.
    deviation = max(1.0, 3 * fall**-2) / 128 / 2 / np.sqrt(2 * decay) / np.sqrt(values.size)
    assert abs(values.mean() - exact) < 5 * deviation * values.max() + 1e-5 * exact


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_a_step_is_decode_update_encode(rounding: str) -> None:
    """By hand, for Adam: its update of the decoded state, and what is left of that."""
    optimizer = small(adam(), {"mu": "int8", "nu": "bfloat16"}, rounding=rounding)
    state, moments = optimizer.init(PARAMS), adam().init(PARAMS)

    @jax.jit
    def run(batch: Any, state: Any) -> Any:
        grads = jax.grad(loss_fn)(PARAMS, batch)
        decoded = jt.policies.decode_opt_state(state)
        return optimizer.update(grads, state, PARAMS), adam().update(grads, decoded, PARAMS)

    @jax.jit
    def values(kept: Any, exact: jax.Array) -> tuple[jax.Array, jax.Array]:
        return dequantize(kept), dequantize(quantize(exact, "int8", block_size=64))

    for seed in range(3):
        (updates, new), (wanted, moments) = run(batch_of(seed), state)
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-9), updates, wanted)
        kept, exact = new.inner_state[0], moments[0]
        assert_bitwise_equal(kept.mu["b"], exact.mu["b"])
        if rounding == "nearest":
            found, rounded = values(kept.mu["w"], exact.mu["w"])
            np.testing.assert_allclose(found, rounded, rtol=1e-5)
            np.testing.assert_allclose(
                kept.nu["w"].astype(np.float32), round_to(exact.nu["w"], "bfloat16").astype(np.float32), rtol=2**-7
            )
        else:
            assert np.abs(kept.nu["w"].astype(np.float32) / exact.nu["w"] - 1).max() <= 2**-7
            assert not (new.key == state.key).all()
        state = new


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("dtype", ["int8", "uint8", "float8_e4m3fn", "float8_e5m2", "bfloat16", "float16"])
def test_a_nan_in_momentum_stays_and_moves_no_parameter(dtype: str, rounding: str) -> None:
    """As `sgd` and then `zero_nans` have it in float32: the parameter of a NaN stands still from then on."""
    momentum = jt.with_state_dtypes(optax.sgd(0.1, momentum=0.9), {"trace": dtype}, rounding=rounding)
    optimizer: Any = relaxed(optax.chain(momentum, optax.zero_nans()))
    params = {"w": jnp.ones(4096)}
    update = jax.jit(optimizer.update)
    state = optimizer.init(params)
    grads = {"w": jnp.linspace(0.5, 1, 4096)}
    updates, state = update({"w": grads["w"].at[100].set(-np.nan)}, state, params)
    for _ in range(2):
        assert float(updates["w"][100]) == 0
        assert float(updates["w"][4000]) < 0
        assert bool(jnp.isnan(optax.tree.get(jt.policies.decode_opt_state(state), "trace")["w"][100]))
        updates, state = update(grads, state, params)


def blocks_of(count: int) -> Any:
    """Returns the parameters of a model of equal blocks and an embedding."""
    random = np.random.default_rng(count)
    shapes = {"up": (16, 64), "down": (64, 16)}
    blocks = [
        {name: jnp.asarray(random.normal(size=x), jnp.float32) for name, x in shapes.items()} for _ in range(count)
    ]
    return {"blocks": blocks, "embedding": jnp.asarray(random.normal(size=(24, 64)), jnp.float32)}


def encoding(count: int, dtypes: Any) -> Any:
    """Returns what lowers a step of a model of so many blocks, whose state is donated, and the step's arguments."""
    wrapped = small(adam(), dtypes)
    params = blocks_of(count)
    grads = jax.tree.map(jnp.sin, params)
    return jax.jit(wrapped.update, donate_argnums=1), (grads, wrapped.init(params), params)


@pytest.mark.full
def test_a_program_does_not_grow_with_the_blocks_of_a_model() -> None:
    """Loops are as many; lines of a program grow by what Adam and decoding take, and slices."""
    texts = []
    for count in (3, 9):
        step, arguments = encoding(count, BOTH)
        texts.append(step.lower(*arguments).as_text())
    assert texts[0].count("stablehlo.while") == texts[1].count("stablehlo.while") > 0
    plain = [jax.jit(adam().update).lower(x, adam().init(x), x).as_text() for x in map(blocks_of, (3, 9))]
    more, more_of_adam = (text[1].count("\n") - text[0].count("\n") for text in (texts, plain))
    assert more < 3 * more_of_adam + 12 * 40  # 12 arrays with two moments each; unrolled it was 200 lines for each


@pytest.mark.full
def test_arrays_in_a_loop_have_the_bits_that_they_have_alone() -> None:
    """Also of the keys of stochastic rounding, one for each; and their old arrays are taken for the new ones."""
    step, (grads, state, params) = encoding(4, {"mu": "int8", "nu": "uint8"})
    key = jax.random.split(state.key)[1]
    memory = step.lower(grads, state, params).compile().memory_analysis()
    kept = sum(x.nbytes for x in jax.tree.leaves(state))
    _, after = step(grads, state, params)
    assert memory is None or memory.alias_size_in_bytes >= kept
    _, exact = jax.jit(adam().update)(grads, adam().init(params), params)

    @partial(jax.jit, static_argnums=1)
    def alone(x: jax.Array, dtype: str, number: int) -> BlockQuantized:
        old = quantize(jnp.zeros_like(x), dtype, block_size=64)
        return requantize(x, old, jax.random.fold_in(key, number))

    leaves = jax.tree.leaves(after.inner_state, is_leaf=lambda x: isinstance(x, BlockQuantized))
    for number, (found, x) in enumerate(zip(leaves, jax.tree.leaves(exact), strict=True)):
        if isinstance(found, BlockQuantized):
            assert_bitwise_equal(found, alone(x, found.codes.dtype.name, number))


@pytest.mark.full
def test_eight_devices_share_what_is_encoded_in_a_loop() -> None:
    """Equal arrays of equal shardings: the same bits, in their places, and no array is gathered."""
    mesh = Mesh(np.array(jax.devices()), ("data",))
    step, (grads, state, params) = encoding(4, BOTH)
    _, wanted = step(grads, jax.tree.map(jnp.copy, state), params)

    def place(path: Any, x: jax.Array) -> jax.Array:
        name = jax.tree_util.keystr(path)
        columns = x.ndim == 2 and ("up" in name or "embedding" in name)
        spec = P(None, "data") if columns else P("data") if x.ndim else P()
        return jax.device_put(x, NamedSharding(mesh, spec))

    apart = jax.tree_util.tree_map_with_path(place, (grads, state, params))
    where = jax.tree.map(lambda x: x.sharding, apart[1])
    compiled = jax.jit(step.__wrapped__, out_shardings=(None, where)).lower(*apart).compile()
    _, found = compiled(*apart)
    assert_bitwise_equal(found, wanted)
    text = compiled.as_text() or ""
    assert "all-gather" not in text
    assert "all-to-all" not in text


def others_frozen(optimizer: Any) -> Any:
    return optax.chain(optimizer, optax.masked(optax.set_to_zero(), jax.tree.map(lambda x: not x, MASK)))


def scaled(optimizer: Any, **options: Any) -> Any:
    return jt.with_loss_scale(optimizer, jt.torch_loss_scale(2.0**8, growth_interval=3), **options)


def multi_steps(optimizer: Any) -> Any:
    return relaxed(optax.MultiSteps(optimizer, 2).gradient_transformation())


CLIPPED = relaxed(optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2)))
SCHEDULED = relaxed(optax.inject_hyperparams(optax.adam)(learning_rate=1e-2))
SCHEDULE_FREE = relaxed(contrib.schedule_free_adamw(1e-2))
LABELS = {"w": "adam", "b": "sgd"}
NESTINGS = {
    "inside": scaled(small(adam(), BOTH)),
    "outside": small(scaled(adam()), BOTH),
    "with a skip rule": scaled(small(adam(), BOTH), skip=jt.spikes()),
    "chain": scaled(small(CLIPPED, BOTH)),
    "in a chain": scaled(optax.chain(optax.clip(1.0), small(adam(), BOTH))),
    "masked": scaled(others_frozen(optax.masked(small(adam(), BOTH), MASK))),
    "of masked": scaled(small(others_frozen(optax.masked(adam(), MASK)), BOTH)),
    "partition": scaled(small(optax.partition({"adam": adam(), "sgd": optax.sgd(0.1)}, LABELS), BOTH)),
    "in a partition": scaled(optax.partition({"adam": small(adam(), BOTH), "sgd": optax.sgd(0.1)}, LABELS)),
    "MultiSteps": scaled(small(multi_steps(adam()), {**BOTH, "acc_grads": "bfloat16"})),
    "MultiSteps with mu_dtype": scaled(small(multi_steps(optax.adam(1e-2, mu_dtype="bfloat16")), {"nu": "uint8"})),
    "in MultiSteps": scaled(optax.MultiSteps(small(adam(), BOTH), 2)),
    "hyperparameters": scaled(small(SCHEDULED, BOTH)),
    "schedule-free": scaled(small(SCHEDULE_FREE, {"nu|/z": "bfloat16"})),
    "master weights outside": jt.with_master_weights(small(scaled(adam()), BOTH)),
    "master weights inside": small(jt.with_master_weights(scaled(adam())), BOTH),
    "Kahan inside": small(jt.with_kahan(scaled(adam())), BOTH),
    "stochastic rounding": jt.with_stochastic_rounding(scaled(small(adam(), BOTH)), jax.random.key(1)),
}


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("nesting", NESTINGS)
def test_in_any_nesting_it_steps_without_retracing_and_a_skip_is_bitwise(nesting: str) -> None:
    optimizer = NESTINGS[nesting]
    stores = isinstance(optimizer, StoringOptimizer)
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), PARAMS) if stores else PARAMS
    count = traces = 0
    metrics: Any = {}

    def counted(params: Any, batch: Any) -> jax.Array:
        nonlocal count
        count += 1
        return loss_fn(params, batch.astype(params["w"].dtype))

    train_step = jt.train_step(jt.stateless(counted), optimizer)
    with jax.numpy_dtype_promotion("standard"):
        step = jax.jit(train_step, donate_argnums=0)
        state = jt.TrainState.create(jax.tree.map(jnp.copy, params), optimizer)
        structure = jax.tree.map(lambda x: (x.shape, x.dtype), state)
        first = float(loss_fn(PARAMS, batch_of(0)))
        for _ in range(12):
            state, metrics = step(state, batch_of(0))
            assert bool(metrics["grads_finite"])
            traces = traces or count
        assert count == traces
        assert jax.tree.map(lambda x: (x.shape, x.dtype), state) == structure
        assert float(metrics["loss"]) < 0.97 * first
        before = jax.tree.map(jnp.copy, state)
        state, metrics = step(state, batch_of(0).at[0, 0].set(jnp.nan))
    assert not bool(metrics["grads_finite"])
    assert_bitwise_equal(state.params, before.params)
    found, wanted = (_within(x.opt_state) for x in (state, before))
    assert len(found) == len(wanted) > 1
    assert_bitwise_equal(found, wanted)


def _within(opt_state: Any) -> list[Any]:
    """Returns all quantized arrays, and the key of their rounding."""
    nodes = jax.tree.leaves(opt_state, is_leaf=lambda x: isinstance(x, StateDtypesState))
    states = [node for node in nodes if isinstance(node, StateDtypesState)]
    leaves = jax.tree.leaves(states, is_leaf=lambda x: isinstance(x, BlockQuantized))
    return [states[0].key, *(x for x in leaves if isinstance(x, BlockQuantized) or x.dtype == jnp.bfloat16)]


def test_the_kind_of_the_optimizer_stays() -> None:
    inner = scaled(optax.sgd(0.1, momentum=0.9))
    assert isinstance(small(inner, {"trace": "bfloat16"}), ParamsOptimizer)
    storing = small(jt.with_master_weights(inner), {"trace": "bfloat16"})
    assert isinstance(storing, StoringOptimizer)
    with pytest.raises(TypeError, match="optimizer must not store the parameters"):
        scaled(storing)


def test_fields_are_those_of_the_states_and_not_of_parameters() -> None:
    params = {"mu": jnp.ones(4096), "layer": {"nu": jnp.ones(4096), "w": jnp.ones((64, 64))}}
    by_name: Any = jt.with_state_dtypes(optax.adam(0.1), {"mu": "bfloat16"})
    state = by_name.init(params).inner_state[0]
    assert {x.dtype.name for x in jax.tree.leaves(state.mu)} == {"bfloat16"}
    assert {x.dtype.name for x in jax.tree.leaves(state.nu)} == {"float32"}
    by_path: Any = jt.with_state_dtypes(optax.adam(0.1), {"nu/layer/w$": "float16", "nu": "float8_e4m3fn"})
    nu = by_path.init(params).inner_state[0].nu
    assert nu["layer"]["w"].dtype == jnp.float16
    assert nu["layer"]["nu"].codes.dtype == jnp.float8_e4m3fn


def test_optaxs_own_functions_find_what_is_kept() -> None:
    optimizer = small(optax.adam(0.1), {"nu": "uint8"})
    state: Any = optimizer.init(PARAMS)
    assert isinstance(optax.tree.get(state, "nu")["w"], BlockQuantized)
    assert optax.tree.get(jt.policies.decode_opt_state(state), "nu")["w"].dtype == jnp.float32
    assert int(optax.tree.get(state, "count")) == 0
    marked: Any = optax.tree_utils.tree_map_params(optimizer, lambda x: "of a parameter", state)
    name = "of a parameter"
    assert marked.inner_state[0].nu == {"w": BlockQuantized(name, name), "b": name}
    free: Any = small(contrib.schedule_free_sgd(0.1), {"z": "int8"})
    averaged = contrib.schedule_free_eval_params(jt.policies.decode_opt_state(free.init(PARAMS)), PARAMS)
    np.testing.assert_allclose(averaged["w"], PARAMS["w"], atol=0.3)


@pytest.mark.full
def test_accumulating_steps_leave_the_moments() -> None:
    optimizer = small(relaxed(optax.MultiSteps(adam(), 3).gradient_transformation()), BOTH)
    state, update = optimizer.init(PARAMS), jax.jit(optimizer.update)
    grads = jax.grad(loss_fn)(PARAMS, batch_of(0))
    for number in range(5):
        before = state
        _, state = update(grads, state, PARAMS)
        if number in (3, 4):
            assert_bitwise_equal(state.inner_state.inner_opt_state[0], before.inner_state.inner_opt_state[0])


@pytest.mark.full
def test_a_key_makes_a_run() -> None:
    grads = jax.grad(loss_fn)(PARAMS, batch_of(0))

    def after(key: jax.Array) -> Any:
        optimizer = small(adam(), {"nu": "bfloat16"}, key=key)
        return jax.jit(optimizer.update)(grads, optimizer.init(PARAMS), PARAMS)[1].inner_state[0].nu["w"]

    assert_bitwise_equal(after(jax.random.key(1)), after(jax.random.key(1)))
    assert (after(jax.random.key(1)) != after(jax.random.key(2))).any()
    assert_bitwise_equal(after(jax.random.PRNGKey(1)), after(jax.random.key(1)))


WRONG: dict[str, tuple[Any, Any, dict[str, Any], str]] = {  # optimizer, dtypes, options
    "dtype": (ADAM, {"nu": "int4"}, {}, r"dtypes\['nu'\]='int4' must be one of bfloat16, float16, int8, uint8"),
    "dtype of Python": (ADAM, {"nu": "float"}, {}, r"dtypes\['nu'\]='float' must be one of"),
    "array": (ADAM, {"nu": np.ones(1, np.int8)}, {}, r"dtypes\['nu'\]=array\(\[1\], dtype=int8\) must be one of"),
    "no dtype": (ADAM, {"nu": None}, {}, r"dtypes\['nu'\]=None must be one of"),
    "expression": (ADAM, {"nu(": "int8"}, {}, r"rule 'nu\(' is not a regular expression"),
    "rules": (ADAM, "nu", {}, "rules must be a dict"),
    "optimizer": (3, {"nu": "int8"}, {}, r"must be an optax\.GradientTransformation, got 3"),
    "key": (ADAM, {"nu": "int8"}, {"key": 0}, "key must be a jax random key"),
    "rounding": (ADAM, {"nu": "int8"}, {"rounding": "up"}, "rounding='up' must be one of 'stochastic', 'nearest'"),
    "key and rounding": (
        ADAM,
        {"nu": "int8"},
        {"rounding": "nearest", "key": jax.random.key(0)},
        "key is only for rounding='stochastic'",
    ),
    "block_size": (ADAM, {"nu": "int8"}, {"block_size": 0}, "block_size=0 must be a whole number above 0"),
    "min_size": (ADAM, {"nu": "int8"}, {"min_size": 2.5}, r"min_size=2.5 must be a whole number"),
}
WRONG_FOR_A_STATE: dict[str, tuple[Any, dict[str, str], str]] = {
    "new": (
        ADAM,
        {"new": "bfloat16"},
        r"'new' matches no floating array.* fields are mu, nu, and the paths are:\n  0/mu/b",
    ),
    "count": (
        ADAM,
        {"count": "bfloat16"},
        "'count' matches no floating array of the optimizer's state; the fields are",
    ),
    "mu/v": (ADAM, {"mu/v": "bfloat16"}, "'mu/v' matches no floating array of the optimizer's state; the fields are"),
    "half": (
        optax.adam(0.1, mu_dtype=jnp.bfloat16),
        {"mu": "int8"},
        r"'0/mu/w' .* is already bfloat16 and cannot become int8",
    ),
    "twice": (
        jt.with_state_dtypes(ADAM, {"nu": "uint8"}),
        {"nu": "bfloat16"},
        "nu/w' of the optimizer's state is already in blocks",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_calls_are_named(name: str) -> None:
    optimizer, dtypes, options, message = WRONG[name]
    error = TypeError if name in ("rules", "optimizer", "key") else ValueError
    with pytest.raises(error, match=message):
        jt.with_state_dtypes(optimizer, dtypes, **options)


@pytest.mark.parametrize("name", WRONG_FOR_A_STATE)
def test_what_does_not_fit_a_state_is_named(name: str) -> None:
    optimizer, dtypes, message = WRONG_FOR_A_STATE[name]
    with pytest.raises(ValueError, match=message):
        jt.with_state_dtypes(optimizer, dtypes).init({"w": jnp.ones((64, 64)), "b": jnp.ones(3)})
