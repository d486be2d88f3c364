import contextlib
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.tree_util import tree_map_with_path
from promotion import promoting
from pytrees import assert_bitwise_equal

from jmp_train.policies.amp_modes.batch_norms import batch_norm_paths, batch_norms_called, in_float32, with_batch_norms
from jmp_train.policies.amp_modes.mode import amp_mode
from jmp_train.policies.autocasting.opaque import opaque_to_autocast
from jmp_train.policies.pytrees.casting import cast_floating
from jmp_train.policies.pytrees.paths import named_leaves, path_name

pytestmark = [pytest.mark.quick, pytest.mark.newest]

SHAPE = (64, 4)
EXAMPLE = jax.ShapeDtypeStruct(SHAPE, jnp.float32)
# Squares overflow in float16; many results of a scale of 1.0003 round otherwise than those of 1.
X = np.random.default_rng(0).normal(300, 100, SHAPE).astype(np.float16)
WEIGHTS = np.random.default_rng(1).integers(-3, 4, SHAPE).astype(np.float16)
SCALE, BIAS = np.float32(1.0003), np.float32(0.25)


class LinenOwn(nn.BatchNorm):
    @nn.compact
    def __call__(self, images: jax.Array, *args: Any, **kwargs: Any) -> jax.Array:
        return super().__call__(images, *args, **kwargs)


class NnxOwn(nnx.BatchNorm):
    def __call__(self, x: jax.Array, *args: Any, **kwargs: Any) -> jax.Array:
        return super().__call__(x, *args, **kwargs)


class EquinoxOwn(eqx.nn.BatchNorm):
    def __call__(self, x: jax.Array, state: Any, **kwargs: Any) -> tuple[jax.Array, Any]:
        return super().__call__(x, state, **kwargs)


class HaikuOwn(hk.BatchNorm):
    def __call__(self, inputs: jax.Array, *args: Any, **kwargs: Any) -> jax.Array:
        return super().__call__(inputs, *args, **kwargs)


@dataclasses.dataclass
class Case:
    """A model of a block (a batch norm called `odd`, then a linear layer) and a layer norm."""

    model: Any
    args: tuple[Any, ...]  # of batch_norm_paths
    path: str
    params: Any
    stats: Any
    # float32 or not, params, stats, x -> y, new stats
    run: Callable[[bool, Any, Any, jax.Array], tuple[jax.Array, Any]]


def called(float32: bool) -> Any:
    return batch_norms_called(in_float32) if float32 else contextlib.nullcontext()


@functools.cache
def linen(norm: Any) -> Case:
    class Block(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            return nn.Dense(4)(norm(use_running_average=False, name="odd")(x))

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array, train: bool = True) -> jax.Array:
            assert train is True  # not traced
            y = Block()(x)
            nn.LayerNorm(name="batch_norm")(y.astype(jnp.float32))
            return y

    net = Net()
    variables = jax.jit(net.init)(jax.random.key(0), jnp.ones(SHAPE))

    def run(float32: bool, params: Any, stats: Any, x: jax.Array) -> Any:
        variables = {"params": params, "batch_stats": stats}
        with called(float32):
            y, updated = net.apply(variables, x, mutable=["batch_stats"])
        return y, updated["batch_stats"]

    return Case(net, (EXAMPLE,), "Block_0/odd", variables["params"], variables["batch_stats"], run)


@functools.cache
def flax_nnx(norm: Any) -> Case:
    class Block(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.odd = norm(4, rngs=rngs)
            self.out = nnx.Linear(4, 4, rngs=rngs)

    class Net(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.batch_norm = nnx.LayerNorm(4, rngs=rngs)
            self.blocks = nnx.List([Block(rngs)])

        def __call__(self, x: jax.Array) -> jax.Array:
            y = self.blocks[0].out(self.blocks[0].odd(x))
            self.batch_norm(y)
            return y

    net = Net(nnx.Rngs(0))
    params, stats = nnx.state(net, nnx.Param), nnx.state(net, nnx.BatchStat)

    def run(float32: bool, params: Any, stats: Any, x: jax.Array) -> Any:
        graph = nnx.split(with_batch_norms(net, x.dtype, in_float32=True) if float32 else net, ...)[0]
        # A copy, since merge keeps the variables, and grad refuses to change those from outside it.
        new = nnx.merge(graph, params, jax.tree.map(lambda x: x, stats))
        return new(x), nnx.state(new, nnx.BatchStat)

    return Case(net, (), "blocks/0/odd", params, stats, run)


@functools.cache
def equinox(norm: Any, mode: Any = "batch") -> Case:
    class Block(eqx.Module):
        odd: eqx.nn.BatchNorm
        out: eqx.nn.Linear

    class Net(eqx.Module):
        batch_norm: eqx.nn.LayerNorm
        value: list[Block]

        def __call__(self, x: jax.Array, state: Any) -> tuple[jax.Array, Any]:
            x, state = self.value[0].odd(x, state)
            y = self.value[0].out(x)
            self.batch_norm(y)
            return y, state

    def make() -> Net:
        block = Block(norm(4, "batch", mode=mode), eqx.nn.Linear(4, 4, key=jax.random.key(0)))
        return Net(eqx.nn.LayerNorm(4), [block])

    net, stats = eqx.nn.make_with_state(make)()

    def run(float32: bool, params: Any, stats: Any, x: jax.Array) -> Any:
        new = with_batch_norms(net, x.dtype, in_float32=True) if float32 else net
        arrays, rest = eqx.partition(new, eqx.is_inexact_array)
        new = eqx.combine(jax.tree.unflatten(jax.tree.structure(arrays), jax.tree.leaves(params)), rest)
        return jax.vmap(new, axis_name="batch", in_axes=(0, None), out_axes=(0, None))(x, stats)

    params = eqx.filter(net, eqx.is_inexact_array)
    return Case(net, (), "value/0/odd", params, stats, run)


@functools.cache
def haiku(norm: Any) -> Case:
    class Block(hk.Module):
        def __init__(self) -> None:
            super().__init__(name="block")
            self.norm = norm(True, True, 0.99, name="odd")

        def __call__(self, x: jax.Array) -> jax.Array:
            return hk.Linear(4)(self.norm(x, is_training=True))

    def forward(x: jax.Array) -> jax.Array:
        y = Block()(x)
        hk.LayerNorm(-1, True, True, name="batch_norm")(y)
        return y

    net = hk.transform_with_state(forward)
    params, stats = promoting(jax.jit(net.init))(jax.random.key(0), jnp.ones(SHAPE))

    def run(float32: bool, params: Any, stats: Any, x: jax.Array) -> Any:
        with called(float32):
            return net.apply(params, stats, None, x)

    return Case(net, (EXAMPLE,), "block/~/odd", params, stats, run)


LIBRARIES = {
    "linen": (linen, nn.BatchNorm),
    "nnx": (flax_nnx, nnx.BatchNorm),
    "equinox": (equinox, eqx.nn.BatchNorm),
    "equinox ema": (functools.partial(equinox, mode="ema"), eqx.nn.BatchNorm),
    "haiku": (haiku, hk.BatchNorm),
}
CLASSES = {
    **LIBRARIES,
    "linen, own": (linen, LinenOwn),
    "nnx, own": (flax_nnx, NnxOwn),
    "equinox, own": (equinox, EquinoxOwn),
    "haiku, own": (haiku, HaikuOwn),
}
each_library = pytest.mark.parametrize(("make", "norm"), LIBRARIES.values(), ids=LIBRARIES)
each_class = pytest.mark.parametrize(("make", "norm"), CLASSES.values(), ids=CLASSES)


def half_but_norms(case: Case) -> Any:
    """Returns half parameters, the linear layer an identity, and float32 ones of the norm."""

    def made(path: Any, x: jax.Array) -> jax.Array:
        name = path_name(path)
        if name.startswith(f"{case.path}/"):
            return jnp.full(x.shape, SCALE if is_scale(name) else BIAS)
        return jnp.eye(4, dtype=jnp.float16) if x.ndim == 2 else jnp.zeros(x.shape, jnp.float16)

    return tree_map_with_path(made, case.params)


def is_scale(name: str) -> bool:
    return name.endswith(("/scale", "/weight"))


def normalized() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns x normalized, its mean and variance, in float64."""
    x = X.astype(np.float64)
    mean, variance = x.mean(0), x.var(0)
    return (x - mean) / np.sqrt(variance + 1e-5), mean, variance


@pytest.mark.quick_cases(1)
@each_class
def test_it_finds_batch_norms_by_type_where_their_parameters_are(make: Any, norm: Any) -> None:
    case = make(norm)
    assert batch_norm_paths(case.model, *case.args) == (case.path,)
    leaves = [name for name, _ in named_leaves(case.params)]
    assert len([name for name in leaves if name.startswith(f"{case.path}/")]) == 2
    assert any(name.startswith("batch_norm/") for name in leaves)  # the layer norm


def test_arguments_that_are_not_arrays_are_passed_on() -> None:
    case = linen(nn.BatchNorm)
    for x in (EXAMPLE, jnp.zeros(SHAPE), np.zeros(SHAPE, np.float32)):
        assert batch_norm_paths(case.model, x, train=True) == (case.path,)
        assert batch_norm_paths(case.model, train=True, x=x) == (case.path,)


@pytest.mark.quick_cases(1)
@each_class
def test_half_goes_in_and_out_and_float32_is_between(make: Any, norm: Any) -> None:
    case = make(norm)
    params = half_but_norms(case)

    def loss(params: Any, stats: Any, x: jax.Array) -> Any:
        y, stats = case.run(True, params, stats, x)
        return (y * WEIGHTS).astype(jnp.float32).sum(), (y, stats)

    step = jax.jit(jax.grad(loss, has_aux=True))
    grads, (y, stats) = promoting(step)(params, case.stats, jnp.asarray(X))
    x_hat, mean, variance = normalized()
    # The linear layer is an identity in half: it would have promoted what is float32.
    assert y.dtype == jnp.float16
    wanted = (x_hat * np.float64(SCALE) + np.float64(BIAS)).astype(np.float16)
    assert (np.asarray(y) == wanted).mean() > 0.98
    rounded = (x_hat + np.float64(BIAS)).astype(np.float16)
    assert (rounded == wanted).mean() < 0.9  # so that a scale in half would be seen
    for name, grad in named_leaves(grads):
        assert grad.dtype == (jnp.float32 if name.startswith(case.path) else jnp.float16), name
        if name.startswith(case.path) and is_scale(name):
            in_float64 = (x_hat * WEIGHTS).sum(0).reshape(grad.shape)
            np.testing.assert_allclose(grad, in_float64, rtol=1e-5, atol=1e-4)
    floats = [x for x in jax.tree.leaves(stats) if jnp.issubdtype(x.dtype, jnp.floating)]
    assert {x.dtype.name for x in floats} == {"float32"}
    assert is_among(floats, mean, 0) and is_among(floats, variance, 1)


def is_among(stats: list[jax.Array], new: np.ndarray, first: int) -> bool:
    """Says whether a running average is there after one step: haiku and ema begin with it."""
    averages = (new, 0.01 * new, 0.99 * first + 0.01 * new)
    flat = [np.asarray(x).reshape(-1) for x in stats]
    return any(np.allclose(x, average, rtol=1e-5) for x in flat for average in averages)


@pytest.mark.quick_cases(2)
@each_library
def test_float32_stays_as_it_is(make: Any, norm: Any) -> None:
    case = make(norm)
    x = jnp.asarray(X, jnp.float32)
    run = jax.jit(promoting(case.run), static_argnums=0)
    before = run(False, case.params, case.stats, x)
    assert_bitwise_equal(before, run(True, case.params, case.stats, x))


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("library", ["linen", "equinox", "haiku"])
def test_float64_stays(library: str) -> None:
    make, norm = LIBRARIES[library]
    with jax.enable_x64(True):
        case = promoting(make.__wrapped__)(norm)
        params, stats = cast_floating((case.params, case.stats), jnp.float64)
        run = functools.partial(promoting(case.run), True)
        y, _ = jax.eval_shape(run, params, stats, jnp.asarray(X, jnp.float64))
        assert y.dtype == jnp.float64


@pytest.mark.full
def test_linen_lifted_transforms_and_containers() -> None:
    class Block(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array, _: Any = None) -> tuple[jax.Array, None]:
            x = nn.Dense(4, param_dtype=jnp.float16)(x)
            x = x + 0 * jax.random.normal(self.make_rng("noise"), x.shape, x.dtype)
            return nn.BatchNorm(use_running_average=False, name="odd")(x=x), None

    class Net(nn.Module):
        def setup(self) -> None:
            split: Any = {"params": True, "noise": True}
            self.jitted = nn.jit(Block)()
            self.rematerialized = [nn.remat(Block)()]
            self.scanned = nn.scan(nn.remat(Block), {"params": 0, "batch_stats": 0}, split_rngs=split, length=2)()
            self.norm = nn.remat(nn.BatchNorm)(use_running_average=False)
            self.dead = nn.BatchNorm(use_running_average=False, use_scale=False, use_bias=False)
            self.given = {"a": nn.Sequential([nn.BatchNorm(use_running_average=False)])}

        def __call__(self, x: jax.Array) -> jax.Array:
            for layer in (self.jitted, *self.rematerialized, self.scanned):
                x, _ = layer(x, None)
            return self.given["a"](self.dead(self.norm(x)))

    net = Net()
    x = jnp.asarray(X)
    rngs = {"params": jax.random.key(0), "noise": jax.random.key(1)}
    with batch_norms_called(in_float32):  # scan wants a carry of one dtype
        variables = jax.jit(net.init)(rngs, x)
        paths = batch_norm_paths(net, x)
    leaves = [name for name, _ in named_leaves(variables["params"])]
    norms = {name.removesuffix("/scale") for name in leaves if name.endswith("/scale")}
    assert set(paths) == norms and list(paths) == sorted(paths)
    assert {"jitted/odd", "rematerialized_0/odd", "scanned/odd", "norm", "given_a/layers_0"} <= norms

    def loss(params: Any) -> Any:
        with batch_norms_called(in_float32):
            y, updated = net.apply({**variables, "params": params}, x, mutable=["batch_stats"], rngs=rngs)
        return jnp.asarray(y, jnp.float32).sum(), (y, updated)

    grads, (y, updated) = jax.jit(jax.grad(loss, has_aux=True))(variables["params"])
    assert y.dtype == jnp.float16 and np.isfinite(y).all()
    assert {x.dtype.name for x in jax.tree.leaves(updated)} == {"float32"}
    for name, grad in named_leaves(grads):
        assert grad.dtype == (jnp.float16 if "Dense" in name else jnp.float32), name


@pytest.mark.parametrize("lift", [nn.jit, nn.remat])
def test_traces_from_outside_are_not_used_within(lift: Any) -> None:
    net = lift(nn.BatchNorm)(use_running_average=False)
    x = jnp.asarray(X)
    variables = promoting(jax.jit(net.init))(jax.random.key(0), x)

    def result_dtype() -> Any:
        run = functools.partial(net.apply, mutable=["batch_stats"])
        return promoting(functools.partial(jax.eval_shape, run))(variables, x)[0].dtype

    for _ in range(2):
        assert result_dtype() == jnp.float32
        with batch_norms_called(in_float32):
            assert result_dtype() == jnp.float16
    assert batch_norm_paths(net, x) == batch_norm_paths(net, x) == ("",)


def test_nnx_containers_and_shared_modules() -> None:
    class Block(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.odd = nnx.BatchNorm(4, rngs=rngs)
            self.dead = nnx.BatchNorm(4, use_scale=False, use_bias=False, rngs=rngs)

    class Net(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.z = Block(rngs)
            self.a = self.z
            self.sequential = nnx.Sequential(nnx.relu, nnx.BatchNorm(4, rngs=rngs))
            self.given = nnx.Dict(b=nnx.BatchNorm(4, use_bias=False, rngs=rngs))

    net = Net(nnx.Rngs(0))
    paths = batch_norm_paths(net)
    assert paths == ("a/odd", "given/b", "sequential/layers/1")
    leaves = [name for name, _ in named_leaves(nnx.state(net, nnx.Param))]
    assert {name.rpartition("/")[0] for name in leaves} == set(paths)
    new = with_batch_norms(net, jnp.bfloat16, in_float32=True)
    assert new.a is new.z and new.a.odd is not net.a.odd
    assert [name for name, _ in named_leaves(nnx.state(new, nnx.Param))] == leaves
    assert net.a.odd.dtype is None and new.a.odd.dtype == jnp.bfloat16
    y = promoting(new.a.dead)(jnp.asarray(X, jnp.bfloat16))
    assert y.dtype == jnp.bfloat16 and np.isfinite(np.asarray(y, np.float32)).all()


@pytest.mark.full
def test_equinox_states_fit_before_and_after() -> None:
    net, state = eqx.nn.make_with_state(eqx.nn.BatchNorm)(4, "batch", mode="batch")
    new = with_batch_norms({"norm": net, "other": 3}, jnp.float16, in_float32=True)
    assert new["other"] == 3 and type(net) is eqx.nn.BatchNorm
    assert new["norm"].batch_state_index is net.batch_state_index
    assert new["norm"].weight is net.weight
    assert isinstance(new["norm"], eqx.nn.BatchNorm)
    again = with_batch_norms({"norm": net, "other": 3}, jnp.float16, in_float32=True)
    assert jax.tree.structure(new) == jax.tree.structure(again)
    x = jnp.asarray(X)
    run = eqx.filter_jit(
        lambda norm, state: jax.vmap(lambda x: norm(x, state=state), axis_name="batch", out_axes=(0, None))(x)
    )
    y, state = run(new["norm"], state)
    assert y.dtype == jnp.float16
    y, state = run(eqx.nn.inference_mode(new["norm"]), state)
    assert y.dtype == jnp.float16 and np.isfinite(np.asarray(y)).all()
    reuse = jax.vmap(lambda x: (new["norm"](x, state), new["norm"](x, state))[0][0], axis_name="batch")
    with pytest.raises(ValueError, match="Attempted to use old state"):  # equinox still sees it
        reuse(x)


def test_equinox_pytrees_and_norms_without_parameters() -> None:
    def norm(**options: Any) -> Any:
        return eqx.nn.BatchNorm(4, "batch", mode="batch", **options)

    tree = {"a": [norm(), eqx.nn.LayerNorm(4)], "b": norm(channelwise_affine=False)}
    tree = eqx.nn.make_with_state(lambda: tree)()[0]
    assert batch_norm_paths(tree) == ("a/0",)
    assert batch_norm_paths({"a": eqx.nn.LayerNorm(4)}) == ()
    assert batch_norm_paths(tree["a"][0]) == ("",)


@pytest.mark.full
def test_haiku_transforms_within_and_running_averages() -> None:
    def forward(x: jax.Array, train: bool = True) -> jax.Array:
        norm = hk.BatchNorm(True, True, 0.9, name="odd")
        x = hk.remat(lambda x: norm(is_training=train, inputs=x))(x)
        x = hk.BatchNorm(False, False, 0.9)(is_training=train, scale=jnp.ones(4), inputs=x)
        inner = hk.transform_with_state(lambda x: hk.BatchNorm(True, True, 0.9, name="in")(x, train))
        lifted, updater = hk.lift_with_state(inner.init, name="lifted")
        params, state = lifted(hk.next_rng_key(), x)
        x, state = inner.apply(params, state, None, x)
        updater.update(state)
        return x

    net = hk.transform_with_state(forward)
    assert batch_norm_paths(net, EXAMPLE, train=True) == ("lifted/in", "odd")
    params, state = promoting(jax.jit(net.init))(jax.random.key(0), jnp.ones(SHAPE))
    assert sorted(params) == ["lifted/in", "odd"]

    def run(train: bool, params: Any, state: Any) -> Any:
        with batch_norms_called(in_float32):
            return net.apply(params, state, jax.random.key(0), jnp.asarray(X), train)

    run = promoting(jax.jit(run, static_argnums=0))
    y, state = run(True, params, state)
    again, unchanged = run(False, params, state)
    assert y.dtype == again.dtype == jnp.float16
    assert_bitwise_equal(state, unchanged)
    # The averages after one batch, debiased, are that batch's statistics.
    np.testing.assert_allclose(np.asarray(again), np.asarray(y), rtol=2e-3, atol=2e-3)
    assert {x.dtype.name for x in jax.tree.leaves(state)} == {"float32", "int32"}


def test_other_transformed_haiku_functions() -> None:
    def forward(x: jax.Array) -> jax.Array:
        return hk.BatchNorm(True, True, 0.9, name="odd")(x, is_training=True)

    several = hk.multi_transform_with_state(lambda: (forward, {"f": forward}))
    assert batch_norm_paths(several, EXAMPLE) == ("odd",)
    assert batch_norm_paths(hk.transform(lambda x: hk.Linear(2)(x)), EXAMPLE) == ()
    jitted = hk.TransformedWithState(jax.jit(several.init), several.apply["f"])
    promoting(jitted.init)(jax.random.key(0), jnp.ones(SHAPE))
    assert batch_norm_paths(jitted, EXAMPLE) == ("odd",)


def test_linen_and_haiku_models_come_back_and_others_are_errors() -> None:
    for model in (nn.BatchNorm(), hk.transform(lambda x: x)):
        assert with_batch_norms(model, jnp.float16, in_float32=True) is model
    for model in ({"w": jnp.ones(2)}, nn.BatchNorm, lambda x: x, None):
        wanted = f"model is of type {type(model).__name__}; it must be a flax linen or nnx module, a"
        with pytest.raises(TypeError, match=wanted):
            batch_norm_paths(model)


@pytest.mark.parametrize(("make", "norm"), [(linen, nn.BatchNorm), (haiku, hk.BatchNorm)])
def test_example_inputs_are_asked_for(make: Any, norm: Any) -> None:
    model = make(norm).model
    with pytest.raises(TypeError, match=r"without example inputs; pass .*\(model, x\)") as raised:
        batch_norm_paths(model)
    assert isinstance(raised.value.__cause__, TypeError)
    with pytest.raises(TypeError) as raised:  # the library's own error
        batch_norm_paths(model, EXAMPLE, EXAMPLE, EXAMPLE, EXAMPLE)
    assert "example inputs" not in str(raised.value)


@pytest.mark.full
def test_under_autocast_norms_return_what_they_are_given_in_the_modes_that_use_it() -> None:
    """torch's batch_norm does, of half and float32 parameters; the statistics stay float32."""
    returned: list[str] = []

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> Any:
            for features in (4, 3):
                x = nn.Dense(features)(x)
                x = nn.BatchNorm(use_running_average=False)(x)
                x = note(x)
            return x

    note = opaque_to_autocast(lambda x: returned.append(x.dtype.name) or x)
    x = jnp.asarray(np.random.default_rng(0).normal(size=(8, 4)), jnp.float32)
    variables = Net().init(jax.random.key(0), x)
    returned.clear()

    def forward(params: Any, stats: Any, x: jax.Array) -> Any:
        both = {"params": params, "batch_stats": stats}
        return Net().apply(both, x, mutable=["batch_stats"])

    for mode in ({"mode": "torch"}, {"mode": "apex", "opt_level": "O1"}):
        predict = amp_mode(**mode).forward(forward)
        y, new = predict(variables["params"], variables["batch_stats"], x)
        assert y.dtype == jnp.float16
        assert {x.dtype.name for x in jax.tree.leaves(new)} == {"float32"}
        assert returned[-2:] == ["float16"] * 2  # those before are of the trace in float32
        float32_y, float32_stats = forward(variables["params"], variables["batch_stats"], x)
        np.testing.assert_allclose(y, float32_y, atol=2e-2)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-3), new, float32_stats)
