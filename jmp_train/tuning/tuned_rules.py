"""`TunedRules`: what tuning has found, and what speaks for it."""

import dataclasses
from typing import Any

from jmp_train.policies.autocasting import AutocastRules, rules_code
from jmp_train.policies.documents import as_json
from jmp_train.tuning.evidence import Float32Entry, FrontPoint, Verification
from jmp_train.tuning.page import tuning_page, tuning_table
from jmp_train.tuning.tolerance import Tolerance


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
      chosen: what was found, as the trials saw it; None if the search was stopped before it tried anything that passes.
      verification: by autocast itself.
      steps_taken: how many steps of training the least trained state among the examples had behind it; None if they
        have no state that counts them.

    Example:
      >>> import jax.numpy as jnp, jmp_train as jt
      >>> w, x = jnp.full((2, 2), 0.5), jnp.full((2, 2), 300.0)
      >>> tuned = jt.tune(lambda w, x: jnp.sqrt((x @ w) ** 2).mean(), [(w, x)])
      >>> tuned.entries[0].primitives, tuned.entries[0].why
      (('integer_pow',), '50% of its values overflow; without it: not finite')
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
    chosen: FrontPoint | None
    verification: Verification
    steps_taken: int | None = None

    def code(self) -> str:
        """Returns the rules as Python, to be copied."""
        added = AutocastRules(operations=self.rules.operations)
        return rules_code(added, base="jt.MOSTLY_HALF") or "rules = jt.MOSTLY_HALF"

    def to_json(self) -> dict[str, Any]:
        """Returns all of it as what JSON has; the rules as code."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return as_json({name: value for name, value in fields.items() if name != "rules"} | {"code": self.code()})

    def to_html(self, title: str = "Tuned rules") -> str:
        """Returns all of it as an HTML page that needs no network: what stays in float32, the rules as code, pictures.

        Args:
          title: of the page, such as what was tuned.

        Example:
          >>> import pathlib, tempfile
          >>> import jax.numpy as jnp, jmp_train as jt
          >>> tuned = jt.tune(lambda w, x: jnp.sqrt((x @ w) ** 2), [(jnp.eye(3), jnp.full((3, 3), 300.0))])
          >>> file = pathlib.Path(tempfile.mkdtemp()) / "tuned.html"
          >>> file.write_text(tuned.to_html("a norm"), encoding="utf-8") > 1000
          True
        """
        return tuning_page(title, self._summary, self._note, self)

    def _repr_html_(self) -> str:
        return tuning_table(self._summary, self._note, self)

    @property
    def _summary(self) -> str:
        kept = f"{len(self.entries)} entr{'y' if len(self.entries) == 1 else 'ies'} in float32"
        head = f"{kept} of {self.choices} that could be {self.dtype}; {self.trials} trials in {self.seconds:.1f} s"
        return head if self.complete else f"{head}; not all of them may be needed: the search was stopped"

    @property
    def _note(self) -> str:
        """What the reader should know of the examples; empty if nothing."""
        if self.steps_taken != 0:
            return ""
        return "the examples' state is from before the first step of training: tune again after some hundred steps"

    def __str__(self) -> str:
        (table, tuned), (table_elements, tuned_elements) = self.half_flops, self.half_elements
        lines = [
            self._summary,
            *(f"  {entry}" for entry in self.entries),
            f"in half precision: {tuned:.1%} of the flops (torch's table: {table:.1%}),",
            f"  {tuned_elements:.1%} of the elements of results (torch's table: {table_elements:.1%})",
            self.verification.verdict,
            self._note,
        ]
        return "\n".join(filter(None, lines))
