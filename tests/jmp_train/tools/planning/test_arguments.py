"""The groups of a step's arguments, by names and types."""

from collections import Counter
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from flax.training import train_state

import jmp_train as jt
from jmp_train.tools.aot import shapes_of
from jmp_train.tools.planning.planner import arguments_of

pytestmark = pytest.mark.quick

PARAMS = {"dense": {"kernel": jnp.zeros((4, 2)), "bias": jnp.zeros(2)}}
STATISTICS = {"norm": {"mean": jnp.zeros(2), "var": jnp.zeros(2)}}
KEY = jax.random.key(0)
ADAM = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3))


class Carry(NamedTuple):
    params: Any
    statistics: Any
    key: Any
    opt_state: Any


def groups(state: Any) -> dict[str, str]:
    """Returns the groups of the state's leaves by their paths."""
    shapes = shapes_of(state)
    leaves = jax.tree_util.tree_flatten_with_path(shapes)[0]
    paths = ["state" + jax.tree_util.keystr(path) for path, _ in leaves]
    found = arguments_of([*paths, "batch['x']"], shapes)
    assert [found[i].path for i in range(len(found))] == [*paths, "batch['x']"]
    assert found[len(paths)].group == "batch"
    return {found[i].path: found[i].group for i in range(len(paths))}


def counts(state: Any) -> dict[str, int]:
    return dict(Counter(groups(state).values()))


def test_a_train_state_with_a_loss_scale() -> None:
    optimizer = jt.with_loss_scale(ADAM, jt.torch_loss_scale())
    state = jt.TrainState.create(PARAMS, optimizer, model_state=STATISTICS, rng=KEY)
    found = groups(state)
    assert found["state.params['dense']['bias']"] == "parameters"
    assert found["state.opt_state.loss_scale.loss_scale"] == "optimizer state"
    assert found["state.model_state['norm']['var']"] == "model state"
    assert found["state.rng"] == found["state.step"] == "other arguments"
    assert counts(state)["parameters"] == counts(state)["model state"] == 2


def test_flax_train_state() -> None:
    state = train_state.TrainState.create(apply_fn=max, params=PARAMS, tx=ADAM)
    assert counts(state) == {"parameters": 2, "optimizer state": 5, "other arguments": 1}


def test_names_in_dicts_and_named_tuples() -> None:
    opt_state = ADAM.init(PARAMS)
    in_dict = {"params": PARAMS, "batch_stats": STATISTICS, "opt_state": opt_state, "rng": KEY, "step": 0}
    assert counts(in_dict) == {"parameters": 2, "model state": 2, "optimizer state": 5, "other arguments": 2}
    carry = Carry(PARAMS, STATISTICS, KEY, opt_state)
    assert counts(carry) == {"parameters": 2, "optimizer state": 5, "other arguments": 3}


def test_the_outermost_name_counts() -> None:
    state = {"opt_state": {"mu": {"params": PARAMS}}, "params": {"opt_state": {"w": jnp.zeros(2)}}}
    found = groups(state)
    assert found["state['opt_state']['mu']['params']['dense']['bias']"] == "optimizer state"
    assert found["state['params']['opt_state']['w']"] == "parameters"


def test_without_names_all_floats_next_to_the_optimizers_state_are_parameters() -> None:
    assert groups((PARAMS, optax.sgd(1e-3).init(PARAMS), KEY, jnp.int32(0))) == {
        "state[0]['dense']['bias']": "parameters",
        "state[0]['dense']['kernel']": "parameters",
        "state[2]": "other arguments",
        "state[3]": "other arguments",
    }
    assert groups((jnp.zeros(3), ADAM.init(jnp.zeros(3))))["state[0]"] == "parameters"


def test_two_models_with_two_optimizers() -> None:
    other = {"w": jnp.zeros(5)}
    state = {"generator": (PARAMS, ADAM.init(PARAMS)), "discriminator": (other, ADAM.init(other))}
    assert counts(state) == {"parameters": 3, "optimizer state": 8}


def test_wrapped_optimizers_are_one_group() -> None:
    wrapped = optax.MultiSteps(optax.inject_hyperparams(optax.adam)(learning_rate=1e-3), 2)
    masked = optax.multi_transform({"a": optax.adam(1.0), "b": optax.sgd(1.0)}, {"dense": {"kernel": "a", "bias": "b"}})
    for optimizer in (wrapped, masked):
        found = groups((PARAMS, optimizer.init(PARAMS)))
        assert {group for path, group in found.items() if path.startswith("state[1]")} == {"optimizer state"}
        assert {group for path, group in found.items() if path.startswith("state[0]")} == {"parameters"}


def test_nnx_variables_say_what_they_are() -> None:
    model = nnx.BatchNorm(3, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
    average = nnx.metrics.Average()
    expected = {"parameters": 2, "model state": 2, "optimizer state": 6, "other arguments": 2}
    assert counts((model, optimizer, average)) == expected
    assert counts(nnx.state((model, optimizer, average))) == expected


def test_without_anything_known_nothing_is_claimed() -> None:
    assert counts(PARAMS) == {"other arguments": 2}
