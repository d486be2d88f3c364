"""A state of a kind is found in any nesting, and none or several of them are an error that says where they are."""

from typing import Any, NamedTuple

import equinox as eqx
import haiku as hk
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import linen, nnx

from jmp_train.policies.pytrees import find_nodes, only_state
from jmp_train.policies.pytrees.paths import named_leaves, path_name

pytestmark = pytest.mark.quick

ONE, OTHER = optax.TraceState({"w": 1}), optax.TraceState({"w": 2})
WORDS = ("trace", "traces", "optax.trace")


def test_the_only_state_of_a_kind_is_found() -> None:
    assert only_state((optax.EmptyState(), {"inner": [ONE]}), optax.TraceState, *WORDS) == ONE
    assert [x for _, x in find_nodes([ONE, (OTHER,)], optax.TraceState)] == [ONE, OTHER]


def test_no_state_and_several_are_refused() -> None:
    with pytest.raises(ValueError, match=r"^opt_state has no trace; wrap the optimizer in optax\.trace$"):
        only_state((optax.EmptyState(),), optax.TraceState, *WORDS)
    several = r"^opt_state has 2 traces, at '0', '1/0'; select one: opt_state\[\.\.\.\]\.trace$"
    with pytest.raises(ValueError, match=several):
        only_state([ONE, (OTHER,)], optax.TraceState, *WORDS)


class Point(NamedTuple):
    x: Any
    y: Any


def names(tree: Any) -> list[str]:
    return [name for name, _ in named_leaves(tree)]


def test_containers() -> None:
    tree = {"a": [1, Point(2, {"b": (3,)})]}
    assert names(tree) == ["a/0", "a/1/x", "a/1/y/b/0"]
    assert names(5) == [""]
    assert [leaf for _, leaf in named_leaves(tree)] == [1, 2, 3]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_libraries_spell_a_parameter_alike() -> None:
    class Net(nnx.Module):
        def __init__(self) -> None:
            self.norm = nnx.LayerNorm(2, rngs=nnx.Rngs(0))

    assert "norm/scale" in names(nnx.state(Net()))
    variables = linen.LayerNorm(name="norm").init(jax.random.key(0), jnp.ones(2))
    assert "params/scale" in names(variables)
    assert names(eqx.filter({"norm": eqx.nn.LayerNorm(2)}, eqx.is_array)) == [
        "norm/weight", "norm/bias",
    ]  # fmt: skip
    net = hk.transform(lambda x: hk.LayerNorm(-1, True, True, name="norm")(x))
    assert "norm/scale" in names(net.init(jax.random.key(0), jnp.ones(2)))


def test_a_lone_value_keeps_its_name() -> None:
    assert path_name((jax.tree_util.GetAttrKey("value"),)) == "value"
