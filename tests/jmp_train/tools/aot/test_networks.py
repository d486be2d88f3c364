"""Bytes and least times of collective operations on links, by the formulas of rings and by hand."""

import pytest

from jmp_train.tools.aot import GPUS, Network, program_costs, read_hlo, tpu_slice
from jmp_train.tools.aot.hlo_collectives import Collective, fraction_sent
from jmp_train.tools.aot.networks import Route

pytestmark = pytest.mark.quick

H100 = GPUS["H100-80GB"]
BYTES = 800


def collective(kind: str, group: tuple[int, ...]) -> Collective:
    sent = fraction_sent(kind, len(group)) * BYTES
    return Collective(kind, "f32", len(group), group, BYTES, sent, 1)


CLUSTER = Network(H100, {"data": 4, "model": 8}, hosts=4, interconnect=50e9)  # a host of eight is one row


@pytest.mark.parametrize(
    ("kind", "group", "axis", "inside", "between"),
    [
        # Inside of a host as on one: 2 (n - 1) / n to reduce, (n - 1) / n to gather or scatter.
        ("all-reduce", tuple(range(8)), "model", 2 * 7 / 8 * BYTES, 0),
        ("all-gather", tuple(range(8)), "model", 7 / 8 * BYTES, 0),
        # One device of each of four hosts.
        ("all-reduce", (0, 8, 16, 24), "data", 0, 2 * 3 / 4 * BYTES),
        ("reduce-scatter", (0, 8, 16, 24), "data", 0, 3 / 4 * BYTES),
        # All: a host reduces and scatters, an eighth of the array goes around the hosts, a host gathers.
        ("all-reduce", tuple(range(32)), "data x model", 2 * 7 / 8 * BYTES, 2 * 3 / 4 * BYTES / 8),
        ("all-gather", tuple(range(32)), "data x model", 7 / 8 * BYTES, 3 / 4 * BYTES / 8),
        # Each part goes to another device: 7 of 32 stay in the host, 24 leave it.
        ("all-to-all", tuple(range(32)), "data x model", 7 / 32 * BYTES, 24 / 32 * BYTES),
        ("collective-permute", (0, 8), "data", 0, BYTES),
    ],
)
def test_bytes_inside_of_hosts_and_between_them(
    kind: str, group: tuple[int, ...], axis: str, inside: float, between: float
) -> None:
    route = CLUSTER.route(collective(kind, group))
    assert route.axis == axis
    assert (route.sent_bytes, route.sent_between_hosts) == (pytest.approx(inside), pytest.approx(between))
    assert route.seconds == pytest.approx(inside / H100.link_bandwidth)
    assert route.seconds_between_hosts == pytest.approx(between / 50e9)


def test_links_of_a_cluster_overlap_and_each_does_one_thing_at_a_time() -> None:
    routes = [(2, Route("", (), 0, 3.0, 0, 1.0)), (1, Route("", (), 0, 1.0, 0, 7.0))]
    assert CLUSTER.least_seconds(routes) == max(2 * 3 + 1, 2 * 1 + 7)


def of_pod(shape: str = "16x16") -> Network:
    tpu = tpu_slice(f"v5e:{shape}")
    rows, columns = tpu.shape
    coordinates = [(x, y, 0) for x in range(rows) for y in range(columns)]
    return Network(tpu, {"data": rows, "model": columns}, coordinates=coordinates)


def test_links_of_a_pod() -> None:
    """A column of a whole pod is a ring, whose two links take 50 GB/s each; both axes take four."""
    pod = of_pod()
    column, whole = tuple(range(0, 256, 16)), tuple(range(256))
    sent = 2 * 15 / 16 * BYTES
    assert pod.route(collective("all-reduce", column)) == Route("data", (0,), sent, sent / 100e9)
    sent = 2 * 255 / 256 * BYTES
    assert pod.route(collective("all-reduce", whole)) == Route("data x model", (0, 1), sent, sent / 200e9)


def test_axes_of_a_pod_overlap_but_no_link_is_used_twice() -> None:
    pod = of_pod()
    along = {name: Route(name, (place,), 100e9, 1.0) for place, name in enumerate(("data", "model"))}
    both = Route("data x model", (0, 1), 200e9, 1.0)
    assert pod.least_seconds([(3, along["data"]), (2, along["model"])]) == 3
    assert pod.least_seconds([(2, along["data"]), (2, along["model"]), (1, both)]) == 3
    assert pod.least_seconds([(3, along["data"]), (1, both)]) == 3, "the other axis may take more of what both could"
    assert pod.least_seconds([]) == 0


PROGRAM = """HloModule step, num_partitions=8
ENTRY %main (x: f32[1000,1000]) -> f32[1000,1000] {
  %x = f32[1000,1000]{1,0} parameter(0)
  %y = f32[1000,1000]{1,0} all-reduce(%x), replica_groups=[4,2]<=[2,4]T(1,0), to_apply=%add
  ROOT %z = f32[1000,1000]{1,0} all-reduce(%y), replica_groups=[2,4]<=[8], to_apply=%add
}
"""


def test_a_programs_communication_by_axis_and_its_bound() -> None:
    network = Network(H100, {"data": 2, "model": 4}, hosts=2, interconnect=1e9)
    costs = program_costs(read_hlo(PROGRAM), H100, network)
    by_axis = {item.axis: item for item in costs.communication}
    assert by_axis["model"].sent_bytes == 2 * 3 / 4 * 4e6
    assert by_axis["model"].sent_between_hosts == by_axis["data"].sent_bytes == 0
    assert by_axis["data"].sent_between_hosts == 2 * 1 / 2 * 4e6
    assert costs.communication_seconds == costs.seconds == 4e6 / 1e9, "the interconnect is the slowest"
