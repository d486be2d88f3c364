"""A comparison as a page: words, charts, the worst tokens, operations."""

from jmp_train.policies import documents
from jmp_train.policies.comparing.charts import distribution_chart, operations_chart
from jmp_train.policies.comparing.differences import Differences, TokenDifference
from jmp_train.policies.comparing.operations import OperationParity, Operations
from jmp_train.policies.diagnosing import place_of
from jmp_train.policies.documents import Code, Section, Table

_HEADS = (
    "#", "operation", "module", "code", "result", "runs", "off from training", "off from float32",
    "rows that training has not",
)  # fmt: skip
_FOOTER = (
    "In the order in which they run. Differences are means over the rows of a result, relative to a row's norm. Rows "
    "that training has not are no fault by themselves: what it computes in other shapes, or masks later, has some."
)


def page(title: str, summary: str, differences: Differences, operations: Operations | None) -> str:
    """Returns the page.

    Args:
      title: what was compared.
      summary: in words.
      differences: of the tokens.
      operations: of both functions, if they are known.
    """
    worst = [_token(token) for token in differences.worst]
    rows = [_row(number, row) for number, row in enumerate(operations.infer, 1)] if operations else []
    return documents.page(
        title,
        [
            Code(summary, "summary"),
            distribution_chart(differences),
            operations_chart(operations) if operations else None,
            Section("The worst tokens", [Table(("token", "train", "infer", "difference"), worst, "worst")]),
            Section("Operations of inference", [Table(_HEADS, rows, "operations-of-inference", texts=range(5))]),
        ],
        [_FOOTER] if operations else [],
    )


def _token(token: TokenDifference) -> tuple[str, ...]:
    place = f"{token.path}[{', '.join(map(str, token.index))}]"
    return place, f"{token.train:.6g}", f"{token.infer:.6g}", f"{token.train - token.infer:.2g}"


def _row(number: int, row: OperationParity) -> tuple[str, ...]:
    result = f"{row.dtype}[{','.join(map(str, row.shape))}]"
    differences = [f"{x:.2g}" if x else "" for x in (row.difference, row.error)]
    unknown = f"{row.unknown:.0%}" if row.unknown else ""
    where = place_of(row.file, row.line)
    return str(number), row.primitive, row.path, where, result, str(row.runs), *differences, unknown
