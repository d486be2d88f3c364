"""The wheel holds the tree, all of it and nothing else, and works where users have names like ours."""

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path, PurePosixPath

import pytest

pytestmark = pytest.mark.quick

ROOT = Path(__file__).parents[2]
FLOORS = {"jmp_train": "jmp_train", "policies": "jmp_train/policies", "graphs": "jmp_train/graphs"}


def tree_files() -> list[str]:
    """Returns the files of the tree that belong to the project, links included."""
    if (ROOT / ".git").exists():
        command = ("git", "ls-files", "--cached", "--others", "--exclude-standard")
        listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
        return [name for name in listed.stdout.splitlines() if os.path.lexists(ROOT / name)]
    files = (path.relative_to(ROOT) for path in ROOT.rglob("*") if path.is_file())
    return [str(p) for p in files if not any(part.startswith((".", "build")) for part in p.parts)]


def expected_in_wheel() -> set[str]:
    return {
        str(PurePosixPath(FLOORS[top], rest))
        for top, _, rest in (name.partition("/") for name in tree_files())
        if top in FLOORS and not (ROOT / top / rest).is_symlink()
    }


@pytest.fixture(scope="module", name="built")
def fixture_built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the folder with the sdist, the wheel made of it, and the wheel made of the tree."""
    source = tmp_path_factory.mktemp("source")
    for name in tree_files():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, source / name, follow_symlinks=False)
    out = tmp_path_factory.mktemp("dist")
    build = (sys.executable, "-m", "build", "--no-isolation", "--outdir")
    for arguments in ((out,), (out / "direct", "--wheel")):
        result = subprocess.run(
            (*build, *arguments),
            cwd=source,
            capture_output=True,
            text=True,
            check=False,
            timeout=200,
        )
        assert result.returncode == 0, result.stdout + result.stderr
    return out


def wheel_names(folder: Path) -> set[str]:
    (wheel,) = folder.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    return {name for name in names if ".dist-info/" not in name}


@pytest.mark.full
@pytest.mark.timeout(300)
def test_the_wheel_holds_the_tree(built: Path) -> None:
    expected = expected_in_wheel()
    assert {
        "jmp_train/py.typed",
        "jmp_train/policies/dtype_policies/policy.py",
        "jmp_train/cli/entry.py",
    } <= expected
    assert wheel_names(built) == expected
    assert wheel_names(built / "direct") == expected


@pytest.mark.timeout(300)
@pytest.mark.full
def test_the_sdist_holds_each_folder_once_and_no_links(built: Path) -> None:
    (archive,) = built.glob("*.tar.gz")
    with tarfile.open(archive) as sdist:
        members = sdist.getmembers()
    assert not [member.name for member in members if member.issym() or member.islnk()]
    names = {member.name.partition("/")[2] for member in members if member.isfile()}
    assert not [name for name in names if name.startswith(("jmp_train/policies", "jmp_train/graphs"))]
    wanted = {name for name in tree_files() if not (ROOT / name).is_symlink()}
    hidden = {name for name in wanted if name.startswith(".")}
    assert wanted - hidden - names == set()


@pytest.mark.timeout(300)
def test_every_module_imports_from_the_wheel_beside_namesakes(built: Path, tmp_path: Path) -> None:
    (wheel,) = built.glob("*.whl")
    target, elsewhere = tmp_path / "target", tmp_path / "elsewhere"
    install = (sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index")
    subprocess.run((*install, "--target", target, wheel), check=True, timeout=200)
    (elsewhere / "policies").mkdir(parents=True)
    (elsewhere / "policies" / "__init__.py").write_text("mine = True\n")
    (elsewhere / "graphs.py").write_text("mine = True\n")
    modules = sorted(
        name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        for name in wheel_names(built)
        if name.endswith(".py") and name != "jmp_train/diagnose.py"  # a command, which cannot be imported
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
    result = subprocess.run(
        (sys.executable, "-c", code),
        cwd=elsewhere,
        env={**os.environ, "PYTHONPATH": str(target)},
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    assert result.stdout == f"imported {len(modules)}\n", result.stderr
