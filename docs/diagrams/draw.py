"""Draws the diagrams of the pages on how it works: `python docs/diagrams/draw.py` writes them to `docs/images`."""

from collections.abc import Callable
from pathlib import Path

import checkpoints
import edge_sums
import rewriting
import skips
import step
import sums

IMAGES = Path(__file__).parents[1] / "images"
DIAGRAMS: dict[str, Callable[[], str]] = {
    "how_step": step.draw,
    "how_autocast": rewriting.draw,
    "how_skips": skips.draw,
    "how_sums": sums.draw,
    "how_edge_sums": edge_sums.draw,
    "how_checkpoints": checkpoints.draw,
}


def main() -> None:
    """Writes all of them."""
    for name, draw in DIAGRAMS.items():
        (IMAGES / f"{name}.svg").write_text(draw())


if __name__ == "__main__":
    main()
