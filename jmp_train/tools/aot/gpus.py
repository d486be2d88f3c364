"""NVIDIA GPUs by name: their properties for the compiler, and their peak rates."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

import jax.numpy as jnp
from jax.typing import DTypeLike

from jmp_train.policies.files import read_toml
from jmp_train.policies.pytrees import checked_path

RATE_DTYPES = ("float64", "float32", "tfloat32", "bfloat16", "float16", "float8", "float4", "int8")
"""The names that `GPU.rates` may have; "tfloat32" is NVIDIA's TF32: float32 rounded to 10 bits for matrix units."""

# Dtypes in which XLA may compute products of a dtype: the first one that the GPU supports.
_PRODUCTS = {
    "float64": ("float64",),
    "float32": ("float32",),
    "tfloat32": ("tfloat32", "float32"),
    "bfloat16": ("bfloat16", "float32"),
    "float16": ("float16", "float32"),
    "float8": ("float8", "float16", "float32"),
    "float4": ("float4", "float16", "float32"),
    "int8": ("int8", "float32"),
}


@dataclass(frozen=True)
class GPU:
    """The properties of a GPU. Rates are peaks: no program is faster, and most are much slower.

    Attributes:
      name: as in `GPUS`: model and memory.
      description: CUDA's name of the device, as in `jax.devices()[0].device_kind`.
      memory_bytes: the whole memory, as CUDA reports it.
      bandwidth: bandwidth of the memory, in bytes per second.
      rates: operations per second in matrix products by dtype, without sparsity; a product and a sum are two. Names
        are those of `RATE_DTYPES`; dtypes that the hardware lacks are missing. "float32" is the rate of plain cores
        with full precision, "tfloat32" that of matrix units for float32; see `matrix_rate`.
      vector_rates: the same for everything but matrix products, by plain cores.
      link: the link between GPUs of one host: "NVLink 4", "PCIe 4.0 x16".
      link_bandwidth: bandwidth from one GPU to others in its host, in bytes per second, in one direction.
      capability: CUDA's compute capability, major and minor.
      core_count: number of streaming multiprocessors.
      fpus_per_core: number of float32 units per multiprocessor.
      clock_rate_ghz: the highest clock rate.
      l2_cache_size: bytes of L2 cache.
      shared_memory_per_core: bytes of shared memory per multiprocessor.
      shared_memory_per_block_optin: the largest shared memory that a kernel may request, in bytes.
      threads_per_core_limit: largest number of resident threads.
      source: addresses of the sources.

    Example:
      >>> gpu = GPUS["V100-16GB"]
      >>> gpu.memory_bytes, gpu.capability, gpu.rates["float16"]
      (16914055168, (7, 0), 125000000000000.0)
    """

    platform: ClassVar[str] = "cuda"
    overlaps: ClassVar[bool] = False  # kernels run one after the other

    name: str
    description: str
    memory_bytes: int
    bandwidth: float
    rates: Mapping[str, float] = field(hash=False)
    vector_rates: Mapping[str, float] = field(hash=False)
    link: str
    link_bandwidth: float
    capability: tuple[int, int]
    core_count: int
    fpus_per_core: int
    clock_rate_ghz: float
    l2_cache_size: int
    shared_memory_per_core: int
    shared_memory_per_block_optin: int
    threads_per_core_limit: int
    source: tuple[str, ...]

    def matrix_rate(self, dtype: DTypeLike, *, allow_tf32: bool = True, precision: str = "default") -> float:
        """Returns the peak operations per second in matrix products of a dtype, as XLA computes them.

        If the GPU lacks the dtype, XLA computes in another one, and that one's rate counts: float32 for bfloat16
        before compute capability 8.0. Dtypes without any unit, such as int32, get the rate of float32 as an upper
        bound.

        Args:
          dtype: dtype of the operands, or the string "tfloat32".
          allow_tf32: whether float32 products may round their operands to TF32 if the GPU supports it, as XLA does by
            default, unless jax's precision is "highest": `jax_default_matmul_precision`, or `precision=`.
          precision: "highest" is `allow_tf32=False`; "default" and "high" change nothing.

        Example:
          >>> gpu = GPUS["A100-80GB"]
          >>> gpu.matrix_rate("float16"), gpu.matrix_rate("float32"), gpu.matrix_rate("float32", allow_tf32=False)
          (312000000000000.0, 156000000000000.0, 19500000000000.0)
        """
        names = _PRODUCTS[_rate_dtype(dtype, allow_tf32 and precision != "highest")]
        return next(self.rates[name] for name in names if name in self.rates)

    def topology(self, devices: int, hosts: int = 1) -> dict[str, Any]:
        """Returns the arguments of `jax.experimental.topologies.get_topology_desc`.

        Args:
          devices: number of GPUs.
          hosts: number of hosts that have them.
        """
        topology = f"{hosts}x1x{devices // hosts}"
        return {"platform": "cuda", "target_config": self.target_config, "topology": topology}

    @property
    def target_config(self) -> str:
        """XLA's description of the GPU: the text of a `GpuTargetConfigProto`."""
        major, minor = self.capability
        return f"""
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  threads_per_core_limit: {self.threads_per_core_limit}
  shared_memory_per_block: 49152
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  cuda_compute_capability {{ major: {major} minor: {minor} }}
  core_count: {self.core_count}
  fpus_per_core: {self.fpus_per_core}
  shared_memory_per_core: {self.shared_memory_per_core}
  shared_memory_per_block_optin: {self.shared_memory_per_block_optin}
  memory_bandwidth: {int(self.bandwidth)}
  l2_cache_size: {self.l2_cache_size}
  clock_rate_ghz: {self.clock_rate_ghz}
  device_memory_size: {self.memory_bytes}
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 7 }}
runtime_version {{ major: 12 minor: 9 }}
device_description_str: "{self.description}"
"""


def _rate_dtype(dtype: DTypeLike, allow_tf32: bool) -> str:
    """Returns the name of a dtype in `_PRODUCTS`."""
    if dtype == "tfloat32":
        return "tfloat32"
    name = jnp.dtype(dtype).name
    if name in ("float32", "complex64") and allow_tf32:
        return "tfloat32"
    if name.startswith(("float8", "float4")):
        return name[:6]
    return {"uint8": "int8", "complex128": "float64"}.get(name, name if name in RATE_DTYPES else "float32")


def read_gpus(path: str | Path) -> dict[str, GPU]:
    """Returns the GPUs in a TOML file by name: one table each, with the attributes of `GPU` as keys.

    The name of a table is the GPU's. A table with `like`, the name of one of `GPUS` or of an earlier table, only needs
    the differences:

        [A100-half]
        like = "A100-40GB"
        memory_bytes = 20_000_000_000

    Args:
      path: the path of the file.

    Raises:
      OSError: the file cannot be read.
      ValueError: the file is no TOML, or a table has a key that is unknown, missing or of a wrong kind; the message
        names the file, the table and the key.
    """
    return _read(checked_path("path", path), GPUS)


def _read(path: Path, known: Mapping[str, GPU]) -> dict[str, GPU]:
    found: dict[str, GPU] = {}
    for name, table in read_toml(path).items():
        if not isinstance(table, dict):
            raise ValueError(f"{path}: {name} must be a table, such as [{name}], got {table!r}")
        found[name] = _gpu(name, table, {**known, **found}, f"{path}: [{name}]")
    return found


def _gpu(name: str, table: dict[str, object], known: Mapping[str, GPU], where: str) -> GPU:
    """Returns the GPU of a table; errors begin with `where`."""
    given = dict(table)
    like = given.pop("like", None)
    if like is not None and (not isinstance(like, str) or like not in known):
        raise ValueError(f"{where} like = {like!r} must be one of {', '.join(known)}")
    if unknown := [key for key in given if key not in _KINDS]:
        raise ValueError(f"{where} has an unknown key {unknown[0]!r}; the keys are like, {', '.join(_KINDS)}")
    values = {key: known[like].__dict__[key] for key in _KINDS} if isinstance(like, str) else {}
    for key, value in given.items():
        wanted, accepts, convert = _KINDS[key]
        if not accepts(value):
            raise ValueError(f"{where} {key} = {value!r} must be {wanted}")
        values[key] = convert(value)
    if missing := [key for key in _KINDS if key not in values]:
        raise ValueError(f'{where} lacks {", ".join(missing)}; take them from another GPU with like = "..."')
    return GPU(name=name, **values)


def _is_text(value: object) -> bool:
    return isinstance(value, str) and value.isprintable() and bool(value) and not {'"', "\\"} & {*value}


def _is_positive(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < float("inf")


def _is_positive_integer(value: object) -> bool:
    return isinstance(value, int) and _is_positive(value)


def _are_rates(value: object) -> bool:
    if not isinstance(value, dict) or not {"float64", "float32"} <= {*value} <= {*RATE_DTYPES}:
        return False
    return all(_is_positive(rate) for rate in value.values())


def _is_capability(value: object) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(type(part) is int and part >= 0 for part in value)


def _are_texts(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(_is_text(text) for text in value)


_Kind = tuple[str, Callable[[object], bool], Callable[[Any], Any]]

# For each type of an attribute the expected value, in words and as a test, and its conversion.
_OF_TYPE: Mapping[Any, _Kind] = {
    str: ("text without quotes or line breaks", _is_text, str),
    float: ("a number above 0", _is_positive, float),
    int: ("an integer above 0", _is_positive_integer, int),
    Mapping[str, float]: (
        "a table of numbers above 0 that has float64 and float32 and may have " + ", ".join(RATE_DTYPES[2:]),
        _are_rates,
        lambda rates: {name: float(rate) for name, rate in rates.items()},
    ),
    tuple[int, int]: ("a list of two integers, major and minor", _is_capability, tuple),
    tuple[str, ...]: ("a list of texts", _are_texts, tuple),
}
_KINDS: Mapping[str, _Kind] = {
    attribute.name: _OF_TYPE[attribute.type] for attribute in fields(GPU) if attribute.name != "name"
}

GPUS: Mapping[str, GPU] = MappingProxyType(_read(Path(__file__).with_name("gpus.toml"), {}))
"""The GPUs that programs can be compiled for, by name; `read_gpus` reads further ones."""
