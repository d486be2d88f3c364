"""Trip counts of the loops of a compiled program."""

from jmp_train.aot.arithmetic import backend_config
from jmp_train.aot.hlo import Instruction, Program

_SAME = ("copy", "bitcast", "convert", "copy-done", "copy-start")


def trip_count(program: Program, loop: Instruction) -> int | None:
    """Returns how often a loop runs, None if it is unknown.

    The compiler for GPUs writes the number down. Otherwise the loop must count from a constant by a constant while it
    is below a constant, as those of `jax.lax.scan` and `fori_loop` do.

    Args:
      program: the program of the loop.
      loop: a "while" instruction.

    Example:
      >>> from jmp_train.aot.hlo import read_hlo
      >>> program = read_hlo('''HloModule jit_f
      ... %cond (t: (s32[])) -> pred[] {
      ...   %t = (s32[]) parameter(0)
      ...   %i = s32[] get-tuple-element(%t), index=0
      ...   %end = s32[] constant(10)
      ...   ROOT %less = pred[] compare(%i, %end), direction=LT
      ... }
      ... %body (u: (s32[])) -> (s32[]) {
      ...   %u = (s32[]) parameter(0)
      ...   %j = s32[] get-tuple-element(%u), index=0
      ...   %step = s32[] constant(3)
      ...   %next = s32[] add(%j, %step)
      ...   ROOT %out = (s32[]) tuple(%next)
      ... }
      ... ENTRY %main () -> (s32[]) {
      ...   %start = s32[] constant(1)
      ...   %first = (s32[]) tuple(%start)
      ...   ROOT %loop = (s32[]) while(%first), condition=%cond, body=%body
      ... }''')
      >>> trip_count(program, program.instructions["loop"])  # 1, 4, 7
      3
    """
    known = backend_config(loop).get("known_trip_count", {}).get("n")
    return _counted(program, loop) if known is None else int(known)


def _counted(program: Program, loop: Instruction) -> int | None:
    test = _root(program, loop.attribute("condition"))
    if test.opcode != "compare" or test.attribute("direction") != "LT":
        return None
    counter, end = (_resolved(program, name) for name in test.operands)
    first, last = program.instructions[loop.operands[0]], _root(program, loop.attribute("body"))
    if counter.opcode != "get-tuple-element" or first.opcode != "tuple" or last.opcode != "tuple":
        return None
    index = int(counter.attribute("index"))
    start, after = (_resolved(program, made.operands[index]) for made in (first, last))
    if after.opcode != "add":
        return None
    parts = [_resolved(program, name) for name in after.operands]
    steps = [_number(part) for part in parts]
    counts_itself = any(p.opcode == "get-tuple-element" and int(p.attribute("index")) == index for p in parts)
    numbers = _number(start), _number(end), next((step for step in steps if step is not None), None)
    if not counts_itself or None in numbers:
        return None
    begin, limit, step = numbers
    assert begin is not None
    assert limit is not None
    return max(0, -(-(limit - begin) // step)) if step else None


def _root(program: Program, computation: str) -> Instruction:
    return next(i for i in program.computations[computation.lstrip("%")] if i.is_root)


def _resolved(program: Program, name: str) -> Instruction:
    """Returns the instruction that makes a value, through those that only move it."""
    instruction = program.instructions[name]
    while instruction.opcode in _SAME:
        instruction = program.instructions[instruction.operands[0]]
    return instruction


def _number(instruction: Instruction) -> int | None:
    is_constant = instruction.opcode == "constant" and instruction.literal.lstrip("-").isdecimal()
    return int(instruction.literal) if is_constant else None
