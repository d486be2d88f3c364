"""Arguments of a wrong kind give an error that names the argument, and not one of numpy, jax or Python's internals."""

import math
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jmp_train as jt
from jmp_train import graphs

pytestmark = [pytest.mark.quick, pytest.mark.filterwarnings("ignore::UserWarning")]

ARRAYS = {"numpy": np.ones(2, np.float32), "jax": jnp.ones(2), "traced": "a tracer"}
TEXTS = {"bytes": b"x", "empty": "", "none": None}
NUMBERS = {"nan": math.nan, "inf": math.inf, "-1": -1, "True": True}
WRONG: dict[str, dict[str, Any]] = {
    "flag": ARRAYS | TEXTS | {"nan": math.nan, "-1": -1, "0-d": jnp.float32(2)},
    "flag or None": ARRAYS | {"bytes": b"x", "nan": math.nan, "-1": -1},
    "number": ARRAYS | TEXTS | {"nan": math.nan},
    "count": ARRAYS | TEXTS | NUMBERS | {"float": np.float32(2)},
    "limit": ARRAYS | TEXTS | {"nan": math.nan, "-1": -1, "True": True},
    "integer": ARRAYS | TEXTS | {"nan": math.nan, "float": np.float32(2)},
    "word": ARRAYS | TEXTS | NUMBERS,
    "path": ARRAYS | TEXTS | NUMBERS,
    "names": ARRAYS | {"nan": math.nan, "-1": -1, "bytes": b"x"},
}
Call = Callable[[Any], Any]


def loss(params: Any, batch: Any) -> Any:
    return (params * batch).mean()


def task(**given: Any) -> jt.Task:
    own: dict[str, Any] = {"loss_fn": jt.stateless(loss), "optimizer": optax.sgd(0.1), "train": {"x": np.ones(4)}}
    return jt.Task(init=lambda key: (jnp.ones(2), None), **own, **given)


GRAPH = graphs.from_edges([0, 1], [1, 0], 2)
STATE = jt.TrainState.create(jnp.ones(2), jt.with_loss_scale(optax.sgd(0.1), jt.StaticLossScale(8.0)))
# What is wanted, the argument, and a call with it.
CALLS: list[tuple[str, str, Call]] = [
    ("number", "period", lambda x: jt.DynamicLossScale(8.0, period=x)),
    ("number", "factor", lambda x: jt.DynamicLossScale(8.0, factor=x)),
    ("number", "min_loss_scale", lambda x: jt.DynamicLossScale(8.0, min_loss_scale=x)),
    ("number", "max_loss_scale", lambda x: jt.DynamicLossScale(8.0, max_loss_scale=x)),
    ("count", "hysteresis", lambda x: jt.DynamicLossScale(8.0, hysteresis=x)),
    ("flag", "consecutive_hysteresis", lambda x: jt.DynamicLossScale(8.0, consecutive_hysteresis=x)),
    ("count", "growth_interval", lambda x: jt.torch_loss_scale(growth_interval=x)),
    ("number", "init_scale", lambda x: jt.torch_loss_scale(init_scale=x)),
    ("number", "loss_scale", lambda x: jt.apex_loss_scale(x)),
    ("flag", "enabled", lambda x: jt.torch_loss_scale(enabled=x)),
    ("flag", "enabled", lambda x: jt.autocast(jnp.sin, enabled=x)),
    ("word", "rule", lambda x: jt.autocast_as(x)),
    ("word", "primitives", lambda x: jt.AutocastRules(primitives=(("exp", x),))),
    ("names", "paths", lambda x: jt.AutocastRules(paths=x)),
    ("word", "fp8_format", lambda x: jt.DelayedScaling(fp8_format=x)),
    ("word", "mode", lambda x: jt.amp_mode(x)),
    ("word", "rounding", lambda x: jt.with_kahan(optax.sgd(0.1), rounding=x)),
    ("word", "rounding", lambda x: jt.with_state_dtypes(optax.sgd(0.1), {".*": "bfloat16"}, rounding=x)),
    ("limit", "stop_after", lambda x: jt.check_progress(STATE.opt_state, stop_after=x)),
    ("number", "sigma", lambda x: jt.spikes(sigma=x)),
    ("count", "window", lambda x: jt.spikes(window=x)),
    ("names", "axis_names", lambda x: jt.all_finite(jnp.ones(2), x)),
    ("names", "axis_names", lambda x: jt.policies.pvary(jnp.ones(2), x)),
    ("flag", "has_aux", lambda x: jt.scaled_value_and_grad(loss, has_aux=x)),
    ("flag", "has_aux", lambda x: jt.scaled_grad(loss, has_aux=x)),
    ("flag", "has_aux", lambda x: jt.nnx_value_and_grad(loss, has_aux=x)),
    ("flag or None", "has_aux", lambda x: jt.stateless(loss, has_aux=x)),
    ("flag", "has_aux", lambda x: jt.weighted(loss, has_aux=x)),
    ("names", "watch", lambda x: jt.train_step(jt.stateless(loss), optax.sgd(0.1), watch=x)),
    ("flag", "higher_is_better", lambda x: task(higher_is_better=x)),
    ("flag", "shards_shared", lambda x: task(shards_shared=x)),
    ("flag", "operations", lambda x: jt.parity(jnp.log, jnp.log, jnp.full(2, 0.5), operations=x)),
    ("path", "directory", lambda x: jt.CheckpointStore(x)),
    ("flag", "read_only", lambda x: jt.CheckpointStore("unused", read_only=x)),
    ("path", "directory", lambda x: jt.SkipRecorder(x)),
    ("flag", "wait", lambda x: jt.SkipRecorder("unused", wait=x)),
    ("flag", "save_state", lambda x: jt.SkipRecorder("unused", save_state=x)),
    ("path", "path", lambda x: jt.load_weights(x, {"w": jnp.ones(2)})),
    ("path", "path", lambda x: jt.save_weights(x, {"w": jnp.ones(2)})),
    ("path", "path", lambda x: jt.load_capsule(x, STATE)),
    ("path", "path", lambda x: jt.AutocastRules.load(x)),
    ("path", "path", lambda x: jt.AutocastRules().save(x)),
    ("path", "path", lambda x: graphs.save_graphs(x, GRAPH)),
    ("path", "path", lambda x: graphs.load_graphs(x)),
    ("path", "data_dir", lambda x: graphs.read_reddit(x)),
    ("path", "data_dir", lambda x: graphs.read_planetoid(x)),
    ("names", "labels", lambda x: graphs.save_graphs("unused", GRAPH, labels=x)),
    ("names", "formats", lambda x: graphs.from_edges([0], [1], 2, formats=x)),
    ("integer", "seed", lambda x: graphs.rand_graph(2, 2, seed=x)),
    ("number", "alpha", lambda x: graphs.appnp_conv(GRAPH, jnp.ones(2), k=1, alpha=x)),
    ("number", "edge_dropout", lambda x: graphs.appnp_conv(GRAPH, jnp.ones(2), k=1, edge_dropout=x)),
    ("word", "norm", lambda x: graphs.appnp_conv(GRAPH, jnp.ones(2), k=1, norm=x)),
    ("word", "norm_by", lambda x: graphs.edge_softmax(GRAPH, jnp.ones(2), norm_by=x)),
    ("flag", "keep_edge_ids", lambda x: graphs.host_edges([0], [1], 2, keep_edge_ids=x)),
    ("integer", "num_threads", lambda x: jt.data.array_batches({"x": np.ones(4)}, 2, num_threads=x)),
    ("integer", "prefetch", lambda x: jt.data.array_batches({"x": np.ones(4)}, 2, prefetch=x)),
]  # fmt: skip


@pytest.mark.quick_cases(15)
@pytest.mark.parametrize(("wanted", "argument", "call"), CALLS)
def test_the_error_names_the_argument(
    wanted: str, argument: str, call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    unnamed = []
    for kind, value in WRONG[wanted].items():
        try:
            if kind == "traced":
                jax.make_jaxpr(lambda x: (call(x), x)[1])(jnp.ones(()))
            else:
                call(value)
            said = "nothing"
        except (ValueError, TypeError) as error:
            said = f"{type(error).__name__}: {error}"
        named = re.search(rf"\b{argument}\b", said) and not re.search("truth value|ConversionError|Traced", said)
        unnamed += [] if named else [f"{kind}: {said[:100]}"]
    assert unnamed == []
    assert [*tmp_path.iterdir()] == []


def test_right_values_of_numpy_and_jax_pass() -> None:
    three: Any = np.float32(3)
    jt.DynamicLossScale(8.0, period=three, factor=jnp.float32(2), max_loss_scale=three)
    jt.StaticLossScale(three)
    jt.apex_loss_scale(three)
    jt.spikes(sigma=three)
    flags: list[tuple[Any, Any]] = [
        (three > 2, three > 4), (jnp.bool_(True), jnp.bool_(False)), (np.array(True), np.array(False)), (1, 0),
    ]  # fmt: skip
    for yes, no in flags:
        results = [jt.autocast(jnp.matmul, enabled=flag)(jnp.ones((2, 2)), jnp.ones((2, 2))) for flag in (yes, no)]
        assert [x.dtype for x in results] == [jnp.float16, jnp.float32]
    limit: Any = np.float32(np.inf)
    jt.check_progress(STATE.opt_state, stop_after=limit)
    graphs.appnp_conv(GRAPH, jnp.ones(2), k=1, alpha=three / 4)
    with jt.CheckpointStore(Path(tempfile.mkdtemp())) as store:
        assert store.steps() == []
    with pytest.raises(ValueError, match=r"^period=nan must be a number"):
        jt.DynamicLossScale(8.0, period=math.nan)
    with pytest.raises(ValueError, match=r"^loss_scale=an array of shape \(2,\) must be a number"):
        jt.StaticLossScale(jnp.ones(2))
    with pytest.raises(TypeError, match="graphs must be a sequence of graphs, got bytes"):
        graphs.stack(b"x")
