"""Imports run downwards only, private jax is not used, and importing is light."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
STANDARD = sys.stdlib_module_names
ALLOWED = {
    "policies": {"jax", "optax", "numpy", "jmp_train.policies"},
    "graphs": {
        "jax",
        "optax",
        "numpy",
        "scipy",
        "jraph",
        "flax",
        "jmp_train.policies",
        "jmp_train.graphs",
    },
}
HEAVY = (
    "orbax",
    "tensorstore",
    "matplotlib",
    "grain",
    "rich",
    "sklearn",
    "networkx",
    "pandas",
    "safetensors",
)


def modules(folder: str) -> list[Path]:
    found = [p for p in (ROOT / folder).rglob("*.py") if not _through_link(p, ROOT / folder)]
    assert found
    return found


def _through_link(path: Path, top: Path) -> bool:
    return any(parent.is_symlink() for parent in path.parents if top in parent.parents)


def imports(path: Path) -> list[str]:
    """Returns the full names of the modules that a file imports."""
    names = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} has a relative import"
            names.append(node.module or "")
    return names


@pytest.mark.parametrize("floor", ALLOWED)
def test_lower_floors_import_downwards_only(floor: str) -> None:
    for path in modules(floor):
        for name in imports(path):
            parts = name.split(".")
            top = ".".join(parts[:2]) if parts[0] == "jmp_train" else parts[0]
            assert top in STANDARD or top in ALLOWED[floor], f"{path} imports {name}"


@pytest.mark.parametrize("folder", ["policies", "graphs", "jmp_train", "benchmarks", "examples"])
def test_private_jax_is_not_used(folder: str) -> None:
    for path in modules(folder):
        assert not [name for name in imports(path) if "_src" in name.split(".")], path


def test_modules_import_from_where_a_name_is_defined() -> None:
    facades = {"jmp_train", "jmp_train.policies", "jmp_train.graphs"}
    for folder in ("policies", "graphs", "jmp_train"):
        for path in modules(folder):
            if path.name != "__init__.py" and path.name != "cli.py":  # which asks for __version__
                assert not facades & set(imports(path)), path


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
    result = subprocess.run(
        (sys.executable, "-c", code), capture_output=True, text=True, check=False, timeout=100
    )
    assert result.stdout == "[]\n[]\n3\n", result.stderr
