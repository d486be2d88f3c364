"""The kernels and collective operations executed by a compiled program, with their numbers of executions."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from jmp_train.tools.aot.arithmetic import CUBLAS, CUDNN_CONVOLUTION, Product, backend_config, product
from jmp_train.tools.aot.collectives import KINDS, Collective, collectives
from jmp_train.tools.aot.hlo import RUNS_OTHERS, Instruction, Program
from jmp_train.tools.aot.networks import Device
from jmp_train.tools.aot.traffic import Places, Traffic, is_kernel, traffic


@dataclass(frozen=True)
class Kernel:
    """A kernel, and the cost of one execution.

    Attributes:
      name: the instruction's.
      opcode: the instruction's: "fusion", "custom-call", "copy", ...
      op_name: the instruction's; for a fusion, that of one of its operations.
      stack_frame: the instruction's.
      times: number of executions in one run of the program.
      products: the matrix products and convolutions in it.
      traffic: its reads and writes.
      is_cast: whether it only converts between floating-point dtypes, or also changes layouts.
      uncounted: the reason why its operations are unknown: the target of a custom call other than XLA's products, or
        the opcode of an instruction with products of another kind; "" if they are known.
      seconds: the least time of one execution; see `Costs.seconds`.
      seconds_without_cache: the same if all bytes move to and from the memory.
      seconds_of_products: the least time of the products in one execution.
    """

    name: str
    opcode: str
    op_name: str
    stack_frame: int | None
    times: int
    products: tuple[Product, ...]
    traffic: Traffic = field(repr=False)
    is_cast: bool
    uncounted: str
    seconds: float
    seconds_without_cache: float
    seconds_of_products: float

    @property
    def read_bytes(self) -> int:
        """Bytes that it reads of its operands, without skipped parts."""
        return sum(access.n_bytes for access in self.traffic.reads.values())

    @property
    def written_bytes(self) -> int:
        """Bytes that it writes of its results, without workspaces."""
        return sum(access.n_bytes for access in self.traffic.writes.values())


@dataclass(frozen=True)
class Work:
    """The operations that a computation executes.

    Attributes:
      kernels: the kernels in order, each once, with its number of executions.
      collectives: the collective operations, likewise.
      unknown_loops: number of loops with unknown trip count, which are assumed to run once.
      conditionals: number of conditionals; the branch that can be the fastest is assumed.
    """

    kernels: tuple[Kernel, ...] = ()
    collectives: tuple[Collective, ...] = ()
    unknown_loops: int = 0
    conditionals: int = 0

    def repeated(self, times: int) -> "Work":
        """Returns the work of several runs.

        Args:
          times: number of runs.
        """
        return replace(
            self,
            kernels=tuple(replace(kernel, times=kernel.times * times) for kernel in self.kernels),
            collectives=tuple(replace(item, times=item.times * times) for item in self.collectives),
        )


def joined(works: list[Work]) -> Work:
    """Returns consecutive works as one.

    Args:
      works: the works, in order.
    """
    return Work(
        tuple(kernel for work in works for kernel in work.kernels),
        tuple(item for work in works for item in work.collectives),
        sum(work.unknown_loops for work in works),
        sum(work.conditionals for work in works),
    )


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

    def work(self, computation: str) -> Work:
        """Returns the operations that a computation executes, including those of its callees.

        Args:
          computation: its name.
        """
        return joined([self._work(instruction) for instruction in self.places.program.computations[computation]])

    def _work(self, instruction: Instruction) -> Work:
        if instruction.opcode == "while":
            return self._loop(instruction)
        if instruction.opcode == "conditional":
            branches = [self.work(name) for name in instruction.called]
            fastest = min(branches, key=_least_seconds)
            return replace(fastest, conditionals=1 + sum(branch.conditionals for branch in branches))
        if instruction.opcode in RUNS_OTHERS:
            return joined([self.work(name) for name in instruction.called])
        if is_kernel(instruction):
            return Work(kernels=(self._kernel(instruction),), collectives=tuple(self._fused_collectives(instruction)))
        return Work(collectives=tuple(collectives(self.places.program, instruction)))

    def _loop(self, instruction: Instruction) -> Work:
        trips = trip_count(self.places.program, instruction)
        body = joined([self.work(instruction.attribute(part).lstrip("%")) for part in ("condition", "body")])
        if trips is None:
            return replace(body, unknown_loops=body.unknown_loops + 1)
        return body.repeated(trips)

    def _kernel(self, instruction: Instruction) -> Kernel:
        program = self.places.program
        inside = tuple(_inside(program, instruction))
        found = traffic(instruction, self.places)
        products = tuple(p for p in (product(program, i) for i in inside) if p)
        seconds_of_products = sum(p.operations / self._rate(p) for p in products)
        n_bytes = sum(x.n_bytes for part in (found.reads, found.writes) for x in part.values())
        return Kernel(
            name=instruction.name,
            opcode=instruction.opcode,
            op_name=instruction.op_name,
            stack_frame=instruction.stack_frame,
            times=1,
            products=products,
            traffic=found,
            is_cast=_is_cast(program, inside),
            uncounted=next((name for name in map(_uncounted, inside) if name), ""),
            seconds=max(seconds_of_products, self._uncached_bytes(found) / self.device.bandwidth),
            seconds_without_cache=max(seconds_of_products, n_bytes / self.device.bandwidth),
            seconds_of_products=seconds_of_products,
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

    def _rate(self, product: Product) -> float:
        return self.device.matrix_rate(_JAX_NAMES.get(product.dtype, "float32"), precision=product.precision)

    def _uncached_bytes(self, found: Traffic) -> int:
        """Returns the bytes that move to and from the memory if the cache holds as much as it can."""
        least = (sum(access.least for access in part.values()) for part in (found.reads, found.writes))
        return sum(max(0, n_bytes - self.device.l2_cache_size) for n_bytes in least)


def _inside(program: Program, instruction: Instruction) -> Iterator[Instruction]:
    """Yields an instruction, or the contents of a fusion."""
    if instruction.opcode.removesuffix("-start") != "fusion":
        yield instruction
        return
    for inner in program.computations[instruction.called[0]]:
        yield from _inside(program, inner)


def _is_cast(program: Program, inside: tuple[Instruction, ...]) -> bool:
    converts = [i for i in inside if i.opcode == "convert"]
    dtypes = {a.dtype for i in converts for name in (i.name, *i.operands) for a in program.instructions[name].arrays}
    return bool(converts) and dtypes <= _FLOATS and all(i.opcode in _LAYOUT or i.opcode == "convert" for i in inside)


def _uncounted(instruction: Instruction) -> str:
    target = instruction.attribute("custom_call_target")
    if instruction.opcode == "custom-call":
        return "" if target.startswith((*CUBLAS, CUDNN_CONVOLUTION)) else target
    return instruction.opcode if instruction.opcode in _OTHER_PRODUCTS else ""


def _least_seconds(work: Work) -> tuple[float, float]:
    return (
        sum(kernel.times * kernel.seconds for kernel in work.kernels),
        sum(kernel.times * kernel.seconds_without_cache for kernel in work.kernels),
    )


def trip_count(program: Program, loop: Instruction) -> int | None:
    """Returns how often a loop runs, None if it is unknown.

    The compiler for GPUs writes the number down. Otherwise the loop must count from a constant by a constant while it
    is below a constant, as those of `jax.lax.scan` and `fori_loop` do.

    Args:
      program: the program of the loop.
      loop: a "while" instruction.
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
    begin, limit, step = _number(start), _number(end), next(filter(None, steps), None)
    if not counts_itself or begin is None or limit is None or step is None:
        return None
    return max(0, -(-(limit - begin) // step))


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


_JAX_NAMES = {
    "f64": "float64",
    "c128": "complex128",
    "f16": "float16",
    "bf16": "bfloat16",
    "f8e4m3fn": "float8_e4m3fn",
    "f8e5m2": "float8_e5m2",
    "s8": "int8",
    "u8": "uint8",
    "s4": "int8",
    "u4": "uint8",
}
_FLOATS = {"f64", "f32", "bf16", "f16", "f8e4m3fn", "f8e5m2", "f8e4m3", "f8e3m4", "f8e4m3fnuz", "f8e5m2fnuz"}
_LAYOUT = {
    *("parameter", "constant", "bitcast", "copy", "transpose", "reshape", "pad", "slice", "concatenate", "broadcast"),
    "tuple",
}
_OTHER_PRODUCTS = {"ragged-dot", "scaled-dot", "fft", "cholesky", "triangular-solve"}
_SAME = ("copy", "bitcast", "convert", "copy-done", "copy-start")  # opcodes that only move a value
