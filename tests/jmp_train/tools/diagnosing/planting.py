"""`Fault`: a row of the table of planted faults, and `Way`: how its model runs, as planted, mended or in float32."""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax

import jmp_train as jt
from jmp_train.tools.diagnosing.remedies import Action

Case = tuple[Callable[..., Any], tuple[Any, ...]]
Standing = Literal["first", "nearly", "wrong", "quiet"]


@dataclasses.dataclass(frozen=True)
class Way:
    """How a model runs.

    Attributes:
      dtype: the half type.
      rules: it runs under autocast with these; None: all of it is half.
      value: takes the place of the planted epsilon, mask fill or loss scale.
      exact: it runs in float32.
      full_state: parameters and state in half are float32, by master weights or as such.
    """

    dtype: str
    rules: jt.AutocastRules | None = None
    value: float | None = None
    exact: bool = False
    full_state: bool = False

    @property
    def policy(self) -> Any:
        """The policy of a train step."""
        full = jnp.float32
        if self.exact:
            return jt.get_policy("float32")
        if self.rules is None:
            return jt.Policy(full, jnp.dtype(self.dtype), full)
        return jt.AutocastPolicy(full, full, full, autocast_dtype=jnp.dtype(self.dtype), rules=self.rules)

    @property
    def state_dtype(self) -> Any:
        """The dtype of parameters and state where they are planted in half."""
        return jnp.dtype("float32" if self.exact or self.full_state else self.dtype)

    def run(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a function under the policy."""
        return jt.apply_policy(fn, self.policy)

    def gradients(self, loss_fn: Callable[..., Any]) -> Callable[..., Any]:
        """Returns what computes the loss and the gradients of the first argument."""
        return jax.value_and_grad(self.run(loss_fn))

    def number(self, planted: float) -> float:
        """Returns the planted number, or what is to be taken in its place."""
        return planted if self.value is None else self.value

    def state(self, tree: Any) -> Any:
        """Returns arrays in the dtype of the state."""
        return jax.tree.map(lambda x: x.astype(self.state_dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x, tree)

    def training(
        self, loss_fn: Callable[..., Any], params: Any, batch: Any, scale: jt.LossScale | None = None
    ) -> tuple[Any, tuple[Any, ...]]:
        """Returns a train step with its arguments: gradient descent, with a loss scale if there is one."""
        optimizer: Any = optax.sgd(0.1, momentum=0.9)
        if scale is not None:
            optimizer = jt.with_loss_scale(optimizer, scale)
        step = jt.train_step(jt.stateless(loss_fn), optimizer, policy=self.policy)
        return step, (jt.TrainState.create(params, optimizer), batch)


@dataclasses.dataclass(frozen=True)
class Fault:
    """A line of a model that half precision harms; it ends with `# fault: ` and the name.

    Attributes:
      name: of the fault.
      kind: of the problem to be reported.
      library: in whose style the model is written.
      build: makes the function and its arguments, given a way to run it.
      dtype: the half type.
      direction: of the pass in which the fault is.
      where: what holds the line: "scan", "remat", ...
      action: of the remedy to be proposed.
      applied: what of the remedy the test takes, "rules" or its "value"; of a "state" remedy its dtype.
      steps: how many are diagnosed.
      tolerance: of the mended results, relative to those in float32.
      autocast: it is planted in a function under autocast; otherwise all of it is half.
      named: "first", "nearly": another line is named before it; "wrong": only others are; "quiet": nothing is.
      mended: whether one report mends it: no problem is left, and the results are right.
      quick: whether it is in the quick ring.
    """

    name: str
    kind: str
    library: str
    build: Callable[[Way], Case]
    dtype: str = "float16"
    direction: str = "forward"
    where: str = "plain"
    action: Action = "rules"
    applied: Literal["rules", "value", "state"] = "rules"
    steps: int = 1
    tolerance: float = 0.02
    autocast: bool = False
    named: Standing = "first"
    mended: bool = True
    quick: bool = False

    def __str__(self) -> str:
        return f"{self.name}-{self.library}-{self.where}-{self.dtype}".replace(" ", "_")

    @property
    def planted(self) -> Way:
        """The way in which it is found."""
        return Way(self.dtype, rules=jt.TORCH_CUDA if self.autocast else None)

    def by_remedy(self, report: jt.tools.NumericsReport) -> Way:
        """Returns the way with the remedy of the report's first problem applied as it is."""
        match self.applied:
            case "rules":
                return Way(self.dtype, rules=report.rules)
            case "value":
                return Way(self.dtype, value=report.problems[0].remedy.value)
            case "state":
                return Way(self.dtype, full_state=True)


SCALE: Any = {"direction": "backward", "action": "loss scale", "applied": "value"}
STATE: Any = {"direction": "update", "action": "state", "applied": "state"}


def harmful(report: jt.tools.NumericsReport) -> list[jt.tools.Problem]:
    """Returns the problems of a report that are no notes."""
    return [problem for problem in report.problems if problem.severity == "problem"]


def values(*shape: int, scale: float = 1.0, seed: int = 0) -> jax.Array:
    """Returns normal numbers of a shape, in float32."""
    return scale * jax.random.normal(jax.random.key(seed), shape)


def mean_square(x: Any) -> jax.Array:
    """Returns a loss of few operations that lose nothing."""
    return jnp.mean(jnp.square(x.astype(jnp.float32)))
