"""The wheel holds the tree, all of it and nothing else, and works where users have names like ours."""

import re
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import dist
import jax
import pytest
from process_helpers import run_python

import jmp_train as jt

pytestmark = pytest.mark.full


@pytest.fixture(scope="module", name="built")
def fixture_built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Returns the wheel and the sdist that it is made of."""
    return dist.build(tmp_path_factory.mktemp("dist"), "--no-isolation")


@pytest.mark.timeout(300)
def test_wheel_and_sdist_have_what_they_need_and_are_used_on_their_own(built: tuple[Path, Path]) -> None:
    wheel, sdist = built
    dist.check_contents(wheel, sdist)
    names = dist.wheel_names(wheel)
    assert "jmp_train/policies/dtype_policies/policy.py" in names
    (metadata,) = [name for name in zipfile.ZipFile(wheel).namelist() if name.endswith("METADATA")]
    assert f"\nVersion: {jt.__version__}\n" in zipfile.ZipFile(wheel).read(metadata).decode()
    strict = (sys.executable, "-m", "twine", "check", "--strict", wheel, sdist)
    subprocess.run(strict, check=True, timeout=60)
    packages = Path(sysconfig.get_path("purelib"))  # what it depends on; nothing there leads to the checkout
    shown = dist.use(wheel, sys.executable, "--no-deps", "--no-index", packages=packages)
    assert re.fullmatch(rf"Python {sys.version.split()[0]} jax {jax.__version__} loss [\d.e-]+", shown)


@pytest.mark.timeout(300)
def test_a_wheel_made_of_the_tree_is_that_made_of_the_sdist(built: tuple[Path, Path], tmp_path: Path) -> None:
    dist.copy_tree(tmp_path / "source")
    command = (sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", tmp_path)
    subprocess.run(command, cwd=tmp_path / "source", check=True, capture_output=True, timeout=200)
    (wheel,) = tmp_path.glob("*.whl")
    assert dist.wheel_names(wheel) == dist.wheel_names(built[0])


def test_what_is_missing_or_too_much_is_named(built: tuple[Path, Path], tmp_path: Path) -> None:
    wheel, sdist = built
    other = tmp_path / wheel.name
    with zipfile.ZipFile(wheel) as old, zipfile.ZipFile(other, "w") as new:
        for name in old.namelist():
            if name != "jmp_train/graphs/kernels/native_kernels.cc":
                new.writestr(name, old.read(name))
        new.writestr("tests/dist.py", "")
    with pytest.raises(
        dist.DistError, match=r"lacks \['jmp_train/graphs/.*\.cc'\], should not have \['tests/dist.py'\]"
    ):
        dist.check_contents(other, sdist)
    short = tmp_path / sdist.name
    with tarfile.open(sdist) as old, tarfile.open(short, "w:gz") as new:
        for member in old.getmembers():
            if not member.name.endswith("/CHANGELOG.md"):
                new.addfile(member, old.extractfile(member) if member.isfile() else None)
    with pytest.raises(dist.DistError, match=r"\.tar\.gz lacks \['CHANGELOG.md'\]"):
        dist.check_contents(wheel, short)


@pytest.mark.timeout(300)
def test_every_module_imports_from_the_wheel_beside_namesakes(built: tuple[Path, Path], tmp_path: Path) -> None:
    wheel, _ = built
    target, elsewhere = tmp_path / "target", tmp_path / "elsewhere"
    install = (sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index")
    subprocess.run((*install, "--target", target, wheel), check=True, timeout=200)
    (elsewhere / "policies").mkdir(parents=True)
    (elsewhere / "policies" / "__init__.py").write_text("mine = True\n")
    (elsewhere / "graphs.py").write_text("mine = True\n")
    modules = sorted(
        name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        for name in dist.wheel_names(wheel)
        if name.endswith(".py")
    )
    assert "jmp_train.policies.dtype_policies.policy" in modules
    code = f"""
import importlib, graphs, policies
for name in {modules!r}:
    module = importlib.import_module(name)
    assert module.__file__.startswith({str(target)!r}), module.__file__
assert graphs.mine and policies.mine
print("imported", {len(modules)})
"""
    shown = run_python("-c", code, cwd=elsewhere, timeout=200, PYTHONPATH=str(target))
    assert shown == f"imported {len(modules)}\n"
