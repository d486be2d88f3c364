"""Against traces of the real `torch.amp.GradScaler`: torch 2.13.0+cpu, device="cpu", with gradients
of which one was made inf where `bad` has a 1; its `state_dict()` before the first step and after
each. To take them again, run `trace` below in an environment that has torch.

    def trace(bad, **arguments):
        weight = torch.nn.Parameter(torch.ones(2))
        optimizer = torch.optim.SGD([weight], lr=0.1)
        scaler = torch.amp.GradScaler(device="cpu", **arguments)
        states = [scaler.state_dict()]
        for step in bad:
            optimizer.zero_grad()
            factors = torch.tensor([1.0, float("inf") if step == "1" else 1.0])
            scaler.scale((weight * factors).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
            states.append(scaler.state_dict())
        return states
"""

import re
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from pytrees import assert_bitwise_equal

import jmp_train as jt

pytestmark = pytest.mark.quick

DEFAULT = {
    "scale": 65536.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2000,
    "_growth_tracker": 0,
}  # fmt: skip
# trace("0001011000000010", init_scale=1024.0, growth_interval=3), the scales and the trackers
HALVED_BAD = "0001011000000010"
HALVED = [
    (1024.0, 0), (1024.0, 1), (1024.0, 2), (2048.0, 0), (1024.0, 0), (1024.0, 1), (512.0, 0),
    (256.0, 0), (256.0, 1), (256.0, 2), (512.0, 0), (512.0, 1), (512.0, 2), (1024.0, 0),
    (1024.0, 1), (512.0, 0), (512.0, 1),
]  # fmt: skip
# trace("0010000100110000", init_scale=1000.0, growth_factor=1.7, backoff_factor=0.3,
#       growth_interval=2)
ROUNDED_BAD = "0010000100110000"
ROUNDED = [
    (1000.0, 0), (1000.0, 1), (1700.0, 0), (510.0, 0), (510.0, 1), (867.0, 0), (867.0, 1),
    (1473.9000244140625, 0), (442.1700134277344, 0), (442.1700134277344, 1),
    (751.6890258789062, 0), (225.5067138671875, 0), (67.65201568603516, 0),
    (67.65201568603516, 1), (115.0084228515625, 0), (115.0084228515625, 1),
    (195.51431274414062, 0),
]  # fmt: skip


def state_dicts(trace: list[tuple[float, int]], *settings: float) -> list[dict[str, Any]]:
    names = ("growth_factor", "backoff_factor", "growth_interval")
    fixed = dict(zip(names, settings, strict=True))
    return [{"scale": scale, **fixed, "_growth_tracker": tracker} for scale, tracker in trace]


@pytest.mark.filterwarnings("ignore:.*not a power of two:UserWarning")
@pytest.mark.parametrize(
    ("bad", "states"),
    [(HALVED_BAD, state_dicts(HALVED, 2.0, 0.5, 3)), (ROUNDED_BAD, state_dicts(ROUNDED, 1.7, 0.3, 2))],
)
def test_from_any_state_ours_follows_torch(bad: str, states: list[dict[str, Any]]) -> None:
    adjust = jax.jit(lambda scale, finite: scale.adjust(finite))
    for start in range(len(states)):
        loss_scale = jt.loss_scale_from_torch(states[start])
        for step in range(start, len(bad)):
            assert jt.loss_scale_to_torch(loss_scale) == states[step]
            loss_scale = adjust(loss_scale, bad[step] == "0")
        assert jt.loss_scale_to_torch(loss_scale) == states[-1]


def test_it_is_the_preset_with_a_counter() -> None:
    assert_bitwise_equal(jt.loss_scale_from_torch(DEFAULT), jt.torch_loss_scale())
    imported = jt.loss_scale_from_torch({**DEFAULT, "growth_factor": 2, "_growth_tracker": 7})
    assert int(imported.counter) == 7  # pyright: ignore[reportAttributeAccessIssue]
    assert jax.tree.structure(imported) == jax.tree.structure(jt.torch_loss_scale())


def test_a_scaler_that_is_not_enabled_has_an_empty_state() -> None:
    assert jt.loss_scale_from_torch({}) == jt.NoOpLossScale()
    assert jt.loss_scale_to_torch(jt.NoOpLossScale()) == {}


powers = st.integers(-126, 126).map(lambda n: 2.0**n)


@settings(max_examples=50, deadline=None)
@given(
    scale=powers | st.floats(2.0**-126, 2.0**126, width=32),
    growth=st.floats(1, 2.0**126, exclude_min=True),
    backoff=st.floats(2.0**-126, 1, exclude_max=True),
    interval=st.integers(1, 2**40),
    data=st.data(),
)
def test_there_and_back_in_pythons_own_numbers(
    scale: float, growth: float, backoff: float, interval: int, data: st.DataObject
) -> None:
    tracker = data.draw(st.integers(0, min(interval, 2**31) - 1))
    (state,) = state_dicts([(scale, tracker)], growth, backoff, interval)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*not a power of two")
        got = jt.loss_scale_to_torch(jt.loss_scale_from_torch(state))
    assert got == state
    assert [type(value) for value in got.values()] == [float, float, float, int, int]
    assert list(got) == list(DEFAULT)


def test_a_bad_entry_is_named() -> None:
    for key, value, message in (
        ("scale", 0.0, "scale=0.0 must be between"),
        ("scale", 2.0**127, r"scale=1.7.* must be between 2\*\*-126 and 2\*\*126"),
        ("scale", float("inf"), "scale=inf must be a finite number"),
        ("scale", "1", "scale='1' must be a finite number"),
        ("scale", None, "scale=None must be a finite number"),
        ("growth_factor", 1.0, "growth_factor=1.0 must be above 1"),
        ("growth_factor", True, "growth_factor=True must be a finite number"),
        ("backoff_factor", 1.0, "backoff_factor=1.0 must be below 1"),
        ("backoff_factor", -1.0, "backoff_factor=-1.0 must be"),
        ("growth_interval", 0, "growth_interval=0 must be an integer of at least 1"),
        ("growth_interval", 10.0, "growth_interval=10.0 must be an integer"),
        ("_growth_tracker", 2000, "_growth_tracker=2000 must be an integer from 0 to 1999"),
        ("_growth_tracker", -1, "_growth_tracker=-1 must be"),
        ("_growth_tracker", 1.0, "_growth_tracker=1.0 must be"),
        ("_growth_tracker", False, "_growth_tracker=False must be"),
        ("extra", 1, r"missing \[\], unknown \['extra'\]"),
    ):
        with pytest.raises(ValueError, match=message):
            jt.loss_scale_from_torch({**DEFAULT, key: value})
    for key in DEFAULT:
        state = {name: value for name, value in DEFAULT.items() if name != key}
        with pytest.raises(ValueError, match=rf"missing \['{key}'\], unknown \[\]"):
            jt.loss_scale_from_torch(state)
    with pytest.raises(TypeError, match=r"state_dict must be the dict .* got 5"):
        jt.loss_scale_from_torch(5)  # pyright: ignore[reportArgumentType]


def test_numbers_that_round_warn_as_those_of_the_preset() -> None:
    with pytest.warns(UserWarning, match="scale=1000.0 is not a power of two") as caught:
        jt.loss_scale_from_torch({**DEFAULT, "scale": 1000.0})
    assert caught[0].filename == __file__


@pytest.mark.parametrize(
    ("loss_scale", "fields"),
    [
        (jt.DynamicLossScale(2.0**15), ["min_loss_scale=1.0"]),
        (jt.apex_loss_scale(), ["max_loss_scale=16777216.0"]),
        (jt.megatron_loss_scale(), ["min_loss_scale=1.0", "hysteresis=2"]),
        (jt.deepspeed_loss_scale(), ["counter=-1", "min_loss_scale=1.0", "hysteresis=2", "counter_start=-1"]),
        (jt.DynamicLossScale(2.0, 5, 5, min_loss_scale=0.0), ["counter=5"]),
        (jt.DynamicLossScale(2.0, 0, 2.5, min_loss_scale=0.0), ["period=2.5"]),
        (jt.DynamicLossScale(2.0, 0, float("inf"), min_loss_scale=0.0), ["period=inf"]),
        (jt.DynamicLossScale(8.0, factor=3, min_loss_scale=0.0), ["backoff_factor=None"]),
        (jt.DynamicLossScale(8.0, backoff_factor=1e-50, min_loss_scale=0.0), ["backoff_factor=1e-50"]),
        (jt.DynamicLossScale(jnp.float32(0.0), min_loss_scale=0.0), ["loss_scale=0.0"]),
    ],
)  # fmt: skip
def test_what_torch_cannot_do_is_named(loss_scale: jt.LossScale, fields: list[str]) -> None:
    with pytest.raises(ValueError, match="torch's GradScaler cannot do this") as error:
        jt.loss_scale_to_torch(loss_scale)
    assert re.findall(r"^  (\S+) must", str(error.value), re.MULTILINE) == fields


def test_other_loss_scales_are_refused() -> None:
    with pytest.raises(ValueError, match=r"always adapts its scale, got StaticLossScale"):
        jt.loss_scale_to_torch(jt.StaticLossScale(8.0))
    with pytest.raises(TypeError, match="loss_scale must be a LossScale, got 8"):
        jt.loss_scale_to_torch(8.0)  # pyright: ignore[reportArgumentType]
    stacked = jax.tree.map(lambda x: np.stack([x, x]), jt.torch_loss_scale())
    with pytest.raises(ValueError, match=r"loss_scale must be a scalar, got shape \(2,\)"):
        jt.loss_scale_to_torch(stacked)


def test_jmps_division_by_a_power_of_two_is_a_product() -> None:
    loss_scale = jt.DynamicLossScale(2.0**15, 3, factor=4, min_loss_scale=0.0)
    state = jt.loss_scale_to_torch(loss_scale)
    assert state == {**DEFAULT, "scale": 2.0**15, "growth_factor": 4.0, "backoff_factor": 0.25,
                     "_growth_tracker": 3}  # fmt: skip
    assert type(state["growth_factor"]) is float


# --- into the state of an optimizer -----------------------------------------------------------


def test_a_state_takes_an_imported_scale_and_goes_on_without_a_retrace() -> None:
    tx = optax.chain(jt.with_loss_scale(optax.sgd(0.1), jt.torch_loss_scale()), optax.identity())
    params = {"w": jnp.ones(2)}

    @jax.jit
    def step(params: Any, state: Any) -> Any:
        updates, state = tx.update(jt.get_loss_scale(state).scale(params), state, params)
        return optax.apply_updates(params, updates), state

    params, state = step(params, tx.init(params))
    imported = jt.loss_scale_from_torch({**DEFAULT, "scale": 4.0, "_growth_tracker": 1999})
    for set_loss_scale in (jt.set_loss_scale, jax.jit(jt.set_loss_scale)):
        new = set_loss_scale(state, imported)
        assert_bitwise_equal(jt.get_loss_scale(new), jax.tree.map(jnp.asarray, imported))
        assert_bitwise_equal(new[0]._replace(loss_scale=None), state[0]._replace(loss_scale=None))
        _, new = step(params, new)
        assert float(jt.get_loss_scale(new).loss_scale) == 8.0
    assert step._cache_size() == 1  # pyright: ignore[reportAttributeAccessIssue]
    assert float(jt.get_loss_scale(state).loss_scale) == 2.0**16  # the old state is as it was


def test_a_train_state_takes_it_too_and_keeps_its_devices() -> None:
    tx = jt.with_loss_scale(optax.adam(0.1), jt.torch_loss_scale())
    state = jt.TrainState.create({"w": jnp.ones(2)}, tx, rng=jax.random.key(0))
    mesh = Mesh(np.array(jax.devices()), ("data",))
    everywhere = NamedSharding(mesh, PartitionSpec())
    state = jax.device_put(state, everywhere)
    imported = jax.tree.map(jnp.asarray, jt.torch_loss_scale(2.0))
    new = jt.set_loss_scale(state, imported)
    got = jt.get_loss_scale(new)
    assert [x.sharding for x in jax.tree.leaves(got)] == [everywhere, everywhere]
    assert jax.tree.structure(new) == jax.tree.structure(state)
    jax.jit(lambda x: x, donate_argnums=0)(new)  # the imported scale was copied
    assert float(imported.loss_scale) == 2.0


def scaled(loss_scale: jt.LossScale) -> Any:
    return jt.with_loss_scale(optax.sgd(0.1), loss_scale).init(jnp.ones(2))


@pytest.mark.parametrize(
    ("state", "loss_scale", "message"),
    [
        (optax.sgd(0.1).init(jnp.ones(2)), jt.torch_loss_scale(), "opt_state has no loss scale"),
        ([scaled(jt.torch_loss_scale())] * 2, jt.torch_loss_scale(), "2 loss scales, at '0', '1'"),
        (scaled(jt.torch_loss_scale()), jt.NoOpLossScale(), "a DynamicLossScale, not a NoOpLossScale; make a new "),
        (scaled(jt.torch_loss_scale()), jt.torch_loss_scale(growth_interval=10, backoff_factor=0.25),
         r"period=2000, not 10 \(a preset's growth_interval or window\), backoff_factor=0.5, not 0.25; keep them"),
        (scaled(jt.torch_loss_scale()), jt.policies.nemo_loss_scale(hysteresis=2), "hysteresis=1, not 2"),
        (scaled(jt.StaticLossScale(8.0)), jt.StaticLossScale(4.0), "loss_scale=8.0, not 4.0"),
        (scaled(jt.StaticLossScale(8.0)), jt.StaticLossScale(jnp.float32(4.0)),
         "the number of one is an array, that of the other is not"),
        (jax.tree.map(lambda x: jnp.stack([x, x]), scaled(jt.torch_loss_scale())), jt.torch_loss_scale(),
         r"^loss_scale: loss_scale must have shape \(2,\) as in opt_state, got \(\)"),
    ],
)  # fmt: skip
def test_a_state_refuses_what_does_not_fit(state: Any, loss_scale: jt.LossScale, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        jt.set_loss_scale(state, loss_scale)
    with pytest.raises(TypeError, match="loss_scale must be a LossScale, got 2"):
        jt.set_loss_scale(state, 2.0)  # pyright: ignore[reportArgumentType]
