"""Shardings of a state: by paths, by shapes, and what the optimizer keeps of a parameter beside it."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from promotion import promoting, relaxed

import jmp_train as jt

pytestmark = [pytest.mark.quick, pytest.mark.newest]

MESH = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))


def specs(shardings: Any) -> dict[str, tuple[Any, ...]]:
    leaves = jax.tree_util.tree_leaves_with_path(shardings)
    return {jax.tree_util.keystr(path): tuple(leaf.spec) for path, leaf in leaves}


def make_state(optimizer: Any, params: Any) -> jt.TrainState:
    return jt.TrainState.create(params, optimizer, rng=jax.random.key(0))


def test_the_optimizers_copies_lie_where_the_parameter_does() -> None:
    """In any nesting of wrappers; `w` is the end of two paths, and the longest counts."""
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(optax.constant_schedule(1e-3)))
    tx = jt.with_master_weights(jt.with_loss_scale(optax.MultiSteps(tx, 2), jt.torch_loss_scale()))
    params = {"w": jnp.ones((4, 8)), "layer": {"w": jnp.ones((4, 8)), "b": jnp.ones(8)}}
    state = make_state(tx, params)
    rules = {"layer/w": P(None, "model"), "layer/b": P("model"), "w": P("data")}
    where = jt.parallel.state_shardings(state, MESH, params=jt.parallel.specs_by_path(params, rules))
    found = specs(where.opt_state)
    for name, spec in (("['layer']['w']", (None, "model")), ("['layer']['b']", ("model",)), ("['w']", ("data",))):
        copies = {path: s for path, s in found.items() if path.endswith(name)}
        if name == "['w']":
            copies = {path: s for path, s in copies.items() if "['layer']" not in path}
        assert len(copies) == 4  # master weights, two moments, accumulated gradient
        assert set(copies.values()) == {spec}
    assert sum(spec != () for spec in found.values()) == 12
    assert set(specs((where.rng, where.step)).values()) == {()}


def test_adafactors_rows_and_columns_are_sharded_by_their_shapes_alone() -> None:
    state = make_state(optax.adafactor(1e-3), {"w": jnp.ones((128, 256))})
    where = jt.zero1_shardings(state, MESH, params={"w": P(None, "model")}, min_size=128)
    pairs = zip(*map(jax.tree.leaves, (state.opt_state, where.opt_state)), strict=True)
    found = {(x.shape, tuple(sharding.spec)) for x, sharding in pairs}
    assert ((128,), ("data",)) in found
    assert ((256,), ("data",)) in found


@settings(deadline=None)
@given(shape=st.lists(st.integers(1, 24), max_size=3).map(tuple), min_size=st.integers(0, 200), model=st.booleans())
def test_the_rule_on_shapes(shape: tuple[int, ...], min_size: int, model: bool) -> None:
    """The longest dimension that four divides and that is whole, of arrays that are large enough."""
    given_spec = P("model") if model and shape and shape[0] % 2 == 0 else P()
    struct = jax.ShapeDtypeStruct(shape, jnp.float32)
    state = jt.TrainState(struct, struct, None, None, jax.ShapeDtypeStruct((), jnp.int32))
    where = jt.fsdp_shardings(state, MESH, params=given_spec, min_size=min_size)
    entries = [*where.params.spec, *(None,) * (len(shape) - len(where.params.spec))]
    candidates = [size for i, size in enumerate(shape) if size % 4 == 0 and not (i == 0 and len(given_spec))]
    sharded = [size for size, entry in zip(shape, entries, strict=True) if entry == "data"]
    wanted = [max(candidates)] if candidates and np.prod(shape) >= min_size else []
    assert sharded == wanted
    assert tuple(given_spec) == tuple(e for e in entries[: len(given_spec)])
    assert where.opt_state.spec == where.params.spec
    where.params.shard_shape(shape)  # fails where the mesh does not divide


def test_wrong_specs_are_refused() -> None:
    params = {"w": jnp.ones((6, 8)), "b": jnp.ones(8)}
    state = make_state(optax.sgd(0.1), params)
    with pytest.raises(ValueError, match="'kernel' found no parameter; the paths are:\n  b\n  w"):
        jt.parallel.specs_by_path(params, {"kernel": P("model")})
    with pytest.raises(ValueError, match=r"params 'b' of shape \(8,\) has fewer dimensions than"):
        jt.parallel.specs_by_path(params, {"b": P(None, "model")})
    with pytest.raises(ValueError, match="axis='modle' is not one of the mesh's: 'data', 'model'"):
        jt.parallel.state_shardings(state, MESH, params={"w": P("modle"), "b": P()})
    with pytest.raises(ValueError, match=r"'w' of shape \(6, 8\) cannot .* 6 must be a multiple of 4"):
        jt.parallel.state_shardings(state, MESH, params={"w": P("data"), "b": P()})
    with pytest.raises(ValueError, match=r"'w' .* 6 must be a multiple of 8 devices"):
        jt.parallel.state_shardings(state, MESH, params={"w": P(("data", "model")), "b": P()})
    with pytest.raises(ValueError, match="must have a PartitionSpec for each parameter"):
        jt.parallel.state_shardings(state, MESH, params={"w": P()})
    with pytest.raises(ValueError, match="params 'b' must be a PartitionSpec, got 'model'"):
        jt.parallel.state_shardings(state, MESH, params={"w": P(), "b": "model"})
    with pytest.raises(ValueError, match="axis='rows' is not one of the mesh's"):
        jt.zero1_shardings(state, MESH, "rows")
    with pytest.raises(TypeError, match="state must be a TrainState, got dict"):
        jt.fsdp_shardings(params, MESH)  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match=r"mesh must be a .*Mesh, got tuple"):
        jt.fsdp_shardings(state, ("data",))  # pyright: ignore[reportArgumentType]


def test_rules_take_tuples_and_are_named_where_they_are_wrong() -> None:
    params = {"up": {"kernel": jnp.ones((6, 8))}}
    specs = jt.parallel.specs_by_path(params, {"up": (None, ("data", "model"))})
    assert specs["up"]["kernel"] == P(None, ("data", "model"))
    with pytest.raises(ValueError, match=r"rule 'up/\(' is not a regular expression: missing \)"):
        jt.parallel.specs_by_path(params, {"up/(": P()})
    rules: Any
    for rules, text in (
        ([("up", P())], "rules must be a dict with regular expressions as keys, got list"),
        ({("up", "kernel"): P()}, r"rule \('up', 'kernel'\) is not a regular expression"),
        ({"up": "model"}, "rule 'up' must have a PartitionSpec, or a tuple .*, got 'model'"),
        ({"up": (0, "model")}, r"rule 'up' must have a PartitionSpec, .* got \(0, 'model'\)"),
        ({"up": None}, "rule 'up' must have a PartitionSpec, .* got None"),
    ):
        with pytest.raises(TypeError, match=text):
            jt.parallel.specs_by_path(params, rules)


class Boxed(nn.Module):
    """Two layers whose kernels say that they are sharded over "model"; the second contracts two axes."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        init = nn.initializers.lecun_normal()
        columns = nn.with_partitioning(init, (None, "model", None))
        x = nn.relu(nn.DenseGeneral((4, 8), kernel_init=columns)(x))
        rows = nn.with_partitioning(init, ("model", None, None))
        return nn.DenseGeneral(3, axis=(-2, -1), kernel_init=rows)(x)


def in_columns(shardings: Any) -> Any:
    return shardings.params["params"]["DenseGeneral_0"]["kernel"]


@pytest.mark.full
def test_linen_boxes_train_as_under_plain_jit() -> None:
    """In every form, and `shardings` of any shape: flax's own, one for all, specs, made of the boxes."""
    x = jnp.asarray(np.random.default_rng(0).normal(size=(16, 4)), jnp.float32)
    optimizer = relaxed(optax.adam(1e-2))
    variables = Boxed().init(jax.random.key(0), x)
    model: Any = Boxed()
    loss = promoting(lambda params, x: (model.apply(params, x) ** 2).mean())
    state = make_state(optimizer, variables)
    step = jt.train_step(jt.stateless(loss), optimizer)
    wanted, metrics = jax.jit(step)(state, x)

    of_boxes = jt.parallel.state_shardings(state, MESH)
    assert in_columns(of_boxes).value.spec == P(None, "model", None)
    assert in_columns(of_boxes).value == in_columns(
        jt.parallel.state_shardings(state, MESH, params=nn.get_partition_spec(state.params))
    ).value  # fmt: skip
    of_both = jt.fsdp_shardings(state, MESH, min_size=16)
    assert in_columns(of_both).value.spec == P(None, "model", "data")
    given = {
        "flax": nn.get_sharding(state, MESH),
        "specs": nn.get_partition_spec(state),
        "one": NamedSharding(MESH, P()),
        "boxes": of_boxes,
        "fsdp": of_both,
    }
    runs = {name: jt.sharded_step(step, MESH, shardings=where) for name, where in given.items()}
    runs |= {"whole": jt.sharded_step(step, MESH), "data": jt.data_parallel(step, MESH)}
    for name, run in runs.items():
        after, got = run(state, x)
        np.testing.assert_allclose(got["loss"], metrics["loss"], rtol=1e-6)
        for a, b in zip(*map(jax.tree.leaves, jax.device_get((after.params, wanted.params))), strict=True):
            np.testing.assert_allclose(a, b, rtol=0, atol=1e-5)
        kernel = in_columns(after).value
        if name in given:
            spec = {"one": P(), "fsdp": P(None, "model", "data")}.get(name, P(None, "model", None))
            assert kernel.sharding.is_equivalent_to(NamedSharding(MESH, spec), 3)


def test_nnx_metadata_and_logical_names_say_where_parameters_lie() -> None:
    init = nnx.initializers.lecun_normal()
    with nnx.use_eager_sharding(False):
        layer = nnx.Linear(4, 8, rngs=nnx.Rngs(0), kernel_init=nnx.with_partitioning(init, (None, "model")))
    definition, params = nnx.split(layer)
    optimizer = optax.sgd(0.1)
    state = make_state(optimizer, params)
    where = jt.parallel.state_shardings(state, MESH)
    assert set(specs(where.params).values()) == {(None, "model"), ()}
    loss = jt.stateless(lambda params, x: (nnx.merge(definition, params)(x) ** 2).mean())
    step, x = jt.train_step(loss, optimizer), jnp.ones((8, 4))
    wanted, _ = jax.jit(step)(state, x)
    after, _ = jt.sharded_step(step, MESH, shardings=where)(state, x)
    kernels = jax.device_get((after.params["kernel"][...], wanted.params["kernel"][...]))
    np.testing.assert_allclose(*kernels, rtol=1e-6)

    logical = nn.LogicallyPartitioned(jnp.ones((4, 8)), ("embed", "mlp"))
    state = make_state(optimizer, {"w": logical})
    with nn.logical_axis_rules([("embed", None), ("mlp", "model")]):
        where = jt.parallel.state_shardings(state, MESH)
    assert tuple(where.params["w"].value.spec) == (None, "model")
    boxed = nn.Partitioned(jnp.ones((4, 8)), ("embed", None))
    with pytest.raises(ValueError, match="axis='embed' is not one of the mesh's: 'data', 'model'"):
        jt.parallel.state_shardings(make_state(optimizer, {"w": boxed}), MESH)


def test_shardings_that_do_not_fit_are_named() -> None:
    optimizer = optax.sgd(0.1)
    step = jt.train_step(jt.stateless(lambda params, x: (params["w"] * x).mean()), optimizer)
    state = make_state(optimizer, {"w": jnp.ones((6, 8))})
    other = jt.parallel.state_shardings(make_state(optimizer, {"v": jnp.ones((6, 8))}), MESH)
    for shardings, message in (
        (P("data"), r"shardings 'params/w' of shape \(6, 8\) cannot be sharded by"),
        (other, "shardings must have a sharding for each array"),
    ):
        run = jt.sharded_step(step, MESH, shardings=shardings)
        with pytest.raises(ValueError, match=message):
            run(state, jnp.ones((8, 8)))


def test_a_state_goes_where_its_shardings_say() -> None:
    state = make_state(optax.adam(1e-3), {"w": jnp.ones((8, 16))})
    where = jt.fsdp_shardings(state, MESH, min_size=16)
    placed = jt.distributed.broadcast_state(state, shardings=where)
    for x, sharding in zip(jax.tree.leaves(placed), jax.tree.leaves(where), strict=True):
        assert x.sharding.is_equivalent_to(sharding, x.ndim)
    with pytest.raises(ValueError, match="mesh and shardings exclude each other"):
        jt.distributed.broadcast_state(state, MESH, shardings=where)
