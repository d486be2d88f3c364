"""What an AMP mode does to a loss function, an optimizer, parameters and a model."""

import dataclasses
import logging
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from promotion import relaxed

import jmp_train as jt

pytestmark = pytest.mark.quick

X = np.random.default_rng(0).normal(size=(16, 4)).astype(np.float32)


def make_params() -> dict[str, Any]:
    return {"dense": {"w": jnp.full((4, 2), 0.25)}, "bn": {"scale": jnp.ones(4)}}


def loss_fn(params: Any, model_state: Any, batch: Any, rng: Any) -> Any:
    del rng
    x = batch["x"] * params["bn"]["scale"].astype(batch["x"].dtype)
    y = x @ params["dense"]["w"]
    loss = (y.astype(jnp.float32) ** 2).mean()
    return loss, (model_state, {"y": y, "loss": loss})


BATCH = {"x": jnp.asarray(X), "label": jnp.arange(16)}


def train(amp: jt.policies.Amp, steps: int = 3, batch: Any = BATCH) -> tuple[jt.TrainState, Any]:
    fn, optimizer = amp.transform(loss_fn, relaxed(optax.adam(0.1)))
    step = jax.jit(jt.train_step(fn, optimizer))
    state = jt.TrainState.create(make_params(), optimizer, cast_params=amp.cast_params)
    metrics = None
    for _ in range(steps):
        state, metrics = step(state, batch)
    return state, metrics


def apex(level: str, **options: Any) -> jt.policies.Amp:
    amp = jt.amp_mode("apex", opt_level=level, **options)
    return dataclasses.replace(amp, batch_norms=("bn",))


INF = {**BATCH, "x": BATCH["x"].at[0, 0].set(jnp.inf)}


def test_keep_batchnorm_fp32() -> None:
    for amp, norm in ((apex("O2"), "float32"), (apex("O2", keep_batchnorm_fp32=False), "float16")):
        params = amp.cast_params(make_params())
        assert (params["bn"]["scale"].dtype.name, params["dense"]["w"].dtype.name) == (norm, "float16")


def test_norms_that_are_not_known_are_asked_for() -> None:
    amp = jt.amp_mode("apex", opt_level="O2")
    with pytest.raises(ValueError, match=r"keep_batchnorm_fp32=True needs .* amp.for_model\(model, \*inp"):
        amp.cast_params(make_params())
    none = dataclasses.replace(amp, batch_norms=())
    assert none.cast_params(make_params())["bn"]["scale"].dtype == jnp.float16


def test_paths_of_norms_are_whole_and_from_the_root() -> None:
    scale = {"scale": jnp.ones(2)}
    params = {"bn": scale, "bn2": scale, "x": {"bn": scale}}
    cast = apex("O2").cast_params(params)
    dtypes = [node["scale"].dtype.name for node in (cast["bn"], cast["bn2"], cast["x"]["bn"])]
    assert dtypes == ["float32", "float16", "float16"]
    whole = apex("O2").cast_params({"params": params})
    assert whole["params"]["bn"]["scale"].dtype == jnp.float32


def test_norms_that_are_not_there_are_named() -> None:
    amp = dataclasses.replace(apex("O2"), batch_norms=("bn", "encoder/norm"))
    with pytest.raises(ValueError, match=r"batch_norms: 'encoder/norm' match .*\n  bn/scale\n  dense/w"):
        amp.cast_params(make_params())
    two_models = {"g": make_params(), "d": make_params()}
    with pytest.raises(ValueError, match="batch_norms: 'bn' match no floating parameter"):
        apex("O2").cast_params(two_models)
    both = dataclasses.replace(amp, batch_norms=("g/bn", "d/bn")).cast_params(two_models)
    assert both["d"]["bn"]["scale"].dtype == jnp.float32


def test_outputs_are_cast_inside_a_loss_where_asked_for() -> None:
    batch = {"x": jnp.full((4, 4), 64.0), "y": jnp.full((4, 2), 1000.0)}

    def far_off(amp: jt.policies.Amp) -> float:
        def fn(params: Any, model_state: Any, batch: Any, rng: Any) -> Any:
            y = amp.cast_outputs(batch["x"] @ params["dense"]["w"])
            return ((y - batch["y"].astype(y.dtype)) ** 2).mean(), (model_state, None)

        mixed, _ = amp.transform(fn, optax.sgd(0.1))
        return float(mixed(amp.cast_params(make_params()), None, batch, None)[0])

    assert far_off(jt.amp_mode("naive")) == far_off(apex("O3")) == (1000 - 64.0) ** 2
    assert far_off(apex("O3", cast_model_outputs="float16")) == np.inf


def test_master_weights() -> None:
    with_master_weights, _ = train(apex("O3", master_weights=True))
    assert jt.get_master_weights(with_master_weights.opt_state)["dense"]["w"].dtype == jnp.float32
    without, _ = train(apex("O2", master_weights=False))
    assert without.params["dense"]["w"].dtype == jnp.float16
    with pytest.raises(ValueError, match="no master weights"):
        jt.get_master_weights(without.opt_state)


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize(
    ("amp", "outputs"),
    [
        (apex("O0"), "float32"),
        (apex("O1"), "float16"),
        (apex("O1", cast_model_outputs="float32"), "float32"),
        (apex("O1", patch_torch_functions=False), "float32"),
        (apex("O2"), "float32"),
        (apex("O2", cast_model_outputs="float16"), "float16"),
        (apex("O3", cast_model_outputs=jnp.bfloat16), "bfloat16"),
        (apex("O2", cast_model_type="float32"), "float32"),
        (apex("O2", cast_model_type=False), "float32"),
        (jt.amp_mode("torch"), "float16"),
        (jt.amp_mode("naive"), "float32"),
    ],
)
def test_outputs(amp: jt.policies.Amp, outputs: str) -> None:
    _, metrics = train(amp, 1)
    assert metrics["aux"]["y"].dtype.name == outputs
    params = amp.cast_params(make_params())

    def predict(params: Any, model_state: Any, batch: Any) -> Any:
        assert model_state == ()
        return loss_fn(params, None, batch, None)[1][1]["y"], batch["label"]

    y, label = jax.jit(amp.forward(predict))(params, (), BATCH)
    assert y.dtype.name == outputs
    assert label.dtype == jnp.int32


def test_static_and_dynamic_scales() -> None:
    for amp, scale in (
        (apex("O2", loss_scale=128.0), 128.0),
        (apex("O2", loss_scale="dynamic"), 2.0**13),
        (apex("O2", max_loss_scale=2.0**8, min_loss_scale=2.0**7), 2.0**7),
        (apex("O2", cast_model_type="bfloat16"), 1.0),
    ):
        state, metrics = train(amp, 3, INF)
        assert (float(metrics["loss_scale"]), int(metrics["skipped_steps"])) == (scale, 3)
        np.testing.assert_array_equal(state.params["dense"]["w"].astype(np.float32), 0.25)


def test_a_scale_for_each_loss() -> None:
    amp = apex("O2", num_losses=2)

    def two(params: Any, model_state: Any, batch: Any, rng: Any) -> Any:
        loss, extra = loss_fn(params, model_state, batch, rng)
        return (loss, 2 * loss), extra

    fn, optimizer = amp.transform(two, optax.sgd(0.1))
    state = jt.TrainState.create(make_params(), optimizer, cast_params=amp.cast_params)
    _, metrics = jax.jit(jt.train_step(fn, optimizer))(state, BATCH)
    assert metrics["loss_scale"].shape == (2,)
    np.testing.assert_allclose(metrics["loss"], 3 * metrics["aux"]["loss"], rtol=1e-6)


def test_zero_gradients_are_counted_where_asked_for() -> None:
    dead = {**BATCH, "x": BATCH["x"].at[:, 1].set(0)}  # two weights of the product get no gradient
    _, metrics = train(jt.amp_mode("naive", log_num_zeros_in_grad=True, initial_scale=2.0**8), 1, dead)
    # And one scale of the norm: x is zero there.
    assert int(metrics["num_zeros_in_grad"]) == 3
    _, metrics = train(jt.amp_mode("naive"), 1, dead)
    assert "num_zeros_in_grad" not in metrics


def test_skips_keep_the_count_of_zeros() -> None:
    optimizer = jt.with_loss_scale(jt.policies.count_zero_gradients(optax.sgd(0.1)), jt.NoOpLossScale())
    params = jnp.ones(3)
    state: Any
    _, state = optimizer.update(jnp.array([0.0, 0.0, 1.0]), optimizer.init(params), params)
    _, state = optimizer.update(jnp.array([0.0, jnp.inf, 1.0]), state, params)
    assert int(state.inner_state.zeros) == 2


@pytest.mark.parametrize("mode", ["torch", "apex"])
def test_disabled_hands_back_what_came(mode: str) -> None:
    amp = jt.amp_mode(mode, enabled=False)
    optimizer, params = optax.sgd(0.1), make_params()
    assert amp.transform(loss_fn, optimizer) == (loss_fn, optimizer)
    assert amp.cast_params(params) is params
    assert amp.forward(loss_fn) is loss_fn
    assert amp.cast_model_state(params) is params
    assert amp.for_model("anything") == (amp, "anything")


@pytest.mark.parametrize("mode", ["torch", "apex"])
def test_half_parameters_are_refused_by_name(mode: str) -> None:
    params = make_params()
    params["dense"]["w"] = params["dense"]["w"].astype(jnp.bfloat16)
    amp = jt.amp_mode(mode)
    fn, _ = amp.transform(loss_fn, optax.sgd(0.1))
    calls = (lambda: amp.cast_params(params), lambda: fn(params, None, BATCH, None))
    for call in (*calls, lambda: apex("O2").cast_params(params)):
        with pytest.raises(ValueError, match=r"params must be in .*mode .*\n  'dense/w' is bfloat16, not float32$"):
            call()


def test_naive_takes_a_model_that_was_created_in_half() -> None:
    amp = jt.amp_mode("naive", initial_scale=2.0**8)
    fn, optimizer = amp.transform(loss_fn, optax.sgd(0.1))
    half = jax.tree.map(lambda x: x.astype(jnp.float16), make_params())
    state = jt.TrainState.create(amp.cast_params(half), optimizer)
    state, metrics = jax.jit(jt.train_step(fn, optimizer))(state, BATCH)
    assert bool(metrics["grads_finite"])
    assert jt.get_master_weights(state.opt_state)["bn"]["scale"].dtype == jnp.float32
    assert state.params["bn"]["scale"].dtype == jnp.float16


def test_parameters_that_are_not_stored_as_the_mode_says_are_named() -> None:
    fn, optimizer = apex("O2").transform(loss_fn, optax.sgd(0.1))
    state = jt.TrainState.create(make_params(), optimizer)
    with pytest.raises(ValueError, match=r"call amp.cast_params:\n  'dense/w' is float32, not float16"):
        jt.train_step(fn, optimizer)(state, BATCH)


def test_statistics_are_stored_as_the_mode_says_and_come_back_so() -> None:
    stats = {"mean": jnp.float32(1 + 2.0**-20), "count": jnp.int32(1)}

    def with_stats(params: Any, stats: Any, batch: Any, rng: Any) -> Any:
        loss, (_, aux) = loss_fn(params, stats, batch, rng)
        return loss, ({**stats, "mean": 2 * stats["mean"]}, aux)

    for amp, dtype in ((apex("O3"), "float16"), (apex("O2"), "float32"), (jt.amp_mode("torch"), "float32")):
        stored = amp.cast_model_state(stats)
        assert stored["mean"].dtype.name == dtype
        fn, _ = amp.transform(with_stats, optax.sgd(0.1))
        _, (new, _) = fn(amp.cast_params(make_params()), stored, BATCH, None)
        assert new["mean"].dtype.name == dtype
        assert float(new["mean"]) == 2 * float(stored["mean"])


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize(
    ("amp", "lines"),
    [
        (apex("O2", verbosity=1), 3),
        (apex("O2", verbosity=0), 0),
        (jt.amp_mode("naive", verbose=True), 3),
        (jt.amp_mode("naive"), 0),
        (jt.amp_mode("torch"), 0),
    ],
)
def test_settings_and_skips_are_logged_where_asked_for(
    amp: jt.policies.Amp, lines: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "jmp_train.amp")
    fn, optimizer = amp.transform(loss_fn, optax.sgd(0.1))
    step = jax.jit(jt.train_step(fn, optimizer))
    state = jt.TrainState.create(make_params(), optimizer, cast_params=amp.cast_params)
    for batch in (INF, {**BATCH, "x": BATCH["x"].at[0, 0].set(jnp.nan)}, {**BATCH, "x": BATCH["x"] * 0}):
        state, metrics = step(state, batch)
        amp.log(metrics)
    assert len(caplog.messages) == lines
    if lines:
        assert caplog.messages[0].startswith(f"AMP mode {amp}; ")
        assert "step skipped, 2 so far" in caplog.messages[2]


def test_a_step_of_ones_own() -> None:
    amp = apex("O2", max_loss_scale=2.0**8)
    fn, optimizer = amp.transform(loss_fn, optax.sgd(0.1))
    params = amp.cast_params(make_params())
    opt_state = optimizer.init(params)

    @jax.jit
    def step(params: Any, opt_state: Any) -> Any:
        scale = jt.get_loss_scale(opt_state)
        grads = jax.grad(lambda p: scale.scale(fn(p, None, BATCH, None)[0]))(params)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        with jax.numpy_dtype_promotion("standard"):
            return optax.apply_updates(params, updates), opt_state, grads

    new_params, opt_state, grads = step(params, opt_state)
    assert grads["dense"]["w"].dtype == jnp.float16
    assert grads["bn"]["scale"].dtype == jnp.float32
    master_weights = jt.get_master_weights(opt_state)
    np.testing.assert_array_equal(new_params["dense"]["w"], master_weights["dense"]["w"].astype(jnp.float16))
    assert float(jnp.abs(master_weights["dense"]["w"] - 0.25).max()) > 0


def test_for_model_asks_only_where_norms_are_kept() -> None:
    model = nn.BatchNorm(use_running_average=False)
    amp = jt.amp_mode("apex", opt_level="O2")
    known, same = amp.for_model(model, jnp.ones((2, 3)))
    assert known.batch_norms == ("",)
    assert same is model
    params = {"scale": jnp.ones(3), "bias": jnp.zeros(3)}
    assert known.cast_params(params)["scale"].dtype == jnp.float32
    with pytest.raises(TypeError, match=r"model is of type function.*batch_norms=\(\.\.\.\)"):
        amp.for_model(lambda x: x)
    assert jt.amp_mode("torch").for_model(model) == (jt.amp_mode("torch"), model)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("mode", ["O2", "O3", "naive"])
def test_products_that_a_mode_leaves_in_float32_are_told_once(mode: str) -> None:
    amp = jt.amp_mode("naive") if mode == "naive" else jt.amp_mode("apex", opt_level=mode)
    amp = dataclasses.replace(amp, batch_norms=())
    model = nn.Dense(2, dtype=jnp.float32)
    params = model.init(jax.random.key(0), X)

    def dense_loss(params: Any, batch: Any) -> Any:
        y: Any = model.apply(params, batch["x"])
        return (y**2).mean()

    fn, optimizer = amp.transform(jt.stateless(dense_loss), optax.sgd(0.1))
    step = jax.jit(jt.train_step(fn, optimizer))
    state = jt.TrainState.create(params, optimizer, cast_params=amp.cast_params)
    with pytest.warns(jt.policies.Float32ProductsWarning, match=f"100% .* AMP mode {amp.mode}"):
        state, _ = step(state, {"x": X})
    step(state, {"x": X[:8]})  # a retrace says nothing: warnings are errors here
