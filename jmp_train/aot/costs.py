"""What a run of a compiled program costs: arithmetic, bytes, casts, communication, and the least time it takes.

The least time is a roofline: each kernel takes at least as long as its products take at the GPU's peak rate, and as
its bytes take at the peak bandwidth of the memory.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from jmp_train.aot.collectives import Collective
from jmp_train.aot.gpus import GPU
from jmp_train.aot.hlo import Program
from jmp_train.aot.kernels import Executed, Kernel
from jmp_train.aot.traffic import Places


@dataclass(frozen=True)
class Operation:
    """The products of one operation of the model.

    Attributes:
      op_name: where it comes from in terms of jax: "jit(step)/jvp(Dense_0)/dot_general".
      dtype: of the operands, XLA's name: "f16", "bf16", "f32".
      operations: in one run of the program, on one device.
      stack_frame: the innermost line of Python, for `Program.frames`; None if unknown.
    """

    op_name: str
    dtype: str
    operations: int
    stack_frame: int | None


@dataclass(frozen=True)
class Communication:
    """The collective operations of one kind on one dtype in groups of one size.

    Attributes:
      kind: as that of `Collective`: "all-reduce", "all-gather", ...
      dtype: of the arrays, XLA's name.
      group_size: how many devices are in a group.
      count: how many are executed in one run of the program.
      n_bytes: of the whole arrays, summed over them.
      sent_bytes: what each device has to send, see `Collective`.
      seconds: that takes at the bandwidth of the link.
    """

    kind: str
    dtype: str
    group_size: int
    count: int
    n_bytes: int
    sent_bytes: float
    seconds: float


@dataclass(frozen=True)
class Costs:
    """What one run of a compiled program costs on each device. Times are lower bounds, in seconds.

    `compute_seconds` is a bound of this program, as the compiler has scheduled it, because

    - kernels run one after the other, and none is faster than the GPU's peak rate and bandwidth allow;
    - of what a kernel reads, at most the size of the L2 cache can be there already, and of what it writes, at most as
      much can stay there, so only the rest counts; but arguments are read and results are written, so once in a run
      they count, less the cache's size each;
    - rows that are gathered or scattered do not count, since they could be the same row, nor what is passed to a custom
      call that is not one of XLA's products and convolutions, since it may read a part of it only;
    - products of float32 count at the rate of TF32 unless their precision is "highest";
    - of the branches of a conditional the one that can be the fastest counts. A loop of unknown trip count counts once,
      which is no bound if it runs not at all.

    What can be faster: cuDNN's Winograd and FFT algorithms, which take fewer operations than a convolution is defined
    by (Winograd less than half in 3x3 convolutions); NVLink switches that reduce themselves (NVLink SHARP), with which
    an all-reduce sends about half; kernels that run at the same time on several streams; and another program, which
    the compiler can come to where it can time kernels.

    Attributes:
      kernels: what is executed, in order, each once, with how often it is executed.
      collectives: the same of collective operations.
      arguments_and_results_seconds: what reading the arguments and writing the results takes at least.
      compute_seconds: the bound for kernels, communication left out.
      compute_seconds_without_cache: the same if all bytes come from and go to the memory, gathered rows and what is
        passed to custom calls too; no bound, but nearer to the time that is measured.
      communication: collective operations by kind, dtype and size of group.
      unknown_loops: how many loops have an unknown trip count, and so are counted once.
      conditionals: how many conditionals there are, of which all figures have the branch that can be the fastest.
    """

    kernels: tuple[Kernel, ...] = field(repr=False)
    collectives: tuple[Collective, ...] = field(repr=False)
    arguments_and_results_seconds: float
    compute_seconds: float
    compute_seconds_without_cache: float
    communication: tuple[Communication, ...]
    unknown_loops: int
    conditionals: int

    @property
    def communication_seconds(self) -> float:
        """The bound for collective operations, which share the link."""
        return sum(item.seconds for item in self.communication)

    @property
    def seconds(self) -> float:
        """The bound of a run; communication and kernels may overlap."""
        return max(self.compute_seconds, self.communication_seconds)

    @property
    def seconds_without_cache(self) -> float:
        """The same with all bytes of kernels; see `compute_seconds_without_cache`."""
        return max(self.compute_seconds_without_cache, self.communication_seconds)

    @property
    def operations(self) -> dict[str, int]:
        """Operations of matrix products and convolutions by the dtype of their operands, the most first."""
        counter: Counter[str] = Counter()
        for kernel in self.kernels:
            for product in kernel.products:
                counter[product.dtype] += kernel.times * product.operations
        return dict(counter.most_common())

    @property
    def by_operation(self) -> tuple[Operation, ...]:
        """Products by the operation that they come from and by dtype, the costliest first."""
        counter: Counter[tuple[str, str]] = Counter()
        frames: dict[tuple[str, str], int | None] = {}
        for kernel in self.kernels:
            for product in kernel.products:
                key = product.op_name, product.dtype
                counter[key] += kernel.times * product.operations
                frames.setdefault(key, product.stack_frame)
        return tuple(Operation(*key, n, frames[key]) for key, n in counter.most_common())

    @property
    def read_bytes(self) -> int:
        """What kernels read, of each operand once; gathered rows count as if no two were the same."""
        return sum(kernel.times * kernel.read_bytes for kernel in self.kernels)

    @property
    def written_bytes(self) -> int:
        """What kernels write, workspaces left out."""
        return sum(kernel.times * kernel.written_bytes for kernel in self.kernels)

    @property
    def cast_bytes(self) -> int:
        """What kernels read and write that only convert between floating-point dtypes, and change layouts."""
        casts = (kernel for kernel in self.kernels if kernel.is_cast)
        return sum(kernel.times * (kernel.read_bytes + kernel.written_bytes) for kernel in casts)

    @property
    def uncounted(self) -> dict[str, int]:
        """How many executed kernels have operations that are not known, by target of the custom call or opcode."""
        counter: Counter[str] = Counter()
        for kernel in self.kernels:
            if kernel.uncounted:
                counter[kernel.uncounted] += kernel.times
        return dict(counter.most_common())


def program_costs(program: Program, gpu: GPU) -> Costs:
    """Returns what one run of a compiled program costs.

    Args:
      program: compiled for this GPU or one like it, as `read_hlo` gives it.
      gpu: whose rates and bandwidths count.

    Example:
      >>> from jmp_train.aot.gpus import GPUS
      >>> from jmp_train.aot.hlo import read_hlo
      >>> program = read_hlo('''
      ... ENTRY %main (x: f16[1024,64], y: f16[64,256]) -> f16[1024,256] {
      ...   %x = f16[1024,64]{1,0} parameter(0)
      ...   %y = f16[64,256]{1,0} parameter(1)
      ...   ROOT %z = f16[1024,256]{1,0} dot(%x, %y), lhs_contracting_dims={1}, rhs_contracting_dims={0}
      ... }''')
      >>> found = program_costs(program, GPUS["A100-40GB"])
      >>> found.operations, found.read_bytes, found.written_bytes
      ({'f16': 33554432}, 163840, 524288)
    """
    places = Places(program)
    work = Executed(places, gpu).work(program.entry)
    ends = _seconds_of_arguments_and_results(places, work.kernels, gpu)
    return Costs(
        kernels=work.kernels,
        collectives=work.collectives,
        arguments_and_results_seconds=ends,
        compute_seconds=max(ends, sum(kernel.times * kernel.seconds for kernel in work.kernels)),
        compute_seconds_without_cache=sum(kernel.times * kernel.seconds_without_cache for kernel in work.kernels),
        communication=_communication(work.collectives, gpu),
        unknown_loops=work.unknown_loops,
        conditionals=work.conditionals,
    )


def _seconds_of_arguments_and_results(places: Places, kernels: Iterable[Kernel], gpu: GPU) -> float:
    """Returns what it takes at least that kernels of the entry read its arguments and write its results."""
    entry = places.program.computations[places.program.entry]
    names = {instruction.name for instruction in entry}
    arguments = {instruction.name for instruction in entry if instruction.opcode == "parameter"}
    read: dict[tuple[str, int], int] = defaultdict(int)
    written: dict[tuple[str, int], int] = {}
    for kernel in kernels:
        if kernel.name in names:
            written.update({place: access.least for place, access in kernel.traffic.writes.items()})
            for place, access in kernel.traffic.reads.items():
                read[place] = max(read[place], access.least)
    arguments_read = sum(n_bytes for (name, _), n_bytes in read.items() if name in arguments)
    root = next(instruction for instruction in entry if instruction.is_root)
    results_written = sum(written.get(place, 0) for place in set(places.of(root.name)))
    n_bytes = sum(max(0, n - gpu.l2_cache_size) for n in (arguments_read, results_written))
    return n_bytes / gpu.bandwidth


def _communication(collectives: Iterable[Collective], gpu: GPU) -> tuple[Communication, ...]:
    groups: dict[tuple[str, str, int], list[Collective]] = defaultdict(list)
    for item in collectives:
        groups[item.kind, item.dtype, item.group_size].append(item)
    found = [_sum(key, items, gpu) for key, items in groups.items()]
    return tuple(sorted(found, key=lambda item: -item.sent_bytes))


def _sum(key: tuple[str, str, int], items: list[Collective], gpu: GPU) -> Communication:
    count, n_bytes = sum(x.times for x in items), sum(x.times * x.n_bytes for x in items)
    sent = sum(x.times * x.sent_bytes for x in items)
    return Communication(*key, count, n_bytes, sent, sent / gpu.link_bandwidth)
