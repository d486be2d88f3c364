"""`.ci/gpu-python` chooses the environment by the driver, which a script in its place names here."""

import os
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.quick
ROOT = Path(__file__).resolve().parents[2]


def script(path: Path, body: str) -> Path:
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path


def run(tmp_path: Path, *arguments: str, **environment: str) -> str:
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        (str(ROOT / ".ci" / "gpu-python"), *arguments),
        env={**os.environ, "PATH": path, **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return done.stdout


@pytest.mark.parametrize(
    ("answer", "choice"),
    [
        ("580.159.04, 9.0", "cuda13"),
        ("580.65.06, 7.0", "cuda12"),  # a V100, which CUDA 13 has left behind
        ("590.10, 12.0\\n590.10, 7.0", "cuda13"),
        ("550.54.15, 8.0", "cuda12"),
        ("525.60.13, 7.5", "cuda12"),
        ("470.82.01, 8.0", "cpu"),
        ("NVIDIA-SMI has failed because it could not communicate with the NVIDIA driver", "cpu"),
        ("", "cpu"),
    ],
)
def test_the_driver_decides(tmp_path: Path, answer: str, choice: str) -> None:
    script(tmp_path / "nvidia-smi", f'printf "{answer}\\n"')
    assert run(tmp_path, "--choice", GPU_PYTHON="") == f"{choice}\n"


@pytest.mark.parametrize(("code", "is_taken"), [(0, True), (1, False)])
def test_a_named_python_is_taken_if_its_jax_finds_a_gpu(tmp_path: Path, code: int, is_taken: bool) -> None:
    script(tmp_path / "nvidia-smi", "exit 9")
    python = script(tmp_path / "python", f"exit {code}")
    wanted = str(python) if is_taken else "cpu"
    assert run(tmp_path, "--choice", GPU_PYTHON=str(python)) == f"{wanted}\n"


def test_a_gpu_is_shared_and_gets_no_flags_for_cpus(tmp_path: Path) -> None:
    script(tmp_path / "nvidia-smi", "exit 9")
    names = ("JAX_PLATFORMS", "XLA_FLAGS", "XLA_PYTHON_CLIENT_PREALLOCATE")
    shown = " ".join(f'"{name}=${{{name}-unset}}"' for name in names)
    python = script(tmp_path / "python", f'echo "$@" {shown}')
    lines = run(tmp_path, "-m", "pytest", GPU_PYTHON=str(python), XLA_FLAGS="").splitlines()
    assert lines[-1] == "-m pytest JAX_PLATFORMS=cuda,cpu XLA_FLAGS= XLA_PYTHON_CLIENT_PREALLOCATE=false"
