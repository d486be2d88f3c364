"""Arguments of a step that do not fit together are named before anything is trained."""

import dataclasses
from collections.abc import Callable
from typing import Any

import equinox as eqx
import haiku as hk
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import linen, nnx
from flax.training import train_state
from promotion import relaxed

import jmp_train as jt

pytestmark = pytest.mark.quick

PARAMS = {"w": jnp.ones(3)}
BATCH = jnp.full((4, 3), 0.5)
SGD, MOMENTUM, ADAM = optax.sgd(0.1), optax.sgd(0.1, momentum=0.9), relaxed(optax.adam(0.1))


def loss_fn(params: Any, batch: jax.Array) -> jax.Array:
    return ((batch @ params["w"].astype(batch.dtype)).astype(jnp.float32) ** 2).mean()


def scaled(inner: Any = None, **kwargs: Any) -> Any:
    return jt.with_loss_scale(inner or SGD, jt.torch_loss_scale(256.0, **kwargs))


def run(optimizer: Any, state: Any, loss: Any = None) -> Any:
    return jt.train_step(loss or jt.stateless(loss_fn), optimizer)(state, BATCH)


# --- the optimizer's state is the optimizer's -------------------------------------------------


@pytest.mark.parametrize(
    ("made_for", "stepped_with", "message"),
    [
        # The state has two fields, as a chain of two has: it moved 256 times too far.
        (jt.with_master_weights(scaled()), SGD, "state.opt_state has a loss scale, but the step's optimizer has none"),
        (jt.with_master_weights(SGD), SGD, "state.opt_state has master weights, but the step's optimizer has none"),
        (SGD, scaled(), "the step's optimizer has a loss scale, but state.opt_state has no"),
        (scaled(), jt.with_master_weights(scaled()), "optimizer has master weights, but state.opt_st"),
        (ADAM, MOMENTUM, r"it has '0/count', '0/mu/w', '0/nu/w' in addition, and lacks '0/trace/w'; pass the same"),
        (scaled(MOMENTUM), scaled(), r"it has 'inner_state/0/trace/w' in addition, and lacks nothing"),
    ],
)
def test_another_optimizers_state_is_refused(made_for: Any, stepped_with: Any, message: str) -> None:
    state = jt.TrainState.create(PARAMS, made_for)
    with pytest.raises(ValueError, match=message):
        run(stepped_with, state)
    step = jax.jit(jt.train_step(jt.stateless(loss_fn), stepped_with))
    with pytest.raises(ValueError, match=message):
        step(state, BATCH)


def test_a_loss_scale_with_other_settings_stays_the_states() -> None:
    state = jt.TrainState.create(PARAMS, scaled(growth_interval=1))
    after, metrics = run(scaled(growth_interval=2000), state)
    assert float(metrics["loss_scale"]) == 512
    assert float(after.params["w"][0]) == pytest.approx(1 - 0.1 * 2 * 1.5 * 0.5)


def test_an_optimizer_whose_init_looks_at_numbers_trains() -> None:
    sgd = optax.with_extra_args_support(MOMENTUM)

    def init(params: Any) -> Any:
        assert float(params["w"].sum()) > 0
        return sgd.init(params)

    optimizer = optax.GradientTransformationExtraArgs(init, sgd.update)
    state, _ = jax.jit(jt.train_step(jt.stateless(loss_fn), optimizer))(jt.TrainState.create(PARAMS, optimizer), BATCH)
    assert float(state.params["w"][0]) == pytest.approx(1 - 0.1 * 2 * 1.5 * 0.5)


# --- the loss function ------------------------------------------------------------------------


def test_a_loss_of_two_arguments_is_told_of_stateless() -> None:
    for make in (lambda loss: jt.train_step(loss, scaled()), lambda loss: jt.amp_mode("torch").transform(loss, SGD)):
        with pytest.raises(TypeError, match=r"loss_fn takes \(params.*stateless\(loss_fn\) adapts a loss_fn\(params,"):
            make(loss_fn)
    with pytest.raises(TypeError, match="loss_fn must be a function, got 3"):
        jt.train_step(3, scaled())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("loss", "came"),
    [
        (lambda p, s, b, r: loss_fn(p, b), r"float32\[\]"),
        (lambda p, s, b, r: (loss_fn(p, b), {"a": 1}), r"\(float32\[\], dict\)"),
        (lambda p, s, b, r: (loss_fn(p, b), None), r"\(float32\[\], NoneType\)"),
    ],
)
def test_what_a_loss_function_returned_is_said(loss: Any, came: str) -> None:
    plain = scaled()
    with_amp, amp_optimizer = jt.amp_mode("torch").transform(loss, SGD)
    for optimizer, fn in ((plain, loss), (amp_optimizer, with_amp)):
        with pytest.raises(TypeError, match=rf"loss_fn returned {came}; it must be a loss_fn\(params, model_state"):
            run(optimizer, jt.TrainState.create(PARAMS, optimizer), fn)


def test_a_forgotten_has_aux_is_no_second_loss() -> None:
    def with_accuracy(params: Any, batch: jax.Array) -> Any:
        return loss_fn(params, batch), 100 * params["w"].sum()

    state = jt.TrainState.create(PARAMS, SGD)
    with pytest.raises(TypeError, match=r"loss_fn returned two scalars\. Pass stateless\(loss_fn"):
        run(SGD, state, jt.stateless(with_accuracy))
    _, metrics = run(SGD, state, jt.stateless(with_accuracy, has_aux=True))
    assert (float(metrics["loss"]), float(metrics["aux"])) == (2.25, 300)
    _, metrics = run(SGD, state, jt.stateless(with_accuracy, has_aux=False))
    assert float(metrics["loss"]) == 302.25
    per_loss = jt.with_loss_scale(SGD, jt.policies.PerLossScale((jt.NoOpLossScale(), jt.NoOpLossScale())))
    _, metrics = run(per_loss, jt.TrainState.create(PARAMS, per_loss), jt.stateless(with_accuracy))
    assert float(metrics["loss"]) == 302.25
    for aux in ({"n": 1}, jnp.ones(2), jnp.array(3), None, ("a", 1.0)):
        wrong = jt.stateless(lambda p, b, aux=aux: (loss_fn(p, b), aux))
        with pytest.raises(
            TypeError, match=r"with values that are not losses; if it returns \(loss, aux\), pass .*has_aux=True"
        ):
            run(SGD, state, wrong)


def test_losses_in_a_dict_are_refused() -> None:
    with pytest.raises(TypeError, match=r"returned a dict of losses, \['a', 'b'\]: return their sum"):
        run(SGD, jt.TrainState.create(PARAMS, SGD), jt.stateless(lambda p, b: {"b": loss_fn(p, b), "a": loss_fn(p, b)}))


# --- the state --------------------------------------------------------------------------------


def test_a_state_of_flax_is_told_what_to_do() -> None:
    state = train_state.TrainState.create(apply_fn=None, params=PARAMS, tx=scaled())
    with pytest.raises(TypeError, match=r"got flax.*TrainState; .*TrainState.create\(state.params, s"):
        run(scaled(), state)
    with pytest.raises(TypeError, match=r"must be a jmp_train.TrainState, got builtins.dict"):
        run(scaled(), PARAMS)


def test_an_nnx_module_and_its_statistics_are_no_parameters() -> None:
    class Model(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            self.linear = nnx.Linear(2, 2, rngs=rngs)
            self.norm = nnx.BatchNorm(2, rngs=rngs)

    model = Model(nnx.Rngs(0))
    with pytest.raises(TypeError, match=r"params is the nnx module Model.*nnx.split\(model, nnx.Par"):
        jt.TrainState.create(model, SGD)
    with pytest.raises(TypeError, match=r"params 'norm/mean' is an nnx\.BatchStat, not a"):
        jt.TrainState.create(nnx.state(model), SGD)
    state = jt.TrainState.create(nnx.state(model, nnx.Param), SGD)
    assert len(jax.tree.leaves(state.params)) == 4


class Normed(linen.Module):
    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return linen.BatchNorm(use_running_average=False)(linen.Dense(2)(x)).sum()


def test_batch_statistics_of_flax_are_no_parameters() -> None:
    variables = Normed().init(jax.random.key(0), BATCH)
    message = (
        "params 'batch_stats' is a collection of flax variables that are "
        'not.*create\\(variables\\[\\"params\\"\\], optimizer, model_state=\\{\\"batch_stats\\": '
        'variables\\[\\"batch_stats\\"\\]\\}\\).*mutable=\\[\\"batch_stats\\"\\]'
    )
    with pytest.raises(TypeError, match=message):
        jt.TrainState.create(variables, SGD)
    with pytest.raises(TypeError, match="params 'critic/batch_stats' is a collection"):
        jt.TrainState.create({"actor": PARAMS, "critic": variables}, SGD)
    with pytest.raises(TypeError, match="params 'cache' is a collection"):
        jt.TrainState.create({"params": PARAMS, "cache": {"index": jnp.ones(())}}, SGD)
    own = {"cache": PARAMS["w"], "params": {}}  # a layer of that name
    assert jt.TrainState.create({"layer": {"cache": own["cache"]}}, SGD).params["layer"]["cache"].shape == (3,)
    state = jt.TrainState.create(variables["params"], SGD, model_state={"batch_stats": variables["batch_stats"]})

    def with_statistics(params: Any, model_state: Any, batch: Any, rng: Any) -> Any:
        loss, new = Normed().apply({"params": params, **model_state}, batch, mutable=["batch_stats"])
        return loss, (new, None)

    after, _ = jax.jit(jt.train_step(with_statistics, SGD))(state, BATCH)
    assert float(jnp.abs(after.model_state["batch_stats"]["BatchNorm_0"]["mean"]).sum()) > 0


@pytest.mark.parametrize(
    ("leaf", "what"),
    [(jnp.arange(3), r"int32\[3\]"), (jnp.ones(2, bool), r"bool\[2\]"), (jax.random.key(0), r"key<fry>\[\]")],
)
def test_parameters_without_a_gradient_are_named(leaf: Any, what: str) -> None:
    with pytest.raises(TypeError, match=f"params 'layer/n' is {what}, which has no gradient"):
        jt.TrainState.create({**PARAMS, "layer": {"n": leaf}}, scaled())


# --- arguments of another type ----------------------------------------------------------------


def stateful(params: Any, model_state: Any, batch: Any, rng: Any) -> Any:
    return loss_fn(params, batch), (model_state, None)


API: Any = jt  # whose arguments may be of any type
RANDOM_LOSS = "a loss that needs random keys is"
WRONG_TYPES: list[tuple[Callable[[], Any], str]] = [
    (lambda: API.TrainState.create(PARAMS, None), r"optimizer must be an optax\.Gradient.*, got None"),
    (lambda: API.TrainState.create(PARAMS, optax.sgd), r"optimizer must be an optax\.Gradient.*, got <func"),
    (lambda: API.stateless(None), "loss_fn must be a function, got None"),
    (lambda: API.stateless(stateful), r"takes \(params: .*be a loss_fn\(params, batch\); pass this one to train_step"),
    (lambda: API.stateless(lambda params: params), r"takes \(params\); it must be a loss_fn\(params, batch\)$"),
    (
        lambda: API.stateless(lambda params, batch, rng: params),
        rf"batch\); {RANDOM_LOSS} a loss_fn\(params, model_state, batch, rng\) -> .*: pass it to train_step without",
    ),
    (
        lambda: API.stateless(lambda params, batch, *, key: params),
        rf"\*, key\); it must be a loss_fn\(params, batch\); {RANDOM_LOSS} .*: pass it to train_step",
    ),
    (lambda: API.scaled_value_and_grad(None), "loss_fn must be a function, got None"),
    (lambda: API.apply_policy(None, "float16"), "fn must be a function or a module, got None"),
    (lambda: API.autocast(None), "fn must be a function or a module, got None"),
    (lambda: API.nnx_value_and_grad(None), "loss_fn must be a function, got None"),
    (lambda: API.TORCH_CUDA.replace(paths=["norm"]), r"paths must be a dict .* to rules, got \['norm'\]"),
    (
        lambda: API.tune(loss_fn, PARAMS, BATCH),
        r"examples must be one list of tuples .*, got dict and ArrayImpl: tune\(fn, \[\(params, batch\), \.\.\.\]\)",
    ),
    (
        lambda: API.tune(jt.train_step(stateful, scaled()), [jt.TrainState.create(PARAMS, scaled()), 1]),
        r"examples\[0\] must be a tuple of arguments, got TrainState: tune\(step, \[\(state, batch\), \.\.\.\]\)",
    ),
    (lambda: API.policies.PerLossScale(3), "loss_scales must be a tuple of loss scales, got 3"),
    (lambda: API.reduce_gradients(PARAMS, "data"), r"axis_names='data' must be a tuple of .*: \('data',\)"),
    (lambda: API.all_finite(PARAMS, "data"), r"axis_names='data' must be a tuple of names: \('data',\)"),
    (lambda: API.distributed.broadcast_state(PARAMS, PARAMS), r"mesh must be a jax\.sharding\.Mesh, got dict"),
]
WRONG_VALUES: list[tuple[Callable[[], Any], str]] = [
    (lambda: API.TrainState.create({}, scaled()), r"params=\{\} has no arrays: there is nothing to train"),
    (lambda: API.spikes("10"), "sigma='10' must be a finite number above 0"),
    (lambda: API.check_progress((), stop_after=2.5), "stop_after=2.5 must be an integer of at least 1"),
    (lambda: API.tune(loss_fn, [(PARAMS, BATCH)], loss_scale="dynamic"), "loss_scale='dynamic' must be a pos"),
    (lambda: API.tune(loss_fn, [(PARAMS, BATCH)], tolerance=-1.0), "^tolerance=-1.0 must be a positive number"),
]


@pytest.mark.parametrize(("call", "message"), WRONG_TYPES)
def test_an_argument_of_another_type_is_named(call: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        call()


@pytest.mark.parametrize(("call", "message"), WRONG_VALUES)
def test_an_argument_of_a_wrong_value_is_named(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


# --- random keys ------------------------------------------------------------------------------


class Dropped(linen.Module):
    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return linen.Dropout(0.5, deterministic=False)(x).mean()


DROPOUT = eqx.nn.Dropout(0.5)
HAIKU = hk.transform(lambda x: hk.dropout(hk.next_rng_key(), 0.5, x).mean())


@pytest.mark.parametrize(
    "loss",
    [
        lambda params, batch, rng: jax.random.normal(rng) * params["w"].sum(),
        lambda params, batch, rng: Dropped().apply({}, batch, rngs={"dropout": rng}),
        lambda params, batch, rng: Dropped().apply({}, batch),
        lambda params, batch, rng: nnx.Dropout(0.5)(batch, rngs=nnx.Rngs(rng)).mean(),
        lambda params, batch, rng: nnx.Dropout(0.5)(batch).mean(),
        lambda params, batch, rng: HAIKU.apply({}, rng, batch),
        lambda params, batch, rng: DROPOUT(batch, key=rng).mean(),
    ],
    ids=["jax", "linen", "linen without rngs", "nnx", "nnx without rngs", "haiku", "equinox"],
)
def test_a_model_that_draws_is_told_where_its_key_comes_from(loss: Any) -> None:
    state = jt.TrainState.create(PARAMS, SGD)
    with pytest.raises(Exception, match=r"(?i)rng|key") as raised:
        run(SGD, state, lambda params, model_state, batch, rng: (loss(params, batch, rng), (model_state, None)))
    notes = "\n".join(raised.value.__notes__)  # jax adds one too
    assert "rng=None: TrainState.create(params, optimizer, rng=jax.random.key(0))" in notes
    assert "stateless" not in notes
    with pytest.raises(type(raised.value)) as raised:
        run(SGD, state, jt.stateless(lambda params, batch: loss(params, batch, None)))
    notes = "\n".join(raised.value.__notes__)
    assert "key to loss_fn(params, model_state, batch, rng)" in notes
    assert "TrainState.create" not in notes  # which would not help


def test_tune_says_of_a_step_that_its_state_has_no_key() -> None:
    def draws(params: Any, state: Any, batch: Any, rng: Any) -> Any:
        return jax.random.normal(rng) * params["w"].sum(), (state, None)

    step = jt.train_step(draws, scaled())
    with pytest.raises(TypeError, match="NoneType") as raised:
        jt.tune(step, [(jt.TrainState.create(PARAMS, scaled()), BATCH)])
    assert any("TrainState.create(params, optimizer, rng=jax.random.key(0))" in note for note in raised.value.__notes__)


def test_a_string_in_the_batch_is_named_without_the_whole_step() -> None:
    step = jax.jit(jt.train_step(jt.stateless(loss_fn), scaled(), policy="mixed_float16"))
    message = (
        r"argument to TrainStep of loss_fn, policy p=full,c=f16,o=full as .* <class 'str'> .* path batch\['name'\]"
    )
    with pytest.raises(TypeError, match=message):
        step(jt.TrainState.create(PARAMS, scaled()), {"x": BATCH, "name": "a"})


def test_branches_of_two_dtypes_are_told_of_autocast() -> None:
    def branches(params: Any, batch: jax.Array) -> jax.Array:
        y = batch @ params["w"]
        return jax.lax.cond(y.sum() > 0, lambda y: y.astype(jnp.float32), lambda y: y, y).sum()

    step = jt.train_step(jt.stateless(branches), scaled(), policy="mixed_float16")
    state = jt.TrainState.create(PARAMS, scaled())
    for trace in (step, lambda state, batch: jt.explain_policy(branches, "mixed_float16", state.params, batch)):
        with pytest.raises(TypeError, match="cond branches must have equal output types") as raised:
            trace(state, BATCH)
        (note,) = [note for note in raised.value.__notes__ if "or one branch of a cond" in note]
        assert 'policy="autocast_float16" runs the function as it is' in note
    step = jt.train_step(jt.stateless(branches), scaled(), policy="autocast_float16")
    assert float(step(state, BATCH)[1]["loss"]) == 6


def test_other_errors_have_no_such_note() -> None:
    with pytest.raises(ValueError, match="Incompatible shapes") as raised:
        run(SGD, jt.TrainState.create(PARAMS, SGD), jt.stateless(lambda params, batch: (batch * jnp.ones(2)).mean()))
    assert not any("rng" in note for note in raised.value.__notes__)


# --- AMP modes --------------------------------------------------------------------------------


def o2(loss: Any) -> Any:
    amp = dataclasses.replace(jt.amp_mode("apex", opt_level="O2"), batch_norms=())
    fn, optimizer = amp.transform(jt.stateless(loss), SGD)
    state = jt.TrainState.create(PARAMS, optimizer, cast_params=amp.cast_params)
    return fn, optimizer, state


def test_a_mode_that_casts_takes_no_policy() -> None:
    fn, optimizer, _ = o2(loss_fn)
    with pytest.raises(ValueError, match=r"policy='p=full,c=f16,o=full': .* by an AMP mode, which"):
        jt.train_step(fn, optimizer, policy="mixed_float16")


def test_an_operation_without_half_precision_is_told_of_the_mode() -> None:
    def spectrum(params: Any, batch: jax.Array) -> jax.Array:
        frequencies = jnp.fft.rfft(batch * params["w"])
        return (jnp.abs(frequencies) ** 2).mean()

    fn, optimizer, state = o2(spectrum)
    with pytest.raises(ValueError, match="RFFT input must be float32") as raised:
        run(optimizer, state, fn)
    assert "AMP mode apex runs the model in float16" in raised.value.__notes__[0]
    assert "x.astype(jnp.float32)" in raised.value.__notes__[0]
