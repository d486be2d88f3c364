"""Programs that are exported here: what they are made of, what cannot be exported, what is kept of compiled ones."""

import os
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import export
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

import jmp_train as jt
from jmp_train.tools.aot import GPUS, ExportedProgram, ExportError, compile_program, export_program
from jmp_train.tools.aot.compiling import cache_folder
from jmp_train.tools.aot.exported import _forget_the_oldest, is_shape, shapes_of

pytestmark = [pytest.mark.quick, pytest.mark.timeout(300)]

STATE = {"w": jax.ShapeDtypeStruct((4, 2), jnp.float32), "step": 0, "none": None}
BATCH = {"x": jax.ShapeDtypeStruct((8, 4), jnp.float16), "y": np.zeros(8, np.int32)}


def step(state: Any, batch: Any) -> Any:
    y = batch["x"].astype(jnp.float32) @ state["w"]
    w = state["w"] - jax.grad(lambda w: ((batch["x"].astype(jnp.float32) @ w) ** 2).mean())(state["w"])
    return {"w": w, "step": state["step"] + 1, "none": None}, y.mean() + batch["y"].sum().astype(jnp.float32)


def exported(function: Any = step, *arguments: Any, **options: Any) -> ExportedProgram:
    given = arguments or (STATE, BATCH)
    return export_program(function, given, names=("state", "batch")[: len(given)], **options)


def read(program: ExportedProgram) -> export.Exported:
    return export.deserialize(bytearray(program.serialized))


def test_paths_and_donated_numbers_are_those_of_the_leaves() -> None:
    program = exported(donated=(0,))
    assert program.paths == ("state['step']", "state['w']", "batch['x']", "batch['y']")
    assert (program.donated, program.devices) == ((0, 1), 1)
    both = lambda state, batch: (state, batch)
    assert exported(both, STATE, BATCH, donated=(1,)).donated == (2, 3)
    assert exported(both, STATE, BATCH, donated=(0, 1)).donated == (0, 1, 2, 3)
    assert exported().donated == ()


def test_the_program_is_for_cuda_and_of_these_shapes() -> None:
    found = read(exported())
    assert found.platforms == ("cuda",)
    assert [(aval.shape, str(aval.dtype)) for aval in found.in_avals] == [
        ((), "int32"), ((4, 2), "float32"), ((8, 4), "float16"), ((8,), "int32"),
    ]  # fmt: skip
    assert [(aval.shape, str(aval.dtype)) for aval in found.out_avals] == [
        ((), "int32"), ((4, 2), "float32"), ((), "float32"),
    ]  # fmt: skip


def test_a_program_is_the_same_each_time() -> None:
    first, again = [exported(donated=(0,)) for _ in range(2)]  # the lines that call are in the program
    assert first.serialized == again.serialized, "else nothing would be found in the cache"
    assert exported(jax.jit(step, donate_argnums=1), donated=(0,)).donated == first.donated
    other = {**BATCH, "x": jax.ShapeDtypeStruct((16, 4), jnp.float16), "y": np.zeros(16, np.int32)}
    assert exported(step, STATE, other, donated=(0,)).serialized != first.serialized


def test_the_program_computes_what_the_step_does() -> None:
    state = {"w": jnp.arange(8.0).reshape(4, 2), "step": 3, "none": None}
    batch = {"x": jnp.full((8, 4), 0.5, jnp.float16), "y": jnp.arange(8)}
    program = read(export_program(step, (state, batch), names=("state", "batch"), platform="cpu"))
    leaves = jax.tree.leaves(jax.tree.map(jnp.asarray, (state, batch)))
    for found, wanted in zip(program.call(*leaves), jax.tree.leaves(step(state, batch)), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-6)


def test_shardings_are_those_that_are_given() -> None:
    mesh = AbstractMesh((4,), ("data",), axis_types=(AxisType.Auto,))
    split, whole = NamedSharding(mesh, PartitionSpec("data")), NamedSharding(mesh, PartitionSpec())
    shardings = ({"w": split, "step": whole, "none": None}, {"x": split, "y": split})
    program = exported(shardings=shardings, devices=4)
    assert program.devices == read(program).nr_devices == 4
    here = Mesh(np.array(jax.devices()[:4]), ("data",))
    found = [getattr(sharding, "spec", PartitionSpec()) for sharding in read(program).in_shardings_jax(here)]
    assert [spec == PartitionSpec("data") for spec in found] == [False, True, True, True]


def test_where_arrays_are_here_does_not_matter() -> None:
    placed = jax.device_put(jnp.zeros((8, 2)), jax.sharding.SingleDeviceSharding(jax.devices()[3]))
    there = jax.ShapeDtypeStruct((8, 2), jnp.float32, sharding=placed.sharding)
    programs = [exported(jnp.sin, x) for x in (placed, there, np.zeros((8, 2), np.float32))]
    assert len({program.serialized for program in programs}) == 1


def test_leaves_that_are_no_arrays_are_constants() -> None:
    def run(state: Any, batch: Any) -> Any:
        assert state["activation"] is jnp.tanh
        assert batch["name"] == "train"
        return {**state, "w": state["activation"](state["w"])}, batch["x"].sum(), "done"

    state, batch = {**STATE, "activation": jnp.tanh}, {**BATCH, "name": "train"}
    program = exported(run, state, batch, donated=(0,))
    assert program.paths == ("state['step']", "state['w']", "batch['x']", "batch['y']")
    assert program.donated == (0, 1)
    assert len(read(program).out_avals) == 3


def test_numbers_are_arguments_and_in_equinoxs_modules_constants() -> None:
    equinox = pytest.importorskip("equinox")
    linear = equinox.nn.Dropout(0.5, inference=True)
    shapes = shapes_of({"model": linear, "step": 3, "rate": 0.5, "key": jax.random.key(0)})
    assert shapes["model"].inference is True
    assert shapes["step"] == jax.ShapeDtypeStruct((), jnp.int32, weak_type=True)
    assert shapes["rate"].dtype == jnp.float32
    assert is_shape(shapes["key"])
    again = shapes_of(shapes)
    assert again["step"] == shapes["step"]
    assert again["model"].inference is True


def test_what_a_step_puts_into_nnx_objects_is_a_result() -> None:
    model = nnx.Linear(4, 2, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.sgd(1e-2, momentum=0.9), wrt=nnx.Param)

    def run(state: Any, batch: Any) -> Any:
        model, optimizer = state
        loss, grads = nnx.value_and_grad(lambda model: (model(batch) ** 2).mean())(model)
        optimizer.update(model, grads)
        return loss

    with jax.numpy_dtype_promotion("standard"):
        program = export_program(
            run, ((model, optimizer), jnp.ones((8, 4))), names=("state", "batch"), donated=(0,), platform="cpu"
        )
    shapes = [aval.shape for aval in read(program).out_avals]
    assert shapes == [*[aval.shape for aval in read(program).in_avals][:-1], ()], "the state in its order, and the loss"
    leaves = jax.tree.leaves(((model, optimizer), jnp.ones((8, 4))))
    results = read(program).call(*leaves)
    kernel = program.paths.index("state[0].kernel.value")
    expected = jax.tree.leaves(nnx.state(model))[kernel]
    assert not np.array_equal(results[kernel], expected), "a step was made"
    run((model, optimizer), jnp.ones((8, 4)))
    np.testing.assert_allclose(results[kernel], model.kernel[...], rtol=1e-5)


def test_nnx_state_that_is_returned_comes_once() -> None:
    graph, state = nnx.split(nnx.Linear(4, 2, rngs=nnx.Rngs(0)))

    def run(state: Any, batch: Any) -> Any:
        model = nnx.merge(graph, state)
        model.kernel[...] = model.kernel[...] * batch.sum()
        return nnx.state(model)

    assert len(read(exported(run, state, jnp.ones(4))).out_avals) == 2


def with_print(state: Any, batch: Any) -> Any:
    jax.lax.fori_loop(0, 2, lambda i, x: (jax.debug.print("x {}", x), x)[1], 0.0)  # in a loop's body
    return state, batch["x"].sum()


def with_callback(state: Any, batch: Any) -> Any:
    return state, jax.pure_callback(np.sin, jax.ShapeDtypeStruct((8, 4), jnp.float16), batch["x"])


@pytest.mark.parametrize(("function", "name"), [(with_print, "debug_print"), (with_callback, "pure_callback")])
def test_a_callback_is_named_with_its_line(function: Any, name: str) -> None:
    line = function.__code__.co_firstlineno + 1
    with pytest.raises(
        ExportError,
        match=re.escape(
            f"{name} at {__file__}:{line}. Remove the callbacks from the planned step; they need almost no memory"
        ),
    ):
        exported(function)


def test_a_step_that_returns_nothing_is_no_program() -> None:
    with pytest.raises(ExportError, match="the step returns no array, so there is nothing to"):
        exported(lambda state, batch: None)


def test_a_step_of_these_devices_is_told_from_one_of_a_plan() -> None:
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    sharding = NamedSharding(mesh, PartitionSpec("data"))

    def run(state: Any, batch: Any) -> Any:
        return state, jax.lax.with_sharding_constraint(batch["x"], sharding).sum()

    with pytest.raises(
        ExportError, match=r"runs on 8 devices by itself .* but a program for 1 is needed; pass the step of one device"
    ):
        exported(run)


def test_what_jax_does_not_lower_for_cuda_is_said_so() -> None:
    def run(state: Any, batch: Any) -> Any:
        return state, jax.lax.platform_dependent(batch["x"], tpu=jnp.sin)

    with pytest.raises(ExportError, match="jax cannot serialize the step for cuda: "):
        exported(run)


def test_errors_of_the_step_itself_come_as_they_are() -> None:
    with pytest.raises(TypeError, match=r"same number of dimensions, got \{1, 2\}"):
        exported(lambda state, batch: jax.lax.add(state["w"], batch["y"].astype("float32")))


def test_the_oldest_are_forgotten(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jmp_train.tools.aot.exported._MOST_CACHED", 25)
    for age, name in enumerate(("new", "used", "old")):
        (tmp_path / name).write_bytes(bytes(10))
        os.utime(tmp_path / name, (1000 - age, 1000 - age))
    _forget_the_oldest(tmp_path)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["new", "used"]
    _forget_the_oldest(tmp_path)
    assert len(list(tmp_path.iterdir())) == 2


# With the compiler


@pytest.mark.full
def test_what_was_compiled_is_kept_and_made_anew_if_it_is_damaged(compiler: None) -> None:
    gpu, program = GPUS["V100-16GB"], exported(donated=(0,))
    first = compile_program(program, gpu)
    (kept,) = (cache_folder() / "programs").iterdir()
    content, inode = kept.read_bytes(), kept.stat().st_ino
    assert compile_program(program, gpu) == first
    assert kept.stat().st_ino == inode, "it is read, not compiled"
    for damaged in (content[:100], b"", b"nonsense"):
        kept.write_bytes(damaged)
        with pytest.raises(TimeoutError, match=r"compiling for V100-16GB took more than timeout=0\.01 s"):
            compile_program(program, gpu, timeout=0.01)
    assert compile_program(program, gpu) == first
    assert kept.read_bytes() == content
    assert first.argument_bytes >= 4 * 8 + 2 * 32 + 4 * 8
    assert first.alias_bytes >= 32, "the next weights take the place of the last"
    with pytest.raises(TimeoutError):  # another GPU is another program
        compile_program(program, GPUS["A100-40GB"], timeout=0.01)


@pytest.mark.full
def test_what_the_compiler_says_comes_with_the_error(compiler: None) -> None:
    broken = ExportedProgram(b"nonsense", 1, (), ())
    with pytest.raises(RuntimeError, match=r"compiling for V100-16GB failed \(exit code 1\):\nTraceback"):
        compile_program(broken, GPUS["V100-16GB"])
    assert not (cache_folder() / "programs").exists()


@pytest.mark.full
def test_random_keys_scans_and_half_precision_compile(compiler: None) -> None:
    def run(state: Any, batch: Any) -> Any:
        key, next_key = jax.random.split(state["rng"])
        x = batch * jax.random.bernoulli(key, 0.5, batch.shape).astype(batch.dtype)
        x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, state["w"])
        return {**state, "rng": next_key}, x.sum()

    state = {"rng": jax.random.key(0), "w": jax.ShapeDtypeStruct((3, 64, 64), jnp.float32)}
    batch = jax.ShapeDtypeStruct((32, 64), jnp.float16)
    with jax.numpy_dtype_promotion("standard"):
        program = exported(jt.autocast(run), state, batch, donated=(0,))
    compiled = compile_program(program, GPUS["A100-40GB"])
    assert compiled.argument_bytes >= 3 * 64 * 64 * 4 + 32 * 64 * 2 + 8
    assert "f16[" in compiled.hlo
    assert compiled.buffer_assignment
    assert compiled.live_range
