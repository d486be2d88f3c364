"""Per-operation precision as a function transformation, like PyTorch's `torch.autocast`, and rules on trial."""

import contextlib
import contextvars
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr
from jax.typing import DTypeLike

from jmp_train.policies.autocasting.fp8 import DEFAULT_RECIPE, DelayedScales, DelayedScaling, Recipe
from jmp_train.policies.autocasting.interpreter import Autocast
from jmp_train.policies.autocasting.program_warnings import (
    is_at_risk,
    products_of,
    warn_of_convolutions,
    warn_of_products,
    warn_of_unmet,
)
from jmp_train.policies.autocasting.region import DECIDED, Region
from jmp_train.policies.autocasting.rules import FLOAT32_RULES, TORCH_CUDA, AutocastRules, Rule
from jmp_train.policies.autocasting.traced_calls import none_key_explained, run_traced
from jmp_train.policies.autocasting.values import argument
from jmp_train.policies.pytrees import check_flag, check_half, shown

Args = ParamSpec("Args")
Result = TypeVar("Result")

# A part of jit's cache keys, so that functions traced without the rules on trial are traced again.
_trial = jax.make_user_context(None)
_rounding = jax.make_user_context(None)
_SCALES: contextvars.ContextVar[DelayedScales | None] = contextvars.ContextVar("fp8 scales", default=None)


def autocast(
    fn: Callable[Args, Result],
    dtype: DTypeLike = jnp.float16,
    *,
    rules: AutocastRules = TORCH_CUDA,
    enabled: bool = True,
    fp8: Recipe = DEFAULT_RECIPE,
) -> Callable[Args, Result]:
    """Returns a function that runs each operation of `fn` in the precision that `rules` give it.

    Matrix products and convolutions run in half precision. Exponentials, sums, norms and losses run in float32. Other
    operations run in the dtype of their inputs. Autocast enters `jit`, `scan`, `while`, `cond`, `remat`, `shard_map`
    and custom rules, and composes with all transformations. Results have the dtypes that the rules give them, as in
    torch. The output dtype of a policy is applied afterwards.

    Args:
      fn: a pure function of arrays, such as a loss. It is traced, as by `jax.jit`, so its control flow must not depend
        on the arrays' values. Arguments that are not arrays are passed on.
      dtype: the half type, float16 or bfloat16.
      rules: a table with the precision of each operation.
      enabled: False runs `fn` unchanged, also within another region.
      fp8: the recipe of the products whose rule is "fp8", such as `Float8CurrentScaling`, or `DelayedScaling`, whose
        state `train_step` keeps. Such products have gradients, but no forward-mode or second derivatives.
        Their scales are those of whole arrays, also if `jit` splits these over devices; in `shard_map`, each device
        scales its own part.

    Returns:
      A function with the same signature. Regions nest; the innermost one decides.

    Raises:
      ValueError: `dtype` is not a half type.
      BannedOperationError: when called, `fn` runs an operation that the rules ban.

    Warns:
      Float32ProductsWarning: when first called or traced, more than a tenth of the flops of products are complex, or in
        operations that autocast cannot enter.
      InnerGradientWarning: when first called or traced, `fn` takes a gradient in float16; `scaled_grad` scales it.
      UnmetRulesWarning: when first called or traced, entries of `rules` apply to no operation of `fn`.
      CpuConvolutionWarning: `fn` has bfloat16 convolutions that this jaxlib may compute wrong on CPUs.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> f = autocast(lambda x, w: (x @ w, jax.nn.softmax(x @ w)))
      >>> product, probabilities = f(jnp.ones((2, 3)), jnp.ones((3, 4)))
      >>> product.dtype.name, probabilities.dtype.name
      ('float16', 'float32')

    An `astype(float32)` of a value that is float32 in the plain function leaves no trace in the program, so autocast
    ignores it. To run such code in float32, use a rule for its path or a region with `enabled=False`.

    Reference: https://docs.pytorch.org/docs/stable/amp.html; see `TORCH_CUDA` for the rules.
    """
    half = check_half(dtype, "dtype")
    if not callable(fn):
        raise TypeError(f"fn must be a function or a module, got {fn!r}")
    if not isinstance(rules, AutocastRules):
        raise TypeError(f"rules must be an AutocastRules, got {rules!r}")
    if not isinstance(fp8, Recipe):
        raise TypeError(f"fp8 must be a recipe, such as Float8CurrentScaling(), got {fp8!r}")
    if mark_of(fn) is not None:
        return fn  # the innermost region decides

    region = Region(half, rules, recipe=fp8)
    run = _Run()

    @functools.wraps(fn)
    def with_autocast(*args: Args.args, **kwargs: Args.kwargs) -> Result:
        with jax.named_scope(DECIDED):
            if not enabled:
                return fn(*args, **kwargs)
            with tried_rules(rules) as taken, none_key_explained(fn, args, kwargs):
                return run(dataclasses.replace(region, rules=taken), fn, args, kwargs)

    check_flag("enabled", enabled)
    mark = AutocastMark(with_autocast, fn, region if enabled else None)
    with_autocast.autocast_mark = mark  # pyright: ignore[reportAttributeAccessIssue]
    return with_autocast


@dataclasses.dataclass
class _Run:
    """Runs a function by the rules of a region; the first call warns of unmet rules and of products left in float32."""

    seen: bool = False

    def __call__(self, region: Region, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.seen and not (region.half == jnp.bfloat16 and is_at_risk()):
            return run_region(region, fn, args, kwargs)
        log, programs = [], []
        noting = dataclasses.replace(region, log=log, programs=programs, refused=[])
        result = run_region(noting, fn, args, kwargs)
        half, products = str(region.half), [product for decision in log for product in products_of(decision)]
        warn_of_convolutions(products)  # on every trace: their results may be garbage
        if self.seen:
            return result
        self.seen = True
        warn_of_unmet(noting)
        way = f'jt.apply_policy(fn, "mixed_{half}") around the function that is not entered casts its arguments.'
        warn_of_products(products, half, f"autocast to {half}", way=way, report="explain_autocast")
        return result


@dataclasses.dataclass(frozen=True)
class AutocastMark:
    """The attribute that `autocast` sets on the functions that it returns.

    Attributes:
      owner: the function that `autocast` returned. Decorators that copy attributes copy the mark, but not the owner.
      plain: the function passed to `autocast`.
      region: the region; None if autocast is not enabled.
    """

    owner: Callable[..., Any]
    plain: Callable[..., Any]
    region: Region | None


def mark_of(fn: Callable[..., Any]) -> AutocastMark | None:
    """Returns the mark of a function that `autocast` returned, None for other functions."""
    mark = getattr(fn, "autocast_mark", None)
    return mark if isinstance(mark, AutocastMark) and mark.owner is fn else None


def autocast_as(rule: Rule) -> Callable[[Callable[Args, Result]], Callable[Args, Result]]:
    """Returns a decorator that fixes the rule of all operations of a function within autocast regions.

    Args:
      rule: "float32" or "lower" for all its operations; "keep" for the dtypes of the plain function. "tf32", "tf32_x3"
        and others are float32 with faster matrix products; see `AutocastRules`.

    Returns:
      A decorator. Outside of autocast regions, it does not change the function.

    Raises:
      ValueError: `rule` is none of these.

    Example:
      >>> import jax.numpy as jnp
      >>> exact = autocast_as("float32")(lambda x, w: x @ w)
      >>> autocast(exact)(jnp.ones((2, 3)), jnp.ones((3, 4))).dtype.name
      'float32'
    """
    if not isinstance(rule, str) or rule not in ("lower", "keep", *FLOAT32_RULES):
        raise ValueError(f"rule={shown(rule)} must be 'lower', 'keep', or one of {', '.join(sorted(FLOAT32_RULES))}")

    def decorate(fn: Callable[Args, Result]) -> Callable[Args, Result]:
        @functools.wraps(fn)
        def with_rule(*args: Args.args, **kwargs: Args.kwargs) -> Result:
            with jax.named_scope(f"{DECIDED}:{rule}"):
                return fn(*args, **kwargs)

        return with_rule

    return decorate


def run_region(region: Region, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Returns `fn(*args, **kwargs)`, computed by the rules of a region."""
    delayed = _SCALES.get() if isinstance(region.recipe, DelayedScaling) else None

    def run(jaxpr: ClosedJaxpr, arrays: list[Any]) -> list[Any]:
        if region.programs is not None:
            region.programs.append(jaxpr)
        key = _next_key() if region.recipe.stochastic else None
        fresh = dataclasses.replace(region, constants={}, memory={}, delayed=delayed, key=key)
        return [value.array for value in Autocast(fresh).evaluate(jaxpr, list(map(argument, arrays)))]

    with fp8_scales(None):  # regions within get no scales
        return run_traced(run, fn, args, kwargs)


class _Rounding:
    """A random key and the number of regions that it was given to; part of jit's cache keys, by identity."""

    def __init__(self, key: jax.Array) -> None:
        self.key, self.regions = key, itertools.count()


def rounding_key(key: jax.Array | None) -> contextlib.AbstractContextManager[None]:
    """Gives a random key for stochastic rounding to the autocast regions that run within this context."""
    return _rounding(None if key is None else _Rounding(key))


def _next_key() -> jax.Array:
    rounding = _rounding.value
    return jax.random.key(0) if rounding is None else jax.random.fold_in(rounding.key, next(rounding.regions))


@contextlib.contextmanager
def fp8_scales(scales: DelayedScales | None) -> Iterator[None]:
    """Gives scales to the outermost autocast region that runs within this context.

    Args:
      scales: the scales of its products; None for no scales, as in a region within another.
    """
    token = _SCALES.set(scales)
    try:
        yield
    finally:
        _SCALES.reset(token)


@dataclasses.dataclass(frozen=True, eq=False)
class RulesTrial:
    """Rules on trial, and those of the regions that they were added to.

    Attributes:
      added: the entries that regions and half-precision policies add to their own rules.
      taken: the own rules of these regions and policies.
    """

    added: AutocastRules
    taken: list[AutocastRules] = dataclasses.field(default_factory=list)


@contextlib.contextmanager
def trying(added: AutocastRules) -> Iterator[RulesTrial]:
    """Traces the functions called within this context with further rules.

    Args:
      added: they precede the rules of each outermost region.
    """
    trial = RulesTrial(added)
    with _trial(trial):
        yield trial


def is_trying() -> bool:
    """Returns whether rules are on trial that no enclosing region has used."""
    return _trial.value is not None


@contextlib.contextmanager
def tried_rules(rules: AutocastRules) -> Iterator[AutocastRules]:
    """Yields the rules of a region with those on trial. Regions within it use their own.

    Args:
      rules: the rules of the region.
    """
    trial = _trial.value
    if trial is None:
        yield rules
        return
    trial.taken.append(rules)
    with _trial(None):
        yield rules.replace(**{f.name: dict(getattr(trial.added, f.name)) for f in dataclasses.fields(rules)})
