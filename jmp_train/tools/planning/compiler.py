"""The compiler of a plan: one thread traces each program once, and several compile."""

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TypeVar

from jmp_train.tools.aot import (
    CompiledProgram,
    Costs,
    ExportedProgram,
    Network,
    Program,
    compile_program,
    program_costs,
)
from jmp_train.tools.planning.targets import Target

T = TypeVar("T")

_BYTES_A_COMPILATION = 4 * 2**30


class Compiler:
    """Compiles the programs of a plan, each traced once for all GPUs, and once for all TPUs.

    Traces depend on contexts of the tracing thread: jax.default_matmul_precision, jax.set_mesh, haiku's policies. So
    the compiling threads ask the planning thread to trace; see `each`.

    Args:
      donate: see `plan`, as are the others.
      timeout: seconds.
      progress: called before each compilation.
      interconnect: bytes per second from a GPU to other hosts.
    """

    def __init__(
        self, donate: bool, timeout: float, progress: Callable[[int, str], None] | None, interconnect: float
    ) -> None:
        self._interconnect = interconnect
        self._donate, self._timeout, self._progress = donate, timeout, progress
        self._lock = threading.Lock()  # of what follows
        self._programs: dict[Any, tuple[Future[ExportedProgram], Target]] = {}
        self._count = 0
        self._stop = threading.Event()
        self._wanted: SimpleQueue[Callable[[], None]] = SimpleQueue()

    def each(self, function: Callable[[Target], T], targets: Sequence[Target], jobs: int | None) -> list[T]:
        """Returns a function of each target, computed by several threads, which may compile.

        Args:
          function: the function that a thread runs.
          targets: its arguments.
          jobs: number of threads; None for as many as cores and memory allow.

        Raises:
          Exception: the first error of a thread, or of tracing.
        """
        with ThreadPoolExecutor(jobs or _jobs()) as pool:
            threads = [pool.submit(function, target) for target in targets]
            try:
                self._trace_for(threads)
                return [thread.result() for thread in threads]
            except BaseException:  # Ctrl-C too
                pool.shutdown(wait=False, cancel_futures=True)
                raise

    def exported(self, target: Target, size: int) -> ExportedProgram:
        """Returns a target's program for a batch size; waits until it is traced."""
        platform = target.kind.platform
        key = (id(target.variant), target.placement, size, platform)
        with self._lock:
            if self._stop.is_set() and key not in self._programs:
                raise CancelledError
            if key not in self._programs:
                program: Future[ExportedProgram] = Future()
                self._programs[key] = (program, target)  # which keeps the id
                self._wanted.put(lambda: self._trace(program, target, size))
        return self._programs[key][0].result()

    def __call__(self, target: Target, size: int) -> CompiledProgram:
        """Returns the memory of a target's program with a batch size."""
        program = self.exported(target, size)
        if self._progress is not None:
            with self._lock:
                self._progress(self._count, f"{target}, batch {size}")
        hosts = target.placement.hosts
        compiled = compile_program(program, target.kind, hosts=hosts, timeout=self._timeout, stop=self._stop)
        with self._lock:
            self._count += 1
        return compiled

    def costs(self, target: Target, compiled: CompiledProgram, hlo: Program) -> Costs:
        """Returns the costs of a target's program, whose text has been read."""
        placed = target.placement
        links = (placed.hosts, self._interconnect, compiled.coordinates)
        return program_costs(hlo, target.kind, Network(target.kind, placed.axes, *links))

    def _trace_for(self, threads: Sequence[Future[Any]]) -> None:
        """Traces the programs that other threads request, until all threads are done."""
        for thread in threads:
            thread.add_done_callback(lambda _: self._wanted.put(lambda: None))
        try:
            while not all(thread.done() for thread in threads):
                for thread in threads:
                    if thread.done():
                        thread.result()
                self._wanted.get()()
        finally:
            self._close()

    def _trace(self, program: Future[ExportedProgram], target: Target, size: int) -> None:
        program.set_result(
            target.variant.exported(target.placement, size, donate=self._donate, platform=target.kind.platform)
        )

    def _close(self) -> None:
        """Stops the compilations and the threads that wait for traces."""
        with self._lock:
            self._stop.set()
            for program, _ in self._programs.values():
                program.cancel()


def _jobs() -> int:
    """Returns the number of simultaneous compilations that cores and memory allow."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(cores, _available_bytes() // _BYTES_A_COMPILATION))


def _available_bytes() -> int:
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return _BYTES_A_COMPILATION
    sizes: Mapping[str, int] = {line.split(":")[0]: 1024 * int(line.split()[1]) for line in lines}
    return sizes.get("MemAvailable", _BYTES_A_COMPILATION)
