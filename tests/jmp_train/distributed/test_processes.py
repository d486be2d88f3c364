"""Several real processes on this machine, by `jmp-train launch`."""

import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from process_helpers import launched
from process_programs import BATCH, STEPS, digits, make_step

import jmp_train as jt
from jmp_train.data.array_loading import array_batches

pytestmark = [pytest.mark.quick, pytest.mark.timeout(200)]

PROGRAMS = Path(__file__).resolve().parents[2] / "programs" / "process_programs.py"
Launch = Callable[..., tuple[int, str]]


@pytest.fixture(name="launch")
def fixture_launch(tmp_path: Path) -> Launch:
    def launch(*arguments: Any, count: int = 2, options: Sequence[str] = ()) -> tuple[int, str]:
        options = [*options, "--logdir", str(tmp_path / "logs")]
        return launched(PROGRAMS, *arguments, count=count, options=options)

    return launch


def alone() -> tuple[Any, list[float]]:
    """Returns what one process on one device makes of the same batches."""
    step, state = make_step("float32")
    run, losses = jax.jit(step), []
    batches = array_batches(digits(), BATCH, seed=1)
    for batch in [next(batches) for _ in range(STEPS)]:
        state, metrics = run(state, batch)
        losses.append(float(metrics["loss"]))
    return state.params, losses


@pytest.mark.full
@pytest.mark.parametrize(
    ("count", "routes"), [(2, ("shard_map", "jit", "pmap")), (4, ("shard_map",)), (4, ("jit", "pmap"))]
)
def test_processes_equal_one(count: int, routes: tuple[str, ...], launch: Launch, tmp_path: Path) -> None:
    code, text = launch("train", tmp_path, *routes, count=count)
    assert code == 0, text
    params, losses = alone()
    assert losses[-1] < 0.7 * losses[0]
    for route in routes:
        with np.load(tmp_path / f"{route}.npz") as found:
            np.testing.assert_allclose(found["losses"], losses, rtol=0, atol=1e-6)
            for name, array in params.items():
                np.testing.assert_allclose(found[name], array, rtol=0, atol=1e-6)
    skips = "finite [True, False, True, True, False, True] scale 256.0"
    assert text.count(skips) == count, text
    assert text.count("master_weights [('hidden', True), ('out', True)] 1") == count, text
    assert (
        text.count("AMP mode naive: model float16, master weights float32, outputs float32, loss scale 256; ") == 1
    ), text
    assert text.count("gradient overflow: step skipped, 1 so far; the loss scale is now 128") == 1, text


@pytest.mark.full
def test_what_differs_is_refused_and_a_state_is_sent_bit_by_bit(launch: Launch) -> None:
    code, text = launch("differ", count=3)
    assert code == 1
    for line in (
        "seed: the processes do not agree: |  seed: process 1 has 7; processes 0 and 2 have 0",
        "policy: process 1 has p=full,c=full,o=full; processes 0 and 2 have p=full,c=f16,o=full",
        "batch 'x': process 1 has float64[3, 2]; processes 0 and 2 have float64[4, 2]",
        "batch 'extra': process 1 has float; processes 0 and 2 have nothing",
        "state 'rng': process 1 has key<fry>[] ",
        "broadcast: the processes do not agree: |  state 'w': process 1 has float64[2]; ",
        "loaded True True",
        "type: 'str' object cannot be interpreted as an integer",
        "save: params must be arrays with values in this process: |  'w': divided between processes; gather it ",
    ):
        assert text.count(line) == 3, f"{line}\n{text}"
    assert "seed: process 1 has 1; processes 0 and 2 have 0" in text, text  # of the first that ends by it
    assert text.count("key: process 0 raised KeyError: 'sizes'") == 2, text
    assert text.count("key: 'sizes'") == 1, text
    assert len(re.findall(r"state 'w': process 1 has float32\[3\] \w{16}; processes", text)) == 3
    assert re.search("jmp-train: error: process . ended with exit code 1", text), text
    assert text.count("signs [True, True, True] 7 int") == 3, text
    kinds = {
        "flags": "bool", "half": "bfloat16", "key": "key<fry>", "nan": "float16", "none": "float32", "number": "",
        "zero": "float32",
    }  # fmt: skip
    assert text.count(f"kinds {kinds}") == 3, text


@pytest.mark.full
@pytest.mark.parametrize("who", [0, 1])
@pytest.mark.parametrize(
    ("how", "code", "end"),
    [
        ("exit", 3, "ended with exit code 3"),
        ("raise", 1, "ended with exit code 1"),
        ("kill", 137, "was killed by signal 9"),
    ],
)
def test_all_are_stopped_when_one_fails_and_only_it_is_heard(
    how: str, code: int, end: str, who: int, launch: Launch, tmp_path: Path
) -> None:
    returned, text = launch("leave", how, who)
    assert returned == code, text
    assert f"jmp-train: error: process {who} {end}" in text, text
    assert text.count("LookupError: lost") == (how == "raise")
    assert text.count("Traceback") == (how == "raise"), text
    assert "coordination_service" not in text
    if how == "kill":  # then the other is not stopped before it has noticed
        log = (tmp_path / "logs" / f"rank_{1 - who}.log").read_text()
        assert re.search(r"coordination_service|\[\S*gloo", log), log


@pytest.mark.full
def test_a_process_that_ends_early_says_that_it_waits_in_vain(launch: Launch) -> None:
    code, text = launch("uneven", 2)
    assert code == 1
    said = "[1] process 1 has ended its script, but others have not within shutdown_timeout=2 s; check that all "
    before, found, after = text.partition(said)
    assert found, text
    assert "Traceback" not in before
    assert "Terminating process" not in before  # jax's own report, of some 50 lines
    assert "[1] process 1 is done" in before
    assert "[0] process 0 is done" not in text
    assert "; the script of process 1 had ended well before that" in after


def test_a_state_that_was_sent_is_one_s_own() -> None:
    params = jnp.arange(4.0)
    sent = jt.distributed.broadcast_state({"w": params, "rng": jax.random.key(3)})
    jax.block_until_ready(jax.jit(lambda x: x * 0 + 7, donate_argnums=0)(sent["w"]))
    np.testing.assert_array_equal(params, np.arange(4.0))
    assert jnp.issubdtype(sent["rng"].dtype, jax.dtypes.prng_key)


def initialize(arguments: str, variables: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Starts jax's processes in one of its own, with these variables in its environment."""
    script = f"from jmp_train import distributed; distributed.initialize({arguments})"
    return subprocess.run(
        [sys.executable, "-c", script], env=variables, capture_output=True, text=True, timeout=60, check=False
    )


@pytest.mark.full
@pytest.mark.parametrize(
    ("arguments", "variables", "message"),
    [
        ("", {"SLURM_NTASKS": "4"}, r"Slurm \(SLURM_NTASKS=4\) set up several processes"),
        (
            "",
            {"OMPI_COMM_WORLD_SIZE": "2"},
            "jax does not know where they connect; also pass coordinator_address, num_processes",
        ),
        ("", {"JOB_COMPLETION_INDEX": "0"}, r"Kubernetes \(JOB_COMPLETION_INDEX=0\) set up"),
        ("", {"TPU_WORKER_HOSTNAMES": "a,b"}, r"a TPU pod \(TPU_WORKER_HOSTNAMES=a,b\) set up several"),
        ("", {"MEGASCALE_NUM_SLICES": "2"}, r"a TPU pod of several slices \(MEGASCALE_NUM_SLICES=2\) set up several"),
        ("num_processes=2", {}, "the arguments set up .* also pass coordinator_address, process_id to"),
    ],
)
def test_processes_that_cannot_meet_are_refused(arguments: str, variables: dict[str, str], message: str) -> None:
    done = initialize(arguments, os.environ | variables)
    assert done.returncode == 1
    assert re.search(f"ValueError: .*{message}", done.stderr), done.stderr


def test_a_process_alone_needs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    jt.distributed.initialize()
    assert jt.distributed.is_main_process()
    jt.distributed.check_agreement({"w": jnp.ones(2)}, seed=0)
    monkeypatch.setenv("SLURM_NTASKS", "4")
    jt.distributed.initialize(num_processes=1)


@pytest.mark.parametrize(
    ("hosts", "arguments", "is_warned"), [(None, "", True), ("localhost", "", False), (None, "num_processes=1", False)]
)
@pytest.mark.full
def test_a_process_with_tpus_that_trains_alone_is_told_so(hosts: str | None, arguments: str, is_warned: bool) -> None:
    variables = {name: value for name, value in os.environ.items() if name != "JAX_PLATFORMS"}
    variables |= {"JAX_FORCE_TPU_INIT": "1"} | ({} if hosts is None else {"TPU_WORKER_HOSTNAMES": hosts})
    done = initialize(arguments, variables)
    assert done.returncode == 0, done.stderr
    assert ("this process has TPUs and trains alone" in done.stderr) == is_warned


@pytest.mark.parametrize(
    ("options", "variables", "message"),
    [
        ({}, {"JAX_PROCESS_ID": "-1"}, "JAX_PROCESS_ID='-1' must be a whole number"),
        ({}, {"JAX_NUM_PROCESSES": "two"}, "JAX_NUM_PROCESSES='two' must be a whole number"),
        ({"collective_timeout": 0}, {}, "collective_timeout=0 must be a whole number of seconds"),
        ({"shutdown_timeout": 2.5}, {}, "shutdown_timeout=2.5 must be a whole number of seconds"),
    ],
)
def test_wrong_starts_are_refused(
    options: dict[str, Any], variables: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=message):
        jt.distributed.initialize(**options)


CLUSTERS = {
    "slurm": {
        "SLURM_JOB_ID": "7", "SLURM_STEP_NODELIST": "localhost", "SLURM_NTASKS": "2",
        "SLURM_PROCID": "{rank}", "SLURM_LOCALID": "{rank}",
    },
    "ompi": {
        "OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://127.0.0.1:34911", "OMPI_COMM_WORLD_SIZE": "2",
        "OMPI_COMM_WORLD_RANK": "{rank}", "OMPI_COMM_WORLD_LOCAL_RANK": "{rank}",
    },
    "tpu": {
        "JAX_FORCE_TPU_INIT": "1",  # what finding TPUs does to jax
        "TPU_SKIP_MDS_QUERY": "1", "TPU_WORKER_HOSTNAMES": "localhost,localhost", "TPU_WORKER_ID": "{rank}",
        "MEGASCALE_COORDINATOR_ADDRESS": "localhost", "MEGASCALE_NUM_SLICES": "1", "MEGASCALE_SLICE_ID": "0",
    },
}  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize("cluster", CLUSTERS)
def test_what_a_cluster_leaves_in_the_environment_is_enough(cluster: str) -> None:
    script = (
        "import jax\nimport jmp_train as jt\n"
        "jt.distributed.initialize(initialization_timeout=60, shutdown_timeout=20)\n"
        "print('process', jax.process_index(), 'of', jax.process_count())\n"
        "jt.distributed.check_agreement(seed=0)\n"
    )
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = server.getsockname()[1]
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", script],
            env=os.environ
            | {name: value.format(rank=rank) for name, value in CLUSTERS[cluster].items()}
            | {"JAX_COORDINATOR_PORT": str(port), "JAX_NUM_CPU_DEVICES": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    for rank, process in enumerate(processes):
        text, _ = process.communicate(timeout=80)
        assert process.returncode == 0, text
        assert f"process {rank} of 2" in text
