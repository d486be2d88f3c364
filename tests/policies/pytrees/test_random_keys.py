import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jmp_train.policies.pytrees import is_key, is_key_or_data

pytestmark = pytest.mark.quick

KEY, DATA = jax.random.key(0), jax.random.PRNGKey(0)


@pytest.mark.parametrize(
    ("leaf", "typed", "either"),
    [
        (KEY, True, True),
        (jax.random.split(KEY), True, True),
        (jax.eval_shape(lambda: KEY), True, True),
        (DATA, False, True),
        (np.asarray(DATA), False, True),
        (jnp.arange(2), False, False),
        (2, False, False),
        (None, False, False),
        ("key", False, False),
    ],
)
def test_which_leaves_are_keys(leaf: object, typed: bool, either: bool) -> None:
    assert (is_key(leaf), is_key_or_data(leaf)) == (typed, either)


def test_keys_within_a_trace() -> None:
    seen: list[tuple[bool, bool]] = []
    jax.make_jaxpr(lambda *leaves: seen.extend((is_key(x), is_key_or_data(x)) for x in leaves))(KEY, DATA, 1.0)
    assert seen == [(True, True), (False, True), (False, False)]
