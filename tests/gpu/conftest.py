"""What the tests of this ring ask of the machine; they set nothing, since any backend is to run them."""

from typing import Any

import jax
import pytest


@pytest.fixture(scope="session")
def is_gpu() -> bool:
    """Returns whether jax computes on a GPU."""
    return jax.default_backend() == "gpu"


@pytest.fixture(scope="session")
def cpu() -> Any:
    """Returns a CPU, which is beside the GPU if there is one; `make test-gpu` names both platforms."""
    return jax.devices("cpu")[0]
