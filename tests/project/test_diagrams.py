"""The diagrams of the pages on how it works: as their scripts draw them, and of the programs as they are."""

import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from process_helpers import run_python

pytestmark = [pytest.mark.full, pytest.mark.timeout(200)]

DOCS = Path(__file__).parents[2] / "docs"
DRAW = """
import sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
import draw
draw.IMAGES = Path(sys.argv[2])
draw.main()
"""


@pytest.fixture(name="drawn", scope="module")
def fixture_drawn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the diagrams, drawn anew."""
    folder = tmp_path_factory.mktemp("diagrams")
    run_python("-c", DRAW, DOCS / "diagrams", folder, timeout=150)
    return folder


@pytest.mark.parametrize("page", ["step", "autocast", "skips", "sums", "checkpoints"])
def test_a_diagram_is_as_it_is_drawn_and_its_page_shows_it(page: str, drawn: Path) -> None:
    """Drawn anew by `python docs/diagrams/draw.py`."""
    kept = (DOCS / "images" / f"how_{page}.svg").read_text()
    assert kept == (drawn / f"how_{page}.svg").read_text()
    assert f"](../images/how_{page}.svg)" in (DOCS / "how_it_works" / f"{page}.md").read_text()
    picture = ET.fromstring(kept)
    assert len(picture.attrib["aria-label"]) > 40
    assert "{http://www.w3.org/2000/svg}text" in {part.tag for part in picture.iter()}


def test_the_autocast_diagram_shows_what_runs(drawn: Path) -> None:
    lines = [text.text for text in ET.parse(drawn / "how_autocast.svg").iter("{http://www.w3.org/2000/svg}text")]
    assert "c:f32 = dot_general a b" in lines
    assert "c:f16 = dot_general f16(a) f16(b)" in lines
    assert "i:f32 = exp h" in lines
