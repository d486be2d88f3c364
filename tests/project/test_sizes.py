"""Files and functions are short, in lines of code without docstrings and comments; a name names one class."""

import ast
import functools
from pathlib import Path

import pytest

pytestmark = pytest.mark.quick

ROOT = Path(__file__).parents[2]
LONGEST_FILE = 300
LONGEST_FUNCTION = 60
LONGER = {"graphs/kernels/dot_product.py:_backward"}


@functools.cache
def trees() -> dict[Path, ast.Module]:
    """Returns the tree of each file of the library and the application."""
    paths = [path for folder in ("policies", "graphs", "jmp_train") for path in (ROOT / folder).rglob("*.py")]
    return {p: ast.parse(p.read_text()) for p in paths if not any(parent.is_symlink() for parent in p.parents)}


def code_lines(path: Path, tree: ast.Module) -> set[int]:
    lines = (line.strip() for line in path.read_text().splitlines())
    found = {number for number, line in enumerate(lines, 1) if line and not line.startswith("#")}
    for node in ast.walk(tree):
        match node:
            case ast.Module(body=body) | ast.ClassDef(body=body) | ast.FunctionDef(body=body):
                match body:
                    case [ast.Expr(value=ast.Constant(value=str())) as docstring, *_]:
                        found -= lines_of(docstring)
    return found


def lines_of(node: ast.stmt) -> set[int]:
    return set(range(node.lineno, (node.end_lineno or 0) + 1))


def test_files_and_functions_are_short() -> None:
    files, functions = {}, set[str]()
    for path, tree in trees().items():
        lines, name = code_lines(path, tree), path.relative_to(ROOT).as_posix()
        files[name] = len(lines)
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and len(lines & lines_of(node)) > LONGEST_FUNCTION:
                functions.add(f"{name}:{node.name}")
    assert {name: count for name, count in files.items() if count > LONGEST_FILE} == {}
    assert functions <= LONGER


def test_no_two_classes_have_the_same_name() -> None:
    """Except for those that begin with `_`."""
    found: dict[str, Path] = {}
    for path, tree in trees().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                assert found.setdefault(node.name, path) == path, node.name
