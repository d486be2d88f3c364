"""Builds the sdist and the wheel, looks at what is in them, and uses them as their users will: `make dist`.

    python tests/dist.py [--out dist] [--tag v0.2.0] [--pythons 3.11 3.13] [--allow-missing]

Both are built of a copy of the files that git knows, the wheel of the sdist. The wheel is installed by itself into a
new environment of each Python, the sdist into one of the first; there the README's code runs, from an empty folder.
"""

import argparse
import ast
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).resolve().parents[1]
LAYERS = {"jmp_train": "jmp_train", "policies": "jmp_train/policies", "graphs": "jmp_train/graphs"}
NEEDED = (
    "jmp_train/py.typed",
    "jmp_train/tools/aot/gpus.toml",
    "jmp_train/tools/documents/page.html",
    "jmp_train/graphs/kernels/native_kernels.cc",
)
PYTHONS = ("3.11", "3.13")
# What an installed copy has to do, beside the README's code: be itself, and find its files.
CHECK = """
import importlib.resources, sys
import jmp_train as jt
assert jt.__file__.startswith(sys.prefix), f"{jt.__file__} is not in {sys.prefix}"
assert jt.__version__ == "{version}", jt.__version__
assert jt.aot.GPUS
assert importlib.resources.files("jmp_train.graphs.kernels").joinpath("native_kernels.cc").is_file()
print("Python", sys.version.split()[0], "jax", jax.__version__, "loss", metrics["loss"])
"""


class DistError(Exception):
    """What keeps the distributions from being released."""


def version() -> str:
    """Returns the version, which is written in `jmp_train/__init__.py` and nowhere else."""
    tree = ast.parse((ROOT / "jmp_train" / "__init__.py").read_text())
    values = [x.value for x in tree.body if isinstance(x, ast.Assign) and ast.unparse(x.targets[0]) == "__version__"]
    (value,) = values
    return ast.literal_eval(value)


def check_changelog(changelog: str, released: str) -> None:
    """Raises a `DistError` if a changelog has no section for a version, with a date and something in it.

    Args:
      changelog: the text of CHANGELOG.md.
      released: the version, as `0.1.0`.
    """
    sections = re.split(r"^## ", changelog, flags=re.MULTILINE)
    found = [section for section in sections if section.startswith(f"[{released}]")]
    if len(found) != 1:
        raise DistError(f"CHANGELOG.md has {len(found)} sections [{released}], wanted is one")
    title, _, text = found[0].partition("\n")
    if not re.fullmatch(r"\[[^]]+\] - \d{4}-\d{2}-\d{2}", title):
        raise DistError(f"CHANGELOG.md: the section is {title!r}, wanted is '[{released}] - YYYY-MM-DD'")
    if not re.search(r"^- ", text, re.MULTILINE):
        raise DistError(f"CHANGELOG.md: the section [{released}] has no entries")


def check_tag(tag: str) -> None:
    """Raises a `DistError` if a tag is not that of the version, or the changelog has no section for it."""
    if tag != f"v{version()}":
        raise DistError(f"the tag {tag} is not v{version()}, the version in jmp_train/__init__.py")
    check_changelog((ROOT / "CHANGELOG.md").read_text(), version())


def tree_files() -> list[str]:
    """Returns the files of the tree that belong to the project, links included."""
    if (ROOT / ".git").exists():
        command = ("git", "ls-files", "--cached", "--others", "--exclude-standard")
        listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
        return [name for name in listed.stdout.splitlines() if os.path.lexists(ROOT / name)]
    files = (path.relative_to(ROOT) for path in ROOT.rglob("*") if path.is_file())
    return [str(p) for p in files if not any(part.startswith((".", "build")) for part in p.parts)]


def copy_tree(folder: Path) -> None:
    """Copies the files of the tree into a folder."""
    for name in tree_files():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, folder / name, follow_symlinks=False)


def build(out: Path, *options: str) -> tuple[Path, Path]:
    """Builds both of a copy of the tree, and returns the wheel and the sdist.

    Args:
      out: the folder for them; what it has of earlier builds is deleted.
      options: of `python -m build`.
    """
    for old in (*out.glob("*.whl"), *out.glob("*.tar.gz")):
        old.unlink()
    with tempfile.TemporaryDirectory() as folder:
        copy_tree(Path(folder))
        _run(sys.executable, "-m", "build", *options, "--outdir", str(out.resolve()), cwd=Path(folder))
    (wheel,), (sdist,) = out.glob("*.whl"), out.glob("*.tar.gz")
    return wheel, sdist


def expected() -> set[str]:
    """Returns the files of the tree where an sdist has them, `policies/` and `graphs/` within `jmp_train/`."""
    files = (name for name in tree_files() if not (ROOT / name).is_symlink() and not name.startswith("."))
    parts = (name.partition("/") for name in files)
    return {str(PurePosixPath(LAYERS.get(top, top), rest)) for top, _, rest in parts}


def wheel_names(wheel: Path) -> set[str]:
    """Returns the files in a wheel but for its metadata."""
    names = zipfile.ZipFile(wheel).namelist()
    return {name for name in names if ".dist-info/" not in name}


def sdist_names(sdist: Path) -> set[str]:
    """Returns the files in an sdist; a link is a `DistError`, as installers treat links each in its way."""
    with tarfile.open(sdist) as archive:
        members = archive.getmembers()
    links = [member.name for member in members if member.issym() or member.islnk()]
    if links:
        raise DistError(f"{sdist.name} has links: {links}")
    return {member.name.partition("/")[2] for member in members if member.isfile()}


def check_contents(wheel: Path, sdist: Path) -> None:
    """Raises a `DistError` if a wheel has anything more or less than the library, or an sdist lacks a file."""
    wanted = expected()
    names, library = wheel_names(wheel), {name for name in wanted if name.startswith("jmp_train/")}
    if names != library:
        raise DistError(f"{wheel.name} lacks {sorted(library - names)}, should not have {sorted(names - library)}")
    lacking = sorted({*NEEDED} - names)
    if lacking:
        raise DistError(f"{wheel.name} lacks {lacking}")
    lacking = sorted(wanted - sdist_names(sdist))
    if lacking:
        raise DistError(f"{sdist.name} lacks {lacking}")


def find_python(wanted: str) -> str | None:
    """Returns a Python of a version that runs here and makes environments, or None; looks as .ci/newest-python does.

    Args:
      wanted: such as 3.13.
    """
    code = f"import sys, ensurepip, venv; sys.exit('%d.%d' % sys.version_info[:2] != '{wanted}')"
    for candidate in _candidates(wanted):
        if subprocess.run((candidate, "-c", code), capture_output=True, check=False).returncode == 0:
            return candidate
    return None


def _candidates(wanted: str) -> Iterator[str]:
    on_path = shutil.which(f"python{wanted}")
    if on_path:
        yield on_path
    versions = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv") / "versions"
    yield from map(str, sorted(versions.glob(f"{wanted}.*/bin/python"), reverse=True))


def use(archive: Path, python: str, *options: str, packages: Path | None = None) -> str:
    """Installs a wheel or an sdist into a new environment, runs the README's code there, and returns what it printed.

    Args:
      archive: the wheel or sdist.
      python: that makes the environment.
      options: of `pip install`.
      packages: a folder that has what it depends on; default: pip gets that too.
    """
    env = {name: x for name, x in os.environ.items() if not name.startswith("PYTHON")} | {"JAX_PLATFORMS": "cpu"}
    if packages is not None:
        env["PYTHONPATH"] = str(packages)
    with tempfile.TemporaryDirectory() as folder:
        environment, elsewhere = Path(folder) / "environment", Path(folder) / "elsewhere"
        elsewhere.mkdir()
        _run(python, "-m", "venv", str(environment), cwd=elsewhere, env=env)
        inside = str(environment / "bin" / "python")
        _run(inside, "-m", "pip", "install", "-q", *options, str(archive.resolve()), cwd=elsewhere, env=env)
        step, *others = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
        # After the step, whose loss it prints: a job of one's own has another `metrics`.
        code = "\n".join([step, CHECK.replace("{version}", version()), *others])
        _run(str(environment / "bin" / "jmp-train"), "--version", cwd=elsewhere, env=env)
        return _run(inside, "-c", code, cwd=elsewhere, env=env)


def _run(*command: str, cwd: Path, env: dict[str, str] | None = None) -> str:
    """Runs a command and returns its output; a `DistError` has that of one that fails."""
    done = subprocess.run(
        command, cwd=cwd, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    if done.returncode != 0:
        raise DistError(f"{' '.join(command[:4])} ... failed with {done.returncode}:\n{done.stdout}")
    return done.stdout.strip()


def interpreters(wanted: Sequence[str], allow_missing: bool) -> dict[str, str]:
    """Returns a Python for each version; a missing one is a `DistError`, or a loud line where that is allowed."""
    found = {name: find_python(name) for name in wanted}
    missing = [name for name, python in found.items() if python is None]
    if missing:
        told = f"NOT TESTED on Python {' and '.join(missing)}, which {'is' if len(missing) == 1 else 'are'} not here"
        if not allow_missing:
            raise DistError(f"{told}: install it, or say --allow-missing")
        print(f"{'!' * 20} {told} {'!' * 20}", file=sys.stderr, flush=True)
    return {name: python for name, python in found.items() if python is not None}


def make(args: argparse.Namespace) -> None:
    """Does all that the command line asks for."""
    if args.tag:
        check_tag(args.tag)
    pythons = interpreters(args.pythons, args.allow_missing)
    args.out.mkdir(parents=True, exist_ok=True)
    wheel, sdist = build(args.out)
    _run(sys.executable, "-m", "twine", "check", "--strict", str(wheel), str(sdist), cwd=ROOT)
    check_contents(wheel, sdist)
    print(f"built {wheel} and {sdist}: what has to be in them is", flush=True)
    for archive, some in ((wheel, list(pythons.values())), (sdist, list(pythons.values())[:1])):
        for python in some:
            print(f"{archive.name}, installed by {python}: {use(archive, python)}", flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="default: dist")
    parser.add_argument("--tag", help="that is to be released; has to be the version's, with a section in CHANGELOG.md")
    parser.add_argument("--pythons", nargs="+", default=PYTHONS, help=f"default: {' '.join(PYTHONS)}")
    parser.add_argument("--allow-missing", action="store_true", help="go on without a Python that is not here")
    try:
        make(parser.parse_args(arguments))
    except DistError as error:
        print(f"dist: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
