"""The charts of a comparison: the distribution of the differences, and the difference of each operation."""

from jmp_train.policies.comparing.log_probs import EDGES, Differences
from jmp_train.policies.comparing.parted import Operations
from jmp_train.policies.documents import Axis, Box, Chart, Label, Mark, Path, Style

# The chart draws differences beyond these limits at its edge.
_DIFFERENCES = Axis(1e-8, 1.0, [(10.0**e, f"{10.0**e:.0e}") for e in range(-8, 1, 2)], is_log=True)


def distribution_chart(differences: Differences) -> Chart:
    """Returns a bar chart of |log p_train - log p_infer|, with bars half a power of ten wide."""
    counts = differences.histogram
    edges = ["0", *(f"{edge:.1e}" for edge in EDGES), "more"]
    marks: list[Mark] = []
    for i, count in enumerate(counts):
        if count:
            marks.append(Box("bar", i + 0.02, i + 0.98, 0, count, f"{edges[i]} to {edges[i + 1]}: {count}"))
            marks.append(Label(str(count), i + 0.5, count, "middle", (0, -4)))
    ticks = [(i + 1, f"{edge:.0e}") for i, edge in enumerate(EDGES) if i % 2 == 0]
    x, y = Axis(0, len(counts), ticks, has_grid=False), Axis(0, max(*counts, 1), [(0, "")])
    title = f"|log p_train - log p_infer| of {differences.n_tokens} tokens"
    label = "How many tokens differ by how much"
    return Chart("distribution", label, x, y, {"bar": Style("first")}, marks, title, (1000, 232), (60, 10, 14, 35))


def operations_chart(operations: Operations) -> Chart:
    """Returns a chart of the differences of the operations of inference from those of training and from float32."""
    rows = operations.infer
    dashes = {"error": [row.error for row in rows], "difference": [row.difference for row in rows]}
    marks: list[Mark] = [
        Path(name, [[(i, x), (i + 1, x)] for i, x in enumerate(values) if x > 0])  # drops NaN
        for name, values in dashes.items()
    ]
    first = operations.first and operations.first.infer
    if first:
        place = rows.index(first) + 0.5
        anchor = "end" if place > len(rows) / 2 else "start"
        marks.append(Path("first", [[(place, _DIFFERENCES.low), (place, _DIFFERENCES.high)]]))
        marks.append(Label(f"first difference: {first.primitive}", place, _DIFFERENCES.low, anchor, (0, 16)))
    styles = {
        "difference": Style("first", "operations of inference, off from those of training"),
        "error": Style("second", "off from float32"),
        "first": Style("bad", width=1.5),
    }
    label = "How far the operations of inference are from those of training"
    x = Axis(0, max(len(rows), 1))
    return Chart("operations", label, x, _DIFFERENCES, styles, marks, size=(1000, 232), margins=(60, 10, 12, 35))
