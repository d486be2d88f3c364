"""Rows of plans, made up, with costs of a small program: what the tests of a plan's page and files show."""

from collections.abc import Mapping

from jmp_train.tools.aot import GPU, GPUS, Buffer, Costs, program_costs, read_hlo
from jmp_train.tools.planning import LargestBatch, Machine, Placement, PlanRow

ODD = "<&\">'"
DATA_PARALLEL = Placement(8, "zero1")
STEP_BYTES = {
    "parameters": 500_000_000,
    "optimizer state": 1_000_000_000,
    "saved for the backward pass": 7_000_000_000,
    "temporaries": 500_000_000,
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


def planned_row(
    gpu: str = "A100-40GB",
    policy: str = "float32",
    *,
    kinds: Mapping[str, int] = STEP_BYTES,
    placement: Placement | None = None,
    largest: LargestBatch | None = None,
    dtype: str = "f32",
    batch_size: int = 64,
    price: float | None = None,
) -> PlanRow:
    """Returns a row.

    Args:
      gpu: the name of one of `GPUS`.
      policy: its name.
      kinds: bytes by kind, which are what the step takes; those that are saved are in two buffers.
      placement: one device if None.
      largest: what was searched for.
      dtype: of the products, XLA's name.
      batch_size: examples.
      price: of an hour of a GPU.
    """
    place = placement or Placement()
    total = sum(kinds.values())
    return PlanRow(
        machine=Machine(gpu, gpus=place.devices // place.hosts, hosts=place.hosts, price=price),
        policy=policy,
        placement=place,
        batch_size=batch_size,
        peak_bytes=total,
        live_bytes=total,
        costs=planned_costs(GPUS[gpu], dtype, devices=place.devices),
        buffers=_buffers(kinds),
        largest=largest,
    )


def _buffers(kinds: Mapping[str, int]) -> tuple[Buffer, ...]:
    found = []
    for kind, n_bytes in kinds.items():
        parts = (n_bytes // 3, n_bytes - n_bytes // 3) if kind.startswith("saved") else (n_bytes,)
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
