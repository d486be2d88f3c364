"""The compiler of a plan: programs traced by the thread that plans, each once, and compiled by several at one time."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future
from queue import SimpleQueue
from typing import Any

from jmp_train.aot import GPU, CompiledForGPU, ExportedProgram, compile_program
from jmp_train.planning.variants import Placement, Variant


class Compiler:
    """Compiles variants of a step, each program traced once for all GPUs.

    What is traced depends on contexts of the thread that traces: jax.default_matmul_precision, jax.set_mesh, haiku's
    policies. So the threads that compile ask the one that plans for what they need traced; see `trace_for`.
    """

    def __init__(self, donate: bool, timeout: float, progress: Callable[[int, str], None] | None) -> None:
        self._donate, self._timeout, self._progress = donate, timeout, progress
        self._lock = threading.Lock()  # of what follows
        self._programs: dict[Any, tuple[Future[ExportedProgram], Variant]] = {}
        self._count = 0
        self._stop = threading.Event()
        self._wanted: SimpleQueue[Callable[[], None]] = SimpleQueue()

    def trace_for(self, threads: Sequence[Future[Any]]) -> None:
        """Traces what other threads want, until all of them are done.

        Args:
          threads: what they run.

        Raises:
          Exception: what the first of them, or tracing, has failed with.
        """
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

    def exported(self, variant: Variant, placement: Placement, size: int) -> ExportedProgram:
        """Returns the program of a variant, for a batch of some size; waits until it is traced."""
        key = (id(variant), placement, size)
        with self._lock:
            if self._stop.is_set() and key not in self._programs:
                raise CancelledError
            if key not in self._programs:
                program: Future[ExportedProgram] = Future()
                self._programs[key] = (program, variant)  # which keeps the id
                self._wanted.put(lambda: self._trace(program, variant, placement, size))
        return self._programs[key][0].result()

    def __call__(self, gpu: GPU, variant: Variant, placement: Placement, size: int) -> CompiledForGPU:
        """Returns what a variant needs of a GPU with a batch of some size."""
        program = self.exported(variant, placement, size)
        if self._progress is not None:
            with self._lock:
                self._progress(self._count, f"{gpu.name}, {variant.policy}, {placement}, batch {size}")
        compiled = compile_program(program, gpu, timeout=self._timeout, stop=self._stop)
        with self._lock:
            self._count += 1
        return compiled

    def _trace(self, program: Future[ExportedProgram], variant: Variant, placement: Placement, size: int) -> None:
        program.set_result(variant.exported(placement, size, donate=self._donate))

    def _close(self) -> None:
        """Stops what is compiled, and lets no thread wait for what nobody will trace."""
        with self._lock:
            self._stop.set()
            for program, _ in self._programs.values():
                program.cancel()
