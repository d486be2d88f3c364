"""64-bit numbers of NumPy: those that do not fit are refused, floats that collapse are warned of, all others pass."""

import re
import time
import warnings
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
