"""Where a state's arrays lie: by paths, by shapes, and what the optimizer keeps of a parameter beside it."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jmp_train as jt

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
    where = jt.state_shardings(state, MESH, params=jt.specs_by_path(params, rules))
    found = specs(where.opt_state)
    for name, spec in (
        ("['layer']['w']", (None, "model")),
        ("['layer']['b']", ("model",)),
        ("['w']", ("data",)),
    ):
        copies = {path: s for path, s in found.items() if path.endswith(name)}
        if name == "['w']":
            copies = {path: s for path, s in copies.items() if "['layer']" not in path}
        assert len(copies) == 4  # master, two moments, accumulated gradient
        assert set(copies.values()) == {spec}
    assert sum(spec != () for spec in found.values()) == 12
    assert set(specs((where.rng, where.step)).values()) == {()}


def test_adafactors_rows_and_columns_are_cut_by_their_shapes_alone() -> None:
    state = make_state(optax.adafactor(1e-3), {"w": jnp.ones((128, 256))})
    where = jt.zero1_shardings(state, MESH, params={"w": P(None, "model")}, min_size=128)
    pairs = zip(*map(jax.tree.leaves, (state.opt_state, where.opt_state)), strict=True)
    found = {(x.shape, tuple(sharding.spec)) for x, sharding in pairs}
    assert ((128,), ("data",)) in found
    assert ((256,), ("data",)) in found


@settings(deadline=None)
@given(
    shape=st.lists(st.integers(1, 24), max_size=3).map(tuple),
    min_size=st.integers(0, 200),
    model=st.booleans(),
)
def test_the_rule_on_shapes(shape: tuple[int, ...], min_size: int, model: bool) -> None:
    """The longest dimension that four divides and that is whole, of arrays that are large enough."""
    given_spec = P("model") if model and shape and shape[0] % 2 == 0 else P()
    struct = jax.ShapeDtypeStruct(shape, jnp.float32)
    state = jt.TrainState(struct, struct, None, None, jax.ShapeDtypeStruct((), jnp.int32))
    where = jt.fsdp_shardings(state, MESH, params=given_spec, min_size=min_size)
    entries = [*where.params.spec, *(None,) * (len(shape) - len(where.params.spec))]
    candidates = [
        size for i, size in enumerate(shape) if size % 4 == 0 and not (i == 0 and len(given_spec))
    ]
    cut = [size for size, entry in zip(shape, entries, strict=True) if entry == "data"]
    wanted = [max(candidates)] if candidates and np.prod(shape) >= min_size else []
    assert cut == wanted
    assert tuple(given_spec) == tuple(e for e in entries[: len(given_spec)])
    assert where.opt_state.spec == where.params.spec
    where.params.shard_shape(shape)  # fails where the mesh does not divide


def test_wrong_specs_are_refused() -> None:
    params = {"w": jnp.ones((6, 8)), "b": jnp.ones(8)}
    state = make_state(optax.sgd(0.1), params)
    with pytest.raises(ValueError, match="'kernel' found no parameter; the paths are:\n  b\n  w"):
        jt.specs_by_path(params, {"kernel": P("model")})
    with pytest.raises(ValueError, match=r"params 'b' of shape \(8,\) has fewer dimensions than"):
        jt.specs_by_path(params, {"b": P(None, "model")})
    with pytest.raises(ValueError, match="axis='modle' is none of the mesh's: 'data', 'model'"):
        jt.state_shardings(state, MESH, params={"w": P("modle"), "b": P()})
    with pytest.raises(ValueError, match=r"'w' of shape \(6, 8\) cannot .* 6 is no multiple of 4"):
        jt.state_shardings(state, MESH, params={"w": P("data"), "b": P()})
    with pytest.raises(ValueError, match=r"'w' .* 6 is no multiple of 8 devices"):
        jt.state_shardings(state, MESH, params={"w": P(("data", "model")), "b": P()})
    with pytest.raises(ValueError, match="must have a PartitionSpec for each parameter"):
        jt.state_shardings(state, MESH, params={"w": P()})
    with pytest.raises(ValueError, match="params 'b' must be a PartitionSpec, got 'model'"):
        jt.state_shardings(state, MESH, params={"w": P(), "b": "model"})
    with pytest.raises(ValueError, match="axis='rows' is none of the mesh's"):
        jt.zero1_shardings(state, MESH, "rows")
    with pytest.raises(TypeError, match="state must be a TrainState, got dict"):
        jt.fsdp_shardings(params, MESH)  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match=r"mesh must be a .*Mesh, got tuple"):
        jt.fsdp_shardings(state, ("data",))  # pyright: ignore[reportArgumentType]


def test_shardings_of_another_state_are_refused() -> None:
    tx = optax.sgd(0.1)
    state = make_state(tx, {"w": jnp.ones((8, 16))})
    other = jt.state_shardings(make_state(tx, {"v": jnp.ones((8, 16))}), MESH)
    step = jt.train_step(jt.stateless(lambda params, x: (params["w"] * x).mean()), tx)
    run = jt.sharded_step(step, MESH, shardings=other)
    with pytest.raises(ValueError, match="shardings must have a sharding for each array"):
        run(state, jnp.ones((8, 16)))


def test_a_state_goes_where_its_shardings_say() -> None:
    state = make_state(optax.adam(1e-3), {"w": jnp.ones((8, 16))})
    where = jt.fsdp_shardings(state, MESH, min_size=16)
    placed = jt.broadcast_state(state, shardings=where)
    for x, sharding in zip(jax.tree.leaves(placed), jax.tree.leaves(where), strict=True):
        assert x.sharding.is_equivalent_to(sharding, x.ndim)
    with pytest.raises(ValueError, match="mesh and shardings exclude each other"):
        jt.broadcast_state(state, MESH, shardings=where)
