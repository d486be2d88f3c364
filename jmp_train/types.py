"""Type aliases for a train step, in addition to those of `jmp_train.policies.types`."""

from typing import Any, TypeAlias

from jmp_train.policies import PyTree

ModelState: TypeAlias = PyTree  # values that the forward pass updates, such as batch statistics; or None
Batch: TypeAlias = PyTree  # arrays [examples, ...], graphs, stacks of graphs
Metrics: TypeAlias = dict[str, Any]  # results of a step, by name
