"""What an operation is in the user's words where no line of theirs made it: an argument's cast, the loss, an update."""

import os
from collections.abc import Mapping, Sequence

from jmp_train.policies.diagnosing.equations import LAYERS, Site, frames_of

_POLICIES = os.path.join("policies", "dtype_policies")
_STEPS = os.path.join("jmp_train", "steps")
_LOSS, _REDUCED = "float32_scalar", ("reduce_gradients", "scatter_gradients")


def argument_of(site: Site, arguments: Mapping[int, str]) -> str:
    """Returns the path of the argument that an operation casts, in the forward pass; empty if it does not.

    Args:
      site: the operation.
      arguments: paths by number.
    """
    if site.equation.primitive.name != "convert_element_type" or site.direction == "backward":
        return ""
    (source, *others) = site.sources or (0,)
    return "" if others or source >= 0 else arguments.get(-1 - source, "")


def is_by_policy(site: Site) -> bool:
    """Whether a policy casts the arguments here, and not the user."""
    return any(_POLICIES in file for file, _ in frames_of(site))


def is_of_graphs(site: Site) -> bool:
    """Whether a library's operation on graphs, which keeps its rows in half, is what the user called."""
    return any(file.startswith(LAYERS) for file, _ in frames_of(site))


def is_reduction(site: Site) -> bool:
    """Whether the library averages gradients over devices here."""
    return any(function in _REDUCED for _, function in frames_of(site))


def is_loss(site: Site) -> bool:
    """Whether the train step makes the loss float32 here, or its derivative half again."""
    return any(function == _LOSS for _, function in frames_of(site))


def subject_of(
    site: Site, row: int, arguments: Mapping[int, str], results: Sequence[tuple[str, frozenset[int]]]
) -> str:
    """Returns what an operation without a line is; empty where it has one.

    Args:
      site: the operation.
      row: its number.
      arguments: paths by number.
      results: what each result is, and from which rows it comes.
    """
    if site.line:
        return ""
    if path := argument_of(site, arguments):
        return f"the argument {path!r}"
    if is_loss(site):
        return "the loss" if site.direction == "forward" else "the derivative of the loss"
    if is_reduction(site):
        return "the mean of the gradients over the devices"
    ends = [name for name, rows in results if row in rows]
    if len(ends) == 1:
        return ends[0]
    if any(_STEPS in file for file, _ in frames_of(site)):
        return "the train step itself, outside of your functions"
    return "a cast of autocast's" if site.under_autocast else "an operation of which jax knows no line"
