"""A missing package of the extra says how to install it, in the library as on the command line."""

import ast
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import jmp_train as jt
from jmp_train import graphs
from jmp_train.app.reports.display import LiveDisplay, console_on
from jmp_train.app.runs.run_log import RunLog
from jmp_train.app.tasks import digits
from jmp_train.data.array_loading import array_batches
from jmp_train.data.graph_batching import neighbor_batches

pytestmark = pytest.mark.quick

ROOT = Path(jt.__file__).parents[1]
MODULES = {"scikit-learn": "sklearn"}


def graph_batches(folder: Path) -> Any:
    edges, seeds = graphs.host_edges([0, 1], [1, 0], 2), np.arange(2)
    sampler = graphs.neighbor_sampler(edges, (2,), seeds, batch_size=1)
    return neighbor_batches(sampler, seeds, lambda batch: batch)


CALLS: dict[str, list[Callable[[Path], Any]]] = {
    "grain": [lambda folder: array_batches({"x": np.ones(4)}, 2), graph_batches],
    "rich": [lambda folder: console_on(sys.stdout), lambda folder: LiveDisplay(sys.stdout, ["a"])],
    "sklearn": [lambda folder: digits.task(digits.Options())],
    "tensorboardX": [lambda folder: RunLog(folder / "log")],
}


@pytest.mark.parametrize("package", CALLS)
def test_a_missing_package_is_named_with_its_remedy(
    package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    text = rf"^this needs the package {package}: pip install 'jmp_train\[train\]'$"
    for call in CALLS[package]:
        with pytest.raises(ModuleNotFoundError, match=text) as error:
            call(tmp_path)
        assert error.value.name is not None
        assert error.value.name.partition(".")[0] == package


def test_each_import_of_an_extra_has_the_remedy() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extra = project["optional-dependencies"]["train"]
    names = {line.partition(">")[0] for line in extra}
    modules = {str(MODULES.get(name, name)) for name in names}
    assert set(CALLS) <= modules
    bare = [
        f"{path.relative_to(ROOT)}:{line}"
        for layer in ("jmp_train", "policies", "graphs")
        for path in sorted((ROOT / layer).rglob("*.py"))
        if any(module in (text := path.read_text()) for module in modules)
        for name, line in bare_imports(ast.parse(text))
        if name.partition(".")[0] in modules
    ]
    assert bare == []


def bare_imports(node: ast.AST) -> Iterator[tuple[str, int]]:
    """Yields the imports that run and are in no `with extra_packages()`."""
    match node:
        case ast.With(items=[ast.withitem(ast.Call(ast.Name("extra_packages")))]):
            return
        case ast.If(ast.Name("TYPE_CHECKING") | ast.Attribute(attr="TYPE_CHECKING")):
            return
        case ast.Import():
            yield from ((one.name, node.lineno) for one in node.names)
        case ast.ImportFrom():
            yield node.module or "", node.lineno
    for child in ast.iter_child_nodes(node):
        yield from bare_imports(child)
