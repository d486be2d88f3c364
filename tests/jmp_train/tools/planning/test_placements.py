"""Machines and placements: meshes, hosts, interconnects, prices."""

import re
from typing import Any

import pytest
from jax.sharding import PartitionSpec as P

from jmp_train.tools.aot import GPUS, tpu_slice
from jmp_train.tools.planning import Allowances, Machine, Placement, PlanSearch

pytestmark = pytest.mark.quick


def test_devices_times_hosts_times_shardings() -> None:
    search = PlanSearch(shardings=["replicated", "fsdp"])
    found = [placed for hosts in (1, 8) for n in (4, 8) for placed in search.placements(Machine("T4-16GB", n, hosts))]
    assert [(p.devices, p.hosts, p.shardings) for p in found] == [
        (n * h, h, how) for h in (1, 8) for n in (4, 8) for how in ("replicated", "fsdp")
    ]
    assert str(found[-1]) == "64 devices on 8 hosts, fsdp"
    assert search.placements(Machine("T4-16GB")) == [Placement()]


def test_a_mesh_is_of_all_devices_and_the_batch_along_data() -> None:
    (placed,) = PlanSearch(shardings="zero1", mesh={"data": 16, "model": 16}).placements(Machine("v5e:16x16"))
    assert placed == Placement(256, "zero1", (("data", 16), ("model", 16)))
    assert (placed.axes, placed.batch_parts) == ({"data": 16, "model": 16}, 16)
    assert (Placement(8).axes, Placement(8).batch_parts) == ({"data": 8}, 8)


def test_placements_with_rules_can_be_keys() -> None:
    rules = {"kernel": P(None, "model")}
    assert {Placement(8, rules): 1}[Placement(8, dict(rules))] == 1


@pytest.mark.parametrize(
    ("mesh", "kind", "message"),
    [
        ({"data": 8, "model": 4}, ValueError, "has 32 devices, but v5e:4x4 has 16"),
        ({"model": 16}, ValueError, "mesh={'model': 16} needs an axis 'data' along which the batch is split"),
        ({"data": 16, "model": 0}, ValueError, "must have lengths of at least 1"),
        ({"data": 16.0}, ValueError, "must have lengths of at least 1"),
        ([("data", 16)], TypeError, "must be a dict of axes and lengths, such as {'data': 16, 'model': 16}"),
    ],
)
def test_meshes_that_cannot_be(mesh: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=re.escape(message)):
        PlanSearch(mesh=mesh).placements(Machine("v5e:4x4"))


def test_a_mesh_of_gpus_has_those_of_all_hosts() -> None:
    with pytest.raises(ValueError, match=r"mesh=\{'data': 8\} has 8 devices, but T4-16GB has 16"):
        PlanSearch(mesh={"data": 8}).placements(Machine("T4-16GB", 8, 2))


@pytest.mark.parametrize(
    ("given", "found"),
    [("400Gb/s", 50e9), ("100 Gb/s", 12.5e9), ("NDR", 50e9), ("HDR", 25e9), ("p4d", 50e9 / 8), (1e9, 1e9), (1, 1)],
)
def test_interconnects(given: Any, found: float) -> None:
    assert Machine("T4-16GB", interconnect=given).bandwidth_to_hosts == found


@pytest.mark.parametrize("given", ["fast", "400GB/s", 0, -1, float("inf"), True, None])
def test_no_interconnects(given: Any) -> None:
    with pytest.raises(ValueError, match=f"interconnect={given!r} must be a bandwidth from a GPU to other hosts"):
        Machine("T4-16GB", interconnect=given)


def test_prices_are_of_a_gpu_or_a_chip() -> None:
    machines = [Machine("H100-80GB", 8, 2, price=3), Machine("v5e:4x4", price=1.2), Machine("v3:2x2", price=2)]
    assert [machine.price_per_hour for machine in machines] == [48, 16 * 1.2, 8]
    assert Machine(GPUS["T4-16GB"]).price_per_hour is None
    assert Machine(tpu_slice("v3:2x2")).devices == 8


@pytest.mark.parametrize(
    ("given", "kind", "message"),
    [
        ({"device": "V100"}, ValueError, "device='V100' must be one of P100-16GB, V100-16GB, "),
        ({"device": 5}, TypeError, "device=5 must be a name such as 'A100-40GB' or 'v5e:2x2', or a jt.aot.GPU"),
        ({"device": "v5e:3x3"}, ValueError, "'v5e:3x3' is no slice of TPUs: v5e has no slice of 3x3 chips"),
        ({"device": "v9:1x1"}, ValueError, "'v9:1x1' is no slice of TPUs: the generations are v3, v4, v5e, v5p"),
        ({"gpus": 0}, ValueError, "gpus=0 must be an integer of at least 1"),
        ({"hosts": "4"}, ValueError, "hosts='4' must be an integer of at least 1"),
        ({"price": 0}, ValueError, "price=0 must be a number above 0, for an hour"),
        ({"allowances": 0.5}, TypeError, "allowances must be jt.planning.Allowances, got float"),
    ],
)
def test_no_machines(given: dict[str, Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=re.escape(message)):
        Machine(**{"device": "T4-16GB", **given})


def test_of_a_tpus_memory_a_step_has_what_libtpu_leaves() -> None:
    tpu = tpu_slice("v5e:2x2")
    assert Machine(tpu, allowances=Allowances(0.1, fragmentation=0)).usable_bytes == tpu.program_bytes == 15.75 * 2**30
    assert Allowances(fragmentation=0.5).usable_bytes(tpu, 4) == tpu.program_bytes // 2
