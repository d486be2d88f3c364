"""Batches of any size, as shapes.

What a GPU's memory has to hold beside the program.
"""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jmp_train import graphs
from jmp_train.tools.aot import GPUS
from jmp_train.tools.planning import Allowances, Workload
from jmp_train.tools.planning.batches import batches_of, shapes_of

pytestmark = pytest.mark.quick

BATCH = {"image": jax.ShapeDtypeStruct((16, 8, 8, 3), jnp.bfloat16), "label": np.zeros(16, np.int32), "rate": 0.5}


def test_all_first_axes_grow_and_scalars_stay() -> None:
    batches, size = batches_of(BATCH, None)
    assert size == 16
    grown = batches(24)
    assert grown["image"] == jax.ShapeDtypeStruct((24, 8, 8, 3), jnp.bfloat16)
    assert (grown["label"].shape, grown["label"].dtype) == ((24,), jnp.int32)
    assert (grown["rate"].shape, grown["rate"].dtype, grown["rate"].weak_type) == ((), jnp.float32, True)


def test_another_size_to_begin_with() -> None:
    batches, size = batches_of(BATCH, 4)
    assert size == 4
    assert batches(4)["image"].shape == (4, 8, 8, 3)


def test_a_function_of_the_size_stays() -> None:
    def graph(size: int) -> Any:
        return {"nodes": jax.ShapeDtypeStruct((30 * size, 5), jnp.float32)}

    assert batches_of(graph, 8) == (graph, 8)


def test_a_graph_that_need_not_grow_stays_as_it_is() -> None:
    padded = graphs.pad(graphs.from_edges([0, 1], [1, 0], 2, nodes={"h": jnp.ones((2, 3))}), 4, 8)
    batch = {"graph": padded, "label": jnp.zeros(2, jnp.int32)}
    batches, size = batches_of(batch, None, grows=False)
    assert size == 1 and batches(1) == shapes_of(batch)
    (variant,) = Workload(lambda state, batch: (state, batch["label"].sum()), 0.0, batch).variants(grows=False)
    assert (variant.batch_size, variant.batches(1)) == (1, shapes_of(batch))
    with pytest.raises(ValueError, match="or find_largest=False"):
        batches_of(batch, None)
    assert batches_of(BATCH, None, grows=False)[1] == 16  # examples along all first axes are still counted


def test_keys_and_numpy_arrays_become_shapes_as_jax_takes_them() -> None:
    shapes = shapes_of({"key": jax.random.key(0), "x": np.zeros((2, 3), np.float64), "count": 3, "none": None})
    assert shapes["key"].dtype == jax.random.key(0).dtype
    assert (shapes["x"].shape, shapes["x"].dtype) == ((2, 3), jnp.float32)
    assert shapes["none"] is None


@pytest.mark.parametrize(
    ("batch", "batch_size", "kind", "message"),
    [
        (BATCH, 0, ValueError, "batch_size=0 must be an integer of at least 1"),
        (BATCH, 2.0, ValueError, "batch_size=2.0 must be an integer of at least 1"),
        (lambda size: size, None, TypeError, "batch is a function of the number of examples, and so batch_size must"),
        ({"rate": 0.5}, None, ValueError, "batch has no array with a first axis: give a function"),
        (None, None, ValueError, "batch has no array with a first axis: give a function"),
        (
            {"a": np.zeros(4), "b": {"c": np.zeros((3, 2))}, "d": np.zeros((4, 1))}, None, ValueError,
            ("batch 'b/c' has a first axis of 3, others of 4: where the examples are not along all first axes, give a "
            "function of the number of examples and batch_size"),
        ),
    ],
)  # fmt: skip
def test_bad_batches(batch: Any, batch_size: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=re.escape(message)):
        batches_of(batch, batch_size)


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
