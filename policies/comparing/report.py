"""`ParityReport`: what `parity` returns, as text, as JSON, as a page, as a picture."""

import dataclasses
import json
import math
import os
import textwrap
from pathlib import Path
from typing import Any

from jmp_train.policies.comparing.differences import Differences, TokenDifference
from jmp_train.policies.comparing.page import page
from jmp_train.policies.comparing.parted import FirstDifference, OperationParity, Operations
from jmp_train.policies.comparing.picture import standalone
from jmp_train.policies.diagnosing import finite_or_none, place_of

_WIDTH = 100
_SHOWN = 3  # of the worst tokens
_EXPLAINED = 0.25  # of the mean: where operations run one by one differ by less, the compiler makes the rest


@dataclasses.dataclass(frozen=True)
class ParityReport(Differences):
    """How far the log-probabilities of training and inference are apart, and from which operation on.

    Attributes:
      operations: of both functions, each run by itself; None if it was not looked for them.

    Example:
      >>> import jax.numpy as jnp, jmp_train as jt
      >>> report = jt.parity(lambda x: -x, lambda x: -x, jnp.ones(3))
      >>> print(report)
      3 tokens: |log p_train - log p_infer| is 0 on average, median 0, 99% up to 0, maximum 0
      p_train / p_infer is from 0.999 to 1.002 for 100.00% of the tokens, from 0.99 to 1.01 for 100.00%,
        from 0.95 to 1.05 for 100.00%; KL divergence (k3) 0
      no operation differs beyond float32's rounding
    """

    operations: Operations | None

    @property
    def first_difference(self) -> FirstDifference | None:
        """Where the two functions part; None if no operation differs, or it was not looked for one."""
        return self.operations.first if self.operations else None

    def as_dict(self) -> dict[str, Any]:
        """Returns all of it as JSON has it: numbers that are not finite are None."""
        bands = [{"low": low, "high": high, "share": share} for (low, high), share in self.bands.items()]
        quantiles = [{"share": share, "difference": x} for share, x in self.quantiles.items()]
        return finite_or_none(dataclasses.asdict(self) | {"bands": bands, "quantiles": quantiles})

    def to_json(self) -> str:
        """Returns all of it as JSON; numbers that are not finite are null."""
        return json.dumps(self.as_dict(), allow_nan=False)

    def to_html(self, title: str = "Parity") -> str:
        """Returns all of it as an HTML page that needs no network: the distribution, operations, the worst tokens.

        Args:
          title: of the page, such as what was compared.
        """
        return page(title, str(self), self, self.operations)

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Writes the distribution of the differences and how far the operations are apart, as a picture in SVG.

        Args:
          path: of the file, which is overwritten.
        """
        Path(path).write_text(standalone(self, self.operations), encoding="utf-8")

    def __str__(self) -> str:
        shares = [f"from {low:g} to {high:g} for {share:.2%}" for (low, high), share in self.bands.items()]
        shares[0] += " of the tokens"
        tokens = f"{self.n_tokens} token{'s' * (self.n_tokens != 1)}"
        numbers = f"median {self.median:.2g}, 99% up to {self.quantiles[0.99]:.2g}, maximum {self.maximum:.2g}"
        lines = [
            f"{tokens}: |log p_train - log p_infer| is {self.mean:.2g} on average, {numbers}",
            f"p_train / p_infer is {', '.join(shares)}; KL divergence (k3) {self.kl:.2g}",
        ]
        if self.n_nan:
            lines.append(f"{self.n_nan} of the tokens are NaN: left out of the averages, outside of all ranges")
        if self.n_infinite:
            lines.append(
                f"{self.n_infinite} of the tokens are impossible (-inf) in one function alone: left out of the "
                "averages, outside of all ranges"
            )
        lines += [f"worst: {_token(token)}" for token in self.worst[:_SHOWN]]
        lines = [line for text in lines for line in _wrapped(text)]
        return "\n".join(lines + self._operation_lines())

    def _operation_lines(self) -> list[str]:
        if self.operations is None:
            return []
        compiler = (
            f"the operations run one by one differ by {self.operations.mean:.2g} on average: the rest is the "
            "compiler's, which fuses, reorders sums and leaves out roundings"
        )
        is_compilers = self.mean > 1e-6 and self.operations.mean < _EXPLAINED * self.mean
        first = self.operations.first
        if first is None:
            return _wrapped(f"no operation differs beyond float32's rounding{f'; {compiler}' if is_compilers else ''}")
        kinds = {"value": "other values, even in float32", "rounding": "rounding, while float32 agrees"}
        lines = [f"first difference: {kinds[first.kind]}"]
        for name, operation in (("train", first.train), ("infer", first.infer)):
            lines += [] if operation is None else _operation(name, operation)
        return lines + (_wrapped(compiler) if is_compilers else [])


def _token(token: TokenDifference) -> str:
    place = f"{token.path}[{', '.join(map(str, token.index))}]"
    return f"{place} train {token.train:.6g}, infer {token.infer:.6g}"


def _operation(name: str, operation: OperationParity) -> list[str]:
    shape = ",".join(map(str, operation.shape))
    path = f" ({operation.path.strip('/')})" if operation.path else ""
    head = f"{name}: {operation.primitive} {operation.dtype}[{shape}], {place_of(operation.file, operation.line)}{path}"
    other = "infer" if name == "train" else "train"
    if operation.unknown:
        evidence = f"{operation.unknown:.0%} of its rows are not among those of {other}"
    else:
        evidence = f"off by {operation.difference:.2g} from {other}, by {operation.error:.2g} from float32"
    if not math.isnan(operation.contribution):
        if not operation.unknown and not operation.difference:
            evidence = f"its rows are those of {other}, at other places or for other tokens"
        evidence += f"; with the values of {other}, {operation.contribution:.0%} of the difference goes away"
    code = [f"      {operation.code}"[:_WIDTH]] if operation.code else []
    return [*_wrapped(head, "  "), *code, *_wrapped(evidence, "    ")]


def _wrapped(text: str, indent: str = "") -> list[str]:
    return textwrap.wrap(text, _WIDTH, initial_indent=indent, subsequent_indent=indent + "  ")
