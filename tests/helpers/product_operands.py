"""What the products of matrices and the convolutions of a program are made of, read from its HLO."""

import re
from collections.abc import Iterator
from typing import NamedTuple

_INSTRUCTION = re.compile(r"\s+(?:ROOT )?%?([\w.\-]+) = \(?([a-z]\w*)\[.*")
_PRODUCT = re.compile(r" (dot|convolution|custom-call)\(([^)]*)\)")
_LIBRARY = re.compile(r'custom_call_target="__(cublas|cudnn)\$(\w+)')


class Product(NamedTuple):
    """A product of matrices, or a convolution.

    Attributes:
      kind: "dot" or "convolution".
      library: "cublas" or "cudnn", which computes it; "" for XLA, which generates code.
      operands: the dtypes of both factors, by XLA's names: "f16", "bf16", "f32".
    """

    kind: str
    library: str
    operands: tuple[str, ...]


def products(hlo: str) -> list[Product]:
    """Returns all products and convolutions of a program, of whatever compiles them.

    A compiler for GPUs passes them to cuBLAS and cuDNN as custom calls, or leaves `dot` and `convolution` within a
    fusion, for which it generates code. Before compilation, as `lowered.as_text(dialect="hlo")` has it, all are
    `dot` and `convolution`.

    Args:
      hlo: the text of an HLO module.
    """
    return list(_products(hlo))


def _products(hlo: str) -> Iterator[Product]:
    dtypes: dict[str, str] = {}  # of the results of this computation; operands are named without theirs
    for line in hlo.splitlines():
        if not line.startswith(" "):
            dtypes = {}
        instruction = _INSTRUCTION.match(line)
        if instruction is None:
            continue
        dtypes[instruction[1]] = instruction[2]
        found = _PRODUCT.search(line)
        if found is None:
            continue
        called = _LIBRARY.search(line)
        if found[1] == "custom-call" and called is None:
            continue
        names = [name.split()[-1].removeprefix("%") for name in found[2].split(", ")[:2]]
        operands = tuple(dtypes[name] for name in names)
        if called is None:
            yield Product(found[1], "", operands)
        else:
            kind = "convolution" if called[2].startswith("conv") else "dot"
            yield Product(kind, called[1], operands)
