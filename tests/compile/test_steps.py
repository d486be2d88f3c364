"""The ring of compilations: steps of tasks, loss scales and optimizers compile for GPUs and TPUs that are not here.

Each program compiles without an error, has nothing in double precision, computes its products in the dtypes that it
promises, and takes the memory that `memory.json` has. `python tests/compile/test_steps.py` writes the table anew.
"""

import functools
import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from example_tasks import load_task

import jmp_train as jt
from jmp_train.app.runs import planned_step
from jmp_train.policies import with_state_dtypes
from jmp_train.tools.aot import GPUS, CompiledProgram, compile_program, program_costs, read_hlo, tpu_slice
from jmp_train.tools.planning import Placement, Workload
from jmp_train.tools.planning.workloads import Variant

pytestmark = [pytest.mark.full, pytest.mark.timeout(1200)]

DEVICES = {name: GPUS[name] for name in ("V100-16GB", "A100-40GB", "H100-80GB")} | {
    name: tpu_slice(name) for name in ("v5e:1x1", "v6e:1x1")
}
TABLE = Path(__file__).with_name("memory.json")
TOLERANCE = 0.1  # versions of the compilers differ
WIDTH = 256


def of_task(name: str) -> Variant:
    step, state, batches = planned_step(load_task(name), "autocast_bfloat16")
    (variant,) = Workload(step, state, batches(None)).variants(grows=False)
    return variant


def of_optimizer(optimizer: Any, policy: str = "mixed_bfloat16") -> Variant:
    def loss_fn(params: Any, batch: Any) -> jax.Array:
        x = batch
        for w in params:
            x = jnp.tanh(x @ w.astype(x.dtype))
        return (x.astype(jnp.float32) ** 2).mean()

    step = jt.train_step(jt.stateless(loss_fn), optimizer, policy=policy)
    state = jax.eval_shape(lambda: jt.TrainState.create([jnp.zeros((WIDTH, WIDTH))] * 3, optimizer))
    batch = jax.ShapeDtypeStruct((512, WIDTH), jnp.float32)
    (variant,) = Workload(step, state, batch).variants()
    return variant


def scaled(preset: Callable[[], Any]) -> Variant:
    return of_optimizer(jt.with_loss_scale(optax.adam(1e-3), preset()), "mixed_float16")


PROGRAMS: dict[str, Callable[[], Variant]] = {
    **{f"task {name}": functools.partial(of_task, name) for name in ("digits", "karate", "lm")},
    **{
        f"loss scale {preset.__name__}": functools.partial(scaled, preset)
        for preset in (jt.torch_loss_scale, jt.apex_loss_scale, jt.megatron_loss_scale, jt.deepspeed_loss_scale)
    },
    "adam in 8 bits": lambda: of_optimizer(with_state_dtypes(optax.adam(1e-3), {"mu": "int8", "nu": "uint8"})),
    "adam in bfloat16": lambda: of_optimizer(with_state_dtypes(optax.adam(1e-3), {"nu": "bfloat16"})),
}


def compiled(name: str, device: str) -> CompiledProgram:
    kind = DEVICES[device]
    variant = PROGRAMS[name]()
    program = variant.exported(Placement(), variant.batch_size, kind.platform)
    return compile_program(program, kind)


def checked(name: str, device: str) -> int:
    """Returns the memory of a program, after checking its dtypes."""
    found = compiled(name, device)
    assert not re.search(r"\b(f64|c128)\[", found.hlo), "double precision"
    costs = program_costs(read_hlo(found.hlo), DEVICES[device])
    promised = "f16" if name.startswith("loss scale") else "bf16"
    emulated = promised == "bf16" if device == "V100-16GB" else promised == "f16" and device.startswith("v")
    products = {dtype: n for dtype, n in costs.operations.items() if dtype == promised or (emulated and dtype == "f32")}
    assert sum(products.values()) >= 0.9 * sum(costs.operations.values()), costs.operations
    return found.allocated_bytes


@pytest.mark.parametrize("device", list(DEVICES))
@pytest.mark.parametrize("name", list(PROGRAMS))
def test_a_program_compiles_in_its_dtypes_and_its_memory(name: str, device: str, request: Any) -> None:
    request.getfixturevalue("tpu_compiler" if DEVICES[device].platform == "tpu" else "compiler")
    with jax.numpy_dtype_promotion("standard"):
        assert checked(name, device) == pytest.approx(json.loads(TABLE.read_text())[name][device], rel=TOLERANCE)


def main() -> None:
    """Writes the table of the programs whose names have the arguments, of all without."""
    os.environ["XLA_FLAGS"] = ""
    table = json.loads(TABLE.read_text()) if TABLE.exists() else {}
    for name in PROGRAMS:
        for device in DEVICES if not sys.argv[1:] or any(text in name for text in sys.argv[1:]) else ():
            try:
                table.setdefault(name, {})[device] = checked(name, device)
                print(name, device, table[name][device], flush=True)
            except (AssertionError, RuntimeError, ValueError) as error:
                print(name, device, "FAILED", str(error)[-300:], flush=True)
            TABLE.write_text(json.dumps(table, indent=1) + "\n")


if __name__ == "__main__":
    main()
