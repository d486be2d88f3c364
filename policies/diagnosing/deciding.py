"""Finds whole numbers that half precision changes: indices, buckets and positions, which the shadow follows."""

import math
from collections.abc import Callable, Iterator

import jax.numpy as jnp

from jmp_train.policies.autocasting import AutocastRules
from jmp_train.policies.diagnosing.amplifying import error_limit, named_row, text_of
from jmp_train.policies.diagnosing.examining import Examination
from jmp_train.policies.diagnosing.names import named
from jmp_train.policies.diagnosing.problems import Problem, problem_at
from jmp_train.policies.diagnosing.remedies import merged_rules, operands_in_float32

_LINES = 2  # that are tried


def decisions(
    first: Examination, again: Callable[[AutocastRules], Examination | None]
) -> Iterator[tuple[int, Problem]]:
    """Finds whole numbers that differ in half precision and change results: a run by rules has others.

    Args:
      first: the examination of the unchanged function.
      again: returns the examination of the function that runs by rules, or None.
    """
    evidence = first.evidence
    rows = [i for i, row in enumerate(evidence.rows) if row.decided and row.direction == "forward"]
    begins = {named_row(evidence, i): i for i in reversed(rows)}
    for begin, row in sorted(begins.items())[:_LINES]:
        remedy = operands_in_float32(evidence, row, shared=True)
        run = again(merged_rules([remedy]))
        moved = 0.0 if run is None else _apart(first, run)
        if moved > error_limit(evidence):
            text = (
                f"{evidence.rows[row].decided:.2%} of {named(evidence, row)} are other whole numbers than those of "
                f"float32, with which results or gradients differ by {text_of(moved)}"
            )
            yield problem_at(evidence, begin, "integer precision lost", text, remedy)


def _apart(first: Examination, second: Examination) -> float:
    """Returns the largest difference between the results of two runs, in float32."""
    found = [0.0]
    for x, y in zip(first.outputs, second.outputs, strict=False):
        if x.shape != y.shape or not bool(jnp.isfinite(y).all()):
            continue
        if not bool(jnp.isfinite(x).all()):
            return math.inf
        size, difference = (float(jnp.linalg.norm(jnp.ravel(z))) for z in (y, x - y))
        found.append(difference / size if size else 0.0)
    return max(found)
