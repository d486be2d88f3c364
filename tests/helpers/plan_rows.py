"""Rows of plans, made up, with costs of a small program: what the tests of a plan's page and files show."""

from collections.abc import Mapping

from jmp_train.tools.aot import GPU, GPUS, Buffer, Costs, program_costs, read_hlo
from jmp_train.tools.planning import Allowances, LargestBatch, Placement, PlanRow, Remedy

ODD = "<&\">'"
DATA_PARALLEL = Placement(8, "zero1")
STEP_BYTES = {
    "parameters": 500_000_000,
    "optimizer state": 1_000_000_000,
    "activations saved for the backward pass": 7_000_000_000,
    "gradients": 500_000_000,
    f"of its own {ODD}": 2_000_000,
    "padding": 1_000,
}
_PROGRAM = """
HloModule step, num_partitions={devices}
ENTRY %main (x: f32[{examples},4096], w: f32[4096,8192]) -> f32[8192] {{
  %x = f32[{examples},4096]{{1,0}} parameter(0)
  %w = f32[4096,8192]{{1,0}} parameter(1)
  %a = {dtype}[{examples},4096]{{1,0}} convert(%x), metadata={{op_name="jit(step)/convert"}}
  %b = {dtype}[4096,8192]{{1,0}} convert(%w), metadata={{op_name="jit(step)/convert"}}
  %y = {dtype}[{examples},8192]{{1,0}} dot(%a, %b), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}, \
metadata={{op_name="jit(step)/<dense>/dot_general"}}
  %v = {dtype}[1,4096]{{1,0}} slice(%a), slice={{[0:1], [0:4096]}}
  %u = {dtype}[1,8192]{{1,0}} dot(%v, %b), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}
  %z = f32[8192]{{0}} custom-call(%y, %u), custom_call_target="my<kernel>"
  ROOT %r = f32[8192]{{0}} all-reduce(%z), replica_groups={{{{{group}}}}}, to_apply=%add
}}
"""
_WITHOUT_PRODUCTS = """
HloModule step
ENTRY %main (x: f32[1024]) -> f32[1024] {
  %x = f32[1024]{0} parameter(0)
  ROOT %y = f32[1024]{0} negate(%x)
}
"""


def planned_costs(gpu: GPU, dtype: str, examples: int = 4096, devices: int = 1) -> Costs:
    """Returns what two products take, one of many rows and one of one; two casts; a sum over the devices.

    Args:
      gpu: that they run on.
      dtype: XLA's name.
      examples: rows of the larger product.
      devices: that the sum is over.
    """
    group = ",".join(map(str, range(devices)))
    text = _PROGRAM.format(dtype=dtype, examples=examples, devices=devices, group=group)
    return program_costs(read_hlo(text), gpu)


def costs_without_products(gpu: GPU) -> Costs:
    """Returns what a program without matrix products takes.

    Args:
      gpu: that it runs on.
    """
    return program_costs(read_hlo(_WITHOUT_PRODUCTS), gpu)


def planned_row(
    gpu: str = "A100-40GB",
    policy: str = "float32",
    *,
    kinds: Mapping[str, int] = STEP_BYTES,
    placement: Placement | None = None,
    largest: LargestBatch | None = None,
    dtype: str = "f32",
    batch_size: int = 64,
) -> PlanRow:
    """Returns a row.

    Args:
      gpu: the name of one of `GPUS`.
      policy: its name.
      kinds: bytes by kind, which are what the step takes; those of activations are in two buffers.
      placement: one device if None.
      largest: what was searched for.
      dtype: of the products, XLA's name.
      batch_size: examples.
    """
    target, place = GPUS[gpu], placement or Placement()
    total, usable = sum(kinds.values()), Allowances().usable_bytes(target, place.devices)
    remedies = (
        Remedy(f"smaller {ODD}", f"jt.smaller({ODD})", total // 2, total // 2 <= usable, 0.0123),
        Remedy(
            "policy mixed_float16", 'jt.train_step(..., policy="mixed_float16")', 3 * total, 3 * total <= usable, 0.2
        ),
    )
    return PlanRow(
        kind=target,
        policy=policy,
        placement=place,
        batch_size=batch_size,
        peak_bytes=total,
        live_bytes=total,
        usable_bytes=usable,
        largest=largest,
        costs=planned_costs(target, dtype, devices=place.devices),
        buffers=_buffers(kinds),
        remedies=() if total <= usable else remedies,
    )


def _buffers(kinds: Mapping[str, int]) -> tuple[Buffer, ...]:
    found = []
    for kind, n_bytes in kinds.items():
        parts = (n_bytes // 3, n_bytes - n_bytes // 3) if kind.startswith("activations") else (n_bytes,)
        found += [Buffer(n, kind, f"op {ODD}", "f32", (8, n), f"model.py:7 ({ODD})", f"Dense_{ODD}") for n in parts]
    return tuple(sorted(found, key=lambda buffer: -buffer.n_bytes))


def found_batch(size: int, a_example: int, *, start: int = 64) -> LargestBatch:
    """Returns what a search finds where an example takes so many bytes.

    Args:
      size: the largest batch.
      a_example: bytes.
      start: the first that was tried.
    """
    tried = {count: count * a_example for count in sorted({start, max(size, 1), size + 1})}
    return LargestBatch(size, tried[size] if size else None, (size + 1) * a_example, tried)
