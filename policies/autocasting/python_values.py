"""Names the user's line if Python needs the value of a traced array, as an `if` does."""

import contextlib
import linecache
import traceback
from collections.abc import Iterator

import jax

from jmp_train.policies.autocasting.source_lines import is_of_users

_ERRORS = (
    jax.errors.ConcretizationTypeError,  # of bool, int and float
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)
_HINT = "asks for the value of an array, which has none while the function is traced"


@contextlib.contextmanager
def python_values_explained() -> Iterator[None]:
    """Adds to jax's errors the user's line that needs a value, and the code to write instead."""
    try:
        yield
    except _ERRORS as error:
        frames = traceback.extract_tb(error.__traceback__)
        line = next((frame for frame in reversed(frames) if is_of_users(frame.filename)), None)
        if line is not None and line.lineno is not None and not any(_HINT in note for note in _notes(error)):
            code = linecache.getline(line.filename, line.lineno).strip()
            error.add_note(f"{line.filename}:{line.lineno}: `{code}` {_HINT}; jnp.where and jax.lax.cond need none")
        raise


def _notes(error: BaseException) -> list[str]:
    return getattr(error, "__notes__", [])
