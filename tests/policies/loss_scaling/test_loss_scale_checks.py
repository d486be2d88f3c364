"""A loss scale of a user-defined class works wherever ours do, and what is not one is named."""

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import equinox as eqx
import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import serialization
from jax.sharding import Mesh
from pytrees import assert_bitwise_equal, poison_gradient

import jmp_train as jt
from jmp_train.policies.loss_scaling.loss_scale import is_loss_scale

pytestmark = pytest.mark.quick

MESH = Mesh(np.array(jax.devices()), ("data",))


class Additive:
    """Grows by addition and falls by multiplication: the methods, for any kind of class."""

    loss_scale: Any
    steps: Any
    growth: float

    def scale(self, tree: Any) -> Any:
        return jt.policies.scale_tree(tree, self.loss_scale)

    def unscale(self, tree: Any) -> Any:
        return jt.policies.unscale_tree(tree, self.loss_scale)

    def adjust(self, grads_finite: Any) -> Any:
        smaller = jnp.maximum(self.loss_scale / 2, 16.0)
        number = jnp.where(grads_finite, self.loss_scale + self.growth, smaller)
        return type(self)(number, self.steps + 1, self.growth)  # pyright: ignore[reportCallIssue]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class OfADataclass(Additive):
    loss_scale: Any = 8.0
    steps: Any = 0
    growth: float = dataclasses.field(default=1.0, metadata={"static": True})


@flax.struct.dataclass
class OfFlax(Additive):
    loss_scale: Any
    steps: Any
    growth: float = flax.struct.field(pytree_node=False)


class OfEquinox(eqx.Module):
    loss_scale: Any
    steps: Any
    growth: float = eqx.field(static=True)

    scale = Additive.scale
    unscale = Additive.unscale
    adjust = Additive.adjust


@jax.tree_util.register_pytree_node_class
class OfAPlainClass(Additive):
    def __init__(self, loss_scale: Any, steps: Any, growth: float) -> None:
        self.loss_scale, self.steps, self.growth = loss_scale, steps, growth

    def tree_flatten(self) -> Any:
        return (self.loss_scale, self.steps), self.growth

    @classmethod
    def tree_unflatten(cls, growth: float, leaves: Any) -> Any:
        return cls(*leaves, growth=growth)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Scheduled:
    """Has no leaf for the number, which is a property."""

    steps: Any
    overflows: Any
    schedule: Callable[[Any], Any] = dataclasses.field(metadata={"static": True})

    @property
    def loss_scale(self) -> Any:
        return jnp.maximum(jnp.ldexp(self.schedule(self.steps), -self.overflows), 2.0**-10)

    scale = Additive.scale
    unscale = Additive.unscale

    def adjust(self, grads_finite: Any) -> Any:
        overflows = self.overflows + jnp.where(grads_finite, 0, 1)
        return Scheduled(self.steps + 1, overflows, self.schedule)


def warm_up(steps: Any) -> jax.Array:
    return 64.0 + 96.0 * jnp.minimum(steps, 10).astype(jnp.float32)


USERS: dict[str, Callable[[], Any]] = {
    **{
        kind.__name__: functools.partial(kind, 64.0, 0, 8.0)
        for kind in (OfADataclass, OfFlax, OfEquinox, OfAPlainClass)
    },
    "Scheduled": lambda: Scheduled(0, 0, warm_up),
}
SCALES: dict[str, Callable[[], Any]] = {
    "none": jt.NoOpLossScale,
    "static leaf": lambda: jt.StaticLossScale(jnp.float32(8.0)),
    "dynamic": lambda: jt.DynamicLossScale(64.0, period=2),
    "megatron": lambda: jt.megatron_loss_scale(64.0, growth_interval=2, hysteresis=2),
    **USERS,
}
every_scale = pytest.mark.parametrize("name", SCALES)
users_scale = pytest.mark.parametrize("name", USERS)
FINITE = (True, True, False, True, True)


def numbers_after(scale: Any, decisions: tuple[bool, ...]) -> list[float]:
    numbers = []
    for finite in decisions:
        scale = scale.adjust(jnp.array(finite))
        numbers.append(float(scale.loss_scale))
    return numbers


def loss_fn(params: Any, batch: Any) -> jax.Array:
    w = poison_gradient(params["w"], batch["factor"][0])
    return ((batch["x"] @ w).astype(jnp.float32) ** 2).mean()


def batch(finite: bool = True) -> dict[str, jax.Array]:
    factor = 1.0 if finite else np.inf
    return {"x": jnp.full((16, 4), 0.5), "factor": jnp.full(16, factor)}


def with_scale(name: str) -> tuple[Any, jt.TrainState]:
    """Returns an optimizer with the loss scale, and its first state."""
    optimizer = jt.with_loss_scale(optax.sgd(0.1, momentum=0.9), SCALES[name]())
    return optimizer, jt.TrainState.create({"w": jnp.linspace(0.1, 0.8, 8).reshape(4, 2)}, optimizer)


@functools.cache
def run(name: str, route: str) -> tuple[Any, list[Any]]:
    optimizer, state = with_scale(name)
    step = jt.train_step(jt.stateless(loss_fn), optimizer, policy="mixed_float16")
    step = jax.jit(jt.data_parallel(step, MESH) if route == "data_parallel" else step)
    every = []
    for finite in FINITE:
        state, metrics = step(state, batch(finite))
        every.append(metrics)
    # data_parallel's first state comes from one device
    traces: Any = step._cache_size()  # pyright: ignore[reportAttributeAccessIssue]
    assert traces == (1 if route == "jit" else 2)
    return state, every


@every_scale
def test_it_is_a_loss_scale_by_what_it_has(name: str) -> None:
    scale = SCALES[name]()
    assert isinstance(scale, jt.LossScale)
    assert is_loss_scale(scale)
    assert is_loss_scale(jax.tree.map(lambda _: object(), scale))  # shapes, shardings, masks
    assert not is_loss_scale(type(scale))


@every_scale
def test_gradients_are_scaled_by_its_number(name: str) -> None:
    scale = SCALES[name]()
    loss, grad = jax.jit(jt.scaled_value_and_grad(jnp.sin))(scale, jnp.float32(1.0))
    np.testing.assert_allclose(loss, np.sin(1.0), rtol=1e-6)
    np.testing.assert_allclose(grad, np.cos(1.0) * float(scale.loss_scale), rtol=1e-6)
    np.testing.assert_allclose(scale.unscale(grad), np.cos(1.0), rtol=1e-6)


@pytest.mark.quick_cases(2)
@every_scale
@pytest.mark.parametrize("route", ["jit", "data_parallel"])
def test_a_train_step_follows_its_rule(name: str, route: str) -> None:
    state, metrics = run(name, route)
    expected = numbers_after(SCALES[name](), FINITE)
    np.testing.assert_array_equal([m["loss_scale"] for m in metrics], expected)
    assert [bool(m["grads_finite"]) for m in metrics] == list(FINITE)
    assert int(metrics[-1]["skipped_steps"]) == 1
    assert float(jt.get_loss_scale(state.opt_state).loss_scale) == expected[-1]
    plain, _ = run("none", route)
    np.testing.assert_allclose(state.params["w"], plain.params["w"], rtol=0, atol=1e-3)


@every_scale
def test_it_is_set_by_another_of_its_kind(name: str) -> None:
    other = SCALES[name]().adjust(jnp.array(False))
    found = jt.get_loss_scale(jt.set_loss_scale(with_scale(name)[1], other))
    assert float(found.loss_scale) == float(other.loss_scale)
    assert type(found) is type(other)


@users_scale
def test_a_user_scale_of_another_setting_is_refused(name: str) -> None:
    _, state = with_scale(name)
    kind = type(USERS[name]())
    with pytest.raises(ValueError, match=rf"a {kind.__name__}, not a NoOpLossScale"):
        jt.set_loss_scale(state, jt.NoOpLossScale())
    other: Any = kind(0, 0, optax.constant_schedule(8.0)) if kind is Scheduled else kind(64.0, 0, 4.0)
    named = {"Scheduled": "schedule=", "OfAPlainClass": r"8\.0.*, not .*4\.0"}
    with pytest.raises(ValueError, match=named.get(name, r"growth=8\.0, not 4\.0")):
        jt.set_loss_scale(state, other)


@pytest.mark.quick_cases(2)
@every_scale
def test_a_checkpoint_keeps_it(name: str, tmp_path: Path) -> None:
    state, _ = run(name, "jit")
    _, fresh = with_scale(name)
    with jt.CheckpointStore(tmp_path) as store:
        store.save(1, state)
        _, restored = store.restore(fresh)
    assert_bitwise_equal(restored, state)
    assert type(jt.get_loss_scale(restored.opt_state)) is type(SCALES[name]())


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize("name", [name for name in SCALES if name not in USERS] + ["OfFlax"])
def test_flax_serializes_it(name: str) -> None:
    state, _ = run(name, "jit")
    _, fresh = with_scale(name)
    assert_bitwise_equal(serialization.from_bytes(fresh, serialization.to_bytes(state)), state)


@users_scale
def test_it_is_one_of_several(name: str) -> None:
    scales = jt.policies.PerLossScale((USERS[name](), jt.torch_loss_scale(4.0)))
    optimizer: Any = jt.with_loss_scale(optax.sgd(1.0), scales)
    state = optimizer.init(jnp.ones(()))
    first, second = jnp.array(float(USERS[name]().loss_scale)), jnp.array(4.0)
    updates, state = optimizer.update((first, second), state, jnp.ones(()))
    assert float(updates) == -2.0
    _, state = optimizer.update((jnp.array(jnp.inf), second), state, jnp.ones(()))
    assert float(jt.get_loss_scale(state, loss_id=1).loss_scale) == 4.0
    assert type(jt.get_loss_scale(state, loss_id=0)) is type(USERS[name]())
    assert int(state.skipped_steps) == 1


@users_scale
def test_how_far_it_can_fall_is_found_by_trial(name: str) -> None:
    # From 64 to 16 by halves; from 1024 at the schedule's end to 2**-10.
    assert jt.policies.skips_to_floor(USERS[name]()) == (2 if name != "Scheduled" else 20)


# --- what is not one ---------------------------------------------------------------------------


class WithoutTwo:
    loss_scale = 8.0

    def scale(self, tree: Any) -> Any:
        return tree


@dataclasses.dataclass(frozen=True)
class NotRegistered(Additive):
    loss_scale: Any = 8.0


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Wrong(Additive):
    """Its `adjust` returns what `made` makes of it."""

    loss_scale: Any = 8.0
    steps: Any = 0
    made: Any = dataclasses.field(default=None, metadata={"static": True})

    def adjust(self, grads_finite: Any) -> Any:
        del grads_finite
        return self.made(self)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class FunctionLeaf(Additive):
    loss_scale: Any
    schedule: Any = len


PLACES: dict[str, Callable[[Any], Any]] = {
    "with_loss_scale": lambda scale: jt.with_loss_scale(optax.sgd(0.1), scale),
    "scaled_value_and_grad": lambda scale: jt.scaled_value_and_grad(jnp.sin)(scale, jnp.ones(())),
    "several": lambda scale: jt.with_loss_scale(optax.sgd(0.1), jt.policies.PerLossScale((jt.NoOpLossScale(), scale))),
    "set": lambda scale: jt.set_loss_scale(with_scale("none")[1], scale),
}


@pytest.mark.parametrize(
    ("scale", "error", "message"),
    [
        (8.0, TypeError, r"must be a LossScale, got 8\.0; "),
        (None, TypeError, "must be a LossScale, got None; "),
        (WithoutTwo(), TypeError, r"whose class WithoutTwo has no unscale\(\) and adjust\(\)"),
        (NotRegistered(), TypeError, "whose class NotRegistered is not a pytree; register it, for example with"),
        (OfADataclass, TypeError, r"a class; pass an instance: OfADataclass\(\.\.\.\)"),
        (jt.NoOpLossScale, TypeError, r"a class; pass an instance: NoOpLossScale\(\.\.\.\)"),
        (FunctionLeaf(8.0), TypeError, "whose leaf 'schedule' is not a number or array; mark settings as"),
        (OfADataclass(0.0), ValueError, r"loss_scale=0\.0 must be a finite number above 0"),
        (OfADataclass(float("inf")), ValueError, "loss_scale=inf must be a finite number above 0"),
    ],
)
@pytest.mark.parametrize("place", PLACES)
def test_what_it_lacks_is_named(scale: Any, error: Any, message: str, place: str) -> None:
    with pytest.raises(error, match=message):
        PLACES[place](scale)


def test_several_in_several_are_refused() -> None:
    inner: Any = jt.policies.PerLossScale((jt.NoOpLossScale(),))
    with pytest.raises(TypeError, match="each of loss_scales must be the scale of one loss, got Per"):
        jt.with_loss_scale(optax.sgd(0.1), jt.policies.PerLossScale((inner,)))


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (lambda self: None, "Wrong.adjust must return a scale of the same structure, got"),
        (lambda self: Wrong(self.loss_scale, None, self.made), "the same structure"),
        (
            lambda self: Wrong(self.loss_scale.astype(jnp.float16), self.steps, self.made),
            r"adjust must keep shapes and dtypes; it changed 'loss_scale' from float32\[\]",
        ),
        (
            lambda self: Wrong(self.loss_scale, self.steps[None], self.made),
            r"it changed 'steps' from int32\[\] to int32\[1\]",
        ),
    ],
)
def test_a_rule_that_a_compiled_step_cannot_follow_is_named(made: Any, message: str) -> None:
    optimizer = jt.with_loss_scale(optax.sgd(0.1), Wrong(8.0, 0, made))
    state = optimizer.init(jnp.ones(2))
    with pytest.raises(TypeError, match=message):
        optimizer.update(jnp.ones(2), state, jnp.ones(2))


def test_torch_has_no_state_for_a_user_scale() -> None:
    with pytest.raises(ValueError, match=r"torch's GradScaler corresponds to a DynamicLossScale, got OfADataclass\("):
        jt.loss_scale_to_torch(OfADataclass(64.0, 0, 8.0))
