"""Programs compiled for TPUs that are not here, by libtpu."""

import re
from importlib import metadata
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, NamedSharding

from jmp_train.tools.aot import (
    TPUS,
    CompiledProgram,
    buffers_at_peak,
    compile_program,
    export_program,
    program_costs,
    read_hlo,
    tpu_slice,
)
from jmp_train.tools.aot.compiling import compiler_path, libtpu_requirement

pytestmark = [pytest.mark.full, pytest.mark.timeout(500)]

WIDTH = 300
PAIRS = {"0.10.2": "libtpu==0.0.42.*", "0.12.0.1": "libtpu==0.0.50.*"}  # of jax and libtpu, all of which we ran


def compiled(function: Any, *shapes: Any, tpu: str = "v5e:1x1") -> CompiledProgram:
    slice_ = tpu_slice(tpu)
    arguments = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in shapes]
    names = [f"argument {i}" for i in range(len(shapes))]
    options: dict[str, Any] = {"devices": slice_.devices, "platform": "tpu"}
    if slice_.devices > 1:
        whole = NamedSharding(AbstractMesh((slice_.devices,), ("data",)), jax.P())
        options["shardings"] = [whole] * len(shapes)
    program = export_program(function, arguments, names=names, donated=(0,), **options)
    return compile_program(program, slice_)


def test_the_version_is_jaxs_own_and_tested() -> None:
    assert libtpu_requirement() == PAIRS[metadata.version("jax")]


def step(w: Any, x: Any) -> Any:
    return w - 0.1 * jax.grad(lambda w: (jnp.tanh(x @ w) @ w.T).mean())(w)


def test_memory_is_what_libtpu_reports(tpu_compiler: None) -> None:
    """Arrays take whole tiles of 8 x 128 numbers; the donated argument's memory is the result's."""
    found = compiled(step, ((WIDTH, WIDTH), jnp.float32), ((WIDTH, WIDTH), jnp.float32))
    columns, rows = 384, 304  # the next multiples of 128 and 8
    assert found.argument_bytes == 2 * 4 * columns * rows
    assert found.alias_bytes == 4 * columns * rows
    assert found.reported_bytes is not None
    assert found.allocated_bytes == pytest.approx(found.reported_bytes, rel=0.01)
    assert found.peak_bytes <= found.allocated_bytes
    hlo = read_hlo(found.hlo)
    options: Any = {"platform": "tpu", "temp_bytes": found.temp_bytes}
    buffers = buffers_at_peak(found.buffer_assignment, found.live_range, hlo, **options)
    assert sum(buffer.n_bytes for buffer in buffers) == found.allocated_bytes
    arguments = [buffer for buffer in buffers if buffer.operation == "argument"]
    assert [buffer.tile_bytes for buffer in arguments] == [4 * (columns * rows - WIDTH * WIDTH)] * 2


@pytest.mark.parametrize("generation", [*TPUS])
def test_what_does_not_fit_is_measured_and_the_limit_is_that_of_the_table(generation: str, tpu_compiler: None) -> None:
    """libtpu refuses three matrices, of which two would fill the memory; its message has its limit."""
    tpu = TPUS[generation]
    n = 8192 * round((tpu.memory_bytes / 8) ** 0.5 / 8192)
    matrix = ((n, n), jnp.float32)
    found = compiled(jnp.dot, matrix, matrix, tpu=tpu.name)
    assert found.reported_bytes is None
    assert found.allocated_bytes == pytest.approx(3 * 4 * n * n, rel=0.01)
    needed, limit = (float(size) for size in re.findall(r"\(([\d.]+)G\)", found.refusal))
    assert found.allocated_bytes / 2**30 == pytest.approx(needed, abs=0.1)
    assert limit - 0.011 <= tpu.program_bytes / 2**30 <= limit + 0.001


@pytest.mark.parametrize(("precision", "passes"), [("default", 1), ("high", 3), ("highest", 6)])
def test_the_passes_of_a_product_in_float32(precision: str, passes: int, tpu_compiler: None) -> None:
    """Three more facts of a product: its operations, its bytes, and its least time by the slower of the two."""
    n = 2048

    def product(x: Any, y: Any) -> Any:
        return jnp.dot(x, y, precision=precision)

    found = compiled(product, ((n, n), jnp.float32), ((n, n), jnp.float32))
    costs, tpu = program_costs(read_hlo(found.hlo), TPUS["v5e"]), TPUS["v5e"]
    assert costs.operations == {"f32": 2 * n**3}
    assert {p.precision for kernel in costs.kernels for p in kernel.products} == {precision}
    assert costs.memory_seconds == pytest.approx(3 * 4 * n * n / tpu.bandwidth)
    by_arithmetic = passes * 2 * n**3 / tpu.rates["bfloat16"]
    assert costs.compute_seconds == pytest.approx(max(by_arithmetic, 3 * 4 * n * n / tpu.bandwidth))


def test_a_loop_reads_one_matrix_of_ten_at_a_time(tpu_compiler: None) -> None:
    """The carry moves to vector memory and back each time, the weights are read once."""
    n, times = 512, 10

    def loop(x: Any, ws: Any) -> Any:
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, ws)[0]

    found = compiled(loop, ((n, n), jnp.bfloat16), ((times, n, n), jnp.bfloat16))
    costs = program_costs(read_hlo(found.hlo), TPUS["v5e"])
    assert costs.operations == {"bf16": times * 2 * n**3}
    matrices = times * 2 * n * n
    assert costs.memory_seconds * TPUS["v5e"].bandwidth == pytest.approx(3 * matrices, rel=0.01)


def test_libtpu_writes_nothing_of_its_own(tpu_compiler: None, tmp_path: Any) -> None:
    """A process that compiles, as `compile_program` starts it, leaves its log empty."""
    import subprocess
    import sys

    from jmp_train.tools.aot.compiling import compiling_environment

    code = (
        "from jax.experimental import topologies as t; import jax; "
        "d = t.get_topology_desc('v5e:2x2', 'tpu'); s = jax.NamedSharding(t.make_mesh(d, (4,), ('x',)), jax.P('x')); "
        "jax.jit(lambda x: x.sum()).lower(jax.ShapeDtypeStruct((8, 128), 'float32', sharding=s)).compile()"
    )
    environment = compiling_environment(compiler_path("tpu"), "tpu")
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
