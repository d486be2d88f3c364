"""The kernels and collective operations executed by a compiled program, with their numbers of executions."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from jmp_train.tools.aot.hlo import RUNS_OTHERS, HloModule, Instruction
from jmp_train.tools.aot.hlo_collectives import KINDS, Collective, collectives
from jmp_train.tools.aot.hlo_products import HloProduct, backend_config, is_block_scaled, product
from jmp_train.tools.aot.networks import Device
from jmp_train.tools.aot.traffic import Places, Traffic, is_kernel, traffic


@dataclass(frozen=True)
class Kernel:
    """A kernel, and the least cost of one execution.

    Attributes:
      name: the instruction's.
      times: number of executions in one run of the program.
      products: the matrix products and convolutions in it.
      traffic: its reads and writes.
      seconds_of_products: the least time of the products.
      seconds_of_bytes: the least time of the bytes that the cache cannot hold.
    """

    name: str
    times: int
    products: tuple[HloProduct, ...]
    traffic: Traffic = field(repr=False)
    seconds_of_products: float
    seconds_of_bytes: float

    @property
    def seconds(self) -> float:
        """The least time of one execution."""
        return max(self.seconds_of_products, self.seconds_of_bytes)


Work = list[Kernel | Collective]
"""The kernels and collective operations of a computation in order, each once, with its number of executions."""


@dataclass(frozen=True)
class Executed:
    """Finds the operations that computations execute.

    Attributes:
      places: places of the program.
      device: the device that runs it.
    """

    places: Places
    device: Device
    _channels: set[str] = field(default_factory=set, repr=False)

    def work(self, *computations: str) -> Work:
        """Returns the operations that computations execute, including those of their callees.

        A loop with an unknown trip count runs once. Of a conditional, the branch that can be the fastest runs.

        Args:
          *computations: their names.
        """
        all_of = self.places.program.computations
        return [done for name in computations for instruction in all_of[name] for done in self._work(instruction)]

    def _work(self, instruction: Instruction) -> Work:
        program = self.places.program
        if instruction.opcode == "while":
            body = self.work(*(instruction.attribute(part).lstrip("%") for part in ("condition", "body")))
            times = trip_count(program, instruction)
            return body if times is None else [replace(done, times=times * done.times) for done in body]
        if instruction.opcode == "conditional":
            return min((self.work(name) for name in instruction.called), key=_least_seconds)
        if "float4" in self.device.rates and is_block_scaled(program, instruction):
            return [self._kernel(instruction)]
        if instruction.opcode in RUNS_OTHERS:
            return self.work(*instruction.called)
        if is_kernel(instruction):
            return [self._kernel(instruction), *self._fused_collectives(instruction)]
        return list(collectives(program, instruction))

    def _kernel(self, instruction: Instruction) -> Kernel:
        program = self.places.program
        found = traffic(instruction, self.places)
        products = tuple(p for p in (product(program, i) for i in _inside(program, instruction)) if p)
        parts = (sum(part.values()) for part in (found.reads, found.writes))
        n_bytes = sum(max(0, part - self.device.l2_cache_size) for part in parts)
        return Kernel(
            name=instruction.name,
            times=1,
            products=products,
            traffic=found,
            seconds_of_products=sum(p.operations / self._rate(p) for p in products),
            seconds_of_bytes=n_bytes / self.device.bandwidth,
        )

    def _fused_collectives(self, fusion: Instruction) -> Iterator[Collective]:
        """Yields the collectives in a fusion of a TPU; several fusions may be stages of one, with the same channel."""
        program = self.places.program
        for inner in _inside(program, fusion) if fusion.opcode == "fusion" else ():
            channel = inner.attribute("channel_id")
            if inner.opcode in KINDS and channel not in self._channels:
                self._channels.add(channel)
                scatters = fusion.called[0].startswith("all-reduce-scatter")  # it sums, and keeps a part
                yield from collectives(program, inner, kind="reduce-scatter" if scatters else None)

    def _rate(self, product: HloProduct) -> float:
        return self.device.matrix_rate(_JAX_NAMES.get(product.dtype, "float32"), precision=product.precision)


def _inside(program: HloModule, instruction: Instruction) -> Iterator[Instruction]:
    """Yields an instruction, or the contents of a fusion."""
    if instruction.opcode.removesuffix("-start") != "fusion":
        yield instruction
        return
    for inner in program.computations[instruction.called[0]]:
        yield from _inside(program, inner)


def _least_seconds(work: Work) -> float:
    return sum(done.times * done.seconds for done in work if isinstance(done, Kernel))


def trip_count(program: HloModule, loop: Instruction) -> int | None:
    """Returns how often a loop runs, None if it is unknown.

    The compiler for GPUs writes the number down. Otherwise the loop must count from a constant by a constant while it
    is below a constant, as those of `jax.lax.scan` and `fori_loop` do.

    Args:
      program: the program of the loop.
      loop: a "while" instruction.
    """
    known = backend_config(loop).get("known_trip_count", {}).get("n")
    return _counted(program, loop) if known is None else int(known)


def _counted(program: HloModule, loop: Instruction) -> int | None:
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
    begin, limit, step = _number(start), _number(end), next(filter(None, steps), None)
    if not counts_itself or begin is None or limit is None or step is None:
        return None
    return max(0, -(-(limit - begin) // step))


def _root(program: HloModule, computation: str) -> Instruction:
    return next(i for i in program.computations[computation.lstrip("%")] if i.is_root)


def _resolved(program: HloModule, name: str) -> Instruction:
    """Returns the instruction that makes a value, through those that only move it."""
    instruction = program.instructions[name]
    while instruction.opcode in _SAME:
        instruction = program.instructions[instruction.operands[0]]
    return instruction


def _number(instruction: Instruction) -> int | None:
    is_constant = instruction.opcode == "constant" and instruction.literal.lstrip("-").isdecimal()
    return int(instruction.literal) if is_constant else None


_JAX_NAMES = {
    "f64": "float64",
    "c128": "complex128",
    "f16": "float16",
    "bf16": "bfloat16",
    "f8e4m3fn": "float8_e4m3fn",
    "f8e5m2": "float8_e5m2",
    "f4e2m1fn": "float4_e2m1fn",
    "s8": "int8",
    "u8": "uint8",
    "s4": "int8",
    "u4": "uint8",
}
_SAME = ("copy", "bitcast", "convert", "copy-done", "copy-start")  # opcodes that only move a value
