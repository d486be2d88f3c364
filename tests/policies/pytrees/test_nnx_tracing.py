"""nnx objects under `autocast` and `apply_policy`: what the function does to them is not lost."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import errors, nnx
from jax.core import Tracer

import jmp_train as jt

pytestmark = pytest.mark.quick

Transform = Callable[[Callable[..., Any]], Callable[..., Any]]
X = jnp.asarray(np.random.default_rng(0).normal(size=(8, 3)), jnp.float32)


def mixed(fn: Callable[..., Any]) -> Callable[..., Any]:
    return jt.apply_policy(fn, jt.get_policy("mixed_float16"))


def autocast_policy(fn: Callable[..., Any]) -> Callable[..., Any]:
    return jt.apply_policy(fn, jt.get_policy("autocast_float16"))


def plainly(fn: Callable[..., Any]) -> Callable[..., Any]:
    return fn


@pytest.fixture(autouse=True)
def promotion() -> Iterator[None]:
    with jax.numpy_dtype_promotion("standard"):  # flax asks for it
        yield


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.linear = nnx.Linear(3, 3, rngs=rngs)
        self.norm = nnx.BatchNorm(3, momentum=0.5, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.rows = nnx.Variable(jnp.zeros((), jnp.int32))
        self.streams = nnx.Rngs(1, noise=2)

    def __call__(self, x: jax.Array) -> jax.Array:
        self.rows[...] += x.shape[0]
        y = self.dropout(nnx.relu(self.norm(self.linear(x))))
        return y + 0.01 * jax.random.normal(self.streams.noise(), y.shape, y.dtype)


def net() -> Net:
    return Net(nnx.Rngs(0))


def loss_fn(net: Net, x: jax.Array) -> jax.Array:
    return jnp.mean(net(x).astype(jnp.float32) ** 2)


def state_of(net: Any) -> dict[str, np.ndarray]:
    pure = nnx.to_flat_state(nnx.state(net))
    return {
        "/".join(map(str, path)): np.asarray(jax.random.key_data(x[...]) if isinstance(x, nnx.RngKey) else x[...])
        for path, x in pure
    }


def both(nets: dict[str, list[Net]], x: jax.Array) -> jax.Array:
    return loss_fn(nets["a"][0], x) + loss_fn(nets["b"][0], x)


def cond_and_loops(net: Net, x: jax.Array) -> jax.Array:
    loss = nnx.cond(x.sum() < 1e3, loss_fn, lambda net, x: jnp.float32(0), net, x)
    nnx.cond(x.sum() > 1e3, loss_fn, lambda net, x: jnp.float32(0), net, x)
    nnx.fori_loop(0, 2, lambda i, net: (loss_fn(net, x), net)[1], net)
    nnx.while_loop(lambda c: c[1] < 2, lambda c: (loss_fn(c[0], x), (c[0], c[1] + 1))[1], (net, 0))
    return loss


# Functions of a net and X, which are jitted and called twice.
JITTED: dict[str, Callable[[Transform], Callable[..., Any]]] = {
    "as argument": lambda wrap: nnx.value_and_grad(wrap(loss_fn)),
    "around value_and_grad": lambda wrap: wrap(nnx.value_and_grad(loss_fn)),
    "closed over": lambda wrap: nnx.value_and_grad(lambda net, x: wrap(lambda x: loss_fn(net, x))(x)),
    "nested twice": lambda wrap: lambda net, x: wrap(both)({"a": [net], "b": [net]}, x),
    "around jit and remat": lambda wrap: nnx.value_and_grad(wrap(nnx.jit(nnx.remat(loss_fn)))),
    "within remat": lambda wrap: nnx.value_and_grad(nnx.remat(wrap(loss_fn))),
    "around cond and loops": lambda wrap: wrap(cond_and_loops),
}


def through_layers(x: jax.Array, net: Net) -> jax.Array:
    return net(x).astype(x.dtype)


def scanned(layer: Callable[..., Any]) -> Callable[..., Any]:
    return nnx.scan(layer, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)


def around_scan(wrap: Transform) -> Callable[..., Any]:
    return nnx.value_and_grad(wrap(lambda net, x: jnp.mean(scanned(through_layers)(x, net))))


def within_scan(wrap: Transform) -> Callable[..., Any]:
    layers = scanned(lambda x, net: wrap(through_layers)(x, net).astype(jnp.float32))
    return nnx.value_and_grad(lambda net, x: jnp.mean(layers(x, net)))


def around_vmap_and_within(wrap: Transform) -> Callable[..., Any]:
    outer = wrap(nnx.vmap(lambda net, x: net(x), in_axes=(0, None)))
    inner = nnx.vmap(wrap(lambda net, x: net(x)), in_axes=(0, None))
    return lambda net, x: (outer(net, x), inner(net, x))


# The same of two nets, stacked.
STACKED = {"around scan": around_scan, "within scan": within_scan, "around vmap and within": around_vmap_and_within}


def after_two_calls(model: Net, fn: Callable[..., Any]) -> Net:
    jitted = nnx.jit(fn)
    jitted(model, X)
    jitted(model, X)
    return model


# Each of these runs a function that a transform has changed, and returns the net that it had.


def eagerly(wrap: Transform) -> Net:
    model = net()
    wrap(loss_fn)(model, X)
    wrap(loss_fn)(x=X, net=model)
    return model


def closed_over_by_what_is_called(wrap: Transform) -> Net:
    model = net()

    class Trainer:
        def __init__(self) -> None:
            self.nets = {"first": [model]}

        def loss(self, x: jax.Array) -> jax.Array:
            return functools.partial(loss_fn, self.nets["first"][0])(x)

    wrap(Trainer().loss)(X)
    return model


def a_module_and_its_method(wrap: Transform) -> Net:
    model = net()
    wrap(model)(X)
    wrap(model.__call__)(X)
    return model


def new_and_plain_attributes(wrap: Transform) -> Net:
    model: Any = net()
    model.count = jnp.zeros(())

    def run(net: Any, x: jax.Array) -> jax.Array:
        net.count = net.count + 1
        net.last = nnx.BatchStat(jnp.ones(2))
        net.head = nnx.Linear(3, 1, rngs=nnx.Rngs(1))
        return loss_fn(net, x)

    after_two_calls(model, nnx.value_and_grad(wrap(run)))
    assert model.count == 2
    return model


def in_tree_mode(wrap: Transform) -> nnx.BatchNorm:
    model = nnx.BatchNorm(3, rngs=nnx.Rngs(0))

    def run(kernel: jax.Array, norm: nnx.BatchNorm, x: jax.Array) -> jax.Array:
        return jnp.mean(norm(x @ kernel).astype(jnp.float32) ** 2)

    modes: list[dict[str, Any]] = [{"graph": False}, {"graph_updates": False}]
    for graph in modes:
        step = nnx.value_and_grad(wrap(run), **graph)
        nnx.jit(step, **graph)(jnp.eye(3), model, X)
    return model


def by_split_and_merge(wrap: Transform) -> Net:
    model = net()
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)

    def run(params: nnx.State, rest: nnx.State, x: jax.Array) -> Any:
        merged = nnx.merge(graphdef, params, rest, copy=True)
        return loss_fn(merged, x), nnx.state(merged, nnx.Not(nnx.Param))

    _, new = jax.jit(jax.value_and_grad(wrap(run), has_aux=True))(params, rest, X)[0]
    nnx.update(model, new)
    return model


OTHERS = (
    eagerly, closed_over_by_what_is_called, a_module_and_its_method, new_and_plain_attributes, in_tree_mode,
    by_split_and_merge,
)  # fmt: skip
CASES: dict[str, Callable[[Transform], Any]] = {
    **{name: lambda wrap, make=make: after_two_calls(net(), make(wrap)) for name, make in JITTED.items()},
    **{
        name: lambda wrap, make=make: after_two_calls(nnx.vmap(Net)(nnx.Rngs(0).split(2)), make(wrap))
        for name, make in STACKED.items()
    },
    **{case.__name__: case for case in OTHERS},
}
WRAPS = (jt.autocast, mixed, autocast_policy)


@pytest.mark.full
@pytest.mark.filterwarnings("ignore::jmp_train.policies.Float32ProductsWarning")  # of what is closed over
@pytest.mark.parametrize("case", CASES)
def test_state_is_that_of_the_plain_function(case: str) -> None:
    expected = state_of(CASES[case](plainly))
    for wrap in WRAPS[: 3 if case == "as argument" else 2]:
        if (case, wrap) == ("around scan", mixed):  # BatchNorm returns float32, and scan refuses it
            continue
        found = state_of(CASES[case](wrap))
        assert found.keys() == expected.keys()
        for path, value in found.items():
            assert value.dtype == expected[path].dtype, path
            if not np.issubdtype(value.dtype, np.floating):  # counts and keys
                np.testing.assert_array_equal(value, expected[path], path)
            np.testing.assert_allclose(value, expected[path], atol=5e-3, err_msg=path)
    moved = [path for path in expected if path.endswith(("mean", "rngs/count", "noise/count"))]
    assert all(np.any(expected[path] != 0) for path in moved)
    assert moved


def test_masks_are_those_of_the_plain_function() -> None:
    x = jnp.ones(32)
    plain, other = nnx.Dropout(0.5, rngs=nnx.Rngs(0)), nnx.Dropout(0.5, rngs=nnx.Rngs(0))
    dropped = jt.autocast(lambda dropout, x: dropout(x))
    masks = [np.asarray(dropped(other, x)) for _ in range(3)]
    np.testing.assert_array_equal(masks, [np.asarray(plain(x)) for _ in range(3)])
    assert not np.array_equal(masks[0], masks[1])


@pytest.mark.full
def test_objects_are_as_they_were_after_an_error() -> None:
    model = net()
    before = state_of(model)

    def fails(net: Net, x: jax.Array) -> None:
        net(x)
        raise KeyError("mine")

    for wrap in WRAPS[:2]:
        with pytest.raises(KeyError, match="mine"):
            wrap(fails)(model, X)
        model.linear.kernel[...] += 0  # at home, where it was
    after = state_of(model)
    for path in ("linear/kernel", "norm/scale"):
        np.testing.assert_array_equal(after[path], before[path])
    assert not any(isinstance(x, Tracer) for x in jax.tree.leaves(nnx.state(model)))


@pytest.mark.full
def test_results_are_the_callers_objects_and_new_ones_can_change() -> None:
    model = net()

    def run(net: Net, x: jax.Array) -> Any:
        return net(x), net, nnx.state(net), nnx.Linear(2, 2, rngs=nnx.Rngs(1))

    _, same, state, new = jt.autocast(run)(model, X)
    assert same is model
    assert state["norm"]["mean"] is model.norm.mean
    new.kernel[...] += 1
    assert new.kernel.dtype == jnp.float32


def test_state_keeps_the_dtype_that_it_is_stored_in() -> None:
    for dtype in (jnp.bfloat16, jnp.float32):
        model: Any = nnx.BatchNorm(3, rngs=nnx.Rngs(0))
        model.mean.set_value(model.mean[...].astype(dtype))
        jt.autocast(lambda model, x: model(x))(model, X)
        assert model.mean[...].dtype == dtype

        def double(model: Any) -> None:
            model.scale[...] *= 2

        for wrap in WRAPS:
            wrap(double)(model)
        assert model.scale[...].dtype == jnp.float32
        np.testing.assert_array_equal(model.scale[...], 8.0)


def test_a_variable_that_cannot_be_carried_is_named() -> None:
    model = net()

    class Hidden:
        __slots__ = ("net",)

    hidden = Hidden()
    hidden.net = model
    with pytest.raises(errors.TraceContextError, match=r"a Variable of int32\[\] .* did not find it"):
        jt.autocast(lambda x: hidden.net(x))(X)
    with pytest.raises(errors.TraceContextError, match=r"Variable 'model/rows' .* outer transformation"):
        jax.jit(lambda x: jt.autocast(lambda x: model(x))(x))(X)
    assert model.rows[...] == 0


def test_policies_cast_the_parameters_alone() -> None:
    seen = []

    class Model(nnx.Module):
        def __init__(self) -> None:
            self.layers = nnx.List([nnx.Linear(2, 2, rngs=nnx.Rngs(0)) for _ in range(2)])
            self.adapter = nnx.LoRAParam(jnp.ones(2))
            self.stat = nnx.BatchStat(jnp.ones(()))
            self.cache = nnx.Cache(jnp.ones(()))

        def __call__(self, x: jax.Array) -> jax.Array:
            params = (*(layer.kernel for layer in self.layers), self.adapter, self.stat, self.cache)
            seen.append([str(p[...].dtype) for p in params])
            for layer in self.layers:
                x = layer(x.astype(layer.kernel[...].dtype))
            return x

    model, x = Model(), jnp.ones((1, 2))
    policy = jt.policy_by_path({"^layers/1/": "bfloat16"}, default="mixed_float16")
    expected = ["float16", "bfloat16", "float16", "float32", "float32"]
    calls: Any = ((Model.__call__, (model, x)), (model, (x,)), (model.__call__, (x,)))
    for fn, args in calls:
        seen.clear()
        assert jt.apply_policy(fn, policy)(*args).dtype == jnp.float32
        assert seen[-1] == expected
    with pytest.raises(ValueError, match="'nope' found no floating parameter; the paths are:\n  adapt"):
        jt.apply_policy(model, jt.policy_by_path({"nope": "float32"}))(x)
    assert jt.explain_policy(model, "mixed_float16", x).half_products_share == 1
    assert {x.dtype.name for x in jax.tree.leaves(nnx.state(model))} == {"float32"}


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("run", [nnx.jit, nnx.remat], ids=["jit", "remat"])
def test_parameters_that_a_transform_hands_on_are_not_rounded(run: Callable[..., Any]) -> None:
    """`nnx.jit` and, within a scan, `nnx.remat` return new arrays for variables that nothing was put into."""

    def layers(model: nnx.Linear, x: Any) -> Any:
        return scanned(run(lambda x, layer: layer(x)))(x, model)

    create = nnx.split_rngs(splits=2)(nnx.vmap(lambda rngs: nnx.Linear(3, 3, rngs=rngs)))
    model = create(nnx.Rngs(0))
    before = model.kernel[...]
    assert jt.apply_policy(layers, "mixed_float16")(model, jnp.ones((2, 3))).dtype == jnp.float32
    np.testing.assert_array_equal(model.kernel[...], before, strict=True)
    model_loss = lambda model, x: layers(model, x).sum().astype(jnp.float32)
    jt.nnx_value_and_grad(model_loss, "mixed_float16")(jt.StaticLossScale(8.0), model, jnp.ones((2, 3)))
    np.testing.assert_array_equal(model.kernel[...], before, strict=True)


def test_what_is_put_into_a_part_of_a_parameter_is_kept_and_the_rest_is_as_it_was() -> None:
    model = nnx.Linear(1, 3, rngs=nnx.Rngs(0))
    model.kernel[...] = jnp.float32([[0.1, 0.2, 0.3]])

    def put(model: nnx.Linear) -> None:
        model.kernel[...] = model.kernel[...].at[0, 1].set(0.7)

    jt.apply_policy(put, "mixed_float16")(model)
    expected = np.array([[0.1, np.float16(0.7), 0.3]], np.float32)
    np.testing.assert_array_equal(model.kernel[...], expected, strict=True)


@pytest.mark.full
def test_nothing_is_traced_again_and_explaining_changes_nothing() -> None:
    model, traced = net(), []

    def run(net: Net, x: jax.Array) -> jax.Array:
        traced.append(1)
        return loss_fn(net, x)

    step = nnx.jit(nnx.value_and_grad(jt.autocast(run)))
    for _ in range(3):
        step(model, X)
    assert len(traced) == 1
    before = state_of(model)
    shares = [
        jt.explain_autocast(loss_fn, model, X).half_flops_share,
        jt.explain_autocast(lambda x: loss_fn(model, x), X).half_flops_share,
        jt.explain_policy(lambda x: loss_fn(model, x), "autocast_float16", X).half_flops_share,
    ]
    assert min(shares) > 0.1
    jax.tree.map(np.testing.assert_array_equal, state_of(model), before)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.float32])
def test_references_of_jax_are_written_in_their_dtype(dtype: Any) -> None:
    def run(ref: Any, x: jax.Array) -> jax.Array:
        def body(carry: jax.Array, _: None) -> tuple[jax.Array, None]:
            y = carry @ jnp.eye(3) * 0.5
            jax.lax.cond(y[0, 0] != 0, lambda: ref.__setitem__(..., ref[...] + y.astype(dtype)), lambda: None)
            return y, None

        return jax.lax.scan(body, x, length=3)[0]

    refs = [jax.new_ref(jnp.zeros(X.shape, dtype)) for _ in range(2)]
    run(refs[0], X)
    jt.autocast(run)(refs[1], X)
    assert refs[1][...].dtype == dtype
    np.testing.assert_allclose(refs[1][...], refs[0][...], atol=5e-3)
