"""Placements: meshes, hosts, interconnects."""

import re
from typing import Any

import pytest
from jax.sharding import PartitionSpec as P

from jmp_train.tools.aot import tpu_slice
from jmp_train.tools.planning import Placement
from jmp_train.tools.planning.targets import checked_interconnect, checked_placements, placements_of_slice

pytestmark = pytest.mark.quick


def test_hosts_times_devices_times_shardings() -> None:
    found = checked_placements([4, 8], ["replicated", "fsdp"], None, [1, 8])
    assert [(p.devices, p.hosts, p.shardings) for p in found] == [
        (n * h, h, how) for h in (1, 8) for n in (4, 8) for how in ("replicated", "fsdp")
    ]
    assert str(found[-1]) == "64 devices on 8 hosts, fsdp"


def test_a_mesh_is_of_all_devices_and_the_batch_along_data() -> None:
    (placed,) = placements_of_slice(tpu_slice("v5e:16x16"), "zero1", {"data": 16, "model": 16})
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
        ([("data", 16)], TypeError, "must be a dict of axes and their lengths, such as {'data': 16, 'model': 16}"),
    ],
)
def test_meshes_that_cannot_be(mesh: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=re.escape(message)):
        placements_of_slice(tpu_slice("v5e:4x4"), "replicated", mesh)


def test_a_mesh_of_gpus_has_those_of_all_hosts() -> None:
    with pytest.raises(ValueError, match=r"mesh=\{'data': 8\} has 8 devices, but hosts x devices is 16"):
        checked_placements(8, "replicated", {"data": 8}, 2)
    with pytest.raises(ValueError, match="hosts=0 must be an integer of at least 1"):
        checked_placements(8, "replicated", None, 0)


@pytest.mark.parametrize(
    ("given", "found"),
    [("400Gb/s", 50e9), ("100 Gb/s", 12.5e9), ("NDR", 50e9), ("HDR", 25e9), ("p4d", 50e9 / 8), (1e9, 1e9), (1, 1)],
)
def test_interconnects(given: Any, found: float) -> None:
    assert checked_interconnect(given) == found


@pytest.mark.parametrize("given", ["fast", "400GB/s", 0, -1, float("inf"), True, None])
def test_no_interconnects(given: Any) -> None:
    with pytest.raises(ValueError, match=f"interconnect={given!r} must be a bandwidth from a GPU to other hosts"):
        checked_interconnect(given)
