"""Type aliases: what a train step takes and returns, beside those of `jmp_train.policies.types`."""

from typing import Any, TypeAlias

from jmp_train.policies import PyTree

ModelState: TypeAlias = PyTree  # what the forward pass changes itself, such as batch statistics; or None
Batch: TypeAlias = PyTree  # arrays [examples, ...], graphs, stacks of graphs
Metrics: TypeAlias = dict[str, Any]  # what a step reports, by name
