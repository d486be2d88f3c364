"""The loader of batches of small graphs: every graph once an epoch, few programs, the same graphs for any processes."""

import dataclasses
from collections.abc import Iterator
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
from jmp_train.data.graph_batching import neighbor_batches, shuffled_order

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


NUM_NODES, CLASSES = 600, 3


def sampler_of(seeds: np.ndarray, fanouts: Any = (4, 3), batch_size: int = 32) -> Any:
    random = np.random.default_rng(0)
    labels = np.arange(NUM_NODES) % CLASSES
    senders = random.integers(0, NUM_NODES, 4_000)
    # Three of four edges connect nodes of one class.
    same = senders + CLASSES * random.integers(0, 50, 4_000)
    receivers = np.where(random.random(4_000) < 0.75, same, random.integers(0, NUM_NODES, 4_000)) % NUM_NODES
    edges = graphs.host_edges(senders, receivers, NUM_NODES)
    return graphs.neighbor_sampler(edges, fanouts, seeds, batch_size), edges, labels


def ids(batch: graphs.MiniBatch) -> Any:
    return {"seeds": batch.seeds, "inputs": batch.inputs}


def taken(batches: Iterator[Any], number: int | None = None) -> list[np.ndarray]:
    found = []
    for batch in batches:
        found.append(np.asarray(batch["seeds"]))
        if len(found) == number:
            break
    return found


def real(batches: list[np.ndarray]) -> list[int]:
    return [int(seed) for batch in batches for seed in batch if seed >= 0]


def test_each_seed_comes_once_an_epoch_in_another_order() -> None:
    seeds = np.arange(0, NUM_NODES, 7)  # 86, two batches and a part
    sampler, _, _ = sampler_of(seeds)
    found = taken(neighbor_batches(sampler, seeds, ids, epochs=2))
    assert [len(batch) for batch in found] == [32] * 6
    first, second = real(found[:3]), real(found[3:])
    assert sorted(first) == sorted(second) == seeds.tolist()
    assert first != second
    whole = taken(neighbor_batches(sampler, seeds, ids, drop_remainder=True))
    assert [len(batch) for batch in whole] == [32] * 2 and -1 not in whole[1]
    in_order = taken(neighbor_batches(sampler, seeds, ids, shuffle=False))
    assert real(in_order) == seeds.tolist()


def test_threads_and_resuming_change_nothing() -> None:
    seeds = np.arange(NUM_NODES)
    sampler, _, _ = sampler_of(seeds)
    alone = [jax.device_get(b) for b in neighbor_batches(sampler, seeds, ids, seed=5)]
    many = neighbor_batches(sampler, seeds, ids, seed=5, num_threads=3, prefetch=7)
    for _ in range(4):
        next(many)
    state = many.get_state()
    again = neighbor_batches(sampler, seeds, ids, seed=5)
    again.set_state(state)
    for wanted, found, resumed in zip(alone[4:], many, again, strict=True):
        for name, array in wanted.items():
            np.testing.assert_array_equal(found[name], array)
            np.testing.assert_array_equal(resumed[name], array)


def test_processes_share_the_seeds_in_equal_numbers() -> None:
    seeds = np.arange(200)  # 66 for each of three, and two that wait for the next epoch
    sampler, _, _ = sampler_of(seeds)
    parts, inputs = [], []
    for index in range(3):
        batches = list(neighbor_batches(sampler, seeds, ids, process_index=index, process_count=3))
        parts.append(real([np.asarray(batch["seeds"]) for batch in batches]))
        inputs.append([np.asarray(batch["inputs"]) for batch in batches])
    assert [len(part) for part in parts] == [66] * 3
    assert len(set().union(*parts)) == 198


def test_processes_draw_different_neighbors() -> None:
    # All seeds are the same node, so that only what is drawn can differ.
    hub = graphs.host_edges(np.arange(1, 500), np.zeros(499, int), 500)
    seeds = np.zeros(4, int)
    sampler = graphs.neighbor_sampler(hub, (5,), seeds, 2)
    drawn = [
        np.asarray(next(neighbor_batches(sampler, seeds, ids, process_index=i, process_count=2))["inputs"])
        for i in range(2)
    ]
    assert not np.array_equal(drawn[0], drawn[1])


def test_stacks_are_of_one_shape_and_of_each_seed_once() -> None:
    seeds = np.arange(70)
    sampler, _, _ = sampler_of(seeds, fanouts=(-1,), batch_size=8)
    layers = [sampler.layers(part, np.random.default_rng(0)) for part in np.split(seeds[:64], 8)]
    counts = [sum(len(places) for places, _, _ in layer.ends.values()) for (layer,) in layers]
    (size,) = sampler.sizes[-1]
    tight = dataclasses.replace(size, edges=dict.fromkeys(size.edges, sorted(counts)[4]))
    sampler = dataclasses.replace(sampler, sizes=((tight,), (size,)))  # half of them fit

    def whole(batch: graphs.MiniBatch) -> Any:
        return {"blocks": batch.blocks, **ids(batch)}

    found = list(neighbor_batches(sampler, seeds, whole, stack=4, shuffle=False))
    assert len(found) == 2 and all(len(stacked) == 4 for stacked in found)
    parts = [part for stacked in found for part in graphs.unstack(stacked)]
    assert [part["seeds"].tolist() for part in parts] == np.arange(64).reshape(8, 8).tolist()
    assert {part["blocks"][-1].num_targets for part in parts} == {8}
    sharding = NamedSharding(Mesh(np.array(jax.devices()[:4]), ("data",)), PartitionSpec("data"))
    placed = next(neighbor_batches(sampler, seeds, whole, stack=4, shuffle=False, device=sharding))
    assert placed.graphs["inputs"].sharding == sharding
    with pytest.raises(ValueError, match="stack=0 must be positive"):
        neighbor_batches(sampler, seeds, ids, stack=0)


def test_wrong_calls_are_refused() -> None:
    seeds = np.arange(10)
    sampler, _, _ = sampler_of(seeds)
    with pytest.raises(ValueError, match=r"process_index=2 must be in \[0, 2\)"):
        neighbor_batches(sampler, seeds, ids, process_index=2, process_count=2)
    with pytest.raises(ValueError, match="10 nodes, 10 for each of 1 processes, but a batch needs 32"):
        neighbor_batches(sampler, seeds, ids, drop_remainder=True)
    with pytest.raises(ValueError, match="epochs=0 must be at least 1"):
        neighbor_batches(sampler, seeds, ids, epochs=0)
    with pytest.raises(ValueError, match="seed=-1 must be between 0"):
        neighbor_batches(sampler, seeds, ids, seed=-1)
