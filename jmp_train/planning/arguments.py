"""What the arguments of a step are, by their paths."""

import re
from collections.abc import Sequence

from jmp_train.aot import Argument

_GROUPS = {
    r"^state\.params\b": "parameters",
    r"^state\.(opt_state|optimizer)\b": "optimizer state",
    r"^state\.(model_state|batch_stats)\b": "model state",
    r"^batch\b": "batch",
}


def arguments_of(paths: Sequence[str]) -> dict[int, Argument]:
    """Returns the arguments of a step by their numbers, each in its group.

    Args:
      paths: such as "state.params['kernel']".

    Example:
      >>> [argument.group for argument in arguments_of(["state.params['w']", "state.step"]).values()]
      ['parameters', 'other arguments']
    """
    found = {}
    for i, path in enumerate(paths):
        group = next((name for regex, name in _GROUPS.items() if re.search(regex, path)), None)
        found[i] = Argument(path) if group is None else Argument(path, group)
    return found
