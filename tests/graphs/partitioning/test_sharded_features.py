"""Features in shares over devices: every row arrives, losses are those of one device, and half sends half."""

import dataclasses
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
import sharded_feature_programs as programs
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jmp_train as jt
from jmp_train import graphs
from jmp_train.steps.traced_costs import step_costs

pytestmark = pytest.mark.quick

NODES, READS = 101, 40
SPLIT = P("data")


def mesh_of(devices: int) -> Mesh:
    return Mesh(np.array(jax.devices()[:devices]), ("data",))


def fetched(store: graphs.ShardedFeatures, mesh: Mesh, *, check_vma: bool = True) -> Any:
    def local(store: graphs.ShardedFeatures, ids: jax.Array) -> jax.Array:
        return store.take(ids)

    run = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=SPLIT, out_specs=SPLIT, check_vma=check_vma))
    return lambda ids: np.asarray(run(store, np.asarray(ids, np.int32).ravel()))


@pytest.mark.parametrize(
    "devices", [8, pytest.param(1, marks=pytest.mark.full), pytest.param(3, marks=pytest.mark.full)]
)
@pytest.mark.parametrize("dtype", ["float16", pytest.param("int8", marks=pytest.mark.full)])
def test_every_row_arrives_however_many_a_device_reads_of_another(devices: int, dtype: str) -> None:
    random, mesh = np.random.default_rng(0), mesh_of(devices)
    features = random.integers(-100, 100, (NODES, 2, 3)).astype(dtype)
    take = fetched(graphs.shard_features(features, mesh), mesh, check_vma=devices != 3)
    shape = (devices, READS)
    of_one_owner = random.integers(0, NODES // devices, shape) * devices  # several rounds
    ids = {
        "unique": np.stack([random.permutation(NODES)[:READS] for _ in range(devices)]),
        "of one owner": of_one_owner,
        "one device reads of one owner": np.where(np.arange(devices)[:, None] == 0, of_one_owner, -1),
        "none": np.full(shape, -1),
        "any, padded": random.integers(-1, NODES, shape),
    }
    for name, some in ids.items():
        some = some.ravel()
        wanted = np.where((some >= 0)[:, None, None], features[some], 0)
        np.testing.assert_array_equal(take(some), wanted, err_msg=name)


def test_a_row_that_is_not_there_is_nan() -> None:
    mesh = mesh_of(8)
    take = fetched(graphs.shard_features(np.ones(NODES, np.float32), mesh), mesh)
    ids = np.full((8, 5), 3)
    ids[2, :4] = [NODES, NODES + 7, -1, -2]  # the first of these is in a padded share
    rows = take(ids).reshape(8, 5)
    np.testing.assert_array_equal(rows[2], [np.nan, np.nan, 0, np.nan, 1])
    assert (np.delete(rows, 2, axis=0) == 1).all()


@pytest.mark.full
@pytest.mark.parametrize(
    ("policy", "transform", "micro_batches"),
    [
        *(("float32", transform, parts) for transform in (jt.data_parallel, jt.sharded_step) for parts in (1, 2)),
        ("mixed_float16", jt.data_parallel, 2),
    ],
)
def test_losses_of_shares_are_those_of_one_device(policy: str, transform: Any, micro_batches: int) -> None:
    wanted = programs.losses_of_one_device(policy)
    mesh = mesh_of(programs.COUNT // micro_batches)
    found = programs.losses_of_shares(policy, mesh, programs.problem().features, transform)
    assert len(set(wanted)) == programs.STEPS
    np.testing.assert_allclose(found, wanted, rtol=1e-6 if policy == "float32" else 1e-3)


def test_half_precision_sends_half_the_bytes_little_more_than_is_read() -> None:
    given, mesh = programs.problem(), mesh_of(programs.COUNT)
    optimizer = jt.with_loss_scale(optax.sgd(0.1), jt.NoOpLossScale())
    stack, state = given.steps[0], jt.TrainState.create(given.params, optimizer)
    reads, sent = stack.graphs["sampled"].inputs.shape[1], {}
    for policy in ("float32", "mixed_float16"):
        store = graphs.shard_features(given.features, mesh, dtype=jt.get_policy(policy).compute_dtype)
        run = jt.data_parallel(jt.train_step(jt.stateless(given.loss_fn), optimizer, policy=policy), mesh)
        traced = jax.jit(run).trace(state, {"batch": stack, "features": store})
        sent[policy] = step_costs(traced, state).exchanged_bytes
    of_ids = sent["mixed_float16"] * 2 - sent["float32"]
    read = reads * 3 // 4 * programs.WIDTH * 4
    assert read < sent["float32"] - of_ids < 1.6 * read
    assert of_ids * programs.WIDTH == sent["float32"] - of_ids  # int32 beside float32 rows


@pytest.mark.full
@pytest.mark.timeout(300)
def test_two_processes_read_their_shares_and_lose_the_same(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "jmp_train", "launch", "-n", "2", "--devices-per-process", "2"]
    program = [str(Path(programs.__file__)), str(tmp_path)]
    done = subprocess.run([*command, "--", *program], capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    for policy, rtol in (("float32", 1e-6), ("mixed_float16", 1e-3)):
        wanted = programs.losses_of_one_device(policy)
        found = [np.load(tmp_path / f"{policy}_{process}.npz") for process in range(2)]
        assert sum(int(each["num_read"]) for each in found) == programs.NODES
        for each in found:
            np.testing.assert_allclose(each["losses"], wanted, rtol=rtol)


def test_what_is_refused() -> None:
    mesh, features = mesh_of(2), np.ones((NODES, 4), np.float32)
    store, ids = graphs.shard_features(features, mesh), np.zeros(4, np.int32)

    def within(run: Any, mesh: Mesh = mesh, axis: str = "data", **arrays: Any) -> Any:
        given = arrays or {"store": store, "ids": ids}
        mapped = jax.shard_map(lambda given: run(**given), mesh=mesh, in_specs=P(axis), out_specs=P(axis))
        return jax.jit(mapped)(given)

    def take(store: Any, ids: Any) -> Any:
        return store.take(ids)

    def slopes(store: Any, ids: Any) -> Any:
        return jax.grad(lambda store: store.take(ids).sum())(store)

    class Sparse:
        shape, dtype = (4, 4), np.dtype("float32")

        def __getitem__(self, place: slice) -> object:
            return self

    part = dataclasses.replace(store, rows=store.rows[:34])
    cases: list[tuple[Any, str]] = [
        (lambda: store.take(ids), "the features are sharded over mesh axis 'data': take rows within"),
        (lambda: within(take, Mesh(mesh.devices, ("x",)), "x"), "the features are sharded over mesh axis 'data'"),
        (
            lambda: within(take, mesh_of(1), **jax.device_get({"store": store, "ids": ids})),
            "mesh axis 'data' has 1 devices, but the features have 2",
        ),
        (lambda: within(take, store=store, ids=ids[:, None]), r"ids must be \[reads\], got shape \(2, 1\)"),
        (lambda: within(take, store=part, ids=ids), "a device must have its whole shard of 51 rows, got 17: shard the"),
        (lambda: within(slopes), "Reverse-mode differentiation does not work for lax.while_loop"),
        (lambda: graphs.shard_features(features[:0], mesh), r"features must be \[nodes, ...\] of at least one node"),
        (lambda: graphs.shard_features(features, mesh, "model"), "axis='model' is not one of the mesh's: 'data'"),
    ]
    for call, message in cases:
        with pytest.raises(ValueError, match=message):
            call()
    with pytest.raises(TypeError, match="ids must be integers, got float32"):
        within(take, store=store, ids=ids.astype(np.float32))
    with pytest.raises(TypeError, match="slices of features must be arrays, got Sparse"):
        graphs.shard_features(Sparse(), mesh)  # pyright: ignore[reportArgumentType]
