"""`ParityReport`, the result of `parity`, and its operations: with text, JSON, page and picture."""

import dataclasses
import json
import linecache
import math
import os
from typing import Any, Literal

from jmp_train.policies.pytrees import checked_path
from jmp_train.tools import documents as doc
from jmp_train.tools.checking_parity.log_probs import EDGES, Differences, TokenDifference
from jmp_train.tools.diagnosing import file_and_line

_SHOWN = 3  # worst tokens in the text
_EXPLAINED = 0.25  # of the mean: if operations run one by one differ by less, the compiler causes the rest
_DIFFERENCES = doc.log_axis([1e-8, 1.0], "{:.0e}".format)  # the chart draws others at its edge

_HEADS = (
    "#", "operation", "module", "code", "result", "runs", "off from training", "off from float32",
    "rows that training has not", "part of the difference",
)  # fmt: skip
_FOOTER = (
    "In the order in which they run. Differences are means over the rows of a result, relative to a row's norm. Rows "
    "that training has not are no fault by themselves: what it computes in other shapes, or masks later, has some. The "
    "part of the difference is what goes away once an operation, after those before it, has training's values. "
    "Operations of the same code are tried together, until hardly any difference is left."
)
Kind = Literal["value", "rounding"]


@dataclasses.dataclass(frozen=True)
class OperationParity:
    """An operation of one function, compared with the other function.

    Attributes:
      primitive: the name of its jax primitive.
      path: the path of its modules and scopes.
      file: the file of the user's line, or of the library that the user called.
      line: the number of that line; 0 if unknown.
      dtype: the dtype of its result.
      shape: the shape of its result.
      runs: the number of times that it ran.
      unknown: the fraction of its result's rows that the other function has nowhere, even in float32.
      difference: the mean difference of its rows from the same rows of the other function, relative to a row's norm;
        NaN if no row is known.
      error: the mean difference of its rows from those in float32, likewise.
      contribution: the fraction of the log-probabilities' difference that disappears when this operation, after those
        before it, gets the values of the other function. NaN if not tried, for example if only the rounding differs.

    Example:
      >>> import jax.numpy as jnp, jmp_train as jt
      >>> rows = jt.parity(lambda x: x * 2, lambda x: x + x, -jnp.ones((2, 3))).operations
      >>> [(row.primitive, row.shape, row.difference) for row in (*rows.train, *rows.infer)]
      [('mul', (2, 3), 0.0), ('add', (2, 3), 0.0)]
    """

    primitive: str
    path: str
    file: str
    line: int
    dtype: str
    shape: tuple[int, ...]
    runs: int
    unknown: float
    difference: float
    error: float
    contribution: float = float("nan")

    @property
    def code(self) -> str:
        """The source line, if its file can be read."""
        return linecache.getline(self.file, self.line).strip() if self.line else ""


@dataclasses.dataclass(frozen=True)
class FirstDifference:
    """The operations where two functions diverge.

    Attributes:
      kind: "value" if they differ even when both run in float32, "rounding" if they then agree.
      train: the first operation of training with results that inference lacks; None if there is none.
      infer: the first operation of inference with results that training lacks; None if there is none.

    Example:
      >>> import jax.numpy as jnp, jmp_train as jt
      >>> first = jt.parity(lambda x: x * 2, lambda x: (x + 0.1) * 2, -jnp.ones((2, 3))).first_difference
      >>> first.kind, first.train.primitive, first.infer.primitive
      ('value', 'mul', 'add')
    """

    kind: Kind
    train: OperationParity | None
    infer: OperationParity | None


@dataclasses.dataclass(frozen=True)
class Operations:
    """The operations of both functions.

    Attributes:
      train: the operations of training, in the order in which they run.
      infer: the operations of inference, likewise.
      first: the first operations that differ; None if none differs.
      mean: the mean of |log p_train - log p_infer| if operations run one by one; NaN if it is not finite.
    """

    train: tuple[OperationParity, ...]
    infer: tuple[OperationParity, ...]
    first: FirstDifference | None
    mean: float


@dataclasses.dataclass(frozen=True)
class ParityReport(Differences):
    """A comparison of the log-probabilities of training and inference, and the operations where they diverge.

    Attributes:
      operations: the operations of both functions, run one by one; None if `parity` did not compare them.

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
        """The first operations that differ; None if none differs, or if `parity` did not compare operations."""
        return self.operations.first if self.operations else None

    def as_dict(self) -> dict[str, Any]:
        """Returns the report as a dictionary of JSON values; numbers that are not finite are None."""
        bands = [{"low": low, "high": high, "share": share} for (low, high), share in self.bands.items()]
        quantiles = [{"share": share, "difference": x} for share, x in self.quantiles.items()]
        return doc.as_json(dataclasses.asdict(self) | {"bands": bands, "quantiles": quantiles})

    def to_json(self) -> str:
        """Returns the report as JSON; numbers that are not finite are null."""
        return json.dumps(self.as_dict(), allow_nan=False)

    def to_html(self, title: str = "Parity") -> str:
        """Returns an HTML page that needs no network, with the distribution, the operations and the worst tokens.

        Args:
          title: the title of the page, such as the names of the functions.
        """
        worst = [(*_token(token), f"{token.train - token.infer:.2g}") for token in self.worst]
        rows = [_row(*item) for item in enumerate(self.operations.infer if self.operations else (), 1)]
        return doc.page(
            title,
            [
                doc.Code(str(self), "summary"),
                *self._charts,
                doc.Section("The worst tokens", [doc.Table(("token", "train", "infer", "difference"), worst, "worst")]),
                doc.Section(
                    "Operations of inference", [doc.Table(_HEADS, rows, "operations-of-inference", texts=range(5))]
                ),
            ],
            [_FOOTER] if self.operations else [],
        )

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Writes an SVG picture of the distribution of the differences and of the operations' differences.

        Args:
          path: the path of the file, which is overwritten.
        """
        checked_path("path", path).write_text(doc.svg_file(self._charts), encoding="utf-8")

    @property
    def _charts(self) -> list[doc.Chart]:
        return [distribution_chart(self), *([operations_chart(self.operations)] if self.operations else [])]

    def __str__(self) -> str:
        shares = [f"from {low:g} to {high:g} for {share:.2%}" for (low, high), share in self.bands.items()]
        shares[0] += " of the tokens"
        numbers = f"median {self.median:.2g}, 99% up to {self.quantiles[0.99]:.2g}, maximum {self.maximum:.2g}"
        tokens = doc.counted(self.n_tokens, "token")
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
        lines += ["worst: {} train {}, infer {}".format(*_token(token)) for token in self.worst[:_SHOWN]]
        return doc.text([*map(doc.Text, lines), *self._operation_blocks()])

    def _operation_blocks(self) -> list[doc.Element]:
        if self.operations is None:
            return []
        compiler = ""
        if self.mean > 1e-6 and self.operations.mean < _EXPLAINED * self.mean:
            compiler = (
                f"the operations run one by one differ by {self.operations.mean:.2g} on average: the rest is the "
                "compiler's, which fuses, reorders sums and leaves out roundings"
            )
        first = self.operations.first
        if first is None:
            return [doc.Text("no operation differs beyond float32's rounding" + (f"; {compiler}" if compiler else ""))]
        kinds = {"value": "other values, even in float32", "rounding": "rounding, while float32 agrees"}
        sides = [_operation("train", first.train), _operation("infer", first.infer)]
        return [doc.Section(f"first difference: {kinds[first.kind]}", sides), doc.Text(compiler)]


def distribution_chart(differences: Differences) -> doc.Chart:
    """Returns a bar chart of |log p_train - log p_infer|, with bars half a power of ten wide."""
    counts = differences.histogram
    edges = ["0", *(f"{edge:.1e}" for edge in EDGES), "more"]
    marks: list[doc.Mark] = []
    for i, count in enumerate(counts):
        if count:
            said = f"{edges[i]} to {edges[i + 1]}: {count}"
            marks.append(doc.Box(doc.Style("first"), i + 0.02, i + 0.98, 0, count, said))
            marks.append(doc.Label(str(count), i + 0.5, count, "middle", (0, -4)))
    ticks = [(i + 1, f"{edge:.0e}") for i, edge in enumerate(EDGES) if i % 2 == 0]
    x, y = doc.Axis(0, len(counts), ticks, has_grid=False), doc.Axis(0, max(*counts, 1), [(0, "")])
    title = f"|log p_train - log p_infer| of {doc.counted(differences.n_tokens, 'token')}"
    return doc.Chart(title, x, y, marks, (1000, 232), (60, 10, 14, 35))


def operations_chart(operations: Operations) -> doc.Chart:
    """Returns a chart of the differences of the operations of inference from those of training and from float32."""
    rows = operations.infer
    marks: list[doc.Mark] = [
        doc.dashes(doc.Style("second", "off from float32"), [row.error for row in rows]),
        doc.dashes(doc.Style("first", "off from those of training"), [row.difference for row in rows]),
    ]
    first = operations.first and operations.first.infer
    if first:
        place = rows.index(first) + 0.5
        anchor = "end" if place > len(rows) / 2 else "start"
        marks.append(
            doc.Polyline(doc.Style("bad", width=1.5), [[(place, _DIFFERENCES.low), (place, _DIFFERENCES.high)]])
        )
        marks.append(doc.Label(f"first difference: {first.primitive}", place, _DIFFERENCES.low, anchor, (0, 16)))
    title = "How far the operations of inference are from those of training"
    return doc.Chart(title, doc.Axis(0, max(len(rows), 1)), _DIFFERENCES, marks, (1000, 232), (60, 10, 12, 35))


def _token(token: TokenDifference) -> tuple[str, str, str]:
    place = f"{token.path}[{', '.join(map(str, token.index))}]"
    return place, f"{token.train:.6g}", f"{token.infer:.6g}"


def _operation(name: str, operation: OperationParity | None) -> doc.Section | None:
    if operation is None:
        return None
    shape = ",".join(map(str, operation.shape))
    path = f" ({operation.path.strip('/')})" if operation.path else ""
    where = file_and_line(operation.file, operation.line)
    head = f"{name}: {operation.primitive} {operation.dtype}[{shape}], {where}{path}"
    other = "infer" if name == "train" else "train"
    if operation.unknown:
        evidence = f"{operation.unknown:.0%} of its rows are not among those of {other}"
    else:
        evidence = f"off by {operation.difference:.2g} from {other}, by {operation.error:.2g} from float32"
    if not math.isnan(operation.contribution):
        if not operation.unknown and not operation.difference:
            evidence = f"its rows are those of {other}, at other places or for other tokens"
        evidence += f"; with the values of {other}, {operation.contribution:.0%} of the difference goes away"
    return doc.Section(head, [doc.Code(operation.code), doc.Text(evidence)])


def _row(number: int, row: OperationParity) -> tuple[str, ...]:
    result = f"{row.dtype}[{','.join(map(str, row.shape))}]"
    differences = [f"{x:.2g}" if x else "" for x in (row.difference, row.error)]
    unknown = f"{row.unknown:.0%}" if row.unknown else ""
    part = "" if math.isnan(row.contribution) else f"{row.contribution:.0%}"
    where = file_and_line(row.file, row.line)
    return str(number), row.primitive, row.path, where, result, str(row.runs), *differences, unknown, part
