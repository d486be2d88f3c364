"""Where XLA's compilers are looked for, and how it is installed; pip itself is not run."""

import importlib.util
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from jmp_train.tools.aot import (
    INSTALL,
    INSTALL_TPU,
    PluginError,
    compiling,
    install_compiler,
    install_tpu_compiler,
)
from jmp_train.tools.aot.compiling import (
    cache_folder,
    compiler_folder,
    compiler_path,
    libtpu_requirement,
    tpu_compiler_folder,
)

pytestmark = pytest.mark.quick

JAXLIB = metadata.version("jaxlib")


@pytest.fixture(name="cache", autouse=True)
def fixture_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder for what can be made again, in an environment without the compiler."""
    monkeypatch.setenv("JMP_TRAIN_CACHE", str(tmp_path / "cache"))
    versions({}, monkeypatch)
    return tmp_path / "cache"


def versions(installed: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Has the environment no plugins but these."""

    def version(name: str) -> str:
        if name == "jaxlib":
            return JAXLIB
        if name in installed:
            return installed[name]
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(compiling.metadata, "version", version)


def run_instead_of_pip(code: int, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """Has pip leave half a package and end with a code; returns its calls."""
    calls: list[tuple[str, ...]] = []

    def run(command: tuple[str, ...], **options: Any) -> Any:
        calls.append(command)
        target = Path(command[command.index("--target") + 1])
        target.mkdir()
        (target / "half").write_text("")
        return subprocess.CompletedProcess(command, code, "collecting\n", "ERROR: no space left\n")

    monkeypatch.setattr(subprocess, "run", run)
    return calls


def test_the_cache_is_where_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JMP_TRAIN_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/scratch/cache")
    assert cache_folder() == Path("/scratch/cache/jmp_train")
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setenv("HOME", "/home/me")
    assert cache_folder() == Path("/home/me/.cache/jmp_train")


def test_the_folder_is_of_one_jaxlib_and_one_python(cache: Path) -> None:
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    assert compiler_folder() == cache / f"compiler-jaxlib-{JAXLIB}-cuda12-python{python}"
    assert compiler_folder("13") != compiler_folder("12")


MISSING = {
    "cuda": f"XLA's compiler for CUDA is not installed for jaxlib {JAXLIB}; install it with {INSTALL}",
    "tpu": f"libtpu, XLA's compiler for TPUs, is not installed for jaxlib {JAXLIB}; install it with {INSTALL_TPU}",
}


def test_what_is_not_installed_for_this_jaxlib_is_said_with_the_command(cache: Path) -> None:
    (cache / "compiler-jaxlib-0.0.1-cuda12-python3.11").mkdir(parents=True)
    for platform, text in MISSING.items():
        with pytest.raises(PluginError, match=re.escape(text)):
            compiler_path(platform)


def test_libtpu_is_in_a_folder_of_its_own() -> None:
    compiler_folder().mkdir(parents=True)
    with pytest.raises(PluginError, match=re.escape(MISSING["tpu"])):
        compiler_path("tpu")
    tpu_compiler_folder().mkdir()
    assert compiler_path("tpu") == tpu_compiler_folder() != compiler_folder() == compiler_path()


def test_a_plugin_of_another_version_is_said_with_the_one_that_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    versions({"jax-cuda12-plugin": "0.0.1"}, monkeypatch)
    needed = f"jaxlib {JAXLIB} needs jax-cuda12-plugin of the same version, not 0.0.1: "
    with pytest.raises(PluginError, match=re.escape(f"{needed}pip install 'jax-cuda12-plugin=={JAXLIB}'")):
        compiler_path()
    compiler_folder().mkdir(parents=True)
    assert compiler_path() == compiler_folder(), "the private one fits"


def test_the_private_folder_is_found_and_12_before_13() -> None:
    compiler_folder("13").mkdir(parents=True)
    assert compiler_path() == compiler_folder("13")
    compiler_folder("12").mkdir()
    assert compiler_path() == compiler_folder("12")


def test_an_environment_that_has_the_compiler_needs_no_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    versions({"jax-cuda13-plugin": JAXLIB, "libtpu": "0.0.42.1"}, monkeypatch)
    assert compiler_path() is None
    assert compiler_path("tpu") is None


def test_what_is_installed_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = run_instead_of_pip(1, monkeypatch)
    compiler_folder().mkdir(parents=True)
    assert install_compiler() == compiler_folder()
    assert not calls


@pytest.mark.parametrize("cuda", ["12", "13"])
def test_a_pip_that_fails_leaves_nothing(cuda: str, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = run_instead_of_pip(1, monkeypatch)
    with pytest.raises(
        PluginError, match=f"pip could not install jax-cuda{cuda}-plugin=={JAXLIB} .*:\ncollecting\n.*no space left"
    ):
        install_compiler(cuda)
    assert list(cache.iterdir()) == []
    (command,) = calls
    assert command[:4] == (sys.executable, "-m", "pip", "install")
    assert f"jax-cuda{cuda}-pjrt=={JAXLIB}" in command


def test_pip_moves_the_packages_into_their_folder_at_the_end(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = run_instead_of_pip(0, monkeypatch)
    assert install_compiler() == compiler_folder()
    assert [file.name for file in compiler_folder().iterdir()] == ["half"]
    assert [file.name for file in cache.iterdir()] == [compiler_folder().name], "no scratch folder is left"
    assert "--no-deps" in calls[0], "jax itself stays the environment's"


def test_without_pip_the_other_command_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    text = f"run instead: uv pip install --no-deps --target {compiler_folder()} 'jax-cuda12-plugin=={JAXLIB}'"
    with pytest.raises(PluginError, match=re.escape(text)):
        install_compiler()


def test_other_calls_that_cannot_be(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"cuda='11' must be one of 12, 13"):
        install_compiler("11")
    monkeypatch.setattr(compiling, "_ON_LINUX", False)
    with pytest.raises(PluginError, match="XLA's compiler for CUDA exists only for Linux, not for"):
        install_compiler()


def test_libtpu_is_the_one_that_jax_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = run_instead_of_pip(0, monkeypatch)
    assert re.fullmatch(r"libtpu==0\.0\.\d+\.\*", libtpu_requirement())
    assert install_tpu_compiler() == tpu_compiler_folder()
    assert calls[0][-1] == libtpu_requirement()
    monkeypatch.setattr(compiling.metadata, "requires", lambda name: ["numpy>=2", 'libtpu; extra == "cuda"'])
    versions({"jax": "0.0.1"}, monkeypatch)
    with pytest.raises(PluginError, match=r"jax 0\.0\.1 names no libtpu in its extra tpu"):
        libtpu_requirement()
