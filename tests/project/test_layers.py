"""Imports run downwards only and are light, private jax is not used; files and functions are short, names are clear."""

import ast
import functools
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from process_helpers import run_python

pytestmark = pytest.mark.quick

ROOT = Path(__file__).parents[2]
STANDARD = sys.stdlib_module_names
ALLOWED = {
    "policies": {"jax", "optax", "numpy", "jmp_train.policies"},
    "graphs": {"jax", "optax", "numpy", "scipy", "jraph", "flax", "jmp_train.policies", "jmp_train.graphs"},
}
HEAVY = (
    "orbax", "tensorstore", "matplotlib", "grain", "rich", "sklearn", "networkx", "pandas", "safetensors", "jinja2",
)  # fmt: skip


LONGEST_FILE = 300  # lines of code: without docstrings, comments and blank lines
LONGEST_FUNCTION = 60
Definition = ast.Module | ast.ClassDef | ast.FunctionDef


def modules(folder: str) -> list[Path]:
    found = [p for p in (ROOT / folder).rglob("*.py") if not _through_link(p, ROOT / folder)]
    assert found
    return found


def _through_link(path: Path, top: Path) -> bool:
    return any(parent.is_symlink() for parent in path.parents if top in parent.parents)


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@functools.cache
def imports_in(path: Path) -> list[ast.Import | ast.ImportFrom]:
    """Returns the imports of a file, at its top or within functions."""
    nodes = ast.walk(tree_of(path))
    return [node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)]


def imports(path: Path) -> list[str]:
    """Returns the full names of the modules that a file imports."""
    names = []
    for node in imports_in(path):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        else:
            assert node.level == 0 or "examples" in path.parts, f"{path} has a relative import"
            names.append(node.module or "")
    return names


LAYERS = {"jmp_train": "jmp_train", "jmp_train.policies": "policies", "jmp_train.graphs": "graphs"}
COMMANDS = ("jmp_train.__main__",)  # `python -m` runs it, nothing imports it
APPLICATION = "jmp_train.app"


def _sources() -> dict[str, Path]:
    """Returns the file of each module of the library and the application."""
    found = {}
    for layer, folder in LAYERS.items():
        for path in modules(folder):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            found[".".join((layer, *(part for part in parts if part != "__init__")))] = path
    return found


SOURCES = _sources()
INTERFACES = {module: path for module, path in SOURCES.items() if path.name == "__init__.py"}


@functools.cache
def imported_modules(path: Path) -> set[str]:
    """Returns the modules of this project that a file imports, at its top or within functions."""
    found = set()
    for node in imports_in(path):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names} & SOURCES.keys()
        else:
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                passes = path != INTERFACES.get(node.module or "") and alias.name in passed_on(node.module)
                is_module = full in SOURCES and not passes
                found |= {full if is_module else node.module or ""} & SOURCES.keys()
    return found


@functools.cache
def passed_on(interface: str | None) -> set[str]:
    """Returns the names that users of a folder may import from its interface, modules among them."""
    if interface is None or interface not in INTERFACES:
        return set()
    return {alias.asname for node in imports_in(INTERFACES[interface]) for alias in node.names if alias.asname}


@pytest.mark.parametrize("layer", ALLOWED)
def test_lower_layers_import_downwards_only(layer: str) -> None:
    for path in modules(layer):
        for name in imports(path):
            parts = name.split(".")
            top = ".".join(parts[:2]) if parts[0] == "jmp_train" else parts[0]
            assert top in STANDARD or top in ALLOWED[layer], f"{path} imports {name}"


@pytest.mark.quick_cases(4)
@pytest.mark.parametrize("folder", ["policies", "graphs", "jmp_train", "benchmarks", "examples"])
def test_private_jax_is_not_used(folder: str) -> None:
    for path in modules(folder):
        assert not [name for name in imports(path) if "_src" in name.split(".")], path


def test_one_folder_knows_what_jax_calls_the_parameters_of_loops_and_branches() -> None:
    words = re.compile(r"\"(num_carry|(cond|body)_(nconsts|jaxpr)|branches(_platforms)?|ft_in|_split_transpose)\"")
    named = {path for folder in LAYERS.values() for path in modules(folder) if words.search(path.read_text())}
    assert {path.parent for path in named} == {ROOT / "policies" / "programs"}


def test_no_module_imports_from_inside_another_folder() -> None:
    """Its own folder's modules, those directly in a folder around it, and interfaces: nothing else."""
    for module, path in SOURCES.items():
        own = module if path.name == "__init__.py" else module.rpartition(".")[0]
        for name in imported_modules(path):
            if name in INTERFACES:
                around = f"{own}.".startswith(f"{name}.") and name != own
                assert not around or name == "jmp_train", f"{path}: {name} imports this module"
            else:
                folder = name.rpartition(".")[0]
                interface_of_layer = path.name == "__init__.py" and module in {*LAYERS, "jmp_train.tools"}
                inside = not f"{own}.".startswith(f"{folder}.")
                assert not inside or interface_of_layer, f"{path} imports {name} and not {folder}"


@pytest.mark.parametrize("folder", ["examples", "docs", "benchmarks"])
def test_who_uses_the_library_imports_interfaces(folder: str) -> None:
    for path in (ROOT / folder).rglob("*.py"):
        assert not imported_modules(path) - INTERFACES.keys(), path


def test_interfaces_only_pass_names_on() -> None:
    for module, path in INTERFACES.items():
        tree = tree_of(path)
        kinds = (ast.Expr, ast.Import, ast.ImportFrom)
        if module != "jmp_train":  # which has its version, and loads some folders when they are asked for
            rest = [node for node in tree.body if not isinstance(node, kinds)]
            assert all(ast.unparse(node).startswith("__all__ = ") for node in rest), path


@pytest.mark.parametrize("layer", ["jmp_train.policies", "jmp_train.graphs"])
def test_a_name_for_users_is_in_the_interface_of_the_layer_alone(layer: str) -> None:
    """Unless another folder of the layer imports it."""
    offered = passed_on(layer)
    folders = {name for name in INTERFACES if name.rpartition(".")[0] == layer}
    within = {path for module, path in SOURCES.items() if module.startswith(f"{layer}.")}
    for folder in folders:
        used = {
            alias.name
            for path in within
            for node in imports_in(path)
            if isinstance(node, ast.ImportFrom) and node.module == folder
            for alias in node.names
        }
        assert offered & passed_on(folder) <= used, folder


def test_no_name_of_an_interface_hides_a_module() -> None:
    for module, path in INTERFACES.items():
        if module == "jmp_train":
            continue
        for node in imports_in(path):
            if isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    full = f"{module}.{alias.asname or alias.name}"
                    assert full not in SOURCES or f"{node.module}.{alias.name}" == full, full


def test_the_library_does_not_import_the_application() -> None:
    for module, path in SOURCES.items():
        if module.startswith(APPLICATION) or module in COMMANDS:
            continue
        found = [name for name in imported_modules(path) if name.startswith(APPLICATION)]
        assert not found, path


def test_no_modules_import_each_other_in_a_circle() -> None:
    """Imports within functions count too."""
    uses = {module: imported_modules(path) for module, path in SOURCES.items()}
    done: set[str] = set()

    def visit(module: str, way: tuple[str, ...]) -> None:
        assert module not in way, " -> ".join((*way, module))
        if module not in done:
            for used in uses[module]:
                visit(used, (*way, module))
            done.add(module)

    for module in uses:
        visit(module, ())


@functools.cache
def definitions() -> dict[Path, list[Definition]]:
    """Returns the module, classes and functions in each file of the library and the application."""
    return {path: list(_definitions(tree_of(path))) for path in SOURCES.values()}


def _definitions(node: ast.AST) -> Iterator[Definition]:
    if isinstance(node, Definition):
        yield node
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt):
            yield from _definitions(child)


def code_lines(path: Path, found: list[Definition]) -> set[int]:
    lines = (line.strip() for line in path.read_text().splitlines())
    docstrings = [node.body[0] for node in found if ast.get_docstring(node, clean=False) is not None]
    code = {number for number, line in enumerate(lines, 1) if line and not line.startswith("#")}
    return code.difference(*map(lines_of, docstrings))


def lines_of(node: ast.stmt) -> set[int]:
    return set(range(node.lineno, (node.end_lineno or 0) + 1))


def test_files_and_functions_are_short() -> None:
    files, functions = {}, set[str]()
    for path, found in definitions().items():
        lines, name = code_lines(path, found), path.relative_to(ROOT).as_posix()
        files[name] = len(lines)
        for node in found:
            if isinstance(node, ast.FunctionDef) and len(lines & lines_of(node)) > LONGEST_FUNCTION:
                functions.add(f"{name}:{node.name}")
    assert {name: count for name, count in files.items() if count > LONGEST_FILE} == {}
    assert functions == set()


def test_no_two_classes_have_the_same_name() -> None:
    """Except for those that begin with `_`."""
    where: dict[str, Path] = {}
    for path, found in definitions().items():
        for node in found:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                assert where.setdefault(node.name, path) == path, node.name


@pytest.mark.full
def test_importing_is_light_and_starts_no_backend() -> None:
    code = f"""
import sys, jax, flax, optax, jraph
already = set(sys.modules)  # flax itself loads rich
import jmp_train
from jax.extend import backend
print([name for name in {HEAVY!r} if name in sys.modules and name not in already])
import jax
print([name for name in ("flax.nnx", "jmp_train.graphs") if name in sys.modules])
assert jmp_train.graphs.GATConv
scale = jmp_train.torch_loss_scale()
jax.config.update("jax_num_cpu_devices", 3)  # refused once a backend runs
print(jax.device_count())
"""
    assert run_python("-c", code, timeout=100) == "[]\n[]\n3\n"
