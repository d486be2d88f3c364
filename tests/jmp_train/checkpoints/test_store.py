"""Checkpoints: exact, verified, in one file per step, and on any number of devices."""

import dataclasses
import errno
import json
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from process_helpers import launched
from process_programs import damage_file
from promotion import relaxed
from pytrees import assert_bitwise_equal, assert_same

import jmp_train as jt

pytestmark = [pytest.mark.quick, pytest.mark.newest]

OTHERS = {".venv": ".venv-newest", ".venv-newest": ".venv"}  # environments with another jax


def small_state(value: float = 1.0) -> dict[str, Any]:
    """Returns a state of few files, each of which damage tests damage."""
    return {
        "w": jnp.full((4, 3), value),
        "half": jnp.arange(5, dtype=jnp.bfloat16) * value,
        "rng": jax.random.key(int(value)),
        "step": int(value),
    }


def training_state(seed: int) -> jt.TrainState:
    """Returns a state with every kind of counter, none at its first value."""
    loss_scale = jt.DynamicLossScale(2.0**10, counter=jnp.int32(seed), hysteresis=2)
    tx = jt.with_loss_scale(relaxed(optax.adamw(1e-3)), loss_scale)
    params = {"w": jnp.linspace(0, 1, 12).reshape(4, 3), "none": jnp.zeros((0, 2))}
    state = jt.TrainState.create(params, tx, model_state={"mean": jnp.ones(3)}, rng=jax.random.key(seed))
    step = jax.jit(jt.train_step(jt.stateless(lambda p, x: (p["w"] * x).sum()), tx))
    for x in (1.0, np.inf, 3.0):
        state, _ = step(state, jnp.full((4, 3), x))
    return state


def test_all_kinds_of_leaves_come_back_to_the_last_bit(tmp_path: Path) -> None:
    state = {
        "train": training_state(3),
        "floats": np.array([np.nan, -0.0, np.inf], np.float16),
        "fp8": jnp.asarray(np.ones(2, ml_dtypes.float8_e4m3fn)),
        "int64": np.array(2**40),
        "keys": jax.random.split(jax.random.key(1, impl="rbg"), 3),
        "old_key": jax.random.PRNGKey(4),
        "numbers": [True, 3, 0.1],
        "empty": jnp.zeros((0, 7), jnp.int8),
        "nothing": None,
    }
    like = jax.tree.map(lambda x: x, {**state, "train": training_state(5)})
    with jt.CheckpointStore(tmp_path) as store:
        store.save(12, state)
        step, found = store.restore(like)
    assert step == 12
    assert_same(found, state)


def test_the_state_is_copied_before_save_returns(tmp_path: Path) -> None:
    change = jax.jit(lambda tree: jax.tree.map(lambda x: x * 0 - 1, tree), donate_argnums=0)
    state = {"w": jnp.arange(1000.0), "v": jnp.ones((100, 100))}
    wanted = jax.tree.map(np.array, state)
    with jt.CheckpointStore(tmp_path) as store:
        for step in range(4):
            store.save(step, state)
            state = jax.block_until_ready(change(state))
            assert_bitwise_equal(store.restore(state)[1], wanted)
            wanted = jax.tree.map(np.array, state)


def test_the_newest_steps_are_kept(tmp_path: Path) -> None:
    with jt.CheckpointStore(tmp_path, max_to_keep=2) as store:
        for step in (1, 5, 30, 100_000_000):
            store.save(step, small_state(step % 7))
        store.wait()
        assert store.steps() == [30, 100_000_000]
        store.save(30, small_state(5.0))  # written again
        store.wait()
        assert store.steps() == [30, 100_000_000]
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "step_00000030.safetensors",
        "step_100000000.safetensors",
    ]


def test_a_damaged_step_does_not_count_as_one_that_is_kept(tmp_path: Path) -> None:
    with jt.CheckpointStore(tmp_path) as store:
        for step in (10, 20):
            store.save(step, small_state(float(step)))
    os.truncate(tmp_path / "step_00000020.safetensors", 100)
    with jt.CheckpointStore(tmp_path, max_to_keep=1) as store, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert store.restore(small_state())[0] == 10
        store.save(15, small_state(15.0))
        assert store.restore(small_state())[0] == 15
        assert store.steps() == [15, 20]


def test_numpy_s_arrays_may_be_changed_after_save(tmp_path: Path) -> None:
    array = np.zeros(1_000_000)
    with jt.CheckpointStore(tmp_path) as store:
        store.save(1, {"w": array})
        array += 1
        assert not store.restore({"w": array})[1]["w"].any()


@pytest.fixture(name="two_steps", scope="module")
def fixture_two_steps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("two_steps")
    with jt.CheckpointStore(directory) as store:
        store.save(1, small_state(1.0))
        store.save(2, small_state(2.0))
    return directory


def test_no_intact_step_is_an_error_that_says_what_is_wrong_with_each(two_steps: Path, tmp_path: Path) -> None:
    text = r"there is no checkpoint in .*new"
    with jt.CheckpointStore(tmp_path / "new") as store, pytest.raises(FileNotFoundError, match=text):
        store.restore(small_state())
    shutil.copytree(two_steps, tmp_path / "copy")
    for step in (1, 2):
        os.truncate(tmp_path / "copy" / f"step_0000000{step}.safetensors", step)
    with jt.CheckpointStore(tmp_path / "copy") as store, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        text = r"no checkpoint in .*copy is intact: step 2 is damaged: .*header is truncated; step 1 is damaged: "
        with pytest.raises(ValueError, match=text):
            store.restore(small_state())


def test_a_state_that_does_not_fit_is_refused_with_all_leaves(two_steps: Path) -> None:
    state = small_state()
    other = {
        "w": state["w"].T,
        "half": state["half"].astype(jnp.float32),
        "rng": jax.random.key(0, impl="rbg"),
        "more": jnp.ones(()),
    }
    with jt.CheckpointStore(two_steps) as store, pytest.raises(ValueError) as error:
        store.restore(other)
    assert str(error.value).splitlines()[1:] == [
        "  ['half']: the checkpoint has bfloat16[5], the state has float32[5]",
        "  ['rng']: the checkpoint has key<fry> uint32[2], the state has key<rbg> uint32[4]",
        "  ['step']: the checkpoint has int int64[], the state has nothing",
        "  ['w']: the checkpoint has float32[4, 3], the state has float32[3, 4]",
        "  ['more']: the checkpoint has nothing, the state has float32[]",
    ]


@pytest.mark.parametrize(
    ("saved", "wanted"), [("bare", "scaled"), ("scaled", "bare"), ("disabled", "scaled"), ("scaled", "disabled")]
)
def test_an_optimizer_with_another_wrapper_is_told_of_adoption(tmp_path: Path, saved: str, wanted: str) -> None:
    sgd = optax.sgd(0.1, 0.9)
    optimizers = {
        "bare": sgd,
        "scaled": jt.with_loss_scale(sgd, jt.torch_loss_scale()),
        "disabled": jt.with_loss_scale(sgd, jt.torch_loss_scale(enabled=False)),
    }
    old, new = optimizers[saved], optimizers[wanted]
    params = {"w": jnp.ones(2)}
    old_state = jt.TrainState.create(params, old)
    opt_state = optax.tree.set(old_state.opt_state, trace={"w": jnp.full(2, 3.0)})
    old_state = dataclasses.replace(old_state, opt_state=opt_state)
    with jt.CheckpointStore(tmp_path) as store:
        store.save(1, old_state)
        with pytest.raises(ValueError, match=r"jmp_train\.adopt_opt_state\(optimizer\.init\(params\), old_opt_state\)"):
            store.restore(jt.TrainState.create(params, new))
        _, restored = store.restore(jt.TrainState.create(params, old))
    opt_state = jt.adopt_opt_state(new.init(params), restored.opt_state)
    np.testing.assert_array_equal(optax.tree.get(opt_state, "trace")["w"], 3.0)


def test_parameters_that_are_new_are_no_matter_of_wrappers(tmp_path: Path) -> None:
    scaled = jt.with_loss_scale(optax.sgd(0.1, 0.9), jt.torch_loss_scale())
    with jt.CheckpointStore(tmp_path) as store:
        store.save(1, jt.TrainState.create({"w": jnp.ones(2)}, scaled))
        with pytest.raises(ValueError, match=r"inner_state\[0\]\.trace\['new'\]: .* has float32\[3\]$"):
            store.restore(jt.TrainState.create({"w": jnp.ones(2), "new": jnp.ones(3)}, scaled))


def on_devices(state: Any, count: int) -> Any:
    """Returns a state of which long arrays are divided over some devices, and others copied."""
    mesh = Mesh(np.array(jax.devices()[:count]), ("data",))

    def place(x: Any) -> Any:
        if not isinstance(x, jax.Array):
            return x
        divided = x.ndim > 0 and x.shape[0] % count == 0 and x.shape[0] > 0
        return jax.device_put(x, NamedSharding(mesh, PartitionSpec(*["data"] * divided)))

    return jax.tree.map(place, state)


def test_a_state_moves_between_device_counts(tmp_path: Path) -> None:
    state = {"rng": jax.random.key(1), "long": jnp.asarray(np.linspace(0, 1, 64, dtype="f").reshape(16, 4))}
    blank = {"rng": jax.random.key(0), "long": jnp.asarray(np.zeros((16, 4), "f"))}
    found = on_devices(state, 8)
    with jt.CheckpointStore(tmp_path) as store:
        for step, count in enumerate((4, 1, 2, 8)):
            store.save(step, found)
            like = on_devices(blank, count)
            found = store.restore(like)[1]
            assert_same(found, state)
            assert found["long"].sharding == like["long"].sharding
            assert len(found["rng"].sharding.device_set) == count
        shapes = jax.eval_shape(lambda: blank)
        assert_same(store.restore(shapes)[1], state)


def test_a_store_that_could_not_write_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="max_to_keep=0 must be a whole number of at least 1"):
        jt.CheckpointStore(tmp_path, max_to_keep=0)
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(NotADirectoryError, match=f"{file}/store"):
        jt.CheckpointStore(file / "store")


def test_a_full_disk_is_an_error_and_loses_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Whether it is the header or an array that finds no room."""
    state = {"w": np.random.default_rng(0).normal(size=200_000), "step": 1}
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    store = jt.CheckpointStore(tmp_path)
    store.save(1, state)
    store.wait()
    for size, finish in ((5, store.wait), (600, store.wait), (100_000, store.wait), (1_600_000, store.close)):
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
        try:
            store.save(2, state)
            text = r"step 2 could not be written to .*File too large.*; the steps before"
            with pytest.raises(OSError, match=text) as caught:
                finish()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert caught.value.errno == errno.EFBIG
        assert {path.name for path in tmp_path.iterdir()} - {"lock"} == {"step_00000001.safetensors"}
    signal.signal(signal.SIGXFSZ, handler)
    with jt.CheckpointStore(tmp_path) as store:
        store.save(3, state)
        assert store.restore(state)[0] == 3
    assert capfd.readouterr() == ("", "")


def test_other_programs_read_the_arrays(tmp_path: Path) -> None:
    """As a safetensors file, with the paths of the leaves as names."""
    import safetensors.numpy
    from safetensors import safe_open

    state = {"w": np.arange(6.0).reshape(2, 3), "half": np.ones(2, np.float16), "none": np.zeros((0, 2)), "step": 3}
    with jt.CheckpointStore(tmp_path) as store:
        store.save(1, state, metadata={"lr": 0.1})
    found = safetensors.numpy.load_file(tmp_path / "step_00000001.safetensors")
    assert found.keys() == {"['w']", "['half']", "['none']", "['step']"}
    assert_same({name: found[f"['{name}']"] for name in state}, state | {"step": np.array(3)})
    with safe_open(tmp_path / "step_00000001.safetensors", "np") as file:
        assert json.loads(file.metadata()["jmp_train.checkpoint"])["metadata"] == {"lr": 0.1}


def test_what_lay_on_no_particular_device_still_does(tmp_path: Path) -> None:
    """A state that was fixed to one device could not be given to a step on many."""
    state = {"w": jnp.ones(8), "rng": jax.random.key(0)}
    mesh = Mesh(np.array(jax.devices()), ("data",))
    x = jax.device_put(jnp.ones(8), NamedSharding(mesh, PartitionSpec("data")))
    with jt.CheckpointStore(tmp_path) as store:
        store.save(0, state)
        for found in (store.restore(state)[1], jt.distributed.broadcast_state(state)):
            assert not found["w"].committed
            assert float(jax.jit(lambda a, b, rng: (a["w"] * b).sum())(found, x, found["rng"])) == 8


@pytest.mark.full
@pytest.mark.timeout(120)
def test_another_jax_reads_it_and_is_read(tmp_path: Path) -> None:
    other = Path(sys.prefix).with_name(OTHERS.get(Path(sys.prefix).name, "none")) / "bin" / "python"
    if not other.exists():
        pytest.skip(f"no environment with another jax is there: {other}")
    script = (
        "import sys, jax, numpy as np, jmp_train as jt\n"
        "with jt.CheckpointStore(sys.argv[1]) as store:\n"
        "    state = {'w': jax.numpy.zeros(9, 'bfloat16'), 'rng': jax.random.key(0), 'step': 0}\n"
        "    step, state = store.restore(state)\n"
        "    store.save(step + 1, state | {'step': 2})\n"
        "    print(jax.__version__)\n"
    )
    state = {"w": jnp.linspace(-1, 1, 9, dtype=jnp.bfloat16), "rng": jax.random.key(5), "step": 1}
    with jt.CheckpointStore(tmp_path) as store:
        store.save(1, state)
    done = subprocess.run(
        [str(other), "-c", script, str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"XLA_FLAGS": ""},  # a jaxlib ends at a flag that it does not know
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() != jax.__version__
    with jt.CheckpointStore(tmp_path) as store:
        step, found = store.restore(state)
    assert step == 2
    assert_same(found, state | {"step": 2})


@pytest.mark.full
@pytest.mark.timeout(200)
def test_no_damage_is_silent_with_two_processes_and_a_leaf_divided_between_them(tmp_path: Path) -> None:
    program = Path(__file__).resolve().parents[2] / "programs" / "process_programs.py"
    code, text = launched(program, "damage", tmp_path)
    assert code == 0, text
    cases = [int(count) for count in re.findall(r"cases (\d+)", text)]
    assert len(cases) == 2
    assert cases[0] == 30
    assert text.count("['step']: the checkpoint has int int64[], the state has float float64[]") == 2, text


def test_metadata_is_what_the_step_was_saved_with(tmp_path: Path) -> None:
    metadata: dict[str, Any] = {"options": {"lr": 1e-3, "heads": (2, 2)}, "loss": 0.1}
    with jt.CheckpointStore(tmp_path) as store:
        store.save(1, small_state(), metadata=metadata)
        metadata["loss"] = 0.2  # after `save` returned
        store.save(2, small_state())
        assert store.metadata(1) == {"options": {"lr": 1e-3, "heads": [2, 2]}, "loss": 0.1}
        assert store.metadata(2) == {}
        with pytest.raises(FileNotFoundError, match=f"no step 3 in {tmp_path}, only: 1, 2$"):
            store.metadata(3)
        wrongs: list[Any] = [{"x": jnp.ones(2)}, {"x": {1, 2}}, {(1, 2): 3}]
        for wrong in wrongs:
            with pytest.raises(TypeError, match="metadata must be JSON-serializable: "):
                store.save(3, small_state(), metadata=wrong)
        with pytest.raises(TypeError, match="metadata must be JSON-serializable: "):
            store.save(3, small_state(), metadata=[1])  # pyright: ignore[reportArgumentType]
        assert store.steps() == [1, 2]
    damage_file(tmp_path / "step_00000001.safetensors", "truncated", random.Random(0))
    with pytest.raises(ValueError, match=r"^step 1 is damaged: .*step_00000001\.safetensors"):
        store.metadata(1)


def test_a_given_step_is_restored(tmp_path: Path) -> None:
    with jt.CheckpointStore(tmp_path) as store:
        for step in (1, 2, 3):
            store.save(step, small_state(float(step)))
        step, found = store.restore(small_state(), step=2)
        assert step == 2
        assert_same(found, small_state(2.0))
        with pytest.raises(FileNotFoundError, match=f"no step 4 in {tmp_path}, only: 1, 2, 3$"):
            store.restore(small_state(), step=4)
        os.truncate(tmp_path / "step_00000002.safetensors", 300)
        with pytest.raises(ValueError, match=r"^step 2 is damaged: .*header is truncated"):
            store.restore(small_state(), step=2)  # and not the one before
