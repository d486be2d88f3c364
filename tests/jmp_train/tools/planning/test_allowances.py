"""What a GPU's memory has to hold beside the program."""

import re
from typing import Any

import pytest

from jmp_train.tools.aot import GPUS
from jmp_train.tools.planning import Allowances

pytestmark = pytest.mark.quick

MIB = 2**20


def test_jaxs_pool_is_what_a_program_has() -> None:
    gpu = GPUS["A100-40GB"]
    assert Allowances().usable_bytes(gpu, 1) == int(0.75 * gpu.memory_bytes * 0.98)
    assert Allowances().usable_bytes(gpu, 8) == Allowances().usable_bytes(gpu, 1), "the pool is less than what is left"


def test_with_all_memory_in_the_pool_the_libraries_count() -> None:
    gpu = GPUS["V100-16GB"]
    whole = Allowances(memory_fraction=1, cuda_context=500 * MIB, libraries=200 * MIB, collectives=300 * MIB,
                       fragmentation=0)  # fmt: skip
    assert whole.usable_bytes(gpu, 1) == gpu.memory_bytes - 700 * MIB
    assert whole.usable_bytes(gpu, 2) == gpu.memory_bytes - 1000 * MIB


def test_nothing_is_the_least() -> None:
    assert Allowances(cuda_context=2**50).usable_bytes(GPUS["V100-16GB"], 1) == 0
    assert Allowances(memory_fraction=0).usable_bytes(GPUS["V100-16GB"], 1) == 0


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"memory_fraction": 1.5}, "memory_fraction=1.5 must be between 0 and 1"),
        ({"fragmentation": -0.1}, "fragmentation=-0.1 must be between 0 and 1"),
        ({"memory_fraction": float("nan")}, "memory_fraction=nan must be between 0 and 1"),
        ({"cuda_context": -1}, "cuda_context=-1 must be a number of bytes"),
        ({"libraries": -1}, "libraries=-1 must be a number of bytes"),
        ({"collectives": -2}, "collectives=-2 must be a number of bytes"),
    ],
)
def test_what_cannot_be(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        Allowances(**given)
