"""A half-precision parameter and its compensation are a float32 number: the same training as with master weights."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from jax.sharding import Mesh
from promotion import relaxed
from pytrees import assert_bitwise_equal

import jmp_train as jt
from jmp_train.policies import compensated_params, set_compensated_params
from jmp_train.policies.optimizers.kahan import compensated, no_compensation, stored

pytestmark = pytest.mark.quick

WEIGHTS = {
    "w": jnp.asarray(np.random.default_rng(0).normal(size=(16, 8)) * 0.1, jnp.float32),
    "scale": jnp.linspace(0.5, 1.5, 8),
}
HALF = {"w": WEIGHTS["w"].astype(jnp.bfloat16), "scale": WEIGHTS["scale"]}


@jax.jit
def pair_of(x: jax.Array, like: jax.Array) -> Any:
    """Returns parameter, compensation and their sum, for a float32 number."""
    nothing = no_compensation(like, None)
    new, rest = stored(like, compensated(like, nothing), x, nothing, None)
    return new, rest, compensated(new, rest)


def test_every_float32_is_a_bfloat16_and_its_lower_half() -> None:
    """All upper halves: zeros, subnormal numbers, the largest numbers, infinities, NaN; ties and their neighbors."""
    random = np.random.default_rng(0)
    lower = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF, *random.integers(0, 2**16, 2)], np.uint32)
    bits = (np.arange(2**16, dtype=np.uint32)[:, None] << 16 | lower).ravel()
    x = bits.view(np.float32)
    new, rest, total = map(np.asarray, pair_of(jnp.asarray(x), jnp.full(x.shape, 3, jnp.bfloat16)))
    number = ~np.isnan(x)
    np.testing.assert_array_equal(total.view(np.uint32)[number], bits[number])
    assert np.isnan(new[~number].astype(np.float32)).all()
    assert np.isnan(total[~number]).all()
    pairs = new.view(np.uint16).astype(np.uint32) << 16 | rest
    assert len(np.unique(pairs[number])) == len(np.unique(bits[number]))
    tie = bits & 0xFFFF == 0x8000
    np.testing.assert_array_equal(new[number & ~tie], x[number & ~tie].astype(ml_dtypes.bfloat16))
    up = (bits[number & tie] + np.uint32(0x8000)) >> 16
    np.testing.assert_array_equal(new.view(np.uint16)[number & tie], up)


def test_a_float16_and_its_rest_are_a_float32_from_2_to_the_minus_16() -> None:
    random = np.random.default_rng(0)
    numbers = np.arange(2**16, dtype=np.uint16).view(np.float16)
    numbers = numbers[np.isfinite(numbers)].astype(np.float64)
    distance = np.ldexp(2.0**-10, np.maximum(np.frexp(numbers)[1] - 1, -14))
    shares = np.array([0, 0.5, -0.5, 0.4999, -0.25, *random.uniform(-0.5, 0.5, 3)])
    x = (numbers[:, None] + shares * distance[:, None]).astype(np.float32).ravel()
    x = x[np.abs(x) < 65520]  # float16 has an infinity from there
    new, _, total = map(np.asarray, pair_of(jnp.asarray(x), jnp.full(x.shape, 3, jnp.float16)))
    np.testing.assert_array_equal(new, x.astype(np.float16))
    exact = np.abs(x) >= 2.0**-16
    np.testing.assert_array_equal(total[exact], x[exact])
    assert np.abs(total.astype(np.float64) - x).max() <= 2.0**-40


def test_parameters_that_others_set_stay_near_what_they_set() -> None:
    """Zeros of a pruning mask and swapped parameters meet whatever lower half: none becomes NaN or another number."""
    numbers = jnp.asarray([0.0, -0.0, 1.0, -2.0, 3e38, jnp.inf, -jnp.inf], jnp.bfloat16)
    lower = jnp.asarray([0, 1, 0x7FFF, 0x8000, 0xFFFF], jnp.uint16)
    total = np.asarray(compensated(*jnp.broadcast_arrays(numbers[:, None], lower[None])))
    whole = np.broadcast_to(np.asarray(numbers, np.float32)[:, None], total.shape)
    finite = np.isfinite(whole)
    np.testing.assert_allclose(total[finite], whole[finite], rtol=2.0**-8, atol=1e-38)
    assert np.isfinite(total[finite]).all()
    assert (np.abs(total[~finite]) >= np.float32(ml_dtypes.finfo("bfloat16").max)).all()
    assert (np.signbit(total) == np.signbit(whole)).all()


def multi_steps(optimizer: Any) -> Any:
    return relaxed(optax.MultiSteps(optimizer, 2).gradient_transformation())


LABELS = {"w": "adam", "scale": "sgd"}
ADAMW = relaxed(optax.adamw(3e-6, weight_decay=0.1))
MASKED = relaxed(
    optax.chain(optax.masked(optax.add_decayed_weights(0.1), {"w": True, "scale": False}), optax.sgd(3e-6))
)
OPTIMIZERS = {
    "adamw": ADAMW,
    "loss scale": jt.with_loss_scale(ADAMW, jt.torch_loss_scale(8.0)),
    "masked": MASKED,
    "partition": optax.partition({"adam": ADAMW, "sgd": relaxed(optax.sgd(3e-6))}, LABELS),
    "MultiSteps": multi_steps(ADAMW),
    "8-bit moments": jt.with_state_dtypes(ADAMW, {"mu": "int8", "nu": "uint8"}, min_size=1),
    "lion": relaxed(optax.lion(3e-6)),
}


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(("name", "dtype"), [*((name, "bfloat16") for name in OPTIMIZERS), ("adamw", "float16")])
def test_weights_are_bitwise_the_master_weights(name: str, dtype: str) -> None:
    """By updates far below the last bit of the parameters, of which each needs the float32 parameters."""
    results = []
    for wrap in (jt.with_kahan, jt.with_master_weights):
        optimizer: Any = wrap(OPTIMIZERS[name])
        half = {**HALF, "w": (WEIGHTS["w"] + 1).astype(dtype)}

        def step(carry: Any, key: jax.Array, optimizer: Any = optimizer) -> Any:
            grads = {"w": jax.random.normal(key, (16, 8)) + 1, "scale": jnp.ones(8)}
            if name == "loss scale":
                grads["w"] *= jnp.where(jax.random.uniform(key) < 0.1, jnp.inf, 8)
            return optimizer.update(grads, carry[1], carry[0], return_params=True), None

        keys = jax.random.split(jax.random.key(0), 100)
        run = jax.jit(lambda params, state, step=step, keys=keys: jax.lax.scan(step, (params, state), keys)[0])
        results.append(run(half, optimizer.init(half)))
    (params, state), (other_params, other) = results
    weights: Any = compensated_params(params, state)
    assert_bitwise_equal(weights, jt.get_master_weights(other))
    assert_bitwise_equal(state.inner_state, other.inner_state)
    assert (np.asarray(weights["w"]) != np.asarray(params["w"], np.float32)).any()
    # Ties may differ.
    differ = np.asarray(params["w"] != other_params["w"])
    assert not differ.any() or set(np.asarray(weights["w"]).view(np.uint32)[differ] & 0xFFFF) == {0x8000}


def loss_fn(params: Any, batch: jax.Array) -> jax.Array:
    hidden = jnp.tanh(batch.astype(params["w"].dtype) @ params["w"]).astype(jnp.float32) * params["scale"]
    return ((hidden - 0.5) ** 2).mean()


BATCH = jnp.asarray(np.random.default_rng(1).normal(size=(16, 16)), jnp.float32)


def test_a_run_is_saved_sharded_and_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    optimizer = jt.with_kahan(jt.with_loss_scale(ADAMW, jt.torch_loss_scale(2.0**8)))
    step = jt.train_step(jt.stateless(loss_fn), optimizer)
    state = jt.TrainState.create(jax.tree.map(jnp.copy, HALF), optimizer)
    one = jax.jit(step)
    for _ in range(2):
        state, _ = one(state, BATCH)
    with jt.CheckpointStore(tmp_path / "new") as store:
        store.save(2, state)
        store.wait()
        _, restored = store.restore(jt.TrainState.create(jax.tree.map(jnp.copy, HALF), optimizer))
    assert_bitwise_equal(restored, state)
    wanted, _ = one(state, BATCH)

    mesh = Mesh(np.array(jax.devices()[:2]), ("data",))
    shardings = jt.fsdp_shardings(restored, mesh, min_size=8)
    sharded = jt.sharded_step(step, mesh, shardings=shardings)
    found, _ = sharded(jax.device_put(restored, shardings), BATCH)
    assert found.opt_state.compensation["w"].sharding == found.params["w"].sharding
    assert not found.params["w"].sharding.is_fully_replicated
    weights = [compensated_params(x.params, x.opt_state)["w"] for x in (found, wanted)]
    np.testing.assert_allclose(weights[0], weights[1], atol=3e-6)  # an update; bfloat16 parameters are 4e-4 off


def test_a_state_of_another_form_is_named_and_goes_on(tmp_path: Path) -> None:
    """A checkpoint from before the exact form holds a bfloat16 compensation: it restores as such, and converts."""
    old = jt.with_kahan(ADAMW, compensation_dtype="bfloat16")
    new = jt.with_kahan(ADAMW)
    state: Any = jt.TrainState.create(jax.tree.map(jnp.copy, HALF), old)
    state, _ = jax.jit(jt.train_step(jt.stateless(loss_fn), old))(state, BATCH)
    empty = jt.TrainState.create(jax.tree.map(jnp.copy, HALF), new)
    with jt.CheckpointStore(tmp_path) as store:
        store.save(1, state)
        store.wait()
        with pytest.raises(ValueError, match=r"compensation.*: the checkpoint has bfloat16.*, the state has uint16"):
            store.restore(empty)
    with pytest.raises(ValueError, match="'compensation/w' is bfloat16"):
        jt.adopt_opt_state(empty.opt_state, state.opt_state)
    weights = compensated_params(state.params, state.opt_state)
    adopted = jt.adopt_opt_state(new.init(state.params), state.opt_state.inner_state)
    params, opt_state = set_compensated_params(state.params, adopted, weights)
    assert_bitwise_equal(compensated_params(params, opt_state), weights)
    assert_bitwise_equal(opt_state.inner_state, state.opt_state.inner_state)


def test_float32_parameters_become_pairs_and_pairs_parameters() -> None:
    masters = jt.with_master_weights(ADAMW)
    params, state = set_compensated_params(HALF, jt.with_kahan(ADAMW).init(HALF), WEIGHTS)
    assert_bitwise_equal(compensated_params(params, state), WEIGHTS)
    assert_bitwise_equal(params["w"], HALF["w"])
    there = jt.policies.set_master_weights(masters.init(HALF), compensated_params(params, state))
    back = set_compensated_params(params, jt.with_kahan(ADAMW).init(HALF), jt.get_master_weights(there))
    assert_bitwise_equal(back, (params, state))
    with pytest.raises(ValueError, match="has no compensation"):
        set_compensated_params(HALF, there, WEIGHTS)


@pytest.mark.parametrize(("options", "lost"), [({}, 0.0), ({"compensation_dtype": "bfloat16"}, 1.0)])
def test_lost_updates_are_those_that_the_pair_loses(options: Any, lost: float) -> None:
    optimizer = jt.with_kahan(relaxed(optax.sgd(2.0**-19)), **options)
    step = jax.jit(
        jt.train_step(jt.stateless(lambda p, _: p["w"].astype(jnp.float32).sum()), optimizer, watch=["lost_updates"])
    )
    # A compensation of 1.5 * 2**-9, whose last bit is 2**-16.
    ones: Any = {"w": jnp.ones(8, jnp.bfloat16)}
    params, opt_state = set_compensated_params(ones, optimizer.init(ones), {"w": jnp.full(8, 1 + 1.5 * 2.0**-9)})
    state = dataclasses.replace(jt.TrainState.create(params, optimizer), opt_state=opt_state)
    _, metrics = step(state, jnp.zeros(1))
    assert metrics["watch"]["lost_updates"] == {"w": lost}
