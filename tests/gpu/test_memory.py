"""What a step in half saves: on a GPU by its own count of bytes, beside what `compile_for_gpu` says.

The step is `gpu_programs.dense_step`, eight dense layers. On a GPU it runs in a process of its own, whose peak is its
own, without autotuning, whose trials are counted too, as `compile_for_gpu` compiles.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import gpu_programs
import jax
import pytest
from gpu_builders import compile_for_gpu

import jmp_train as jt
from jmp_train.tools.aot.gpus import GPUS

pytestmark = pytest.mark.gpu
PROGRAMS = Path(gpu_programs.__file__)
POLICIES = ("float32", "mixed_float16", "mixed_bfloat16")
MEASURE = """
import json, sys, jax
from gpu_programs import dense_step
step, arguments, options = dense_step(sys.argv[1])
compiled = jax.jit(step, **options).lower(*arguments).compile()
arrays = jax.tree.map(lambda x: jax.numpy.zeros(x.shape, x.dtype), arguments)
jax.block_until_ready(compiled(*arrays))
print(json.dumps(jax.devices()[0].memory_stats()["peak_bytes_in_use"]))
"""


def measured_bytes(policy: str) -> int:
    """Returns the peak of a GPU's memory in a process that makes one step."""
    flags = "--xla_gpu_autotune_level=0 --xla_gpu_enable_triton_gemm=false"
    path = os.pathsep.join([str(PROGRAMS.parent), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        (sys.executable, "-c", MEASURE, policy),
        env={**os.environ, "XLA_FLAGS": flags, "XLA_PYTHON_CLIENT_PREALLOCATE": "false", "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return int(json.loads(done.stdout))


def nearest_gpu(device_kind: str) -> str:
    """Returns the one of `GPUS` that a device is, or of its model, or an H100: sizes hardly depend on it."""
    exact = [name for name, gpu in GPUS.items() if gpu.description == device_kind]
    of_model = [name for name in GPUS if re.search(rf"\b{name.split('-')[0]}\b", device_kind)]
    return [*exact, *of_model, "H100-80GB"][0]


def test_memory_is_what_the_compiler_says(is_gpu: bool) -> None:
    """A GPU: a tenth and 64 MB for what libraries work in. A CPU, which upcasts half: no more than a quarter more."""
    if is_gpu:
        gpu = nearest_gpu(jax.devices()[0].device_kind)
        found = {policy: measured_bytes(policy) for policy in POLICIES}
        planned = {policy: compile_for_gpu(f"{PROGRAMS}:dense_step", policy, gpu=gpu).peak_bytes for policy in POLICIES}
        print(f"peak bytes, measured {found}, planned for {gpu} {planned}")
        for policy in POLICIES:
            assert 0.9 * planned[policy] <= found[policy] + 2**26, policy
            assert found[policy] <= 1.1 * planned[policy] + 2**26, policy
        assert max(found["mixed_float16"], found["mixed_bfloat16"]) <= 0.8 * found["float32"]
        return
    peaks = {}
    for policy in POLICIES:
        function, arguments, options = gpu_programs.dense_step(policy)
        sizes: Any = jax.jit(function, **options).lower(*arguments).compile().memory_analysis()
        peaks[policy] = sizes.temp_size_in_bytes
    assert max(peaks.values()) <= 1.25 * peaks["float32"]


@pytest.mark.parametrize("policy", POLICIES[1:])
def test_half_as_much_is_kept_for_the_gradients(policy: str) -> None:
    """Of the traced step, which is the same on any device: activations in half, beside the batch in both dtypes."""
    kept = {}
    for name in ("float32", policy):
        function, (state, batch), _ = gpu_programs.dense_step(name)
        kept[name] = jt.steps.step_costs(jax.jit(function).trace(state, batch), state).residual_bytes
    assert 0 < kept[policy] <= 0.6 * kept["float32"]
