"""Floats of a batch that a half policy would make one are told, where values are known; others are not accused.

64-bit numbers of NumPy: those that do not fit are refused, floats that collapse are warned of, all others pass.
"""

import re
import time
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jmp_train as jt
from jmp_train import graphs
from jmp_train.data import array_batches, graph_batches
from jmp_train.policies.dtype_policies import check_narrowed

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


TIME = 1_700_000_000_123
DAY = 86_400_000


@pytest.mark.parametrize(
    ("array", "text"),
    [
        (np.array([0, TIME]), f"from 0 to {TIME}, where int32 ends at 2147483647"),
        (np.array([0, -(2**31) - 1]), "from -2147483649 to 0, where int32 begins at -2147483648"),
        (np.array([[1], [2**32]], np.uint64), "from 1 to 4294967296, where uint32 ends at 4294967295"),
    ],
)
def test_integers_that_do_not_fit_are_refused(array: np.ndarray, text: str) -> None:
    with pytest.raises(ValueError, match=re.escape("the batch has 64-bit integers that do not fit")) as found:
        check_narrowed({"x": np.ones(2), "ids": {"of": array}}, "the batch")
    assert f"'ids/of': {text}" in str(found.value)
    with jax.enable_x64(True):
        check_narrowed({"ids": array}, "the batch")


@pytest.mark.parametrize(
    "array",
    [
        np.array([TIME, TIME + DAY, TIME + 2 * DAY], np.float64),
        np.float64(TIME) + np.arange(2_000.0)[:, None] * [0, 7],
        1e9 + np.random.default_rng(0).normal(size=1_000),
    ],
)
def test_floats_that_collapse_are_warned_of(array: np.ndarray) -> None:
    with pytest.warns(jt.policies.CollapsedValuesWarning, match=r"the batch has float64 values.*\n  'time': .*float32"):
        check_narrowed({"time": array}, "the batch")
    check_narrowed({"time": array}, "the batch", floats=False)


def test_numbers_that_fit_pass_in_silence_and_quickly() -> None:
    random = np.random.default_rng(0)
    fits = {
        "limits": np.array([-(2**31), 2**31 - 1]),
        "labels": random.integers(0, 10, 1_000),
        "uint": np.array([2**32 - 1], np.uint64),
        "normal": random.normal(size=(1_000, 30)),
        "large": random.normal(size=1_000) * 1e20,
        "whole": np.arange(1_000.0),
        "mask": np.where(random.random(1_000) < 0.5, 0, -1e12),
        "missing": np.array([np.nan, 1, np.inf]),
        "constant": np.full(100, 0.1),
        "one": np.float64(1e300),
        "none": np.zeros(0),
        "text": np.array(["a", "b"]),
    }
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_narrowed(fits, "the batch")
    batch = {"x": random.normal(size=(256, 4_096)), "label": random.integers(0, 10, (256, 4_096))}

    def seconds(run: Any) -> float:
        start = time.thread_time()
        run()
        return time.thread_time() - start

    ours = min(seconds(lambda: check_narrowed(batch, "the batch")) for _ in range(7))
    copies = min(seconds(lambda: [x.astype(x.dtype.str.replace("8", "4")) for x in batch.values()]) for _ in range(7))
    assert ours < 20 * copies + 1e-3  # JAX makes such copies of them in any case


def test_features_of_graphs() -> None:
    wrong, rounded = np.array([1, 2**40]), np.array([TIME, TIME + 1_000, TIME + DAY], np.float64)
    for make in (
        lambda x: graphs.from_edges([0], [1], 2, nodes={"t": x}),
        lambda x: graphs.from_edges([0], [1], 2).with_nodes(t=x),
        lambda x: graphs.from_edges([0], [1], 2).with_nodes(t=x.tolist()),
        lambda x: graphs.from_jraph(graphs.to_jraph(graphs.from_edges([0], [1], 2))._replace(nodes={"t": x})),
    ):
        with pytest.raises(ValueError, match=r"nodes has 64-bit integers that do not fit(.|\n)*'t': from 1 to 1099511"):
            make(wrong)
        assert make(wrong // 2**20).nodes["t"].tolist() == [0, 2**20]
    with pytest.raises(ValueError, match="edges has 64-bit integers"):
        graphs.from_edges([0, 1], [1, 0], 2).with_edges(t=wrong)
    with pytest.warns(jt.policies.CollapsedValuesWarning, match=r"nodes has float64 values(.|\n)*'t'"):
        graphs.from_edges([0], [1], 3, nodes={"t": rounded})


def test_batches_of_loaders_and_steps() -> None:
    ids = np.arange(8) + 2**33
    with pytest.raises(ValueError, match=r"the batch has 64-bit integers(.|\n)*'user'"):
        next(array_batches({"user": ids, "x": np.ones(8, np.float32)}, 4))
    counts, ends = np.ones(8, np.int32), np.zeros(8, np.int32)
    data = graphs.GraphData(counts, counts, ends, ends, ends, 2, graphs={"user": ids})
    with pytest.raises(ValueError, match=r"the batch has 64-bit integers(.|\n)*'user'"):
        next(graph_batches(data, 4))

    def loss_fn(params: jax.Array, batch: Any) -> jax.Array:
        return (params * batch["x"]).mean()

    step = jt.train_step(jt.stateless(loss_fn), optax.sgd(0.1))
    state = jt.TrainState.create(jnp.ones(()), optax.sgd(0.1))
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    for run in (step, jt.data_parallel(step, mesh)):
        with pytest.raises(ValueError, match=r"the call has 64-bit integers(.|\n)*'batch/user'"):
            run(state, {"user": ids, "x": np.ones(8, np.float32)})
        run(state, {"user": ids - 2**33, "x": np.ones(8, np.float32)})
