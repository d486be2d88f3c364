"""Tables of refusals: the error that is raised, and the calls that raise it."""

import builtins
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

Call = Callable[[], Any]


def assert_refused(cases: Mapping[str, Call | Sequence[Call]]) -> None:
    """Asserts that calls raise errors: "TypeError: k='a' must be", in which ".*" is any text; else a ValueError."""
    for error, calls in cases.items():
        kind, _, message = error.partition(": ")
        if not kind.endswith("Error"):
            kind, message = "ValueError", error
        pattern = ".*".join(map(re.escape, message.split(".*")))
        for call in [calls] if callable(calls) else calls:
            try:
                call()
            except getattr(builtins, kind) as fault:
                assert re.search(pattern, str(fault)), error
            else:
                pytest.fail(f"nothing was refused, {error}")
