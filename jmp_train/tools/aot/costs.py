"""The costs of a run of a compiled program: arithmetic, bytes, casts, communication, and a bound on its time.

The bound is a roofline: each kernel takes at least the time of its products at the device's peak rate, and the time of
its bytes at the peak bandwidth of the memory. On TPUs, the whole step takes at least the time of all products, and of
all bytes, because the compiler copies ahead of time.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from jmp_train.tools.aot.hlo import HloModule
from jmp_train.tools.aot.hlo_collectives import Collective, n_devices
from jmp_train.tools.aot.kernels import Executed, Kernel
from jmp_train.tools.aot.networks import Device, Network, Route
from jmp_train.tools.aot.traffic import ArrayPlace, Places


@dataclass(frozen=True)
class Communication:
    """The collective operations of one kind, dtype and group size.

    Attributes:
      kind: as in `Collective`: "all-reduce", "all-gather", ...
      dtype: XLA's name of the arrays' dtype.
      group_size: number of devices in a group.
      count: number of executions in one run of the program.
      n_bytes: bytes of the whole arrays, summed over the executions.
      sent_bytes: bytes that each device must send over the links inside its host, or its slice, see `Collective`.
      seconds: time to send them at the bandwidth of the link.
      axis: the axes of the mesh along which they communicate: "data", "data x model"; "" if unknown.
      sent_between_hosts: bytes that each device must send to other hosts.
      seconds_between_hosts: time to send them at the bandwidth of the interconnect.
    """

    kind: str
    dtype: str
    group_size: int
    count: int
    n_bytes: int
    sent_bytes: float
    seconds: float
    axis: str = ""
    sent_between_hosts: float = 0
    seconds_between_hosts: float = 0


@dataclass(frozen=True)
class Costs:
    """The costs of one run of a compiled program on each device. Times are lower bounds, in seconds.

    `compute_seconds` is a lower bound for this program, as scheduled by the compiler, because

    - kernels run one after the other, and none is faster than the GPU's peak rate and bandwidth allow;
    - it assumes that the L2 cache already holds as much of a kernel's reads, and keeps as much of its writes, as its
      size allows, so only the rest counts; reading the arguments and writing the results counts once per run, less the
      cache's size each;
    - gathered or scattered rows do not count, because they could all be the same row, nor do arguments of a custom
      call other than XLA's products and convolutions, because it may read only a part of them;
    - float32 products count at the rate of TF32 unless their precision is "highest"; on TPUs, as one, three or six
      products in bfloat16;
    - for a conditional, the branch that can be the fastest counts. A loop of unknown trip count counts once,
      which is no bound if it does not run at all.

    Some things can be faster: cuDNN's Winograd and FFT algorithms, which take fewer operations than the definition of a
    convolution (Winograd less than half in 3x3 convolutions); NVLink switches that reduce themselves (NVLink SHARP),
    with which an all-reduce sends about half; kernels that run at the same time on several streams; and another
    program, which the compiler may choose if it can time kernels.

    Attributes:
      kernels: the executed kernels, in order, each once, with its number of executions.
      memory_seconds: least time to move the kernels' bytes to and from the memory.
      compute_seconds: the bound for kernels, without communication.
      communication: collective operations by kind, dtype, group size and axis.
      communication_seconds: the bound for collective operations, of which those over different links may overlap.
    """

    kernels: tuple[Kernel, ...] = field(repr=False)
    memory_seconds: float
    compute_seconds: float
    communication: tuple[Communication, ...]
    communication_seconds: float

    @property
    def seconds(self) -> float:
        """The bound for a run, in which communication and kernels may overlap."""
        return max(self.compute_seconds, self.communication_seconds)

    @property
    def products_seconds(self) -> float:
        """The bound for only matrix products and convolutions, at the peak rates of their dtypes."""
        return sum(kernel.times * kernel.seconds_of_products for kernel in self.kernels)

    @property
    def bound_by(self) -> str:
        """The largest part of the bound: "arithmetic", "memory" or "links"."""
        if self.communication_seconds > self.compute_seconds:
            return "links"
        return "arithmetic" if self.products_seconds >= self.memory_seconds else "memory"

    @property
    def operations(self) -> dict[str, int]:
        """Operations of matrix products and convolutions by the dtype of their operands, the largest number first."""
        counter: Counter[str] = Counter()
        for kernel in self.kernels:
            for product in kernel.products:
                counter[product.dtype] += kernel.times * product.operations
        return dict(counter.most_common())


def program_costs(program: HloModule, device: Device, network: Network | None = None) -> Costs:
    """Returns the costs of one run of a compiled program.

    Args:
      program: a program from `read_hlo`, compiled for this device or a similar one.
      device: the device, with its rates and bandwidths.
      network: the links between the devices; None for those of one host, or slice, and a mesh with the axis "data".

    Example:
      >>> from jmp_train.aot import GPUS, read_hlo
      >>> program = read_hlo('''
      ... ENTRY %main (x: f16[1024,64], y: f16[64,256]) -> f16[1024,256] {
      ...   %x = f16[1024,64]{1,0} parameter(0)
      ...   %y = f16[64,256]{1,0} parameter(1)
      ...   ROOT %z = f16[1024,256]{1,0} dot(%x, %y), lhs_contracting_dims={1}, rhs_contracting_dims={0}
      ... }''')
      >>> found = program_costs(program, GPUS["A100-40GB"])
      >>> found.operations, found.bound_by
      ({'f16': 33554432}, 'arithmetic')
    """
    places = Places(program)
    work = Executed(places, device).work(program.entry)
    kernels = tuple(done for done in work if isinstance(done, Kernel))
    ends = _seconds_of_arguments_and_results(places, kernels, device)
    products = sum(kernel.times * kernel.seconds_of_products for kernel in kernels)
    if device.overlaps:
        sizes = (kernel.times * kernel.traffic.n_bytes for kernel in kernels)
        memory = sum(sizes) / device.bandwidth
        compute = max(products, memory)
    else:  # one kernel after the other
        memory = max(ends, sum(kernel.times * kernel.seconds_of_bytes for kernel in kernels))
        compute = sum(kernel.times * kernel.seconds for kernel in kernels)
    links = network or Network(device, {"data": n_devices(program)})
    routes = [(done, links.route(done)) for done in work if isinstance(done, Collective)]
    return Costs(
        kernels=kernels,
        memory_seconds=memory,
        compute_seconds=max(ends, compute),
        communication=_communication(routes),
        communication_seconds=links.least_seconds([(item.times, route) for item, route in routes]),
    )


def _seconds_of_arguments_and_results(places: Places, kernels: Iterable[Kernel], device: Device) -> float:
    """Returns the least time in which the entry's kernels read its arguments and write its results."""
    entry = places.program.computations[places.program.entry]
    names = {instruction.name for instruction in entry}
    arguments = {instruction.name for instruction in entry if instruction.opcode == "parameter"}
    read: dict[ArrayPlace, int] = defaultdict(int)
    written: dict[ArrayPlace, int] = {}
    for kernel in kernels:
        if kernel.name in names:
            written.update(kernel.traffic.writes)
            for place, n_bytes in kernel.traffic.reads.items():
                read[place] = max(read[place], n_bytes)
    arguments_read = sum(n_bytes for (name, _), n_bytes in read.items() if name in arguments)
    root = next(instruction for instruction in entry if instruction.is_root)
    results_written = sum(written.get(place, 0) for place in set(places.of(root.name)))
    n_bytes = sum(max(0, n - device.l2_cache_size) for n in (arguments_read, results_written))
    return n_bytes / device.bandwidth


def _communication(routes: Iterable[tuple[Collective, Route]]) -> tuple[Communication, ...]:
    groups: dict[tuple[str, str, int, str], list[tuple[Collective, Route]]] = defaultdict(list)
    for item, route in routes:
        groups[item.kind, item.dtype, item.group_size, route.axis].append((item, route))
    found = [_sum(key, items) for key, items in groups.items()]
    return tuple(sorted(found, key=lambda item: -item.sent_bytes - item.sent_between_hosts))


def _sum(key: tuple[str, str, int, str], items: list[tuple[Collective, Route]]) -> Communication:
    kind, dtype, group_size, axis = key
    return Communication(
        kind,
        dtype,
        group_size,
        count=sum(x.times for x, _ in items),
        n_bytes=sum(x.times * x.n_bytes for x, _ in items),
        sent_bytes=sum(x.times * route.sent_bytes for x, route in items),
        seconds=sum(x.times * route.seconds for x, route in items),
        axis=axis,
        sent_between_hosts=sum(x.times * route.sent_between_hosts for x, route in items),
        seconds_between_hosts=sum(x.times * route.seconds_between_hosts for x, route in items),
    )
