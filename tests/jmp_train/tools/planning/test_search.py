"""The search for a placement: what is tried, what is cut, and that the result is that of the full table."""

import dataclasses
from typing import Any

import jax
import optax
import pytest
from plan_rows import planned_row
from plan_steps import batch_of_rows, state_of_layers, tanh_loss
from promotion import relaxed

import jmp_train as jt
from jmp_train.tools.aot import GPUS
from jmp_train.tools.planning import Allowances, Cut, Machine, Placement, PlanSearch, Workload
from jmp_train.tools.planning.search import Target, searched

pytestmark = [pytest.mark.quick, pytest.mark.timeout(500)]

WIDTH, DEPTH, ROWS = 512, 8, 1024
OPTIMIZER = relaxed(optax.adam(1e-3))
BATCH = batch_of_rows(ROWS, WIDTH)
RULES = {"layers/[0246]": jax.P(None, "model"), "layers/[1357]": jax.P("model", None)}
ALL_MEMORY = Allowances(memory_fraction=1, cuda_context=0, libraries=0, collectives=0, fragmentation=0)


STEP = jt.train_step(jt.stateless(tanh_loss), OPTIMIZER)
STATE = state_of_layers(OPTIMIZER, WIDTH, DEPTH)
(VARIANT,) = Workload(STEP, STATE, BATCH, "float32").variants()


def test_rules_are_tried_over_meshes_with_their_axis() -> None:
    found = PlanSearch(placement=True, shardings=RULES).placements(Machine("v5e:2x4"))
    assert [(p.shardings if isinstance(p.shardings, str) else "rules", p.axes) for p in found] == [
        ("replicated", {"data": 8}),
        ("zero1", {"data": 8}),
        ("fsdp", {"data": 8}),
        ("rules", {"data": 4, "model": 2}),
        ("rules", {"data": 2, "model": 4}),
        ("rules", {"data": 1, "model": 8}),
    ]
    on_hosts = PlanSearch(placement=True).placements(Machine("H100-80GB", 4, 2))
    assert [(p.devices, p.hosts) for p in on_hosts] == [(8, 2)] * 3
    assert PlanSearch(placement=True).placements(Machine("H100-80GB")) == [Placement()]


def test_the_state_of_a_device_is_that_of_its_shards() -> None:
    state = 3 * 4 * DEPTH * WIDTH**2
    sizes = [VARIANT.state_bytes(Placement(8, how)) for how in ("replicated", "zero1", "fsdp")]
    assert sizes == pytest.approx([state, state / 3 + state * 2 / 3 / 8, state / 8], rel=1e-3)
    rules = Placement(8, RULES, (("data", 2), ("model", 4)))
    assert VARIANT.state_bytes(rules) == pytest.approx(state / 4, rel=1e-3)


def made_up(target: Target) -> Any:
    """Returns a row whose memory is six of its state's, of which changes of the step save a half each."""
    needed = 6 * target.variant.state_bytes(target.placement) >> target.variant.policy.count(",")
    row = planned_row(placement=target.placement, policy=target.variant.policy, kinds={"parameters": needed})
    return dataclasses.replace(row, machine=target.machine)


def machine(usable: int) -> Machine:
    """Returns GPUs of which a step can have this memory."""
    return Machine(dataclasses.replace(GPUS["A100-40GB"], memory_bytes=usable), allowances=ALL_MEMORY)


USABLE = 3 * 4 * DEPTH * WIDTH**2  # a state


def test_what_fits_is_not_changed_and_what_is_too_large_is_not_compiled() -> None:
    placed = [(machine(USABLE if n > 1 else USABLE // 2), Placement(n, how)) for n, how in PLACED]
    targets = [Target(gpus, VARIANT, placement) for gpus, placement in placed]
    batches = []

    def compile_all(wanted: Any) -> list[Any]:
        batches.append([(target.placement.devices, target.variant.policy) for target in wanted])
        return [made_up(target) for target in wanted]

    rows, cuts = searched(targets, compile_all)
    whole, sharded, changed, twice_changed = batches
    assert whole == [], "the replicated state is too large, or cannot be divided"
    assert sharded == [(8, "float32"), (4, "float32")]
    names = ["2 micro-batches", "4 micro-batches", "rematerialization"]
    assert changed == [(4, f"float32, {name}") for name in names], "of the one that does not fit"
    assert twice_changed == [], "one of these does"
    assert [row.fits for row in rows] == [True] * 4 + [False]
    reasons = [(cut.placement, cut.reason) for cut in cuts]
    assert ("1 device", "the state alone takes 0.025 GB of 0.013 GB") in reasons
    assert ("3 devices, replicated", "batch 1024 is not a multiple of 3") in reasons
    assert reasons.count(("8 devices, fsdp", "fits without, and with less arithmetic")) == 3


PLACED = [(1, "replicated"), (3, "replicated"), (8, "fsdp"), (4, "fsdp")]


def names_of(targets: Any) -> list[str]:
    return [str(target.placement) for target in targets]


@pytest.mark.parametrize(
    ("optimizer", "bound_by_products", "compiled"),
    [
        (OPTIMIZER, True, ["8 devices, replicated", "4 devices, replicated", "4 devices, fsdp"]),
        (OPTIMIZER, False, ["8 devices, replicated", "4 devices, replicated", "8 devices, fsdp", "4 devices, fsdp"]),
        (  # whose products each device repeats, unless they are sharded
            relaxed(optax.contrib.muon(1e-3)),
            True,
            ["8 devices, replicated", "4 devices, replicated", "8 devices, fsdp", "4 devices, fsdp"],
        ),
    ],
    ids=["adam", "bound by memory", "muon"],
)
def test_no_sharding_is_tried_where_products_alone_take_as_long(
    optimizer: Any, bound_by_products: bool, compiled: list[str]
) -> None:
    """On eight devices the replicated state fits; on four it does not, so sharding may help."""
    state = state_of_layers(optimizer, WIDTH, 2)
    (variant,) = Workload(jt.train_step(jt.stateless(tanh_loss), optimizer), state, BATCH).variants()
    asked = []

    def compile_all(wanted: Any) -> list[Any]:
        asked.extend(target for target in wanted if "," not in target.variant.policy)
        return [row_of(target) for target in wanted]

    def row_of(target: Target) -> Any:
        row = planned_row(placement=target.placement, kinds={"parameters": 8 - target.placement.devices})
        products = row.costs.products_seconds
        costs = dataclasses.replace(row.costs, compute_seconds=products * (1 if bound_by_products else 2))
        return dataclasses.replace(row, costs=dataclasses.replace(costs, communication_seconds=0), machine=machine(3))

    machines = {n: machine(10**12) for n in (8, 4)}
    targets = [Target(machines[n], variant, Placement(n, how)) for n in machines for how in ("replicated", "fsdp")]
    _, cuts = searched(targets, compile_all)
    assert names_of(asked) == compiled
    reasons = {cut.placement: cut.reason for cut in cuts if "products alone" in cut.reason}
    assert set(reasons) == {"8 devices, replicated", *names_of(targets)} - {"8 devices, replicated", *compiled}
    assert all(reason.startswith("8 devices, replicated takes ") for reason in reasons.values())


@pytest.mark.full
def test_no_sharding_is_faster_than_products_alone(tpu_compiler: None) -> None:
    """What the search leaves out on a slice that the replicated state fits is no faster in the full table."""
    width, rows = 2048, 32768
    state, batch = state_of_layers(OPTIMIZER, width, 3), batch_of_rows(rows, width)
    workload = Workload(STEP, state, batch, "mixed_bfloat16")
    found = jt.plan(workload, "v5e:2x2", PlanSearch(placement=True))
    assert [str(row.placement) for row in found.rows] == ["4 devices, replicated"]
    products = found.rows[0].costs.products_seconds
    assert products == pytest.approx((3 * 3 - 1) * 2 * rows / 4 * width**2 / 197e12)
    full = jt.plan(workload, "v5e:2x2", PlanSearch(largest_batch=False, shardings=["zero1", "fsdp"]))
    cut = [cut.placement for cut in found.cuts if "products alone" in cut.reason]
    assert cut == [str(row.placement) for row in full.rows]
    assert min(row.step_seconds_bound for row in full.rows) >= found.rows[0].step_seconds_bound == products


def test_a_plan_knows_the_fastest_and_the_smallest() -> None:
    one = planned_row(price=3.6)
    eight = planned_row(placement=Placement(8, "zero1"), dtype="bf16")
    cut = Cut("A100-40GB", "float32", "8 devices, fsdp", "fits without, and with less arithmetic")
    plan = jt.planning.Plan((one, eight), (cut,))
    assert (plan.fastest, plan.smallest) == (eight, one)
    text, page = str(plan), plan.to_html()
    assert "fastest that fits, at least " in text
    assert "fewest devices that fit: A100-40GB, float32, 1 device" in text
    assert "not compiled: 1 placement" in text
    assert "What was not compiled" in page
    assert one.step_cost_bound == pytest.approx(one.step_seconds_bound / 1000)
    assert f"{one.step_seconds_bound:.3g}" in text, "the cost of 1000 steps"
    assert plan.to_json()["cuts"] == [vars(cut)]
    none = jt.planning.Plan((planned_row("T4-16GB", kinds={"parameters": 30 * 10**9}),), (cut,))
    assert none.fastest is None
    assert "no placement fits" in str(none)


@pytest.mark.full
def test_the_search_finds_what_the_full_table_has(compiler: None) -> None:
    """On a GPU for which only shards fit: the fastest of the search is the fastest of all that it could compile."""
    gpu = dataclasses.replace(GPUS["V100-16GB"], name="small", memory_bytes=24_000_000)  # the state has 25 MB
    four = Machine(gpu, 4, allowances=ALL_MEMORY)
    found = jt.plan(Workload(STEP, STATE, BATCH, "float32"), four, PlanSearch(placement=True, shardings=RULES))
    assert found.fastest is not None
    assert found.cuts
    meshes = [
        (["replicated", "zero1", "fsdp"], None),
        (RULES, {"data": 2, "model": 2}),
        (RULES, {"data": 1, "model": 4}),
    ]
    steps = [dataclasses.replace(STEP, accumulate_steps=parts) for parts in (1, 2, 4)]
    searches: list[PlanSearch] = [PlanSearch(False, how, mesh) for how, mesh in meshes]
    plans = (jt.plan(Workload(step, STATE, BATCH, "float32"), four, search) for search in searches for step in steps)
    full = [row for plan in plans for row in plan.rows]
    assert {row.fits for row in full} == {True, False}
    assert found.fastest.step_seconds_bound == min(row.step_seconds_bound for row in full if row.fits)
    assert str(found.fastest.placement) in {str(row.placement) for row in full if row.fits}
    for cut in found.cuts:
        assert cut.reason.startswith(("the state alone takes", "fits without"))
    too_large = {cut.placement for cut in found.cuts if cut.reason.startswith("the state")}
    assert all(not row.fits for row in full if str(row.placement) in too_large)
