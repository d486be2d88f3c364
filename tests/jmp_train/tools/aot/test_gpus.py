import dataclasses
import json
import pickle
import re
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest
from gpu_builders import compile_for_gpu
from process_helpers import run_python

from jmp_train.tools.aot.compiling import compiling_environment
from jmp_train.tools.aot.gpus import GPU, GPUS, RATE_DTYPES, read_gpus

TESTS = Path(__file__).parents[3]
pytestmark = pytest.mark.quick

# What was compiled for when these three were the only ones.
FORMER = {
    "V100-16GB": (
        'device_description_str: "Tesla V100-SXM2-16GB" major: 7 minor: 0 core_count: 80 fpus_per_core: 64 '
        "shared_memory_per_core: 98304 shared_memory_per_block_optin: 98304 memory_bandwidth: 898048000000 "
        "l2_cache_size: 6291456 clock_rate_ghz: 1.53 device_memory_size: 16914055168"
    ),
    "A100-40GB": (
        'device_description_str: "NVIDIA A100-SXM4-40GB" major: 8 minor: 0 core_count: 108 fpus_per_core: 64 '
        "shared_memory_per_core: 167936 shared_memory_per_block_optin: 166912 memory_bandwidth: 1555000000000 "
        "l2_cache_size: 41943040 clock_rate_ghz: 1.41 device_memory_size: 42505273344"
    ),
    "H100-80GB": (
        'device_description_str: "NVIDIA H100 80GB HBM3" major: 9 minor: 0 core_count: 132 fpus_per_core: 128 '
        "shared_memory_per_core: 233472 shared_memory_per_block_optin: 232448 memory_bandwidth: 3352320000000 "
        "l2_cache_size: 52428800 clock_rate_ghz: 1.98 device_memory_size: 84929347584"
    ),
}
OF_ALL = (
    "threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048 shared_memory_per_block: 49152 "
    "block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535 registers_per_core_limit: 65536 "
    'registers_per_block_limit: 65536 platform_name: "CUDA" major: 9 minor: 7 major: 12 minor: 9'
)


def settings(text: str) -> list[str]:
    """Returns the fields of a text proto without their nesting, sorted."""
    return sorted(re.findall(r'\w+: (?:"[^"]*"|[\d.]+)', text))


@pytest.mark.parametrize("name", FORMER)
def test_descriptions_are_what_they_were(name: str) -> None:
    assert settings(GPUS[name].target_config) == settings(FORMER[name] + " " + OF_ALL)


@pytest.mark.parametrize("name", GPUS)
def test_numbers_of_a_gpu_fit_each_other(name: str) -> None:
    gpu = GPUS[name]
    assert name == gpu.name
    gigabytes = int(name.rpartition("-")[2].removesuffix("GB"))
    assert gpu.memory_bytes == pytest.approx(1e9 * gigabytes, rel=0.1)
    assert 0.008 < gpu.memory_bytes / gpu.bandwidth < 0.1  # seconds to read the whole memory
    assert 10e9 < gpu.link_bandwidth < gpu.bandwidth / 4
    # A core's unit multiplies and adds in one clock.
    units = 2 * gpu.core_count * gpu.fpus_per_core * gpu.clock_rate_ghz * 1e9
    assert gpu.vector_rates["float32"] == pytest.approx(units, rel=0.07)
    assert gpu.rates["float32"] == gpu.vector_rates["float32"]
    assert all(gpu.rates[dtype] >= rate for dtype, rate in gpu.vector_rates.items())
    assert gpu.rates["float64"] <= gpu.rates["float32"] <= gpu.matrix_rate("float32") <= gpu.rates["float16"]
    # Operations on a byte of memory that keep the units busy.
    assert 10 < gpu.rates["float16"] / gpu.bandwidth < 500
    since = {"tfloat32": (8, 0), "bfloat16": (8, 0), "float8": (8, 9), "float4": (10, 0), "int8": (7, 0)}
    expected = {"float64", "float32", "float16"} | {dtype for dtype, first in since.items() if gpu.capability >= first}
    assert {*gpu.rates} == expected
    assert gpu.rates.get("bfloat16", gpu.rates["float16"]) == gpu.rates["float16"]
    assert gpu.rates.get("float8", 2 * gpu.rates["float16"]) == pytest.approx(2 * gpu.rates["float16"], rel=0.02)
    assert gpu.shared_memory_per_block_optin <= gpu.shared_memory_per_core
    assert gpu.threads_per_core_limit in (1024, 1536, 2048)
    assert all(address.startswith("https://") for address in gpu.source)


def test_no_two_gpus_are_described_alike() -> None:
    assert {dtype for gpu in GPUS.values() for dtype in gpu.rates} == {*RATE_DTYPES}
    for texts in ([gpu.description for gpu in GPUS.values()], [gpu.target_config for gpu in GPUS.values()]):
        assert len(set(texts)) == len(GPUS)


@pytest.mark.parametrize(
    ("name", "dtype", "allow_tf32", "rate"),
    [
        ("V100-16GB", "bfloat16", True, 15.7e12),
        ("V100-16GB", jnp.float16, True, 125e12),
        ("V100-16GB", jnp.float32, True, 15.7e12),
        ("V100-16GB", "int8", True, 62.8e12),
        ("V100-16GB", jnp.dtype("float8_e5m2"), True, 125e12),
        ("A100-80GB", jnp.float32, True, 156e12),
        ("A100-80GB", "float32", False, 19.5e12),
        ("A100-80GB", "tfloat32", False, 156e12),
        ("A100-80GB", jnp.float8_e4m3fn, True, 312e12),
        ("H100-80GB", jnp.float8_e4m3fn, True, 1978.9e12),
        ("H100-80GB", "int8", True, 1978.9e12),
        ("H100-80GB", jnp.float4_e2m1fn, True, 989.4e12),
        ("B200-180GB", jnp.float4_e2m1fn, True, 9000e12),
        ("H100-80GB", "uint8", True, 1978.9e12),
        ("H100-80GB", "int32", True, 66.9e12),
        ("H100-80GB", "complex64", True, 494.7e12),
        ("H100-80GB", "complex64", False, 66.9e12),
        ("H100-80GB", "complex128", True, 66.9e12),
    ],
)
def test_a_product_has_the_rate_of_what_it_is_computed_in(name: str, dtype: Any, allow_tf32: bool, rate: float) -> None:
    assert GPUS[name].matrix_rate(dtype, allow_tf32=allow_tf32) == rate
    with pytest.raises(TypeError, match="halves"):
        GPUS[name].matrix_rate("halves")


def test_a_gpu_can_be_hashed_copied_and_sent() -> None:
    gpu = GPUS["A6000-48GB"]
    other = pickle.loads(pickle.dumps(gpu))
    assert other == gpu
    assert hash(other) == hash(gpu)
    assert json.loads(json.dumps(dataclasses.asdict(gpu)))["rates"] == gpu.rates


def toml(gpu: GPU) -> str:
    """Returns the table of a GPU; TOML writes texts, numbers and lists as JSON does."""
    lines = [f"[{gpu.name}]"]
    fields = dataclasses.asdict(gpu)
    del fields["name"]
    for key, value in fields.items():
        if isinstance(value, dict):
            lines += [f"{key}.{name} = {rate}" for name, rate in value.items()]
        else:
            lines.append(f"{key} = {json.dumps(value)}")
    return "\n".join(lines)


def test_a_table_that_says_everything_is_read(tmp_path: Path) -> None:
    path = tmp_path / "gpus.toml"
    path.write_text("\n".join(toml(gpu) for gpu in GPUS.values()))
    assert read_gpus(path) == {**GPUS}


def test_a_table_may_say_only_what_differs(tmp_path: Path) -> None:
    path = tmp_path / "gpus.toml"
    path.write_text(
        '[mine]\nlike = "A100-40GB"\nmemory_bytes = 20_000_000_000\nlink_bandwidth = 5\n'
        '[theirs]\nlike = "mine"\nsource = ["a letter"]\n'
    )
    mine = dataclasses.replace(GPUS["A100-40GB"], name="mine", memory_bytes=20_000_000_000, link_bandwidth=5.0)
    assert read_gpus(str(path)) == {
        "mine": mine,
        "theirs": dataclasses.replace(mine, name="theirs", source=("a letter",)),
    }
    assert "device_memory_size: 20000000000\n" in mine.target_config
    assert "mine" not in GPUS


LIKE = '[mine]\nlike = "T4-16GB"\n'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (LIKE + "cores = 5", r"\[mine\] has an unknown key 'cores'; the keys are like, description, memory_bytes, "),
        (LIKE + "memory_bytes = -1", r"\[mine\] memory_bytes = -1 must be an integer above 0"),
        (LIKE + "memory_bytes = 16e9", r"\[mine\] memory_bytes = 16000000000\.0 must be an integer above 0"),
        (LIKE + "bandwidth = true", r"\[mine\] bandwidth = True must be a number above 0"),
        (LIKE + "bandwidth = nan", r"\[mine\] bandwidth = nan must be a number above 0"),
        (LIKE + "bandwidth = inf", r"\[mine\] bandwidth = inf must be a number above 0"),
        (LIKE + "description = 4", r"\[mine\] description = 4 must be text without quotes or line breaks"),
        (LIKE + "description = 'a \"b\"'", r"\[mine\] description = 'a \"b\"' must be text without quotes"),
        (LIKE + "capability = 8.0", r"\[mine\] capability = 8\.0 must be a list of two integers, major and minor"),
        (LIKE + "capability = [8, -1]", r"\[mine\] capability = \[8, -1\] must be a list of two integers"),
        (LIKE + "source = 'a letter'", r"\[mine\] source = 'a letter' must be a list of texts"),
        (LIKE + "source = []", r"\[mine\] source = \[\] must be a list of texts"),
        (LIKE + "rates = { float32 = 1e12 }", r"\[mine\] rates = \{'float32': .* must be a table of numbers above 0"),
        (LIKE + "rates = { float64 = 1, float32 = 1, half = 1 }", r"\[mine\] rates = .*may have tfloat32, bfloat16"),
        (LIKE + "vector_rates = { float64 = 0, float32 = 1 }", r"\[mine\] vector_rates = .* numbers above 0"),
        ('[mine]\nlike = "T4"', r"\[mine\] like = 'T4' must be one of P100-16GB, V100-16GB, "),
        ("[mine]\nlike = ['T4-16GB']", r"\[mine\] like = \['T4-16GB'\] must be one of "),
        (
            "[mine]\nbandwidth = 1e12",
            r'\[mine\] lacks description, memory_bytes, rates, .*; take them from another GPU with like = "\.\.\."',
        ),
        ("mine = 3", r"mine must be a table, such as \[mine\], got 3"),
        ("[mine", r"is not a TOML file: "),
    ],
)
def test_errors_name_file_table_and_key(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "gpus.toml"
    path.write_text(text)
    with pytest.raises(ValueError, match=rf"(?s)^{re.escape(str(path))}:? {message}"):
        read_gpus(path)


def test_a_file_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"none\.toml"):
        read_gpus(tmp_path / "none.toml")


def test_the_page_has_the_table() -> None:
    page = (TESTS.parent / "docs" / "plan.md").read_text()
    lines = re.findall(r"^\| (\S+GB \| .*) \|$", page, re.MULTILINE)
    rows = [[cell.strip() for cell in line.split("|")] for line in lines]
    assert [row[0] for row in rows] == [*GPUS]
    for name, memory, bandwidth, *rates, link, capability in rows:
        gpu = GPUS[name]
        assert (memory, bandwidth) == (f"{gpu.memory_bytes / 1e9:.1f}", f"{gpu.bandwidth / 1e9:.0f}"), name
        columns = ("float32", "tfloat32", "bfloat16", "float16", "float8", "float4", "int8")
        expected = [f"{gpu.rates[key] / 1e12:.4g}" if key in gpu.rates else "" for key in columns]
        assert rates == expected, name
        assert link == f"{gpu.link}, {gpu.link_bandwidth / 1e9:.0f}", name
        assert capability == "{}.{}".format(*gpu.capability), name


@pytest.mark.full
@pytest.mark.timeout(600)
def test_every_gpu_is_compiled_for(plan_python: str) -> None:
    """One process for all; products in bfloat16 are float32's where the GPU has no bfloat16."""
    environment: Any = {
        **compiling_environment(None),
        "PYTHONPATH": f"{TESTS / 'helpers'}:{TESTS.parent / 'benchmarks'}",
    }
    out = run_python(TESTS / "programs" / "every_gpu.py", python=plan_python, timeout=500, **environment)
    found = json.loads(out.splitlines()[-1])
    assert [*found] == [*GPUS]
    for name, program in found.items():
        brain = "bf16" if "bfloat16" in GPUS[name].rates else "f32"
        assert sorted(program["factors"]) == sorted([["f16"] * 2, [brain] * 2, ["f32"] * 2]), name
        assert program["argument_bytes"] == 256 * 256 * 2 * (2 + 2 + 4), name
        assert program["argument_bytes"] < program["peak_bytes"] < 2**27, name


@pytest.mark.full
def test_a_gpu_of_a_file_is_compiled_for(plan_python: str, tmp_path: Path) -> None:
    path = tmp_path / "gpus.toml"
    path.write_text('[mine]\nlike = "L4-24GB"\ncore_count = 29\n')
    program = compile_for_gpu(
        f"{TESTS / 'programs' / 'gpu_programs.py'}:loop",
        "256",
        gpu=read_gpus(path)["mine"],
        python=plan_python,
        timeout=150,
    )
    assert program.argument_bytes == 2 * 2 * 256 * 256
