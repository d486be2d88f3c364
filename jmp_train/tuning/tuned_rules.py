"""`TunedRules`: what tuning has found, and what speaks for it."""

import dataclasses
import math
from typing import Any

from jmp_train.policies.autocasting import AutocastRules, rules_code
from jmp_train.tuning.tolerance import Errors, Tolerance


@dataclasses.dataclass(frozen=True)
class Float32Entry:
    """What stays in float32, and why.

    Attributes:
      expressions: for `AutocastRules.operations`.
      primitives: the names of jax's primitives.
      path: of modules and scopes; empty where there are none.
      line: file and number of the user's line.
      operations: how many operations it reaches.
      without: the errors if it were left out, and all else as it is; None if that was not tried.
      repaired: whether the trials could do without it, and autocast itself could not.

    Example:
      >>> entry = Float32Entry(("^norm:mul@",), ("mul",), "norm", "model.py:3", 1, None)
      >>> entry.why
      ''
    """

    expressions: tuple[str, ...]
    primitives: tuple[str, ...]
    path: str
    line: str
    operations: int
    without: Errors | None
    repaired: bool = False

    @property
    def why(self) -> str:
        """What goes wrong without it, in words."""
        if self.repaired:
            return "added when autocast itself was run"
        return "" if self.without is None else f"without it: {self.without}"


@dataclasses.dataclass(frozen=True)
class FrontPoint:
    """A choice of the Pareto front.

    Attributes:
      half_flops: the share of the flops of what can be chosen that runs in half precision.
      gradient_error: relative to float32.
      float32_operations: how many entries' worth of operations stay in float32.
    """

    half_flops: float
    gradient_error: float
    float32_operations: int


@dataclasses.dataclass(frozen=True)
class Verification:
    """What autocast itself does with the rules.

    Attributes:
      passed: whether the errors are tolerated on all examples, the held-out ones among them.
      errors: of the worst example.
      held_out: how many examples the search had not seen.
      float32_losses: of training steps in float32; empty if none were asked for.
      tuned_losses: of the same steps with the rules.
    """

    passed: bool
    errors: Errors
    held_out: int
    float32_losses: tuple[float, ...] = ()
    tuned_losses: tuple[float, ...] = ()


@dataclasses.dataclass(frozen=True)
class TunedRules:
    """What `tune` returns; printed, it is a table.

    Attributes:
      rules: for `autocast`, `AutocastPolicy` and AMP modes.
      dtype: the half type's name.
      entries: what stays in float32, beside sums and solvers.
      choices: how many operations or groups of them could be chosen.
      complete: whether the search came to its end, so that each entry is needed.
      trials: how many choices were tried.
      seconds: of the trials, without compiling.
      compile_seconds: of the programs.
      loss_scale: in the trials.
      tolerance: of the errors.
      half_flops: the shares of the flops in half precision, by torch's table and by these rules.
      half_elements: the same of the results' elements.
      front: choices that were tried, the best ones of their share of half precision, the largest share first.
      verification: by autocast itself.

    Example:
      >>> import jax.numpy as jnp, jmp_train as jt
      >>> w, x = jnp.full((2, 2), 0.5), jnp.full((2, 2), 300.0)
      >>> tuned = jt.tune(lambda w, x: jnp.sqrt((x @ w) ** 2).mean(), [(w, x)])
      >>> tuned.entries[0].primitives, tuned.entries[0].why
      (('integer_pow',), 'without it: not finite')
    """

    rules: AutocastRules
    dtype: str
    entries: tuple[Float32Entry, ...]
    choices: int
    complete: bool
    trials: int
    seconds: float
    compile_seconds: float
    loss_scale: float
    tolerance: Tolerance
    half_flops: tuple[float, float]
    half_elements: tuple[float, float]
    front: tuple[FrontPoint, ...]
    verification: Verification

    def code(self) -> str:
        """Returns the rules as Python, to be copied."""
        return rules_code(AutocastRules(operations=self.rules.operations), base="jt.MOSTLY_HALF")

    def to_json(self) -> dict[str, Any]:
        """Returns all of it as what JSON has; the rules as code."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        plain = {name: _plain(value) for name, value in fields.items() if name != "rules"}
        return {**plain, "code": self.code()}

    def __str__(self) -> str:
        kept = f"{len(self.entries)} entr{'y' if len(self.entries) == 1 else 'ies'} in float32"
        head = f"{kept} of {self.choices} that could be {self.dtype}; {self.trials} trials in {self.seconds:.1f} s"
        lines = [head if self.complete else f"{head}; not all of them may be needed: the search was stopped"]
        lines += [f"  {' '.join(e.primitives)}  {e.path}  {e.line}  {e.why}" for e in self.entries]
        (table, tuned), (table_elements, tuned_elements) = self.half_flops, self.half_elements
        lines.append(f"in half precision: {tuned:.1%} of the flops (torch's table: {table:.1%}),")
        lines.append(f"  {tuned_elements:.1%} of the elements of results (torch's table: {table_elements:.1%})")
        verdict = "holds" if self.verification.passed else "does not hold"
        lines.append(f"under autocast itself it {verdict}: {self.verification.errors}")
        return "\n".join(lines)


def _plain(value: Any) -> Any:
    """Returns dataclasses and tuples as dictionaries and lists, numbers that are not finite as None."""
    if dataclasses.is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Errors):
        return {name: _plain(item) for name, item in value._asdict().items()}
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
