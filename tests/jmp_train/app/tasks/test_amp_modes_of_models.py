"""Every AMP mode, with models of three libraries, on one device and on eight: the dtypes of the mode's table."""

from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import Mesh
from promotion import relaxed
from pytrees import assert_bitwise_equal

import jmp_train as jt

pytestmark = pytest.mark.full

MESH = Mesh(np.array(jax.devices()), ("data",))
X = np.random.default_rng(0).normal(size=(32, 4)).astype(np.float32)
BATCH = {"x": jnp.asarray(X), "y": jnp.asarray(np.sign(X[:, :1] * X[:, 1:2]))}

F32, F16, BF16 = "float32", "float16", "bfloat16"


class Dtypes(NamedTuple):
    """A row of the table; `None` for what the mode does not have."""

    params: str
    norms: str
    activations: str
    statistics: str
    outputs: str
    master_weights: str | None
    scale: float | None


# activations: those between the layers; outputs: what the model returns, when no option says otherwise.
TABLE = {
    "torch": Dtypes(F32, F32, F16, F32, F16, None, 2.0**16),
    "O0": Dtypes(F32, F32, F32, F32, F32, None, 1.0),
    "O1": Dtypes(F32, F32, F16, F32, F16, None, 2.0**16),
    "O2": Dtypes(F16, F32, F16, F32, F32, F32, 2.0**16),
    "O3": Dtypes(F16, F16, F16, F16, F32, None, 1.0),
    "naive": Dtypes(F16, F16, F16, F16, F32, F32, 2.0**32),
    "naive-bfloat16": Dtypes(BF16, BF16, BF16, BF16, F32, F32, 1.0),
    "O2-bfloat16": Dtypes(BF16, F32, BF16, F32, F32, F32, 1.0),
    "torch-bfloat16": Dtypes(F32, F32, BF16, F32, BF16, None, 1.0),
}


def amp_named(name: str, **options: Any) -> jt.policies.Amp:
    mode, _, dtype = name.partition("-")
    if mode.startswith("O"):
        mode, options = "apex", {"opt_level": mode, **options}
    return jt.amp_mode(mode, dtype=jnp.dtype(dtype or "float16"), **options)


class Made(NamedTuple):
    amp: jt.policies.Amp
    params: Any
    model_state: Any
    loss_fn: Callable[..., Any]
    norm: Callable[[Any], Any]  # the norm's parameters in the tree of the parameters
    dense: Callable[[Any], Any]


def squared(y: jax.Array, batch: Any) -> jax.Array:
    return ((y.astype(jnp.float32) - batch["y"].astype(jnp.float32)) ** 2).mean()


def linen(amp: jt.policies.Amp) -> Made:
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> Any:
            x = nn.BatchNorm(use_running_average=False, momentum=0.5, name="first")(x)
            hidden = nn.Dense(8, name="dense")(x)
            return nn.Dense(1)(nn.relu(hidden)), hidden

    net = Net()
    variables = net.init(jax.random.key(0), BATCH["x"])
    amp, net = amp.for_model(net, BATCH["x"])

    def loss_fn(params: Any, stats: Any, batch: Any, rng: Any) -> Any:
        variables = {"params": params, "batch_stats": stats}
        (y, hidden), updated = net.apply(variables, batch["x"], mutable=["batch_stats"])
        return squared(y, batch), (updated["batch_stats"], outputs(y, hidden))

    params, stats = variables["params"], variables["batch_stats"]
    return Made(amp, params, stats, loss_fn, lambda p: p["first"]["scale"], lambda p: p["dense"]["kernel"])


def flax_nnx(amp: jt.policies.Amp) -> Made:
    class Net(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.first = nnx.BatchNorm(4, momentum=0.5, rngs=rngs)
            self.dense = nnx.Linear(4, 8, rngs=rngs)
            self.out = nnx.Linear(8, 1, rngs=rngs)

        def __call__(self, x: jax.Array) -> Any:
            hidden = self.dense(self.first(x))
            return self.out(nnx.relu(hidden)), hidden

    amp, model = amp.for_model(Net(nnx.Rngs(0)))
    graph, params, stats = nnx.split(model, nnx.Param, nnx.BatchStat)

    def loss_fn(params: Any, stats: Any, batch: Any, rng: Any) -> Any:
        net = nnx.merge(graph, params, stats)
        y, hidden = net(batch["x"])
        return squared(y, batch), (nnx.state(net, nnx.BatchStat), outputs(y, hidden))

    return Made(
        amp,
        params,
        stats,
        loss_fn,
        lambda p: p["first"]["scale"].get_value(),
        lambda p: p["dense"]["kernel"].get_value(),
    )


def equinox(amp: jt.policies.Amp) -> Made:
    class Net(eqx.Module):
        first: eqx.nn.BatchNorm
        dense: eqx.nn.Linear
        out: eqx.nn.Linear

        def __call__(self, x: jax.Array, state: Any) -> Any:
            x, state = self.first(x, state)
            hidden = self.dense(x)
            return (self.out(jax.nn.relu(hidden)), hidden), state

    keys = jax.random.split(jax.random.key(0))
    net = Net(
        eqx.nn.BatchNorm(4, axis_name="rows", mode="batch", momentum=0.5),
        eqx.nn.Linear(4, 8, key=keys[0]),
        eqx.nn.Linear(8, 1, key=keys[1]),
    )
    stats = eqx.nn.State(net)
    amp, net = amp.for_model(net)
    params, static = eqx.partition(net, eqx.is_inexact_array)

    def loss_fn(params: Any, stats: Any, batch: Any, rng: Any) -> Any:
        net = eqx.combine(params, static)
        over_rows = jax.vmap(net, axis_name="rows", in_axes=(0, None), out_axes=(0, None))
        (y, hidden), stats = over_rows(batch["x"], stats)
        return squared(y, batch), (stats, outputs(y, hidden))

    return Made(amp, params, stats, loss_fn, lambda p: p.first.weight, lambda p: p.dense.weight)


def outputs(y: jax.Array, hidden: jax.Array) -> dict[str, Any]:
    """What the loss returns: the model's outputs, an activation, and how many bytes its elements have."""
    return {"y": y, "hidden": hidden, "bytes": jnp.int32(hidden.dtype.itemsize)}


LIBRARIES = {"linen": linen, "nnx": flax_nnx, "equinox": equinox}
ROUTES: dict[str, Callable[[jt.steps.TrainStep], Any]] = {
    "jit": jax.jit,
    "data_parallel": lambda step: jax.jit(jt.data_parallel(step, MESH)),
    "pmap": jt.pmap_step,
    "sharded": lambda step: jax.jit(jt.sharded_step(step, MESH)),
}


def start(made: Made, optimizer: Any) -> tuple[jt.steps.TrainStep, jt.TrainState, Any]:
    loss_fn, tx = made.amp.transform(made.loss_fn, relaxed(optimizer))
    state = jt.TrainState.create(
        made.params, tx, model_state=made.amp.cast_model_state(made.model_state), cast_params=made.amp.cast_params
    )
    return jt.train_step(loss_fn, tx), state, loss_fn


def float_dtypes(tree: Any) -> set[str]:
    leaves = jax.tree.leaves(tree)
    return {x.dtype.name for x in leaves if jnp.issubdtype(x.dtype, jnp.floating)}


SMALL_SCALES = {  # so that no step is skipped
    "torch": {"init_scale": 2.0**8},
    "O1": {"max_loss_scale": 2.0**8},
    "O2": {"max_loss_scale": 2.0**8},
    "naive": {"initial_scale": 2.0**8},
}
CASES = [
    (name, library, route)
    for name in TABLE
    for library in LIBRARIES
    for route in ROUTES
    if (library, route) == ("linen", "jit")
    or (route in ("jit", "data_parallel") and "bfloat16" not in name)
    or (library == "linen" and name in ("O2", "naive"))
]


@pytest.mark.parametrize(("name", "library", "route"), CASES)
def test_the_dtypes_are_those_of_the_table(name: str, library: str, route: str) -> None:
    wanted = TABLE[name]
    with jax.numpy_dtype_promotion("standard"):  # the libraries promote by themselves
        made = LIBRARIES[library](amp_named(name, **SMALL_SCALES.get(name, {})))
        step, state, loss_fn = start(made, optax.adam(0.03))
        step = ROUTES[route](step)
        losses, metrics = [], {}
        for _ in range(12):
            state, metrics = step(state, BATCH)
            assert bool(metrics["grads_finite"])
            losses.append(float(metrics["loss"]))
        grads = jax.eval_shape(jax.grad(loss_fn, has_aux=True), state.params, state.model_state, BATCH, None)[0]
    assert losses[-1] < 0.9 * losses[0]
    assert made.dense(state.params).dtype.name == made.dense(grads).dtype.name == wanted.params
    assert made.norm(state.params).dtype.name == made.norm(grads).dtype.name == wanted.norms
    assert float_dtypes(state.params) == {wanted.params, wanted.norms}
    assert float_dtypes(state.model_state) == {wanted.statistics}
    assert metrics["aux"]["y"].dtype.name == wanted.outputs
    if made.amp.precision.autocast_rules:  # traced in float32, and returned as it was made
        assert metrics["aux"]["hidden"].dtype.name == wanted.activations
    else:  # returned in float32
        assert {*np.ravel(metrics["aux"]["bytes"]).tolist()} == {jnp.dtype(wanted.activations).itemsize}
    assert metrics["loss"].dtype.name == F32
    adam = [x for x in jax.tree.leaves(state.opt_state) if x.dtype != jnp.int32 and x.ndim]
    assert float_dtypes(adam) == {F32}
    if wanted.master_weights:
        master_weights = jt.get_master_weights(state.opt_state)
        assert float_dtypes(master_weights) == {wanted.master_weights}
        assert_bitwise_equal(state.params, jax.jit(made.amp.cast_params)(master_weights))
    else:
        with pytest.raises(ValueError, match="no master weights"):
            jt.get_master_weights(state.opt_state)
    assert float(jnp.ravel(amp_named(name).loss_scale.loss_scale)[0]) == wanted.scale
