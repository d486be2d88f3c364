"""The library, which scripts import, does not speak of the command line."""

import ast
import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.quick

ROOT = Path(__file__).parents[2]
APPLICATION = {"app"}
STARTS_IT = {"__main__.py", "command_start.py"}
OF_COMMANDS = {"task.py"}  # what commands take
# Options of pip, which install_compiler calls, and a variable of CSS.
OTHERS = {"--no-deps", "--target", "--quiet", "--disable-pip-version-check", "--color"}
COMMAND_LINE = re.compile(r"(?<![\w-])--(?!xla_)[a-z][a-z-]+|\bjmp-train [a-z]")


def library() -> list[Path]:
    found = [
        *(ROOT / "policies").rglob("*.py"),
        *(ROOT / "graphs").rglob("*.py"),
        *(ROOT / "jmp_train").glob("*.py"),
    ]
    for folder in (ROOT / "jmp_train").iterdir():
        if not folder.is_symlink() and folder.is_dir() and folder.name not in APPLICATION:
            found += folder.rglob("*.py")
    return [path for path in found if path.name not in STARTS_IT | OF_COMMANDS]


def command_line_words(source: str) -> list[str]:
    """Returns what the strings of a module, docstrings included, say of the command line."""
    texts = [
        node.value
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    return [word for text in texts for word in COMMAND_LINE.findall(text) if word not in OTHERS]


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("layer", ["policies", "graphs", "jmp_train"])
def test_the_library_does_not_speak_of_the_command_line(layer: str) -> None:
    paths = [path for path in library() if path.relative_to(ROOT).parts[0] == layer]
    assert paths
    found = {str(path): words for path in paths if (words := command_line_words(path.read_text()))}
    assert found == {}


def test_words_of_the_command_line_are_found() -> None:
    source = 'f"--data-dir {x} is needed"\ndef f():\n    "See `jmp-train launch`."\n"--xla_flag a--b"'
    assert command_line_words(source) == ["--data-dir", "jmp-train l"]
