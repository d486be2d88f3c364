"""How devices agree to skip a step that overflows on one of them."""

from parts import arrow, box, diagram, key

LEFTS = (20, 260, 500)
WIDE = 200
SCALED = (
    ["gradients, scaled", "512, 96, 8"],
    ["gradients, scaled", "inf, 80, 8"],
    ["gradients, scaled", "640, 112, 8"],
)


def draw() -> str:
    """Returns the picture."""
    alt = (
        "Of three devices one has a gradient that is infinite. The mean spreads it to all, the minimum of the verdicts "
        "makes one verdict, and all three keep their old state."
    )
    return diagram(720, 560, alt, _parts())


def _parts() -> list[str]:
    def row(y: float, lines: list[str], kind: str) -> list[str]:
        return [box(left, y, WIDE, lines, kind) for left in LEFTS]

    def arrows(start: float, end: float) -> list[str]:
        return [arrow((left + WIDE / 2, start), (left + WIDE / 2, end)) for left in LEFTS]

    heads = ["device 0", "device 1", "device 2"]
    own = [[head, *lines] for head, lines in zip(heads, SCALED, strict=True)]
    kinds = ("float32", "bad", "float32")
    return [
        key(20, 4, [("float32", "float32, finite"), ("bad", "overflow"), ("good", "decided alike")]),
        *(box(left, 30, WIDE, lines, kind) for left, lines, kind in zip(LEFTS, own, kinds, strict=True)),
        *arrows(101, 124),
        box(20, 124, 680, ["mean over the data axes", "in reduce_dtype: inf and NaN reach every device"]),
        *arrows(176, 200),
        *row(200, ["÷ scale, in float32", "inf, 96 / scale, 8 / scale"], "bad"),
        *arrows(252, 276),
        *row(276, ["all finite?", "no"], "bad"),
        *arrows(328, 352),
        box(
            20, 352, 680, ["minimum over all axes of the step", "one verdict, also where each device has only a shard"]
        ),
        *arrows(404, 428),
        *row(428, ["select", "old params, old optimizer", "and model state", "the scale falls"], "good"),
    ]
