"""The loader of mini-batches: every seed once an epoch, the same on every run, apart on every process."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jmp_train import graphs
from jmp_train.data.graph_batching import neighbor_batches

pytestmark = pytest.mark.quick

COUNT, CLASSES = 600, 3


def sampler_of(seeds: np.ndarray, fanouts: Any = (4, 3), batch_size: int = 32) -> Any:
    random = np.random.default_rng(0)
    labels = np.arange(COUNT) % CLASSES
    senders = random.integers(0, COUNT, 4_000)
    # Three of four edges connect nodes of one class.
    same = senders + CLASSES * random.integers(0, 50, 4_000)
    receivers = np.where(random.random(4_000) < 0.75, same, random.integers(0, COUNT, 4_000)) % COUNT
    edges = graphs.host_edges(senders, receivers, COUNT)
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
    seeds = np.arange(0, COUNT, 7)  # 86, two batches and a part
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
    seeds = np.arange(COUNT)
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
