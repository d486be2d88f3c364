"""A plan has the rates of the precision that a rule gives to products of float32 operands."""

import dataclasses
from typing import Any

import optax
import pytest
from plan_steps import batch_of_rows, state_of_layers, tanh_loss
from promotion import relaxed

import jmp_train as jt
from jmp_train.tools.aot import GPUS, Device, tpu_slice
from jmp_train.tools.planning import PlanRow, PlanSearch, Workload

pytestmark = [pytest.mark.full, pytest.mark.timeout(500)]

WIDTH, DEPTH, ROWS = 256, 4, 1024
OPTIMIZER = jt.with_loss_scale(relaxed(optax.adam(1e-3)), jt.NoOpLossScale())
STATE, BATCH = state_of_layers(OPTIMIZER, WIDTH, DEPTH), batch_of_rows(ROWS, WIDTH)
OPERATIONS = (3 * DEPTH - 1) * 2 * ROWS * WIDTH**2


def policy(rule: Any) -> jt.AutocastPolicy:
    rules = jt.TORCH_CUDA.replace(primitives={"dot_general": rule})
    named: Any = jt.get_policy("autocast_bfloat16")
    return dataclasses.replace(named, rules=rules)


def rows(device: str, *rules: str) -> list[PlanRow]:
    step = jt.train_step(jt.stateless(tanh_loss), OPTIMIZER)
    workload = Workload(step, STATE, BATCH, policies=list(map(policy, rules)))
    found = jt.plan(workload, device, PlanSearch(largest_batch=False))
    return list(found.rows)


def least_seconds(row: PlanRow) -> float:
    return sum(kernel.times * kernel.seconds_of_products for kernel in row.costs.kernels)


def rate(device: Device, precision: str) -> float:
    return device.matrix_rate("float32", precision=precision)


def test_on_a_gpu(compiler: None) -> None:
    a100 = GPUS["A100-40GB"]
    exact, rounded, half, three = rows(a100.name, "float32", "tf32", "lower", "tf32_x3")
    assert set(half.costs.operations) == {"bf16"}
    assert least_seconds(exact) == pytest.approx(OPERATIONS / rate(a100, "highest"))
    assert least_seconds(rounded) == pytest.approx(OPERATIONS / rate(a100, "default"))
    assert least_seconds(three) == pytest.approx(3 * OPERATIONS / rate(a100, "default"))


def test_on_a_tpu(tpu_compiler: None) -> None:
    exact, rounded, three = rows("v5e:1x1", "float32", "tf32", "bf16_x3")
    for row, precision in ((exact, "highest"), (rounded, "default"), (three, "high")):
        assert least_seconds(row) == pytest.approx(OPERATIONS / rate(tpu_slice("v5e:1x1"), precision))
