"""A state of a kind is found in any nesting, and none or several of them are an error that says where they are."""

import optax
import pytest

from jmp_train.policies.pytrees import find_nodes, only_state

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
