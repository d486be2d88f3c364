"""The loader of batches of small graphs: every graph once an epoch, few programs, the same graphs for any processes."""

from typing import Any

import grain
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from pytrees import assert_bitwise_equal

from jmp_train import graphs
from jmp_train.data import graph_batches
from jmp_train.data.graph_batching import shuffled_order

pytestmark = pytest.mark.quick

COUNT = 50


@pytest.fixture(scope="module")
def data() -> graphs.GraphData:
    made = graphs.synthetic_proteins(COUNT)
    number = np.arange(COUNT, dtype=np.int32)
    return graphs.GraphData(
        made.n_node, made.n_edge, made.senders, made.receivers, made.labels, 2, made.nodes, graphs={"number": number}
    )


def all_numbers(batches: Any) -> list[int]:
    return [number for batch in batches for number in numbers(batch)]


def numbers(batch: Any) -> list[int]:
    """Returns which graphs a batch has, padding left out."""
    mask = np.asarray(graphs.graph_mask(batch["graph"]))
    assert np.asarray(batch["label"])[~mask].sum() == 0
    return np.asarray(batch["number"])[mask].tolist()


def test_each_graph_comes_once_an_epoch_in_another_order(data: graphs.GraphData) -> None:
    sizes = (graphs.PaddedSize(336, 1264, 9), *graphs.padded_sizes(data, 8, buckets=1))
    batches = list(graph_batches(data, 8, sizes=sizes, epochs=2))
    assert len(batches) == 14 and len(numbers(batches[6])) == 2  # the last of an epoch is not whole
    first, second = (all_numbers(batches[start : start + 7]) for start in (0, 7))
    assert sorted(first) == sorted(second) == list(range(COUNT)) and first != second
    for batch in batches:
        chosen = numbers(batch)
        np.testing.assert_array_equal(batch["label"][: len(chosen)], data.labels[chosen])
        np.testing.assert_array_equal(batch["graph"].n_node[: len(chosen)], data.n_node[chosen])
    shapes = {tuple(jnp.shape(x) for x in jax.tree.leaves(batch)) for batch in batches}
    assert len(shapes) == 2  # two sizes, two programs
    small = {batch["graph"].num_nodes == 336 for batch in batches if batch["graph"].n_node[:8].sum() < 336}
    assert small == {True}
    in_order = graph_batches(data, 8, shuffle=False, drop_remainder=True, places=np.arange(10, 30))
    assert all_numbers(in_order) == list(range(10, 26))


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("drop_remainder", [False, True])
def test_the_order_is_that_of_grain(data: graphs.GraphData, drop_remainder: bool) -> None:
    order = grain.MapDataset.range(COUNT).shuffle(seed=2**32 - 1)
    wanted = order.batch(8, drop_remainder=drop_remainder, batch_fn=list).repeat(3)
    batches = graph_batches(data, 8, seed=2**32 - 1, epochs=3, drop_remainder=drop_remainder, num_threads=2)
    assert [numbers(batch) for batch in batches] == list(wanted)


def test_threads_and_where_it_starts_change_nothing(data: graphs.GraphData) -> None:
    alone = [jax.device_get(batch) for batch in graph_batches(data, 8, seed=5, epochs=2)]
    many = graph_batches(data, 8, seed=5, epochs=2, num_threads=3, prefetch=7)
    for _ in range(9):
        next(many)
    again = graph_batches(data, 8, seed=5, epochs=2)
    again.set_state(many.get_state())
    later = graph_batches(data, 8, seed=5, epochs=2, start=9)
    for wanted, *found in zip(alone[9:], many, again, later, strict=True):
        for batch in found:
            assert_bitwise_equal(jax.device_get(batch), wanted)


def test_a_step_has_the_same_graphs_however_many_processes_and_devices_share_it(data: graphs.GraphData) -> None:
    options: tuple[dict[str, Any], ...] = (
        {"stack": 4},
        *({"process_index": i, "process_count": 2, "stack": 2} for i in range(2)),
    )
    alone, *parts = (jax.device_get(list(graph_batches(data, 4, **each))) for each in options)
    assert len(alone) == len(parts[0]) == len(parts[1]) == 3
    for whole, *shares in zip(alone, *parts, strict=True):
        assert_bitwise_equal([*graphs.unstack(shares[0]), *graphs.unstack(shares[1])], graphs.unstack(whole))


def test_a_stack_goes_to_the_devices_a_graph_each(data: graphs.GraphData) -> None:
    mesh = Mesh(np.array(jax.devices()[:4]), ("data",))
    sharding = NamedSharding(mesh, PartitionSpec("data"))
    stacked = next(graph_batches(data, 3, stack=4, device=sharding, formats=("coo", "csr")))
    assert len(stacked) == 4 and all(x.sharding == sharding for x in jax.tree.leaves(stacked))
    chosen = all_numbers(graphs.unstack(jax.device_get(stacked)))
    assert len(set(chosen)) == 12


def test_what_is_prepared_reaches_the_step(data: graphs.GraphData) -> None:
    def prepare(graph: graphs.Graph) -> graphs.Graph:
        return graph.with_nodes(h=jax.nn.one_hot(graph.nodes["label"], 3, dtype=jnp.float16))

    batch = next(graph_batches(data, 8, prepare=prepare))
    assert batch["graph"].nodes["h"].dtype == "float16"


def test_wrong_arguments_are_named(data: graphs.GraphData) -> None:
    with pytest.raises(ValueError, match="there are 50 graphs, but a step needs 64"):
        graph_batches(data, 8, stack=8)
    with pytest.raises(ValueError, match="stack=0 must be positive"):
        graph_batches(data, 8, stack=0)
    with pytest.raises(ValueError, match="start=-1 must be at least 0"):
        graph_batches(data, 8, start=-1)
    with pytest.raises(ValueError, match=r"process_index=2 must be in \[0, 2\)"):
        graph_batches(data, 8, process_index=2, process_count=2)
    small = graphs.PaddedSize(n_node=8, n_edge=8, n_graph=9)
    with pytest.raises(ValueError, match=r"no size fits a batch of 8 graphs with \d+ nodes and"):
        next(graph_batches(data, 8, sizes=[small]))


# --- the order of an epoch, for any number of examples, seed and epoch ---------------------------


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("seed", [0, 1, 2**31 + 12345, 2**32 - 1])
@pytest.mark.parametrize("count", [1, 2, 188, 40_000, 2**16, 2**16 + 1, 2**16 + 2, 2**18 + 1, 300_000])
def test_the_order_of_an_epoch_is_that_of_grain(count: int, seed: int) -> None:
    data = grain.MapDataset.range(count).shuffle(seed=seed)
    places = sorted({0, 1 % count, count // 3, count // 2, count - 1})
    for epoch in (0, 3):
        found = shuffled_order(count, (seed + epoch) % 2**32)
        assert found[places].tolist() == [data[place + epoch * count] for place in places]
    if count not in (2**16 + 1, 2**18 + 1):  # of which grain has one number twice
        assert np.array_equal(np.sort(found), np.arange(count))


def test_the_order_that_is_kept_cannot_be_changed() -> None:
    order = shuffled_order(10, 5)
    with pytest.raises(ValueError, match="read-only"):
        order[0] = 0
    assert shuffled_order(10, 5) is order
