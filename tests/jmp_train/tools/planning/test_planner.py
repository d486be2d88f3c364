"""Plans of small steps, compiled for GPUs that are not here, and all calls that cannot be planned."""

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from flax.training import train_state
from plan_steps import batch_of_rows, state_of_layers, tanh_loss
from promotion import relaxed

import jmp_train as jt
from jmp_train.tools.aot import GPU, GPUS, ExportedProgram, PluginError, read_gpus
from jmp_train.tools.planning import Allowances, Machine, Placement, PlanRow, PlanSearch, Workload
from jmp_train.tools.planning.workloads import in_precision

pytestmark = [pytest.mark.quick, pytest.mark.timeout(500)]

WIDTH, DEPTH, ROWS = 256, 6, 1024
OPTIMIZER = relaxed(optax.adam(1e-3))
SCALED = jt.with_loss_scale(OPTIMIZER, jt.torch_loss_scale())
BATCH = batch_of_rows(ROWS, WIDTH)
SAVED = "saved for the backward pass"


STEP = jt.train_step(jt.stateless(tanh_loss), SCALED)
PLAIN_STEP = jt.train_step(jt.stateless(tanh_loss), OPTIMIZER)


STATE, PLAIN_STATE = (state_of_layers(optimizer, WIDTH, DEPTH) for optimizer in (SCALED, OPTIMIZER))


def rows_of(
    *given: Any, machines: Any = "V100-16GB", search: PlanSearch | None = None, **options: Any
) -> list[PlanRow]:
    return list(jt.plan(Workload(*given, **options), machines, search or PlanSearch(largest_batch=False)).rows)


def assert_adds_up(row: PlanRow) -> None:
    assert sum(buffer.n_bytes for buffer in row.buffers) == row.peak_bytes == sum(row.bytes_by_kind.values())
    assert row.headroom_bytes == row.usable_bytes - row.peak_bytes
    assert row.fits == (row.headroom_bytes >= 0)


# Calls that cannot be planned


def never(state: Any, batch: Any) -> Any:
    raise AssertionError("it is not called")


@pytest.mark.parametrize(
    ("given", "kind", "message"),
    [
        ({"policies": "float33"}, ValueError, "float33"),
        ({"policies": ["float32", "torch"]}, ValueError, "Unknown dtype 'torch'"),
        ({"policies": []}, ValueError, "policies is empty"),
        ({"policies": [3]}, TypeError, "each of policies that is no AMP mode must be a Policy, a "),
        ({"policies": jt.amp_mode("torch")}, ValueError, "optimizer already has a loss scale; call with_loss_scale"),
        ({"state": {"w": 1.0}, "policies": "float32"}, TypeError, "policies can be given for a TrainStep and its"),
        ({"step": never, "policies": "float32"}, TypeError, "policies can be given for a TrainStep and its TrainState"),
        ({"step": None}, TypeError, "step must be a function of state and batch, got NoneType"),
        ({"state": None}, TypeError, "step without a state must be a function of a policy, and so policies must be"),
        ({"batch_size": 0}, ValueError, "batch_size=0 must be an integer of at least 1"),
        (
            {"step": lambda policy: 3, "state": None, "batch": None, "policies": ["float32"]}, TypeError,
            "step('float32') must return (step, state, batch), got int",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_planned_is_said_before_anything_is_compiled(
    given: dict[str, Any], kind: type[Exception], message: str
) -> None:
    arguments: Any = {"step": STEP, "state": STATE, "batch": BATCH, **given}
    with pytest.raises(kind, match=re.escape(message)):
        jt.plan(Workload(**arguments))


WORKLOAD = Workload(STEP, STATE, BATCH)
ANYTHING: Any = (STEP, 5, None)


@pytest.mark.parametrize(
    ("call", "kind", "message"),
    [
        (lambda: jt.plan(*ANYTHING), TypeError, "workload must be a jt.planning.Workload, got TrainStep"),
        (lambda: jt.plan(WORKLOAD, []), ValueError, "machines is empty"),
        (lambda: jt.plan(WORKLOAD, ANYTHING[1]), TypeError, "machines=5 must be of type str or Machine, "),
        (
            lambda: jt.plan(WORKLOAD, Machine("V100-16GB", 3)), ValueError,
            "batch_size=1024 must be a multiple of 3 for 3 devices, replicated and its micro",
        ),
        (lambda: PlanSearch(shardings="zero3"), ValueError, "shardings='zero3' must be 'replicated', 'zero1', 'fsdp',"),
        (lambda: PlanSearch(shardings=ANYTHING[2]), TypeError, "shardings=None must be of type str or Callable"),
        (lambda: PlanSearch(shardings=[]), ValueError, "shardings is empty"),
    ],
)  # fmt: skip
def test_no_machines_and_no_searches(call: Callable[[], Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=re.escape(message)):
        call()


def test_a_compiled_step_is_no_step() -> None:
    compiled = jax.jit(lambda state, batch: (state, batch.sum())).lower(jnp.ones(2), jnp.ones(4)).compile()
    with pytest.raises(TypeError, match="step is compiled already, for this machine: give the function"):
        jt.plan(Workload(compiled, jnp.ones(2), jnp.ones(4)))


@pytest.fixture(name="no_compiler")
def fixture_no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Has `compile_program` find no compiler."""
    monkeypatch.setenv("JMP_TRAIN_CACHE", str(tmp_path))
    monkeypatch.setattr("jmp_train.tools.aot.compiling.CUDA_VERSIONS", ())


def test_without_the_compiler_all_compilations_end_with_the_command(no_compiler: None) -> None:
    with pytest.raises(PluginError, match=r"install it with jmp_train\.aot\.install_compiler\(\)"):
        rows_of(STEP, STATE, BATCH, policies=["float32", "mixed_float16"], machines=["V100-16GB", "T4-16GB"])


def test_an_error_of_the_step_comes_as_it_is(no_compiler: None) -> None:
    def fails(params: Any, batch: Any) -> Any:
        raise LookupError("no such layer")

    with pytest.raises(LookupError, match="no such layer"):
        rows_of(jt.train_step(jt.stateless(fails), OPTIMIZER), PLAIN_STATE, BATCH, policies=["float32", "float16"])


def test_a_callback_is_said_with_the_policy(no_compiler: None) -> None:
    def prints(params: Any, batch: Any) -> Any:
        loss = tanh_loss(params, batch)
        jax.debug.print("loss {}", loss)
        return loss

    text = f"policy mixed_float16, 1 device: the step calls back to Python.*: debug_print at {re.escape(__file__)}"
    with pytest.raises(ValueError, match=text):
        rows_of(jt.train_step(jt.stateless(prints), SCALED), STATE, BATCH, policies="mixed_float16")


def test_the_step_is_traced_with_the_callers_contexts(no_compiler: None) -> None:
    """Such as haiku's policies, meshes, precisions: each thread has its own."""
    seen = []

    def step(state: Any, batch: Any) -> Any:
        seen.append("HIGHEST" in str(jax.make_jaxpr(jnp.dot)(batch, batch)))
        return state, batch.sum()

    with jax.default_matmul_precision("highest"), pytest.raises(PluginError):
        rows_of(step, jnp.ones(2), jnp.ones(8))
    assert seen == [True]


# Placements and precisions, without the compiler


def exported(step: Any, state: Any, **placed: Any) -> ExportedProgram:
    (variant,) = Workload(step, state, BATCH).variants()
    return variant.exported(Placement(**placed), ROWS)


@pytest.mark.parametrize("shardings", ["replicated", "zero1", "fsdp"])
def test_the_batch_is_split_and_the_state_as_said(shardings: str) -> None:
    found = exported(STEP, STATE, devices=8, shardings=shardings)
    program = jax.export.deserialize(bytearray(found.serialized))
    assert program.nr_devices == 8
    split = {path for path, s in zip(found.paths, program.in_shardings_hlo, strict=True) if s and not s.is_replicated()}
    moments = {path for path in found.paths if ".mu" in path or ".nu" in path}
    weights = {path for path in found.paths if "state.params" in path}
    wanted = {"replicated": set[str](), "zero1": moments, "fsdp": moments | weights}[shardings]
    assert split == wanted | {"batch['x']"}


def test_a_plain_step_takes_shardings_as_a_function() -> None:
    def split(state: Any, mesh: Any) -> Any:
        return jax.tree.map(lambda x: jax.NamedSharding(mesh, jax.P("data")), state)

    def step(state: Any, batch: Any) -> Any:
        return state, batch["x"].sum()

    state = {"w": jnp.zeros((64, 2))}
    program = jax.export.deserialize(bytearray(exported(step, state, devices=8, shardings=split).serialized))
    assert not any(s is None or s.is_replicated() for s in program.in_shardings_hlo)
    with pytest.raises(TypeError, match="shardings='zero1' is for a TrainState, not for dict: give a function"):
        exported(step, state, devices=8, shardings="zero1")
    assert str(Placement(8, split)) == "8 devices, split"


def test_each_precision_has_its_own_state() -> None:
    mode = dataclasses.replace(jt.amp_mode("apex", opt_level="O2"), batch_norms=())
    half, o2 = Workload(PLAIN_STEP, PLAIN_STATE, BATCH, ["float16", mode]).variants()
    assert (half.policy, o2.policy) == ("float16", str(o2.policy))
    assert {x.dtype.name for x in jax.tree.leaves(half.state.params)} == {"float16"}
    assert {x.dtype.name for x in jax.tree.leaves(o2.state.params)} == {"float16"}
    assert jt.get_loss_scale(o2.state.opt_state) is not None
    by_itself = Workload(STEP, STATE, BATCH, batch_size=64).variants()
    assert [(v.policy, v.step, v.batch_size) for v in by_itself] == [("as it is", STEP, 64)]


# With the compiler


@pytest.mark.full
def test_buffers_add_up_in_all_precisions_and_the_peak_grows(compiler: None) -> None:
    def make(policy: Any) -> Any:
        step, state = (STEP, STATE) if isinstance(policy, str) else (PLAIN_STEP, PLAIN_STATE)
        return *in_precision(step, state, policy), BATCH

    policies = ["float32", "mixed_float16", jt.amp_mode("torch")]
    options: dict[str, Any] = {"policies": policies, "machines": ["V100-16GB", "A100-40GB"]}
    rows, larger = (rows_of(make, batch_size=size, **options) for size in (ROWS, 4 * ROWS))
    assert [row.device for row in rows] == 3 * ["V100-16GB"] + 3 * ["A100-40GB"]
    weights = 4 * DEPTH * WIDTH**2
    for row, more in zip(rows, larger, strict=True):
        assert_adds_up(row)
        assert_adds_up(more)
        assert row.peak_bytes < more.peak_bytes
        assert row.bytes_by_kind["parameters"] == weights
        assert 2 * weights <= row.bytes_by_kind["optimizer state"] <= 2 * weights + 1024
        assert row.bytes_by_kind["batch"] == 4 * ROWS * WIDTH
        named = sum(b.n_bytes for b in row.buffers if b.source or b.kind in ("padding", "kept for other moments"))
        assert named >= 0.95 * row.peak_bytes
        assert row.fits
        assert 0 < row.step_seconds_bound < more.step_seconds_bound
        assert row.largest_batch is None
    for in_float32, *in_half in (larger[:3], larger[3:]):
        for row in in_half:
            assert row.bytes_by_kind[SAVED] <= 0.65 * in_float32.bytes_by_kind[SAVED]  # with copies of weights
            assert row.step_seconds_bound < in_float32.step_seconds_bound


@pytest.mark.full
def test_the_largest_batch_fits_a_gpu_of_ones_own_and_the_next_does_not(compiler: None, tmp_path: Path) -> None:
    file = tmp_path / "own.toml"
    file.write_text('[Small]\nlike = "V100-16GB"\nmemory_bytes = 2_000_000_000')
    gpu = read_gpus(file)["Small"]
    shown = []

    def planned(policy: str, size: int, search: PlanSearch | None = None) -> PlanRow:
        (row,) = rows_of(STEP, STATE, BATCH, policies=policy, batch_size=size, machines=Machine(gpu), search=search)
        return row

    for policy in ("float32", "mixed_float16"):
        row = planned(policy, ROWS, PlanSearch(progress=lambda count, text: shown.append((count, text))))
        assert row.machine.kind.memory_bytes == 2_000_000_000
        assert row.usable_bytes == Allowances().usable_bytes(gpu, 1)
        assert row.largest is not None
        assert row.largest_batch == row.largest.size > ROWS
        assert row.largest.is_monotonic
        assert [count for count, _ in shown] == list(range(len(shown)))
        assert shown[0][1] == f"Small, {policy}, 1 device, batch {ROWS}"
        assert len({text for _, text in shown[1:]}) == len(row.largest.tried) <= 20
        shown.clear()
        fits, next_one = (planned(policy, row.largest.size + more) for more in (0, 1))
        assert fits.fits
        assert fits.peak_bytes == row.largest.bytes
        assert not next_one.fits
        assert next_one.peak_bytes == row.largest.next_bytes


@pytest.mark.full
def test_zero1_and_fsdp_hold_an_eighth(compiler: None) -> None:
    search = PlanSearch(largest_batch=False, shardings=["replicated", "zero1", "fsdp"])
    placed = rows_of(STEP, STATE, BATCH, machines=[Machine("V100-16GB", n) for n in (1, 8)], search=search)
    one, replicated, zero1, fsdp = placed
    assert [str(row.placement) for row in placed] == [
        "1 device", "8 devices, replicated", "8 devices, zero1", "8 devices, fsdp",
    ]  # fmt: skip
    for row in placed:
        assert_adds_up(row)
    assert replicated.bytes_by_kind["batch"] == one.bytes_by_kind["batch"] / 8
    assert replicated.bytes_by_kind["parameters"] == one.bytes_by_kind["parameters"]
    state, weights = (one.bytes_by_kind[kind] for kind in ("optimizer state", "parameters"))
    for row in (zero1, fsdp):
        assert row.bytes_by_kind["optimizer state"] == pytest.approx(state / 8, rel=0.01)
    assert zero1.bytes_by_kind["parameters"] == weights
    assert fsdp.bytes_by_kind["parameters"] == pytest.approx(weights / 8, rel=0.01)
    assert not one.costs.communication
    assert all(row.costs.communication and row.costs.communication_seconds > 0 for row in placed[1:])


@pytest.mark.full
def test_micro_batches_and_rematerialization_need_less(compiler: None) -> None:
    state, batch = state_of_layers(SCALED, WIDTH, 24), batch_of_rows(4096, WIDTH)
    small = Machine(read_gpu_of(100_000_000), allowances=Allowances(memory_fraction=1, cuda_context=0, libraries=0))
    plan = jt.plan(Workload(STEP, state, batch, "float32"), small, PlanSearch(placement=True))
    sizes = {row.policy.removeprefix("float32, "): row.peak_bytes for row in plan.rows}
    (row,) = (row for row in plan.rows if row.policy == "float32")
    assert not row.fits
    assert row.bytes_by_kind[SAVED] > 0.5 * row.peak_bytes
    assert sizes["rematerialization"] < row.peak_bytes - 0.4 * row.bytes_by_kind[SAVED]
    assert sizes["4 micro-batches"] < sizes["2 micro-batches"] < row.peak_bytes


def read_gpu_of(memory_bytes: int) -> GPU:
    return dataclasses.replace(GPUS["V100-16GB"], name="Small", memory_bytes=memory_bytes)


@pytest.mark.full
def test_steps_of_ones_own_with_jit_inside_and_graphs_as_batches(compiler: None) -> None:
    @jax.jit
    def step(state: Any, graph: Any) -> Any:
        def loss(params: Any) -> Any:
            h = jnp.tanh(graph["nodes"] @ params["w"])
            sums = jax.ops.segment_sum(h[graph["senders"]], graph["receivers"], len(h))
            return (sums**2).mean()

        value, gradients = jax.value_and_grad(loss)(state.params)
        return state.apply_gradients(grads=gradients), value

    def graphs(size: int) -> Any:
        edges = jax.ShapeDtypeStruct((200 * size,), jnp.int32)
        nodes = jax.ShapeDtypeStruct((30 * size + 1, 64), jnp.float32)
        return {"nodes": nodes, "senders": edges, "receivers": edges}

    state = train_state.TrainState.create(apply_fn=step, params={"w": jnp.zeros((64, 64))}, tx=OPTIMIZER)
    small, large = (rows_of(step, state, graphs, batch_size=size)[0] for size in (16, 64))
    for row, size in ((small, 16), (large, 64)):
        assert_adds_up(row)
        assert row.bytes_by_kind["batch"] == (30 * size + 1) * 256 + 2 * 200 * size * 4
        assert row.bytes_by_kind["parameters"] == 64 * 64 * 4
        assert 2 * 64 * 64 * 4 <= row.bytes_by_kind["optimizer state"] <= 2 * 64 * 64 * 4 + 16
        assert (row.policy, row.batch_size) == ("as it is", size)
    assert small.peak_bytes < large.peak_bytes


@pytest.mark.full
def test_what_does_not_grow_has_no_largest_batch(compiler: None) -> None:
    def step(state: Any, batch: Any) -> Any:
        return jax.tree.map(lambda w: w * 0.5, state)

    constant: Callable[[int], Any] = lambda size: {"graph": jax.ShapeDtypeStruct((100, 4), jnp.float32)}
    (row,) = rows_of(step, {"w": jnp.zeros((64, 64))}, constant, batch_size=1, search=PlanSearch())
    assert row.largest is None
    assert row.largest_batch is None
