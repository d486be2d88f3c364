"""Weak scaling of a small step: as many examples per chip, from one chip to a pod, by hand arithmetic."""

import optax
import pytest
from plan_steps import batch_of_rows, state_of_layers, tanh_loss
from promotion import relaxed

import jmp_train as jt
from jmp_train.tools.planning import Machine, Plan, PlanRow, PlanSearch, Workload

pytestmark = [pytest.mark.full, pytest.mark.timeout(500)]

WIDTH, DEPTH, ROWS = 512, 3, 2048  # rows of a chip
OPTIMIZER = relaxed(optax.sgd(1e-3))
GRADIENT_BYTES = 4 * DEPTH * WIDTH**2  # summed in float32
OPERATIONS = (3 * DEPTH - 1) * 2 * ROWS * WIDTH**2  # no gradient of the input


STEP = jt.train_step(jt.stateless(tanh_loss), OPTIMIZER)
STATE = state_of_layers(OPTIMIZER, WIDTH, DEPTH)


def planned(chips: int, machine: Machine) -> PlanRow:
    batch = batch_of_rows(chips * ROWS, WIDTH)
    workload = Workload(STEP, STATE, batch, policies="mixed_bfloat16")
    (row,) = jt.plan(workload, machine, PlanSearch(largest_batch=False)).rows
    assert row.placement.devices == chips
    return row


def check_alike(rows: list[PlanRow]) -> None:
    """Each chip has the same parameters, as much of a batch, and computes as much."""
    one, *others = rows
    assert one.costs.communication == ()
    for row in others:
        assert row.costs.operations == one.costs.operations == {"bf16": OPERATIONS}
        assert row.costs.products_seconds == one.costs.products_seconds
        assert row.costs.compute_seconds == pytest.approx(one.costs.compute_seconds, rel=0.1)
        for kind in ("parameters", "batch"):
            assert row.bytes_by_kind[kind] == one.bytes_by_kind[kind]


def test_a_slice_of_tpus(tpu_compiler: None) -> None:
    """A ring sends 2 (n - 1) / n of the gradients, over two links of a chip; in a pod, whose axes wrap, over four."""
    rows = [planned(chips, Machine(name)) for name, chips in (("v5e:1x1", 1), ("v5e:4x4", 16), ("v5e:16x16", 256))]
    check_alike(rows)
    assert rows[0].costs.products_seconds == pytest.approx(OPERATIONS / 197e12)
    for row, links in zip(rows[1:], (2, 4), strict=True):
        n = row.placement.devices
        sent = sum(item.sent_bytes for item in row.costs.communication)
        assert sent == pytest.approx(2 * (n - 1) / n * GRADIENT_BYTES, rel=0.01)
        assert row.costs.communication_seconds == pytest.approx(sent / (links * 50e9), rel=0.01)


def test_hosts_of_gpus(compiler: None) -> None:
    """A host sums first, so each of its eight GPUs sends an eighth of the gradients around the ring of hosts."""
    machines = [(1, 1), (1, 8), (8, 8)]
    rows = [planned(hosts * n, Machine("H100-80GB", n, hosts, "400Gb/s")) for hosts, n in machines]
    check_alike(rows)
    for row, (hosts, n) in zip(rows[1:], machines[1:], strict=True):
        inside = sum(item.sent_bytes for item in row.costs.communication)
        between = sum(item.sent_between_hosts for item in row.costs.communication)
        assert inside == pytest.approx(2 * (n - 1) / n * GRADIENT_BYTES, rel=0.01)
        assert between == pytest.approx(2 * (hosts - 1) / hosts * GRADIENT_BYTES / n, rel=0.01, abs=0)
        seconds = max(inside / 450e9, between / 50e9)
        assert row.costs.communication_seconds == pytest.approx(seconds, rel=0.02)
    page = Plan((rows[-1],)).to_html()
    assert "64 devices on 8 hosts, replicated" in page
    assert "sent to other hosts" in page
