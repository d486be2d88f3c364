"""Other people's code leaves dtype promotion as jax has it."""

from collections.abc import Iterator

import jax
import pytest


@pytest.fixture(autouse=True, scope="module")
def promotion_as_in_scripts() -> Iterator[None]:
    with jax.numpy_dtype_promotion("standard"):
        yield
