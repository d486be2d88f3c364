"""Task `lm`: its sizes and its text."""

import math
from functools import partial
from typing import get_args, get_type_hints

import jax
import jax.numpy as jnp
import lm
import numpy as np
import pytest
from example_tasks import load_task

pytestmark = pytest.mark.quick


@pytest.mark.full
def test_the_sizes_are_declared_and_gpt2_small_has_its_parameters() -> None:
    assert get_args(get_type_hints(lm.Options)["model"]) == tuple(lm.RECIPES)
    counts = {}
    for name, recipe in lm.RECIPES.items():
        params, model_state = jax.eval_shape(partial(lm.init, config=recipe.config), jax.random.key(0))
        leaves = jax.tree.leaves(params)
        assert model_state == {}
        assert {x.dtype for x in leaves} == {jnp.dtype("float32")}
        counts[name] = sum(math.prod(x.shape) for x in leaves)
    assert counts == {"tiny": 820_352, "small": 9_540_480, "gpt2-small": 124_730_880}


def test_the_text_is_pythons_documentation_and_its_last_tenth_is_held_out() -> None:
    text = lm.documentation()
    assert len(text) > 300_000
    assert b'The "try" statement' in text
    task = load_task("lm")
    for data, size in ((task.train, 0.9 * len(text)), (task.test, 0.1 * len(text))):
        assert data["token"].shape == data["label"].shape == (len(data["token"]), 128)
        assert size - 130 <= data["token"].size <= size + 1
        np.testing.assert_array_equal(data["token"].ravel()[1:], data["label"].ravel()[:-1])
    begins = task.train["token"].tobytes()
    assert text.startswith(begins)
    assert text[len(begins) :].find(task.test["token"].tobytes()) <= 128
    prepared = task.prepare({name: x[:2] for name, x in task.train.items()})
    assert {x.dtype for x in prepared.values()} == {np.dtype("int32")}
    np.testing.assert_array_equal(prepared["label"], task.train["label"][:2])
