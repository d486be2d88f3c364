"""The job files of `examples/jobs`, each started as its launcher starts it, with two processes on this machine.

The command of the page about users' jobs runs on its file, and prints what the page shows but for times.
"""

import os
import re
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from process_helpers import run_python

pytestmark = pytest.mark.quick

ROOT = Path(__file__).parents[2]
JOBS = ROOT / "examples" / "jobs"
SCRIPT = "examples/data_parallel/checkpoint.py"

# In the place of a launcher that is not here: two processes with the variables that it would set.
LAUNCHER = """#!/bin/bash
while [ "$1" != python ] && [ "$1" != bash ]; do shift; done
for rank in 0 1; do
  env {variables} "$@" &
  processes+=($!)
done
for process in "${{processes[@]}}"; do wait "$process" || exit 1; done
"""
LAUNCHERS = {
    "slurm.sh": (
        "srun",
        "SLURM_JOB_ID={port} SLURM_STEP_NODELIST=localhost SLURM_NTASKS=2 SLURM_PROCID=$rank SLURM_LOCALID=$rank",
    ),
    "openmpi.sh": (  # of Open MPI 5, without what jax knows Open MPI 4 by
        "mpirun",
        "OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_RANK=$rank OMPI_COMM_WORLD_LOCAL_RANK=$rank",
    ),
}


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("localhost", 0))
        return listening.getsockname()[1]


def environment(*folders: Path, **variables: object) -> dict[str, str]:
    """Returns that of a process, which finds programs in these folders, and this Python under the name `python`."""
    path = os.pathsep.join(map(str, (*folders, Path(sys.executable).parent, os.environ["PATH"])))
    return {**os.environ, "JAX_PLATFORMS": "cpu", "PATH": path, **{name: str(x) for name, x in variables.items()}}


def check_trained(output: str) -> None:
    assert len(set(re.findall(r"process (\d) \(\d+\) goes on from step 0", output))) == 2, output
    losses = [float(loss) for loss in re.findall(r"^step \d+  loss ([\d.]+)", output, re.MULTILINE)]
    assert len(losses) == 2, output  # by process 0 alone
    assert losses[1] < losses[0]


def run_job(job: Path, directory: Path, variables: Mapping[str, str]) -> str:
    command = ("bash", str(job), SCRIPT, "--directory", str(directory), "--steps", "40")
    done = subprocess.run(
        command, cwd=ROOT, env=dict(variables), capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.full
@pytest.mark.timeout(240)
@pytest.mark.parametrize("job", LAUNCHERS)
def test_a_job_script_trains_in_two_processes(job: str, tmp_path: Path) -> None:
    name, variables = LAUNCHERS[job]
    (tmp_path / "bin").mkdir()
    launcher = tmp_path / "bin" / name
    launcher.write_text(LAUNCHER.format(variables=variables.format(port=os.getpid())))
    launcher.chmod(0o755)
    check_trained(run_job(JOBS / job, tmp_path / "run", environment(tmp_path / "bin", PORT=free_port())))


@pytest.mark.parametrize("job", LAUNCHERS)
def test_a_job_script_is_bash_without_a_fault(job: str) -> None:
    subprocess.run(("bash", "-n", str(JOBS / job)), check=True, capture_output=True)


def kubernetes_job() -> tuple[Any, Any]:
    """Returns the Service and the Job."""
    service, job = yaml.safe_load_all((JOBS / "kubernetes.yaml").read_text())
    assert (service["kind"], job["kind"]) == ("Service", "Job")
    return service, job


def test_the_pods_of_the_kubernetes_job_find_each_other() -> None:
    service, job = kubernetes_job()
    name, spec, pod = job["metadata"]["name"], job["spec"], job["spec"]["template"]["spec"]
    assert service["spec"]["clusterIP"] == "None" and service["spec"]["selector"] == {"job-name": name}
    assert pod["subdomain"] == service["metadata"]["name"]
    assert spec["completionMode"] == "Indexed" and spec["completions"] == spec["parallelism"]
    (container,) = pod["containers"]
    variables = {variable["name"]: variable for variable in container["env"]}
    host, _, port = variables["JAX_COORDINATOR_ADDRESS"]["value"].partition(":")
    assert host == f"{name}-0.{pod['subdomain']}" and 1024 < int(port) < 65536
    assert variables["JAX_NUM_PROCESSES"]["value"] == str(spec["completions"])
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}


@pytest.mark.full
@pytest.mark.timeout(240)
def test_the_kubernetes_job_trains_in_two_processes(tmp_path: Path) -> None:
    """As in its pods: the index comes from an annotation, and the coordinator is on this machine."""
    (container,) = kubernetes_job()[1]["spec"]["template"]["spec"]["containers"]
    index = {"fieldRef": {"fieldPath": "metadata.annotations['batch.kubernetes.io/job-completion-index']"}}
    variables = {v["name"]: v["value"] for v in container["env"] if "value" in v}
    (indexed,) = (v["name"] for v in container["env"] if v.get("valueFrom") == index)
    variables["JAX_COORDINATOR_ADDRESS"] = f"localhost:{free_port()}"
    command = [str(tmp_path / "run") if part == "/checkpoints" else part for part in container["command"]]
    inherited = environment(**variables)
    pods = [
        subprocess.Popen(
            [*command, "--steps", "40"],
            cwd=ROOT,
            env={**inherited, indexed: str(number), "JOB_COMPLETION_INDEX": str(number)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for number in range(int(variables["JAX_NUM_PROCESSES"]))
    ]
    outputs = [pod.communicate(timeout=200)[0] for pod in pods]
    assert [pod.returncode for pod in pods] == [0, 0], outputs
    check_trained("".join(outputs))


PAGE = (Path(__file__).parents[2] / "docs" / "your_own_job.md").read_text()
JOB, COMMAND, SHOWN = (
    re.findall(rf"^```{kind}\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)[0] for kind in ("python", "sh", "text")
)


def shape(text: str) -> list[str]:
    """Returns the lines without numbers and without the width of columns."""
    lines = [" ".join(re.sub(r"\d[\d.]*", "#", line).split()) for line in text.splitlines()]
    return [line for line in lines if line.strip("─ ")]


@pytest.mark.full
@pytest.mark.timeout(300)
def test_the_command_prints_what_the_page_shows(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(JOB)
    output = run_python("-m", "jmp_train", *COMMAND.split()[1:], cwd=tmp_path, COLUMNS="150")
    tables = output[output.index(" policy ") :]
    results, written = (shape(part) for part in SHOWN.split("\n\n"))
    lines = shape(tables)
    assert lines[: len(results)] == results
    assert lines[-len(written) :] == written
    costs = lines[len(results)]  # which the page omits
    assert costs == "policy flops in half saved ratio parameters state ratio"
    found, wanted = ([float(x) for x in re.findall(r"([\d.]+)% +[\d.]+ +\d+", text)] for text in (tables, SHOWN))
    assert len(found) == 3
    assert found == pytest.approx(wanted, abs=2)
