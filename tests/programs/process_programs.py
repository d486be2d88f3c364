"""What tests run as several processes: `jmp-train launch -n 2 -- process_programs.py NAME ...`."""

import contextlib
import logging
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from sklearn.datasets import load_digits

import jmp_train as jt
from jmp_train import graphs
from jmp_train.data.array_loading import array_batches

BATCH, STEPS = 64, 20


def digits() -> dict[str, np.ndarray]:
    images, labels = load_digits(return_X_y=True)
    return {"x": (images / 16).astype(np.float32), "y": labels.astype(np.int32)}


def make_step(policy: str) -> tuple[jt.steps.TrainStep, jt.TrainState]:
    def loss_fn(params: Any, batch: Any) -> jax.Array:
        logits = jax.nn.relu(batch["x"] @ params["hidden"]) @ params["out"]
        losses = optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), batch["y"])
        return losses.mean()

    optimizer = optax.sgd(0.1, momentum=0.9)
    if "16" in policy:
        optimizer = jt.with_loss_scale(optimizer, jt.torch_loss_scale(2.0**10))
    random = np.random.default_rng(0)
    params = {
        "hidden": jnp.asarray(random.normal(0, 0.1, (64, 32)), jnp.float32),
        "out": jnp.asarray(random.normal(0, 0.1, (32, 10)), jnp.float32),
    }
    step = jt.train_step(jt.stateless(loss_fn), optimizer, policy=policy)
    return step, jt.TrainState.create(params, optimizer)


def join() -> tuple[Mesh, NamedSharding]:
    """Has this process take part; returns a mesh of all devices, and the sharding of a batch over them."""
    jt.distributed.initialize(shutdown_timeout=20)
    mesh = Mesh(np.array(jax.devices()), ("data",))
    return mesh, NamedSharding(mesh, PartitionSpec("data"))


def batch_of_parts(sharding: NamedSharding, overflows: bool) -> Any:
    """Returns a batch to which each process gives its part; if it overflows, in the last process only."""
    batch = jax.tree.map(lambda x: x[: BATCH // jax.process_count()].copy(), digits())
    if overflows and jax.process_index() == jax.process_count() - 1:
        batch["x"][0] = 7e4
    return jax.tree.map(lambda x: jax.make_array_from_process_local_data(sharding, x), batch)


@contextlib.contextmanager
def printing_refusal(name: str) -> Iterator[None]:
    """Prints in one line the error that is raised within."""
    try:
        yield
    except (ValueError, TypeError, KeyError, RuntimeError) as error:
        print(f"{name}: {error}".replace("\n", " |"))


def first_losses(directory: str) -> None:
    """Trains on all devices of all processes, says how many they are, and leaves the losses in a file."""
    mesh, sharding = join()
    step, state = make_step("float32")
    run, state = jax.jit(jt.data_parallel(step, mesh)), jt.distributed.broadcast_state(state, mesh)
    batches = array_batches(digits(), BATCH, seed=1, sharding=sharding)
    losses = []
    for _ in range(STEPS):
        state, metrics = run(state, next(batches))
        losses.append(float(metrics["loss"]))
    where = f"{jax.device_count()} devices in {jax.process_count()} processes"
    print(f"{where}, {jax.devices()[0].device_kind}")
    np.save(Path(directory, f"losses_{jax.process_index()}.npy"), losses)


def train(directory: str, *names: str) -> None:
    """Trains by some routes, once with a late process, and leaves parameters and losses in files."""
    mesh, sharding = join()
    routes: dict[str, tuple[Callable[[jt.steps.TrainStep], Any], Any, Any]] = {
        "shard_map": (lambda step: jax.jit(jt.data_parallel(step, mesh)), mesh, sharding),
        "jit": (lambda step: jax.jit(jt.sharded_step(step, mesh)), mesh, sharding),
        "pmap": (jt.pmap_step, None, None),
    }
    for route in names:
        transform, where, how = routes[route]
        step, state = make_step("float32")
        if not jt.distributed.is_main_process():  # replaced by those of process 0
            state = jax.tree.map(lambda x: x + 1, state)
        state = jt.distributed.broadcast_state(state, where)
        jt.distributed.check_agreement(state, policy=step.policy, seed=1)
        run, losses = transform(step), []
        for batch in array_batches(digits(), BATCH, seed=1, sharding=how):
            if len(losses) == 5 and jax.process_index() == 1:
                time.sleep(1.0)
            state, metrics = run(state, batch)
            losses.append(float(metrics["loss"]))
            if len(losses) == STEPS:
                break
        jt.distributed.check_agreement(state)
        save(Path(directory, f"{route}.npz"), state.params, losses)
    overflow(mesh, sharding)
    naive_mode(mesh, sharding)
    graphs_of_their_own(mesh, sharding)


def save(path: Path, params: Any, losses: list[float]) -> None:
    if jt.distributed.is_main_process():
        arrays = jax.tree.map(lambda x: np.asarray(x.addressable_data(0)), params)
        np.savez(path, losses=losses, **arrays)


def overflow(mesh: Mesh, sharding: NamedSharding) -> None:
    """Skips steps that overflow in the last process only."""
    step, state = make_step("mixed_float16")
    state = jt.distributed.broadcast_state(state, mesh)
    run, finite, scales = jax.jit(jt.data_parallel(step, mesh)), [], []
    for number in range(6):
        state, metrics = run(state, batch_of_parts(sharding, overflows=number in (1, 4)))
        finite.append(bool(metrics["grads_finite"]))
        scales.append(float(metrics["loss_scale"]))
    print("finite", finite, "scale", scales[-1])
    jt.distributed.check_agreement(state)


def naive_mode(mesh: Mesh, sharding: NamedSharding) -> None:
    """Trains in half precision with master weights; what is logged comes from the first process alone."""
    logging.basicConfig(stream=sys.stdout, level=logging.INFO, format="%(message)s", force=True)
    amp = jt.amp_mode("naive", initial_scale=2.0**8, hysteresis=1, verbose=True)
    plain, state = make_step("float32")
    loss_fn, optimizer = amp.transform(plain.loss_fn, plain.optimizer)
    state = jt.TrainState.create(state.params, optimizer, cast_params=amp.cast_params)
    state = jt.distributed.broadcast_state(state, mesh)
    run = jax.jit(jt.data_parallel(jt.train_step(loss_fn, optimizer), mesh))
    metrics: Any = {}
    for number in range(4):
        state, metrics = run(state, batch_of_parts(sharding, overflows=number == 2))
        amp.log(metrics)
    jt.distributed.check_agreement(state)
    master_weights = jt.get_master_weights(state.opt_state)
    equal = jax.tree.map(lambda x, m: bool((x == m.astype(x.dtype)).all()), state.params, master_weights)
    print("master_weights", sorted(equal.items()), int(metrics["skipped_steps"]))


def graphs_of_their_own(mesh: Mesh, sharding: NamedSharding) -> None:
    """Trains on graphs of which each device has another: stars with 1, 2, ... rays, two for each device."""

    def star(rays: int) -> graphs.Graph:
        h = np.arange(rays + 1, dtype=np.float32)
        ends = np.arange(1, rays + 1), np.zeros(rays, np.int32)
        graph = graphs.from_edges(*ends, rays + 1, nodes={"h": h}, formats=("coo",))
        return graphs.pad(graph, 2 * mesh.size + 2, 2 * mesh.size)

    def loss_fn(weight: Any, batch: Any) -> jax.Array:
        messages = graphs.fn.copy_u("h", "m"), graphs.fn.sum("m", "x")
        return weight * graphs.update_all(batch["graph"], *messages).nodes["x"][0]

    optimizer = optax.sgd(1.0)
    step = jt.train_step(jt.stateless(loss_fn), optimizer, accumulate_steps=2)
    state = jt.distributed.broadcast_state(jt.TrainState.create(jnp.ones(()), optimizer), mesh)
    first = jax.process_index() * 2 * jax.local_device_count()
    own = graphs.stack([star(first + i + 1) for i in range(2 * jax.local_device_count())])
    batch = jax.tree.map(lambda x: jax.make_array_from_process_local_data(sharding, np.asarray(x)), {"graph": own})
    state, metrics = jax.jit(jt.data_parallel(step, mesh))(state, batch)
    sums = np.cumsum(np.arange(1, 2 * mesh.size + 1))  # of a star's rays
    assert float(metrics["loss"]) == sums.mean(), metrics
    assert float(state.params.addressable_data(0)) == 1 - sums.mean()


def differ() -> None:
    """Shows what is said of processes that start from different things."""
    jt.distributed.initialize(shutdown_timeout=20)
    odd = jax.process_index() == 1
    state = {"w": jnp.zeros(3), "rng": jax.random.key(0)}
    cases = {
        "seed": {"seed": 7 if odd else 0},
        "policy": {"policy": jt.get_policy("float32" if odd else "mixed_float16")},
        "shape": {"batch": {"x": np.ones((3 if odd else 4, 2))}},
        "structure": {"batch": {"x": 1.0, **({"extra": 1.0} if odd else {})}},
        "parameters": {"state": {**state, "w": jnp.full(3, -0.0)} if odd else state},
        "rng": {"state": {**state, "rng": jax.random.key(int(odd))}},
    }
    for name, case in cases.items():
        with printing_refusal(name):
            jt.distributed.check_agreement(**case)
    with printing_refusal("broadcast"):
        jt.distributed.broadcast_state({"w": np.zeros(2 if odd else 3)})
    send_all_kinds()
    save_replicated_and_sharded_weights()
    fail_to_describe_a_state()
    jt.distributed.check_agreement(seed=int(odd))  # the end


def fail_to_describe_a_state() -> None:
    """Restores with functions that raise, in process 0 before the others are asked."""
    with tempfile.TemporaryDirectory() as directory, jt.CheckpointStore(directory) as store:
        store.save(1, {"w": np.zeros(3)}, metadata={"name": "a"})
        for name, size in (("key", "sizes"), ("type", "name")):
            with printing_refusal(name):
                store.restore_as(lambda step, metadata, size=size: {"w": np.zeros(metadata[size])})


def send_all_kinds() -> None:
    """Sends all kinds of leaves from process 0 to the others."""
    first = jt.distributed.is_main_process()
    sent = {
        "zero": jnp.full(3, -0.0),
        "half": jnp.arange(4, dtype=jnp.bfloat16),
        "nan": np.array([np.nan, np.inf], np.float16),
        "key": jax.random.key(5),
        "number": 7,
        "none": jnp.zeros((0, 2)),
        "flags": np.array([True, False]),
    }
    other = {**jax.tree.map(lambda x: x, sent), "key": jax.random.key(6), "number": 8}
    got = jt.distributed.broadcast_state(sent if first else other)
    jt.distributed.check_agreement(got)
    print("signs", np.signbit(got["zero"]).tolist(), got["number"], type(got["number"]).__name__)
    print("kinds", {name: str(getattr(x, "dtype", "")) for name, x in got.items()})
    assert (jax.random.key_data(got["key"]) == jax.random.key_data(sent["key"])).all()


def save_replicated_and_sharded_weights() -> None:
    """Saves and loads what all processes have, and shows what is said of an array sharded over them."""
    mesh = Mesh(np.array(jax.devices()), ("data",))
    x = np.arange(2.0 * jax.device_count(), dtype=np.float32)
    replicated, sharded = (jax.device_put(x, NamedSharding(mesh, PartitionSpec(*axes))) for axes in ((), ("data",)))
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "weights.safetensors")
        jt.save_weights(file, {"w": replicated})
        (got,) = jt.load_weights(file, {"w": sharded}).values()
        is_equal = np.array_equal(got.addressable_data(0), sharded.addressable_data(0))
        print("loaded", got.sharding == sharded.sharding, is_equal)
        with printing_refusal("save"):
            jt.save_weights(file, {"w": sharded})


def leave(how: str, who: str) -> None:
    """Ends a process in some way while the others wait for it."""
    jt.distributed.initialize(shutdown_timeout=200)
    jt.distributed.check_agreement(seed=0)
    if jax.process_index() == int(who):
        if how == "exit":
            sys.exit(3)
        if how == "raise":
            raise LookupError("lost")
        os.kill(os.getpid(), signal.SIGKILL)
    jt.distributed.check_agreement(seed=0)


def uneven(shutdown_timeout: str) -> None:
    """Has process 1 take fewer steps than process 0, after it has started and before the first is over."""
    jt.distributed.initialize(shutdown_timeout=int(shutdown_timeout))
    for step in range(3 - jax.process_index()):
        jt.distributed.check_agreement(step=step)
    print("process", jax.process_index(), "is done")


def divided_state(value: float, mesh: Mesh) -> dict[str, Any]:
    """Returns a state of which each process has a part of one leaf, and all of the others."""
    apart, alike = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in (["data"], []))
    rows = np.arange(8.0, dtype=np.float32) * value
    return {
        "divided": placed_whole(rows, apart),
        "alike": placed_whole(np.full((), value, np.float32), alike),
        "step": int(value),
    }


def damage(directory: str) -> None:
    """Saves two steps, and restores from copies with one damaged file each."""
    (mesh, _), folder, cases = join(), Path(directory), 0
    with jt.CheckpointStore(folder / "whole") as store:
        for step in (1, 2):
            store.save(step, divided_state(float(step), mesh))
        found = store.restore(divided_state(7.0, mesh))
        check_restored(found, 2, mesh)
    generator = random.Random(0)
    for kind in ("truncated", "emptied", *["flipped"] * 28):
        copy = folder / str(cases)
        if jt.distributed.is_main_process():  # the others see no folder
            shutil.copytree(folder / "whole", copy)
            damage_file(copy / "step_00000002.safetensors", kind, generator)
        with jt.CheckpointStore(copy) as store, warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            check_restored(store.restore(divided_state(7.0, mesh)), 1, mesh)
        said = [str(warning.message) for warning in warned]
        if jt.distributed.is_main_process():
            assert len(said) == 1, said
            assert said[0].startswith("step 2 is damaged: "), said
            shutil.rmtree(copy)
        cases += 1
    own = folder / f"of_process_{jax.process_index()}"  # not shared
    with jt.CheckpointStore(own) as store:
        store.save(3, divided_state(3.0, mesh), metadata={"a": 1})
        store.wait()
        assert (store.steps(), store.metadata(3)) == ([3], {"a": 1})
        check_restored(store.restore(divided_state(7.0, mesh)), 3, mesh)
    with printing_refusal("refused"), jt.CheckpointStore(folder / "whole") as store:
        store.restore({**divided_state(1.0, mesh), "step": 1.0})
    print("cases", cases)


def capsules(directory: str) -> None:
    """Skips steps by three routes, and replays each from the capsules of all processes."""
    mesh, sharding = join()
    step, state = make_step("mixed_float16")
    fsdp = jt.fsdp_shardings(state, mesh, min_size=64)
    routes: dict[str, tuple[Any, Any, Any]] = {
        "shard_map": (jax.jit(jt.data_parallel(step, mesh)), mesh, sharding),
        "jit": (jt.sharded_step(step, mesh, shardings=fsdp), mesh, sharding),
        "pmap": (jt.pmap_step(step), None, None),
    }
    for route, (run, where, how) in routes.items():
        for save_state in (False, True) if route == "jit" else (False,):
            folder = Path(directory, f"{route}_{save_state}")
            state = jt.distributed.broadcast_state(make_step("mixed_float16")[1], where)
            if route == "jit":
                state = jax.device_put(state, fsdp)
            count = replay_skips(folder, run, state, how, save_state)
            print(f"{route} {save_state}: replayed {count}")


def replay_skips(folder: Path, run: Any, state: jt.TrainState, sharding: Any, save_state: bool) -> int:
    """Trains with skips, and returns how many steps came out of their capsules to the last bit."""
    found, first = 0, state
    with jt.SkipRecorder(folder, wait=True, save_state=save_state) as recorder:
        watched = recorder.watch(run)
        for number in range(5):
            bad = number in (0, 1, 3)
            batch = batch_of_capsules(number, bad)
            if sharding is None:
                batch = {name: np.split(x, jax.process_count())[jax.process_index()] for name, x in batch.items()}
            else:
                batch = {name: placed_whole(x, sharding) for name, x in batch.items()}
            state, metrics = watched(state, batch)
            assert bool(metrics["grads_finite"].addressable_data(0)) is not bad
            if not bad:
                continue
            path = recorder.last_capsule()
            assert path is not None
            before, again = jt.load_capsule(path, first if save_state else state)
            assert local_bytes(again) == local_bytes(batch)
            replayed, replayed_metrics = run(before, again)
            assert local_bytes(replayed_metrics) == local_bytes(metrics)
            assert save_state or local_bytes(replayed) == local_bytes(state)
            found += 1
    return found


def batch_of_capsules(number: int, bad: bool) -> dict[str, np.ndarray]:
    """Returns the whole batch of a step; if it is bad, its last example overflows."""
    batch = {name: x[BATCH * number : BATCH * (number + 1)].copy() for name, x in digits().items()}
    if bad:
        batch["x"][-1] = 7e4
    return batch


def placed_whole(x: np.ndarray, sharding: Any) -> jax.Array:
    """Returns the same array of all processes as one over their devices."""
    return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])


def local_bytes(tree: Any) -> list[list[bytes]]:
    """Returns what this process has of each leaf."""
    return [
        [np.asarray(part.data).tobytes() for part in x.addressable_shards]
        if isinstance(x, jax.Array)
        else [np.asarray(x).tobytes()]
        for x in jax.tree.leaves(tree)
    ]


def check_restored(found: tuple[int, Any], step: int, mesh: Mesh) -> None:
    assert found[0] == step
    wanted = divided_state(float(step), mesh)
    assert jax.tree.structure(found[1]) == jax.tree.structure(wanted)
    for x, y in zip(jax.tree.leaves(found[1]), jax.tree.leaves(wanted), strict=True):
        if isinstance(y, int):
            assert x == y
            continue
        assert x.sharding == y.sharding
        np.testing.assert_array_equal(x.addressable_data(0), y.addressable_data(0))


def damage_file(path: Path, kind: str, generator: random.Random) -> None:
    """Deletes a file, truncates it to half, empties it, or flips one of its bits."""
    data = bytearray(path.read_bytes())
    if kind == "deleted":
        path.unlink()
        return
    if kind == "flipped":
        data[generator.randrange(len(data))] ^= 1 << generator.randrange(8)
    path.write_bytes({"truncated": data[: len(data) // 2], "emptied": b""}.get(kind, bytes(data)))


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
