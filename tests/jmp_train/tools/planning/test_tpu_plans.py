"""Plans for TPUs: calls that cannot be planned, rows, and steps compiled by libtpu."""

import json
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from plan_steps import batch_of_rows, state_of_layers, tanh_loss
from promotion import relaxed

import jmp_train as jt
from jmp_train.app.cli.entry import main
from jmp_train.tools.aot import PluginError
from jmp_train.tools.planning import PlanRow, PlanSearch, Workload

pytestmark = [pytest.mark.quick, pytest.mark.timeout(500)]

WIDTH, DEPTH, ROWS = 256, 4, 1024
OPTIMIZER = relaxed(optax.adam(1e-3))
BATCH = batch_of_rows(ROWS, WIDTH)


STEP = jt.train_step(jt.stateless(tanh_loss), OPTIMIZER)
STATE = state_of_layers(OPTIMIZER, WIDTH, DEPTH)


def rows_of(device: str, policies: Any = None, **search: Any) -> list[PlanRow]:
    workload = Workload(STEP, STATE, BATCH, policies)
    return list(jt.plan(workload, device, PlanSearch(largest_batch=False, **search)).rows)


@pytest.fixture(name="no_compiler")
def fixture_no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Has `compile_program` find no compiler."""
    monkeypatch.setenv("JMP_TRAIN_CACHE", str(tmp_path))


@pytest.mark.full
def test_a_missing_compiler_is_said_with_its_command(no_compiler: None, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(PluginError, match=r"install it with jmp_train\.aot\.install_tpu_compiler\(\)"):
        rows_of("v5e:1x1")
    with jax.numpy_dtype_promotion("standard"):
        assert main(["plan", "digits", "--tpus", "v5e:1x1", "--no-largest"]) == 1
    last = capsys.readouterr().err.splitlines()[-1]
    assert re.search(r"libtpu.* is not installed for jaxlib .*; install it with jmp-train plan --install tpu$", last)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--tpus v5e:5x5", "'v5e:5x5' is no slice of TPUs: v5e has no slice of 5x5 chips"),
        ("--tpus v5e:2x2 --mesh data=2", "mesh={'data': 2} has 2 devices, but v5e:2x2 has 4"),
        ("--tpus v5e:2x2 --mesh data", "argument --mesh: 'data' is not AXIS=N, such as data=16"),
        ("--tpus v5e:2x2 --mesh data=2 data=2", "--mesh names data more than once"),
        ("--tpus v5e:1x1 --price v6e=1", "--price v6e is not planned for; it must be one of v5e"),
        ("--tpus v5e:1x1 --price v5e", "argument --price: 'v5e' is not NAME=X, such as v5e=1.2"),
        ("--devices 4 --hosts 2 --interconnect fast", "interconnect='fast' must be a bandwidth"),
        ("--devices 4 --hosts 3", "batch_size=64 must be a multiple of 12 for 12 devices on 3 hosts"),
    ],
)
def test_slices_meshes_and_clusters_that_cannot_be(
    options: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with jax.numpy_dtype_promotion("standard"):
        assert main(["plan", "digits", *options.split(), "--no-largest"]) == 2
    assert message in capsys.readouterr().err


# With the compiler


@pytest.mark.full
def test_rows_of_a_chip_and_of_four(tpu_compiler: None, tmp_path: Path) -> None:
    policies = ["float32", "mixed_bfloat16", "float16"]
    rows = rows_of("v5e:1x1", policies)
    for row in rows:
        assert row.device == "v5e:1x1"
        assert sum(row.bytes_by_kind.values()) == row.peak_bytes
        assert row.fits
    weights = 4 * DEPTH * WIDTH**2
    in_float32, in_bfloat16, in_float16 = rows
    assert in_float32.bytes_by_kind["parameters"] == in_bfloat16.bytes_by_kind["parameters"] == weights
    assert in_float16.bytes_by_kind["parameters"] == weights / 2
    assert in_float32.bytes_by_kind["batch"] == 4 * ROWS * WIDTH
    assert in_float32.costs.operations == {"f32": (3 * DEPTH - 1) * 2 * ROWS * WIDTH**2}
    plan = jt.planning.Plan(tuple(rows))
    found = json.loads(json.dumps(plan.to_json()))
    assert "what libtpu leaves to programs" in str(plan)
    assert found["rows"][0]["device"] == "v5e:1x1"


@pytest.mark.full
def test_a_slice_shares_batch_and_state(tpu_compiler: None) -> None:
    replicated, fsdp = rows_of("v5e:2x2", "float32", shardings=["replicated", "fsdp"])
    weights = 4 * DEPTH * WIDTH**2
    assert replicated.bytes_by_kind["parameters"] == weights == 4 * fsdp.bytes_by_kind["parameters"]
    assert replicated.bytes_by_kind["batch"] == 4 * ROWS * WIDTH / 4
    assert fsdp.bytes_by_kind["optimizer state"] == pytest.approx(2 * weights / 4, rel=0.01)
    sent = sum(item.sent_bytes for item in replicated.costs.communication if item.kind == "all-reduce")
    assert sent == pytest.approx(2 * 3 / 4 * weights, rel=0.01), "gradients, around a ring of four"
    assert replicated.costs.communication_seconds == pytest.approx(sent / (2 * 50e9), rel=0.02)


@pytest.mark.full
def test_the_largest_batch_of_a_chip_and_what_helps_beyond(tpu_compiler: None) -> None:
    """An example of 32 million numbers: some fit; twice as many do not, and half precision of it helps."""
    weight = jax.ShapeDtypeStruct((2**12,), jnp.float32)
    batch = {"x": jax.ShapeDtypeStruct((8, 2**13, 2**12), jnp.float32)}
    step = jt.train_step(jt.stateless(lambda w, b: ((b["x"] * w) ** 2).mean()), optax.sgd(0.1))
    state = jax.eval_shape(lambda: jt.TrainState.create(jnp.zeros(weight.shape), optax.sgd(0.1)))
    (row,) = jt.plan(Workload(step, state, batch, "float32"), "v5e:1x1").rows
    assert row.largest is not None
    assert row.largest.bytes is not None
    assert row.largest.bytes <= row.usable_bytes < row.largest.next_bytes
    an_example = 4 * 2**25
    assert row.usable_bytes // (2 * an_example) <= row.largest.size <= row.usable_bytes // an_example


RULES = {"layers/[02]": jax.P(None, "model"), "layers/[13]": jax.P("model", None)}  # columns, then rows


@pytest.mark.full
def test_a_mesh_of_two_axes_over_a_slice(tpu_compiler: None) -> None:
    """Each device has a quarter of each matrix and its moments, and a quarter of the batch."""
    mesh = {"data": 4, "model": 4}
    (row,) = rows_of("v5e:4x4", "mixed_bfloat16", mesh=mesh, shardings=RULES)
    weights = 4 * DEPTH * WIDTH**2
    assert str(row.placement).startswith("16 devices, data 4 x model 4")
    assert row.bytes_by_kind["parameters"] == weights / 4
    assert row.bytes_by_kind["optimizer state"] == pytest.approx(2 * weights / 4, rel=0.01)
    assert row.bytes_by_kind["batch"] == 4 * ROWS * WIDTH / 4
    sent = {axis: sum(c.sent_bytes for c in row.costs.communication if c.axis == axis) for axis in ("data", "model")}
    assert sent["data"] == pytest.approx(2 * 3 / 4 * weights / 4, rel=0.01), "gradients, of which each has a quarter"
    activations = 2 * (ROWS // 4) * WIDTH  # of one layer in bfloat16, which rows of columns sum or gather
    assert sent["model"] >= (DEPTH - 1) * 2 * 3 / 4 * activations
    assert {c.axis for c in row.costs.communication} == {"data", "model"}
    assert row.costs.communication_seconds == pytest.approx(max(sent.values()) / 50e9, rel=0.01)
