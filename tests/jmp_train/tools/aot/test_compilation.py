import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from process_helpers import run_python

from jmp_train.tools.aot.compilation import PluginError, compile_for_gpu, compile_here, target_mesh

PROGRAMS = Path(__file__).parents[3] / "programs" / "gpu_programs.py"
EDGES, FEATURES = 20_000, 64  # as in PROGRAMS
pytestmark = [pytest.mark.quick, pytest.mark.timeout(200)]


def compiled(plan_python: str, name: str, *arguments: str, **options: Any) -> Any:
    return compile_for_gpu(f"{PROGRAMS}:{name}", *arguments, python=plan_python, timeout=150, **options)


@pytest.mark.full
@pytest.mark.parametrize(("returned", "stored"), [("sum", 0), ("both", 1)])
def test_messages_that_are_only_summed_are_not_stored(plan_python: str, returned: str, stored: int) -> None:
    program = compiled(plan_python, "messages", returned)
    large = program.arrays_of_at_least(EDGES * FEATURES)
    assert len(large) == stored
    for array in large:
        assert (array.opcode, array.dtype) == ("fusion", "f32")
        assert array.n_bytes == 4 * EDGES * FEATURES
    assert (program.peak_bytes > 4 * EDGES * FEATURES) == bool(stored)
    arguments = [a.n_bytes for a in program.arrays if a.opcode == "parameter"]
    assert program.argument_bytes == sum(arguments)


@pytest.mark.full
@pytest.mark.parametrize("gpu", ["V100-16GB", "A100-40GB", "H100-80GB"])
def test_donated_matrices_and_products_are_seen(plan_python: str, gpu: str) -> None:
    program = compiled(plan_python, "loop", "256", gpu=gpu)
    matrix = 2 * 256 * 256
    assert program.argument_bytes == 2 * matrix
    assert program.alias_bytes == program.output_bytes == matrix  # the donated one
    assert 2 * matrix < program.peak_bytes < 2**26  # cuBLAS works in up to 32 MB
    products = [a for a in program.arrays if a.opcode == "custom-call" and a.dtype == "f16"]
    assert [a.shape for a in products] == [(256, 256)]  # in the loop's body
    assert len(repr(program)) < 200


@pytest.mark.full
def test_a_module_is_found_on_the_python_path(plan_python: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(PROGRAMS.parent))
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=false")
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    with pytest.raises(RuntimeError) as failure:
        compile_for_gpu("gpu_programs:environment", "XLA_FLAGS", "JAX_PLATFORMS", python=plan_python)
    assert "'--xla_cpu_enable_fast_math=false --xla_gpu_autotune_level=0 " in str(failure.value)
    assert "'JAX_PLATFORMS': 'cpu'" in str(failure.value)


TRACEBACK = (
    r"(?s)^compiling .*gpu_programs\.py:environment for V100-16GB failed \(exit code 1\):"
    r"\nTraceback .*raise LookupError.*\nLookupError: \{'NOT_SET': None\}\n$"
)
NO_PROGRAM = r"must return \(function, arguments tuple\) or .*, got NoneType: None"


@pytest.mark.parametrize(("call", "message"), [("environment NOT_SET", TRACEBACK), ("nothing", NO_PROGRAM)])
def test_the_traceback_of_a_builder_is_passed_on(plan_python: str, call: str, message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        compiled(plan_python, *call.split())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gpu": "V100"}, r"gpu='V100' must be a GPU or one of P100-16GB, V100-16GB, "),
        ({"devices": 0}, r"devices=0 must be at least 1"),
        ({"target": "build"}, r"target='build' must be 'module:function' or 'path/to/file\.py:"),
        ({"target": "bench.py:"}, r"target='bench\.py:' must be 'module:function' or "),
    ],
)
def test_a_wrong_call_starts_nothing(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        compile_for_gpu(**{"target": "module:build", "python": "/nowhere", **options})
    if "target" not in options:
        with pytest.raises(ValueError, match=f"^{message}"):
            target_mesh(**{"gpu": "H100-80GB", **options})


def test_an_environment_without_the_plugin_is_told_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JMP_TRAIN_CACHE", str(tmp_path))
    with pytest.raises(
        PluginError, match=r"^XLA's compiler for CUDA is not installed for jaxlib .*install_compiler\(\)"
    ):
        compile_for_gpu(f"{PROGRAMS}:nothing")


def test_a_plugin_of_another_version_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "jax_cuda12_plugin-0.0.1.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Name: jax-cuda12-plugin\nVersion: 0.0.1\n")
    monkeypatch.setenv("JMP_TRAIN_CACHE", str(tmp_path))
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(PluginError, match=r"^jaxlib (.*) needs jax-cuda12-plugin of the same .* not 0\.0\.1: .*=\1"):
        compile_for_gpu(f"{PROGRAMS}:nothing")


def test_a_timeout_kills_the_compiler_and_what_it_started(tmp_path: Path) -> None:
    late = tmp_path / "late"
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\n(sleep 2; touch '{late}') &\nsleep 100\n")
    python.chmod(0o755)
    with pytest.raises(TimeoutError, match=r"^compiling m:f for V100-16GB took more than timeout="):
        compile_for_gpu("m:f", python=python, timeout=0.5)
    time.sleep(2.5)
    assert not late.exists()


def test_compile_here_replicates_what_has_no_sharding() -> None:
    mesh = jax.make_mesh((8,), ("data",))
    shared = NamedSharding(mesh, PartitionSpec("data"))
    rows = jax.ShapeDtypeStruct((64, 4), jnp.float32, sharding=shared)
    arguments = ({"x": rows, "y": jnp.ones(4), "z": 2.0}, jax.random.key(0))
    program = compile_here(
        lambda tree, key: (tree["x"] * tree["y"] * tree["z"], jax.random.split(key)), arguments, mesh=mesh
    )
    assert program.argument_bytes == 4 * 8 * 4 + 4 * 4 + 4 + 8
    shapes = {a.shape for a in program.arrays if a.opcode == "parameter"}
    assert shapes == {(8, 4), (4,), (), (2,)}


def test_compile_here_refuses_what_is_jitted() -> None:
    with pytest.raises(TypeError, match=r"^function must not be jitted, got"):
        compile_here(jax.jit(jnp.sin), (1.0,), mesh=jax.make_mesh((1,), ("data",)))


def test_importing_jmp_train_leaves_it_alone() -> None:
    code = "import sys, jmp_train; print({f'jmp_train.tools.aot.{x}' for x in ('compilation', 'hlo')} & {*sys.modules})"
    assert run_python("-c", code) == "set()\n"
