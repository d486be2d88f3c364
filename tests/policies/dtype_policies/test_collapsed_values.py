"""Floats of a batch that a half policy would make one are told, where values are known; others are not accused."""

import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jmp_train as jt
from jmp_train.data.array_loading import array_batches

pytestmark = pytest.mark.quick

RNG = np.random.default_rng(0)
STEPS = np.arange(5000.0, 5008.0, dtype=np.float32)


@pytest.mark.parametrize(
    ("values", "dtype", "kept"),
    [
        (STEPS, "bfloat16", 1),  # 5000 is between 4992 and 5024
        (STEPS, "float16", 3),  # every fourth: 5000, 5004 and 5008
        (np.arange(1990.0, 2021.0), "bfloat16", 4),  # 1992, 2000, 2008, 2016
        (1.7e9 + np.arange(0.0, 1e5, 60), "bfloat16", 1),
        (1.7e9 + np.arange(0.0, 1e5, 60), "float16", "infinite"),
        (101325 + 100 * RNG.standard_normal(64), "bfloat16", None),  # pascals, no whole numbers
        (np.stack([RNG.standard_normal(31), np.arange(1990.0, 2021.0)], 1), "bfloat16", 4),
    ],
)
def test_what_collapses(values: np.ndarray, dtype: str, kept: int | str | None) -> None:
    values = values.astype(np.float32)
    for leaf in (values, jnp.asarray(values)):
        (text,) = jt.policies.collapse_report({"t": leaf}, f"mixed_{dtype}").values()
        assert text.endswith(f"in {dtype}") and f"become {kept or ''}" in text
        assert text.startswith("column 1: ") == (values.ndim == 2)


@pytest.mark.parametrize(
    "values",
    [
        RNG.standard_normal((64, 8, 8, 3)).astype(np.float32),
        RNG.standard_normal((20000, 4)).astype(np.float32),
        np.arange(257.0, dtype=np.float32),
        np.array([0.0, -1e9], np.float32),  # a mask: two values stay two
        np.repeat(np.float32(1e6 + 1), 8),  # one value
        np.array([], np.float32),
        np.array([np.nan, 1.0, np.inf], np.float32),
        np.arange(100000),  # integers are not cast
        STEPS.astype(np.float16),  # the user's own
        RNG.uniform(0, 1, 4096).astype(np.float32),
    ],
)
def test_what_does_not_collapse(values: np.ndarray) -> None:
    assert jt.policies.collapse_report({"x": values}, "mixed_bfloat16") == {}
    assert jt.policies.collapse_report({"x": STEPS}, "float32") == {}
    assert jt.policies.collapse_report({"x": STEPS}, "autocast_bfloat16") == {}


def told(fn: Callable[[], Any]) -> list[str]:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always", jt.policies.CollapsedValuesWarning)
        fn()
    return [str(w.message) for w in seen if w.filename == __file__]


def test_eager_steps_and_functions_say_it_once_and_traced_ones_cannot() -> None:
    batch = {"t": jnp.asarray(STEPS)}

    def loss_fn(w: jax.Array, batch: Any) -> jax.Array:
        return (w * batch["t"]).astype(jnp.float32).mean()

    optimizer = optax.sgd(0.0)
    state = jt.TrainState.create(jnp.ones(()), optimizer)

    def step() -> jt.steps.TrainStep:
        return jt.train_step(jt.stateless(loss_fn), optimizer, policy="mixed_bfloat16")

    eager = step()
    (text,) = told(lambda: eager(state, batch))
    assert "'batch/t': 8 distinct numbers from 5000 to 5007 become 1 in bfloat16" in text
    assert 'policy="autocast_bfloat16"' in text
    assert not told(lambda: eager(state, batch))
    assert not told(lambda: jax.eval_shape(step(), state, batch))

    mesh = jax.sharding.Mesh(jax.devices()[:2], "data")
    parallel = jt.data_parallel(step(), mesh)
    assert len(told(lambda: parallel(state, batch))) == 1
    assert not told(lambda: parallel(state, batch))

    policy = jt.get_policy("mixed_float16")
    assert len(told(lambda: jt.apply_policy(loss_fn, policy)(jnp.ones(()), batch))) == 1
    value_and_grad = jt.scaled_value_and_grad(loss_fn, policy)
    assert len(told(lambda: value_and_grad(jt.NoOpLossScale(), jnp.ones(()), batch))) == 1


def test_values_that_a_jitted_function_closes_over_are_known() -> None:
    held = jnp.asarray(STEPS)
    step = jt.apply_policy(lambda w, t: jnp.sum(w * t), "mixed_bfloat16")
    with pytest.warns(jt.policies.CollapsedValuesWarning, match="become 1"):
        jax.jit(lambda w: step(w, held))(jnp.float32(1))


def test_the_loader_looks_at_examples_from_all_over_the_data() -> None:
    data = {"t": np.arange(64, dtype=np.int32), "x": RNG.standard_normal(64).astype(np.float32)}

    def prepare(examples: Any) -> Any:
        return {**examples, "t": examples["t"].astype(np.float32) * 101}

    def batches(**options: Any) -> Callable[[], Any]:
        return lambda: array_batches(data, 16, **options)

    (text,) = told(batches(prepare=prepare, policy="mixed_bfloat16"))
    assert "'t': 16 distinct numbers from 0 to 6060, of which bfloat16 rounds 11" in text
    assert not told(batches(prepare=prepare, policy=jt.get_policy("autocast_bfloat16")))
    assert not told(batches(prepare=prepare))
    assert not told(batches(policy="mixed_bfloat16"))
    augment = batches(augment=lambda rows, seeds: prepare(rows), policy="mixed_bfloat16")
    assert len(told(augment)) == 1


def test_integers_are_named_apart_and_so_is_what_autocast_does_not_cast() -> None:
    batch = {"t": STEPS, "position": np.arange(65536, 65600), "pixel": np.arange(256), "half": STEPS.astype(np.float16)}
    cast = jt.check_casts("mixed_bfloat16", batch)
    assert [(loss.path, loss.is_cast) for loss in cast] == [("position", False), ("t", True)]
    assert cast[0].evidence == "64 distinct numbers from 65536 to 65599 become 1 in bfloat16"
    assert str(cast[0]).endswith("become 1 in bfloat16, if the model casts it")
    assert [loss.is_cast for loss in jt.check_casts("autocast_bfloat16", batch)] == [False, False]
    assert jt.check_casts("float32", batch) == ()
    assert (
        jt.check_casts("mixed_float16", {"label": np.arange(10), "mask": np.ones(4, bool), "n": np.int32(70000)}) == ()
    )


def test_indices_of_graphs_are_passed_over() -> None:
    ids = np.arange(20_000)
    nodes, edges = {"id": ids}, {"time": (1.6e9 + ids).astype(np.float32)}
    for formats in (("coo", "csr"), ("mailbox",)):
        graph = jt.graphs.from_edges(ids, ids[::-1], 20_000, nodes, edges, formats=formats)
        losses = jt.check_casts("mixed_float16", {"graph": graph})
        assert [loss.path for loss in losses] == ["graph/nodes/id", "graph/edges/time"]
    losses = jt.check_casts("mixed_float16", {"graph": jt.graphs.to_jraph(graph)})
    assert {loss.path for loss in losses} == {"graph/nodes/id", "graph/edges/time"}


def test_a_diagnosis_names_the_argument_that_collapses() -> None:
    def embedded(t: jax.Array) -> jax.Array:
        return jnp.sin(t.astype(jnp.bfloat16) / 100)

    report = jt.diagnose(embedded, jnp.arange(65536, 65600))
    assert report.collapsed == {"0": "64 distinct numbers from 65536 to 65599 become 1 in bfloat16"}
    assert (
        "the argument '0': 64 distinct numbers from 65536 to 65599 become 1 in bfloat16" in report.problems[0].evidence
    )
