"""Optional C++ kernels for CPUs in place of chunked ones: the same sums by vector instructions.

They run within `native_kernels` if they take the arguments. GPUs and second derivatives use the chunked kernels.
"""

import contextlib
import ctypes
import dataclasses
import functools
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jmp_train.graphs.structure import CSR, common_dtype
from jmp_train.policies import pvary
from jmp_train.policies.files import cache_folder

SOURCE = Path(__file__).with_name("native_kernels.cc")
TARGETS = ("jmp_weighted_sum", "jmp_edge_dot", "jmp_gat_forward", "jmp_gat_of_receivers", "jmp_gat_of_senders")
COMPILERS = ("c++", "g++", "clang++")
OPTIONS = ("-O3", "-march=native", "-std=c++17", "-shared", "-fPIC", "-DNDEBUG", "-w")
Result = TypeVar("Result")
_DTYPES = {"float32", "float16", "bfloat16"}
_IS_IN_USE = jax.make_user_context(False)  # jax traces anew where it changes


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Scales:
    """Factors of rows, without gradients.

    Attributes:
      senders: floating [senders], factors before sending; None for 1.
      receivers: floating [receivers], factors of the sums; None for 1.
    """

    senders: jax.Array | None = None
    receivers: jax.Array | None = None


@functools.cache
def register_kernels() -> None:
    """Compiles the kernels, unless that was done before, and registers them with jax.

    Raises:
      RuntimeError: there is no C++ compiler, or it fails; the message has its output.
    """
    library = ctypes.CDLL(str(built_library()))
    for target in TARGETS:
        jax.ffi.register_ffi_target(target, jax.ffi.pycapsule(getattr(library, target)), platform="cpu")


def built_library() -> Path:
    """Returns the file of the kernels, compiled if necessary; see `register_kernels`."""
    compiler = _compiler()
    file = cache_folder() / f"native_kernels-{_key(compiler)}.so"
    if file.exists():
        return file
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=file.parent) as folder:
        made = Path(folder) / file.name
        command = [*compiler, *OPTIONS, "-I", jax.ffi.include_dir(), str(SOURCE), "-o", str(made)]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if result.returncode:
            raise RuntimeError(f"native kernels cannot be compiled: {shlex.join(command)}\n{result.stderr.strip()}")
        os.replace(made, file)  # other processes may make the same file
    return file


def _compiler() -> list[str]:
    """Returns the command of the compiler: `$CXX`, or the first that is installed."""
    if own := os.environ.get("CXX"):
        command = shlex.split(own)
        if shutil.which(command[0]) is None:
            raise RuntimeError(f"CXX={own} is not a program: native kernels need a C++ compiler")
        return command
    for name in COMPILERS:
        if shutil.which(name) is not None:
            return [name]
    raise RuntimeError(
        f"native kernels need a C++ compiler: none of {', '.join(COMPILERS)} was found; install one or set CXX"
    )


def _key(compiler: list[str]) -> str:
    """Returns a digest of everything that the compiled file depends on, including the CPU's instructions."""
    cpu = Path("/proc/cpuinfo")
    lines = cpu.read_text().splitlines() if cpu.exists() else []
    flags = [line for line in lines if line.startswith(("flags", "Features"))][:1]
    machine = platform.platform(), platform.processor()
    parts = (SOURCE.read_text(), metadata.version("jaxlib"), compiler, *machine, flags)
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


@contextlib.contextmanager
def native_kernels() -> Iterator[None]:
    """Makes code traced within it use C++ kernels on CPUs, for sums, dots and attention over edges.

    The first use compiles them for this machine by `$CXX`, `c++`, `g++` or `clang++`, which takes some seconds, and
    caches them in `$JMP_TRAIN_CACHE` or ~/.cache/jmp_train. Functions under `jax.jit` are traced anew within, and again
    outside. Results differ by float32 rounding. The kernels take float32, float16 or bfloat16 features and sorted edges
    (formats with "csr"): weighted sums, `u_dot_v`, and GAT without attention dropout and edge weights. Compute
    gradients within the context too.

    Returns:
      A context manager.

    Raises:
      RuntimeError: there is no C++ compiler, or it fails; or, when a kernel runs, an edited index array of the graph
        has an id or degree that is out of bounds.

    Warns:
      UserWarning: the graph of an operation has no sorted edges, so it runs without native kernels.

    Example:
      >>> from jmp_train import graphs
      >>> with graphs.native_kernels():  # doctest: +SKIP
      ...     for batch in batches:
      ...         state, metrics = step(state, batch)
      >>> native_kernels().__class__.__name__
      '_GeneratorContextManager'
    """
    register_kernels()
    with _IS_IN_USE(True):
        yield


def are_native_kernels_wanted() -> bool:
    """Returns whether the code runs within `native_kernels`."""
    return bool(_IS_IN_USE.value)


def takes(dtype: DTypeLike, neighbors: CSR, *arguments: Any) -> bool:
    """Returns whether native kernels are enabled and take these arguments.

    Args:
      dtype: dtype of the result.
      neighbors: the edges.
      *arguments: pytrees of the other arrays.
    """
    arrays = jax.tree.leaves(arguments)
    has_some = neighbors.num_nodes > 0 and neighbors.others.shape[0] > 0 and all(x.size for x in arrays)
    return (
        are_native_kernels_wanted() and has_some and {jnp.dtype(dtype).name, *(x.dtype.name for x in arrays)} <= _DTYPES
    )


def on_cpus(native: Callable[..., Result], chunked: Callable[..., Result], *arguments: Any) -> Result:
    """Returns the result of a native kernel on CPUs, otherwise of a chunked one, which has the gradient.

    Args:
      native: the native kernel, without a gradient.
      chunked: a function of the same arguments, with the same result except for rounding.
      *arguments: pytrees of arrays.
    """

    @jax.custom_vjp
    def compute(*arguments: Any) -> Result:
        return jax.lax.platform_dependent(*arguments, cpu=native, default=chunked)

    def forward(*arguments: Any) -> tuple[Result, Any]:
        return compute(*arguments), arguments

    def backward(arguments: Any, gradient: Any) -> Any:
        return jax.vjp(chunked, *arguments)[1](gradient)

    compute.defvjp(forward, backward)
    return compute(*arguments)


def native_sum(
    dtype: DTypeLike, neighbors: CSR, scales: Scales, data: jax.Array, weights: jax.Array | None
) -> jax.Array:
    """Returns the sums of `weighted_sum`.

    Args:
      dtype: dtype of the result.
      neighbors: the edges by the nodes that they enter.
      scales: see `weighted_sum`.
      data: [senders, heads, width].
      weights: [edges, heads or 1]; None for 1.
    """
    like = [((neighbors.num_nodes, *data.shape[1:]), dtype)]
    arrays = data, jnp.zeros((0, 1), jnp.float32) if weights is None else weights
    return _call("jmp_weighted_sum", like, *_of(neighbors), *arrays, *_of_scales(scales))[0]


def native_dot(neighbors: CSR, scales: Scales, senders: jax.Array, receivers: jax.Array) -> jax.Array:
    """Returns the products of `edge_dot`.

    Args:
      neighbors: the edges, which have places, by the nodes that they enter.
      scales: see `edge_dot`.
      senders: [senders, heads, width].
      receivers: [receivers, heads, width].
    """
    like = [((neighbors.num_edges, senders.shape[1]), common_dtype(senders.dtype, receivers.dtype))]
    return _call("jmp_edge_dot", like, *_of(neighbors), senders, receivers, *_of_scales(scales))[0]


def native_gat(
    negative_slope: float, neighbors: CSR, features: jax.Array, left: jax.Array, right: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns attention, the largest logits and the inverse sums; see `Softmax`.

    Args:
      negative_slope: slope of the leaky ReLU below 0.
      neighbors: the edges by the nodes that they enter.
      features: [senders, heads, width].
      left: float32 [senders, heads].
      right: float32 [receivers, heads].
    """
    nodes, (_, heads, width) = neighbors.num_nodes, features.shape
    of_heads = (nodes, heads), jnp.float32
    like = [((nodes, heads, width), features.dtype), of_heads, of_heads]
    total, largest, inverse = _call(
        "jmp_gat_forward", like, neighbors.others, neighbors.degrees, features, left, right, slope=negative_slope
    )
    return total, largest, inverse


def native_gat_gradient(
    negative_slope: float,
    into: CSR,
    out: CSR,
    features: jax.Array,
    left: jax.Array,
    right: jax.Array,
    largest: jax.Array,
    inverse: jax.Array,
    gradient: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the gradients of features, in their dtype, and of `left` and `right`, in float32.

    Args:
      negative_slope: see `native_gat`.
      into: the edges by the nodes that they enter.
      out: the edges by the nodes that they leave.
      features: see `native_gat`.
      left: see `native_gat`.
      right: see `native_gat`.
      largest: from `native_gat`.
      inverse: from `native_gat`.
      gradient: gradient of the attention.
    """
    inputs = features, left, right, largest, inverse, gradient
    of_heads = [((into.num_nodes, features.shape[1]), jnp.float32)] * 2
    mean, of_right = _call("jmp_gat_of_receivers", of_heads, into.others, into.degrees, *inputs, slope=negative_slope)
    targets = jnp.stack([right, largest, inverse, mean], -1)
    like = [(features.shape, features.dtype), (left.shape, jnp.float32)]
    of_features, of_left = _call(
        "jmp_gat_of_senders", like, out.others, out.degrees, features, left, targets, gradient, slope=negative_slope
    )
    return of_features, of_left, of_right


def _of(neighbors: CSR) -> tuple[jax.Array, jax.Array, jax.Array]:
    edges = neighbors.edges
    return neighbors.others, neighbors.degrees, jnp.zeros(0, jnp.int32) if edges is None else edges


def _of_scales(scales: Scales) -> list[jax.Array]:
    none = jnp.zeros(0, jnp.float32)
    return [none if x is None else x.astype(jnp.float32) for x in (scales.senders, scales.receivers)]


def _call(target: str, like: Any, *arrays: jax.Array, slope: float | None = None) -> list[jax.Array]:
    """Returns the results of a kernel, with the shapes and dtypes of `like`."""
    varying = sorted({name for x in arrays for name in jax.typeof(x).manual_axis_type.varying})
    results = [jax.ShapeDtypeStruct(*x) for x in like]
    attributes = {} if slope is None else {"slope": np.float32(slope)}
    found = jax.ffi.ffi_call(target, results, vmap_method="sequential")(*arrays, **attributes)
    return [pvary(x, varying) for x in found]
