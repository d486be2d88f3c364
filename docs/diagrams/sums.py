"""How the sum over a node's edges is made in blocks of blocks."""

import jax.numpy as jnp
import numpy as np
from parts import LINE, arrow, box, diagram, key, text

from jmp_train import graphs

DEGREE = 13161
BLOCK = 32


def draw() -> str:
    """Returns the picture; what the sums of ones come out as is computed."""
    alt = (
        f"The edges of a node are added in blocks of {BLOCK} in float32, the sums of blocks in "
        "blocks again; the last sum is rounded to float16 once."
    )
    return diagram(720, 470, alt, _parts())


def sums_of_ones() -> dict[str, float]:
    """Returns what as many ones as the largest degree of Reddit's graph add up to, by how they are added."""
    one_by_one = np.float16(0)
    for _ in range(DEGREE):
        one_by_one = one_by_one + np.float16(1)
    in_blocks = graphs.segment_sum(jnp.ones(DEGREE, jnp.float16), jnp.zeros(DEGREE, jnp.int32), 1)[0]
    return {"one by one, in float16": float(one_by_one), "in blocks, in float32, rounded once": float(in_blocks)}


def _parts() -> list[str]:
    lefts = (20, 195, 370)
    names = [f"e{BLOCK * i} … e{BLOCK * (i + 1) - 1}" for i in range(3)]
    blocks = [box(x, 60, 155, [name, "float16"], "half") for x, name in zip(lefts, names, strict=True)]
    sums = [box(x, 150, 155, [f"sum of {BLOCK}", "float32"], "float32") for x in lefts]
    ones = [f"{said}: {value:,.0f}" for said, value in sums_of_ones().items()]
    return [
        key(20, 4, [("half", "float16, as stored"), ("float32", "float32")]),
        text(20, 48, "messages on the edges of one node", "soft"),
        *blocks,
        text(545, 92, "…"),
        *(arrow((x + 77, 112), (x + 77, 150)) for x in lefts),
        *sums,
        text(545, 182, "…"),
        *(arrow((x + 77, 202), (x + 77, 226), (272, 226), (272, 250)) for x in lefts if x != 195),
        arrow((272, 202), (272, 250)),
        box(167, 250, 210, [f"sum of {BLOCK} sums", "float32; and so on"], "float32"),
        arrow((272, 302), (272, 330)),
        box(167, 330, 210, ["the node's sum", "rounded to float16, once"], "half"),
        text(20, 418, f"{DEGREE:,} ones, as many as Reddit's largest node has neighbors", "strong"),
        *(text(20, 418 + LINE * (i + 1), line) for i, line in enumerate(ones)),
    ]
