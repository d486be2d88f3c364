"""What readers of files say of a folder that they cannot read."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jmp_train.policies.files import DamagedError


def fault_of(
    read: Callable[..., Any], folder: Path, *arguments: Any, kind: type[Exception] = ValueError, **options: Any
) -> str:
    """Returns the error's message: one line that names the folder, which is cut off where it starts with it."""
    with pytest.raises(kind, match=re.escape(str(folder))) as caught:
        read(folder, *arguments, **options)
    assert type(caught.value) in (kind, DamagedError)  # and not, say, a UnicodeDecodeError
    message = str(caught.value)
    assert "\n" not in message
    return message.removeprefix(f"{folder}/")
