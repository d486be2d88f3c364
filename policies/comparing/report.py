"""`ParityReport`: what `parity` returns, as text, as JSON, as a page, as a picture."""

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

from jmp_train.policies.comparing.charts import distribution_chart, operations_chart
from jmp_train.policies.comparing.differences import Differences, TokenDifference
from jmp_train.policies.comparing.operations import FirstDifference, OperationParity, Operations
from jmp_train.policies.comparing.page import page
from jmp_train.policies.diagnosing import place_of
from jmp_train.policies.documents import Block, Code, Section, Text, as_json, counted, svg_file, text

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
        return as_json(dataclasses.asdict(self) | {"bands": bands, "quantiles": quantiles})

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
        charts = [distribution_chart(self), *([operations_chart(self.operations)] if self.operations else [])]
        Path(path).write_text(svg_file(charts, "Distribution of differences, and of operations"), encoding="utf-8")

    def __str__(self) -> str:
        shares = [f"from {low:g} to {high:g} for {share:.2%}" for (low, high), share in self.bands.items()]
        shares[0] += " of the tokens"
        numbers = f"median {self.median:.2g}, 99% up to {self.quantiles[0.99]:.2g}, maximum {self.maximum:.2g}"
        tokens = counted(self.n_tokens, "token")
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
        return text([*map(Text, lines), *self._operation_blocks()])

    def _operation_blocks(self) -> list[Block]:
        if self.operations is None:
            return []
        compiler = (
            f"the operations run one by one differ by {self.operations.mean:.2g} on average: the rest is the "
            "compiler's, which fuses, reorders sums and leaves out roundings"
        )
        is_compilers = self.mean > 1e-6 and self.operations.mean < _EXPLAINED * self.mean
        first = self.operations.first
        if first is None:
            return [Text(f"no operation differs beyond float32's rounding{f'; {compiler}' if is_compilers else ''}")]
        kinds = {"value": "other values, even in float32", "rounding": "rounding, while float32 agrees"}
        sides = [_operation("train", first.train), _operation("infer", first.infer)]
        return [Section(f"first difference: {kinds[first.kind]}", sides), Text(compiler if is_compilers else "")]


def _token(token: TokenDifference) -> str:
    place = f"{token.path}[{', '.join(map(str, token.index))}]"
    return f"{place} train {token.train:.6g}, infer {token.infer:.6g}"


def _operation(name: str, operation: OperationParity | None) -> Section | None:
    if operation is None:
        return None
    shape = ",".join(map(str, operation.shape))
    path = f" ({operation.path.strip('/')})" if operation.path else ""
    head = f"{name}: {operation.primitive} {operation.dtype}[{shape}], {place_of(operation.file, operation.line)}{path}"
    other = "infer" if name == "train" else "train"
    if operation.unknown:
        evidence = f"{operation.unknown:.0%} of its rows are not among those of {other}"
    else:
        evidence = f"off by {operation.difference:.2g} from {other}, by {operation.error:.2g} from float32"
    return Section(head, [Code(operation.code), Text(evidence)])
