"""Slices of TPUs by name, such as "v5e:4x4": their properties for the compiler, their peak rates and their links."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from itertools import product
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

import jax.numpy as jnp
from jax.typing import DTypeLike

from jmp_train.policies.files import read_toml

PASSES = {"default": 1, "high": 3, "highest": 6}
"""How many products in bfloat16 a TPU computes for a product in float32, by jax's precision."""


@dataclass(frozen=True)
class TPU:
    """A slice of TPUs of one generation. Numbers are of one device: a chip, or one of the two in a chip.

    Attributes:
      name: generation and chips along each axis: "v5e:4x4".
      shape: the chips along each axis.
      description: the name of a device, as in `jax.devices()[0].device_kind`.
      memory_bytes: the whole memory.
      program_bytes: the largest memory of a program that libtpu accepts.
      bandwidth: bandwidth of the memory, in bytes per second.
      rates: operations per second in matrix products by dtype; a product and a sum are two. Other dtypes than these
        are computed in them, see `matrix_rate`.
      chip_link_bandwidth: bandwidth of one link between two chips, in bytes per second, in one direction.
      wraps: the ends of an axis are linked if its length is a multiple of this.
      devices_per_chip: number of devices that jax sees in a chip.
      options: further arguments of `jax.experimental.topologies.get_topology_desc`.
      source: addresses of the sources.

    Example:
      >>> slice_ = tpu_slice("v5e:4x4")
      >>> slice_.devices, slice_.memory_bytes, slice_.rates["bfloat16"]
      (16, 17179869184, 197000000000000.0)
    """

    platform: ClassVar[str] = "tpu"
    link: ClassVar[str] = "ICI"
    overlaps: ClassVar[bool] = True  # the compiler copies ahead of time between main and vector memory
    l2_cache_size: ClassVar[int] = 0  # arrays in vector memory are marked in the program

    name: str
    shape: tuple[int, ...]
    description: str
    memory_bytes: int
    program_bytes: int
    bandwidth: float
    rates: Mapping[str, float] = field(hash=False)
    chip_link_bandwidth: float
    wraps: int
    devices_per_chip: int
    options: Mapping[str, Any] = field(hash=False, repr=False)
    source: tuple[str, ...] = field(repr=False)

    @property
    def devices(self) -> int:
        """Number of devices in the slice."""
        return math.prod(self.shape) * self.devices_per_chip

    @property
    def link_bandwidth(self) -> float:
        """Bandwidth from a device to the others of the slice, in bytes per second, in one direction."""
        return self.bandwidth_over(self.shape)

    def bandwidth_over(self, extents: Sequence[int]) -> float:
        """Returns the bandwidth from a device to the others of a block of chips, in one direction.

        A chip has one link per direction of each axis. At the end of an axis that does not wrap around, only one is
        left, which limits the exchange of all devices.

        Args:
          extents: the chips of the block along each axis.

        Example:
          >>> tpu_slice("v5e:4x4").bandwidth_over((4, 1)), tpu_slice("v5e:16x16").bandwidth_over((16, 16))
          (50000000000.0, 200000000000.0)
        """
        links = sum(
            2 if extent == length and length > 2 and length % self.wraps == 0 else 1
            for extent, length in zip(extents, self.shape, strict=True)
            if extent > 1
        )
        # Devices of one chip exchange through its memory, at best.
        return links * self.chip_link_bandwidth / self.devices_per_chip if links else self.bandwidth

    def matrix_rate(self, dtype: DTypeLike, *, precision: str = "default") -> float:
        """Returns the peak operations per second in matrix products of a dtype.

        Matrix units multiply bfloat16, and on some generations float8 and integers. float32 is split into one, three
        or six products in bfloat16, by jax's precision; float16 is converted to float32 first. float64, which the
        compiler emulates, counts as float32 at the highest precision, an upper bound.

        Args:
          dtype: dtype of the operands.
          precision: "default", "high" or "highest": `jax_default_matmul_precision`, or `precision=`.

        Example:
          >>> tpu = tpu_slice("v5p:2x2x1")
          >>> tpu.matrix_rate("float32"), tpu.matrix_rate("float32", precision="highest"), tpu.matrix_rate("int8")
          (459000000000000.0, 76500000000000.0, 918000000000000.0)
        """
        name = jnp.dtype(dtype).name
        kind = "float8" if name.startswith("float8") else name.removeprefix("u")
        if kind in ("float64", "complex128"):
            precision = "highest"
        passes = PASSES[precision] if kind in ("float16", "float32", "float64", "complex64", "complex128") else 1
        return self.rates.get(kind, self.rates["bfloat16"]) / passes

    def topology(self, devices: int, hosts: int = 1) -> dict[str, Any]:
        """Returns the arguments of `jax.experimental.topologies.get_topology_desc`.

        Args:
          devices: number of devices; a slice has `TPU.devices`.
          hosts: not used; a slice has its own.
        """
        del devices, hosts
        per_host = [min(2, chips) for chips in (*self.shape, 1)[:2]]
        return {
            "platform": "tpu",
            "topology_name": self.name,
            "chips_per_host_bounds": [*per_host, 1],
            **self.options,
        }


@dataclass(frozen=True)
class _Generation:
    """A generation of TPUs: common properties of its slices, and the slices that exist."""

    tpu: TPU
    slices: tuple[str, ...]
    cubes_up_to: int

    def names(self) -> Iterator[str]:
        """Yields the shapes of all slices, from the smallest: those that are listed, then whole cubes."""
        yield from self.slices
        sides = range(4, self.cubes_up_to // 16 + 1, 4)
        cubes = [
            (a, b, c) for a, b in product(sides, repeat=2) if a <= b
            for c in sides if b <= c and a * b * c <= self.cubes_up_to and c <= 8 * a
        ]  # fmt: skip
        yield from ("x".join(map(str, cube)) for cube in sorted(cubes, key=lambda cube: (math.prod(cube), cube)))


def tpu_slice(name: str) -> TPU:
    """Returns a slice of TPUs by its name: a generation and the number of chips along each axis.

    Args:
      name: such as "v5e:4x4" or "v5p:2x2x1".

    Raises:
      ValueError: there is no such generation, or it has no slice of this shape; the message names the nearest.

    Example:
      >>> tpu_slice("v5e:3x3")
      Traceback (most recent call last):
      ...
      ValueError: 'v5e:3x3' is no slice of TPUs: v5e has no slice of 3x3 chips; the nearest are v5e:2x4 and v5e:4x4
    """
    generation, _, shape = name.partition(":")
    if generation not in _GENERATIONS:
        near = get_close_matches(generation, _GENERATIONS, 1, 0)
        example = f"{near[0]}:{_GENERATIONS[near[0]].slices[1]}"
        raise ValueError(
            f"{name!r} is no slice of TPUs: the generations are {', '.join(_GENERATIONS)}, as in {example!r}"
        )
    found = _GENERATIONS[generation]
    if shape not in found.names():  # whole cubes, of which there are many, are made last
        raise ValueError(f"{name!r} is no slice of TPUs: {_no_shape(generation, shape, list(found.names()))}")
    values = {**vars(found.tpu), "name": name, "shape": tuple(map(int, shape.split("x")))}
    return TPU(**values)


def _no_shape(generation: str, shape: str, shapes: Sequence[str]) -> str:
    """Returns why a shape is none of a generation."""
    if not re.fullmatch(r"\d+(x\d+)*", shape):
        return f"give the chips along each axis, as in '{generation}:{shapes[1]}'"
    chips = math.prod(map(int, shape.split("x")))
    numbers = [math.prod(map(int, known.split("x"))) for known in shapes]
    below = [known for known, n in zip(shapes, numbers, strict=True) if n <= chips]
    above = [known for known, n in zip(shapes, numbers, strict=True) if n >= chips]
    near = dict.fromkeys([*below[-1:], *above[:1]])
    verb = "are" if len(near) > 1 else "is"
    names = " and ".join(f"{generation}:{known}" for known in near)
    return f"{generation} has no slice of {shape} chips; the nearest {verb} {names}"


def _read(path: Path) -> dict[str, _Generation]:
    return {name: _generation(name, table) for name, table in read_toml(path).items()}


def _generation(name: str, table: dict[str, Any]) -> _Generation:
    """Returns the generation of a table, whose numbers per chip become numbers per device."""
    parts = table.get("devices_per_chip", 1)
    tpu = TPU(
        name=name,
        shape=(),
        description=table["device"],
        memory_bytes=table["memory_bytes"] // parts,
        program_bytes=table["program_bytes"] // parts,
        bandwidth=table["bandwidth"] / parts,
        rates=MappingProxyType({dtype: rate / parts for dtype, rate in table["rates"].items()}),
        chip_link_bandwidth=table["link_bandwidth"],
        wraps=table["wraps"],
        devices_per_chip=parts,
        options=table.get("topology", {}),
        source=tuple(table["source"]),
    )
    return _Generation(tpu, tuple(table["slices"]), table.get("cubes_up_to", 0))


_GENERATIONS: Mapping[str, _Generation] = MappingProxyType(_read(Path(__file__).with_name("tpus.toml")))

TPUS: Mapping[str, TPU] = MappingProxyType(
    {name: tpu_slice(f"{name}:{g.slices[0]}") for name, g in _GENERATIONS.items()}
)
"""A single chip of each generation of TPUs, by the generation; `tpu_slice` returns larger slices."""
