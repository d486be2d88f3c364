"""`Policy`: the dtypes of a function's parameters, computation, output and reductions; and policies per parameter."""

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import KeyPath
from jax.typing import DTypeLike

from jmp_train.policies.autocasting import (
    DEFAULT_RECIPE,
    HALVES,
    TORCH_CUDA,
    AutocastRules,
    Recipe,
    autocast,
    is_trying,
)
from jmp_train.policies.dtype_policies.float32_sums import with_float32_sums
from jmp_train.policies.pytrees import (
    cast_floating,
    cast_leaf,
    check_half,
    check_regexes,
    check_rules,
    float_dtype,
    is_float_array,
    named_leaves,
    parse_dtype,
    path_name,
    short_name,
    shortened,
)

Tree = TypeVar("Tree")
Args = ParamSpec("Args")
Result = TypeVar("Result")


_DTYPE_FIELDS = ("param_dtype", "compute_dtype", "output_dtype", "reduce_dtype")


@dataclasses.dataclass(frozen=True)
class Policy:
    """The dtypes of parameters, computation, output and gradient reductions; hashable.

    The fields are stored as NumPy dtypes, which compare equal to the scalar types and strings that
    they were created from. The casts only change floating jax and NumPy arrays (see `cast_to_full`).

    Args:
      param_dtype: dtype in which parameters are stored and updated.
      compute_dtype: dtype of activations and of the parameters' copy inside the function.
      output_dtype: dtype of the function's results.
      reduce_dtype: dtype in which gradients are averaged over devices; float32 by default.

    Raises:
      ValueError: a field is not a floating dtype; the message names it.

    Example:
      >>> import jax.numpy as jnp
      >>> policy = Policy(jnp.float32, jnp.float16, jnp.float32)
      >>> str(policy)
      'p=full,c=f16,o=full'
      >>> policy.cast_to_compute({"w": jnp.ones(3)})["w"].dtype.name
      'float16'

    Reference: jmp 0.0.4, `jmp.Policy`.
    """

    param_dtype: DTypeLike
    compute_dtype: DTypeLike
    output_dtype: DTypeLike
    reduce_dtype: DTypeLike = jnp.float32

    def __post_init__(self) -> None:
        for name in _DTYPE_FIELDS:
            object.__setattr__(self, name, float_dtype(getattr(self, name), name))

    def __str__(self) -> str:
        names = [short_name(jnp.dtype(getattr(self, name))) for name in _DTYPE_FIELDS]
        text = "p={},c={},o={}".format(*names[:3])
        return text if self.reduce_dtype == jnp.float32 else f"{text},r={names[3]}"

    @property
    def default(self) -> "Policy":
        """The policy of values that are not parameters: this one (see `PathPolicy.default`)."""
        return self

    def policy_of(self, path: str) -> "Policy":
        """Returns the policy of the parameter at `path`: this one (see `PathPolicy.policy_of`)."""
        del path
        return self

    def cast_to_param(self, x: Tree) -> Tree:
        """Returns `x` with its floating arrays in `param_dtype`."""
        return cast_floating(x, self.param_dtype)

    def cast_to_compute(self, x: Tree) -> Tree:
        """Returns `x` with its floating arrays in `compute_dtype`."""
        return cast_floating(x, dtype_of_arguments(self))

    def cast_to_output(self, x: Tree) -> Tree:
        """Returns `x` with its floating arrays in `output_dtype`."""
        return cast_floating(x, self.output_dtype)

    def transform(self, fn: Callable[Args, Result]) -> Callable[Args, Result]:
        """Returns `fn` as it runs between the casts (see `with_float32_sums` and `AutocastPolicy`)."""
        plain = with_float32_sums(fn)
        if self.compute_dtype not in HALVES:  # but the parameters may be, by path
            return plain

        def run(*args: Args.args, **kwargs: Args.kwargs) -> Result:
            return (autocast(fn, self.compute_dtype) if is_trying() else plain)(*args, **kwargs)

        return run

    def with_output_dtype(self, output_dtype: DTypeLike) -> "Policy":
        """Returns a copy of this policy with another `output_dtype`."""
        return dataclasses.replace(self, output_dtype=output_dtype)


@dataclasses.dataclass(frozen=True)
class AutocastPolicy(Policy):
    """A policy that runs functions under `autocast`, which casts parameters per operation, as needed.

    Args:
      param_dtype: see `Policy`.
      compute_dtype: the dtype in which arguments are passed to the function; usually float32.
      output_dtype: see `Policy`.
      reduce_dtype: see `Policy`.
      autocast_dtype: the half type, float16 or bfloat16.
      rules: see `autocast`.
      fp8: see `autocast`.

    Raises:
      ValueError: a field is not a floating dtype, or `autocast_dtype` is not a half type.

    Example:
      >>> import jax.numpy as jnp
      >>> policy = get_policy("autocast_float16")
      >>> fn = lambda x: (x @ x, jnp.exp(x))
      >>> [y.dtype.name for y in policy.transform(fn)(jnp.ones((2, 2)))]
      ['float16', 'float32']
      >>> from jmp_train import apply_policy
      >>> [y.dtype.name for y in apply_policy(fn, policy)(jnp.ones((2, 2)))]
      ['float32', 'float32']
    """

    autocast_dtype: DTypeLike = jnp.float16
    rules: AutocastRules = TORCH_CUDA
    fp8: Recipe = DEFAULT_RECIPE

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "autocast_dtype", check_half(self.autocast_dtype, "autocast_dtype"))

    def __str__(self) -> str:
        return f"{super().__str__()},a={short_name(jnp.dtype(self.autocast_dtype))}"

    def transform(self, fn: Callable[Args, Result]) -> Callable[Args, Result]:
        """Returns `autocast(fn)`."""
        return autocast(fn, self.autocast_dtype, rules=self.rules, fp8=self.fp8)


def dtype_of_arguments(policy: Policy) -> DTypeLike:
    """Returns the dtype to which a policy casts a function's arguments: float32 if autocast replaces the casts.

    Args:
      policy: the policy. One with a half compute dtype runs by autocast while rules are on trial.
    """
    return jnp.float32 if policy.compute_dtype in HALVES and is_trying() else policy.compute_dtype


_F32, _F16, _BF16 = jnp.float32, jnp.float16, jnp.bfloat16
_NAMED_POLICIES = {
    "mixed_float16": Policy(_F32, _F16, _F32),
    "mixed_bfloat16": Policy(_F32, _BF16, _F32),
    "autocast_float16": AutocastPolicy(_F32, _F32, _F32, autocast_dtype=_F16),
    "autocast_bfloat16": AutocastPolicy(_F32, _F32, _F32, autocast_dtype=_BF16),
}
_KEYS = ("params", "compute", "output", "reduce", "autocast")  # or their first letters
_FIELD_OF_KEY: dict[str, str] = dict(zip(_KEYS, (*_DTYPE_FIELDS, "autocast_dtype"), strict=True))
_FIELD_OF_KEY |= {key[0]: field for key, field in _FIELD_OF_KEY.items()}


def get_policy(policy_name: str) -> Policy:
    """Returns the policy for a name or a jmp policy string.

    Args:
      policy_name: one of
        * "mixed_float16", "mixed_bfloat16": float32 parameters and outputs, half computation;
        * "autocast_float16", "autocast_bfloat16": float32 parameters and outputs, and each
          operation in the precision that `autocast` chooses;
        * a dtype, such as "float32", "float16", "bf16" or "half": that dtype for all three;
        * "params=float32,compute=float16,output=float32", or the short form "p=f32,c=f16,o=f32".
          The defaults are float32 for the parameters, the parameters' dtype for computation and
          the compute dtype for the output. "reduce=" or "r=" sets `reduce_dtype`, by default float32;
          "autocast=" or "a=" creates an `AutocastPolicy`.

    Returns:
      The policy. `get_policy(str(policy)) == policy` holds for every policy, unless it has
      its own autocast rules.

    Raises:
      ValueError: an unknown name, key or dtype, a part that is not key=dtype, or two for the same dtype.

    Example:
      >>> str(get_policy("mixed_bfloat16"))
      'p=full,c=bf16,o=full'
      >>> get_policy("c=f16") == get_policy("params=float32,compute=float16,output=float16")
      True

    Reference: jmp 0.0.4, `jmp.get_policy`.
    """
    if not isinstance(policy_name, str):
        raise TypeError(f"policy_name must be a string, got {policy_name!r}")
    name = policy_name.strip()
    if name in _NAMED_POLICIES:
        return _NAMED_POLICIES[name]
    if "=" not in name:
        return _uniform_policy(name)
    fields: dict[str, np.dtype] = {}
    for part in name.split(","):
        field, dtype = _parse_part(part.strip(), policy_name)
        if field in fields:
            raise ValueError(f"{shortened(policy_name)} gives {field} more than once")
        fields[field] = dtype
    fields.setdefault("param_dtype", jnp.dtype(jnp.float32))
    fields.setdefault("compute_dtype", fields["param_dtype"])
    fields.setdefault("output_dtype", fields["compute_dtype"])
    autocast_dtype = fields.pop("autocast_dtype", None)
    policy = Policy(**fields)
    if autocast_dtype is None:
        return policy
    dtypes = (getattr(policy, name) for name in _DTYPE_FIELDS)
    return AutocastPolicy(*dtypes, autocast_dtype=autocast_dtype)


def _uniform_policy(name: str) -> Policy:
    try:
        dtype = parse_dtype(name)
    except ValueError as error:
        raise ValueError(f"{error}; or a policy: {', '.join(_NAMED_POLICIES)}, or 'params=...,compute=...'") from None
    return Policy(dtype, dtype, dtype)


def _parse_part(part: str, policy_name: str) -> tuple[str, np.dtype]:
    key, *values = (text.strip() for text in part.split("="))
    if len(values) != 1:
        wanted = "must have the form key=dtype"
        raise ValueError(f"{shortened(part)} in {shortened(policy_name)} {wanted}")
    if key not in _FIELD_OF_KEY:
        raise ValueError(
            f"Unknown key {shortened(key)} in {shortened(policy_name)} should be 'params', "
            "'compute', 'output', 'reduce' or 'autocast'."
        )
    return _FIELD_OF_KEY[key], parse_dtype(values[0])


@dataclasses.dataclass(frozen=True)
class PathPolicy:
    """A policy with rules for parameters and a default for everything else, from `policy_by_path`; hashable.

    `cast_to_param` and `cast_to_compute` take the tree of the parameters and follow the rules.
    Inputs and outputs have no parameter path: `apply_policy`, `scaled_value_and_grad` and
    `train_step` cast them by `default`.

    Args:
      rules: pairs of a regular expression and the policy of the parameters with matching paths.
      default: the policy of the other parameters, of inputs, of outputs and of reductions.

    Example:
      >>> PathPolicy((("norm", get_policy("float32")),), get_policy("float16")).output_dtype.name
      'float16'
    """

    rules: tuple[tuple[str, Policy], ...]
    default: Policy

    @property
    def output_dtype(self) -> DTypeLike:
        """The default's `output_dtype`."""
        return self.default.output_dtype

    @property
    def reduce_dtype(self) -> DTypeLike:
        """The default's `reduce_dtype`."""
        return self.default.reduce_dtype

    def policy_of(self, path: str) -> Policy:
        """Returns the policy of the parameter at `path`: that of the first matching rule."""
        return next((p for regex, p in self.rules if re.search(regex, path)), self.default)

    def cast_to_param(self, params: Tree) -> Tree:
        """Returns `params` with every floating array in its own `param_dtype`."""
        return self._cast(params, lambda policy: policy.param_dtype)

    def cast_to_compute(self, params: Tree) -> Tree:
        """Returns `params` with every floating array in its own `compute_dtype`."""
        return self._cast(params, dtype_of_arguments)

    def _cast(self, params: Tree, dtype_of: Callable[[Policy], DTypeLike]) -> Tree:
        self._check_rules(params)

        def cast(path: KeyPath, x: object) -> object:
            return cast_leaf(x, dtype_of(self.policy_of(path_name(path))))

        return jax.tree_util.tree_map_with_path(cast, params)

    def _check_rules(self, params: object) -> None:
        paths = [path for path, x in named_leaves(params) if is_float_array(x)]
        rules = [regex for regex, _ in self.rules]
        check_rules(rules, paths, "policy_by_path: {} found no floating parameter")


def policy_by_path(rules: Mapping[str, Policy | str], default: Policy | str = "mixed_float16") -> PathPolicy:
    """Returns a policy that depends on the parameters' paths, for example with norms in float32.

    A path looks like "layers/0/bias", both for the trees of linen, nnx, equinox and haiku and for plain
    dicts. `re.search` looks for each rule in it, in the order given; the first match wins.

    Args:
      rules: regular expression -> policy, or the name of one. A rule decides its parameters'
        stored and compute dtype; outputs and reductions follow the default.
      default: the policy for paths that match no rule.

    Returns:
      A policy for `apply_policy`, `scaled_value_and_grad` and `train_step`.

    Raises:
      TypeError: `rules` is not a mapping, a key is not a string, or a rule's value or `default` is not a policy.
      ValueError: a rule is not a regular expression, or has another `reduce_dtype` than the default.
        When the policy is applied to a tree: a rule matches no floating array (the paths are listed).

    Example:
      >>> import jax.numpy as jnp
      >>> params = {"dense": {"w": jnp.ones(2)}, "norm": {"scale": jnp.ones(2)}}
      >>> policy = policy_by_path({"norm": "float32"}, default="mixed_bfloat16")
      >>> cast = policy.cast_to_compute(params)
      >>> cast["dense"]["w"].dtype.name, cast["norm"]["scale"].dtype.name
      ('bfloat16', 'float32')
    """
    check_regexes(rules)
    default_policy = _policy_of("default", default)
    pairs = []
    for regex, rule in rules.items():
        policy = _policy_of(f"rule {regex!r}", rule)
        if isinstance(policy, AutocastPolicy):
            raise ValueError(f"rule {regex!r} is an autocast policy; only the default can autocast")
        if policy.reduce_dtype != default_policy.reduce_dtype:
            raise ValueError(
                f"rule {regex!r} has reduce_dtype {policy.reduce_dtype} and the default "
                f"{default_policy.reduce_dtype}; all gradients must be reduced in one dtype"
            )
        pairs.append((regex, policy))
    return PathPolicy(tuple(pairs), default_policy)


def named_policy(policy: object, name: str = "policy") -> Policy | PathPolicy:
    """Returns the policy for a policy or a name.

    Args:
      policy: a policy, or the name of one.
      name: the argument's name, for messages.

    Raises:
      TypeError: `policy` is neither a policy nor a name.
      ValueError: there is no policy of that name.

    Example:
      >>> named_policy("float16") == get_policy("float16")
      True
    """
    if isinstance(policy, str):
        return get_policy(policy)
    if not isinstance(policy, Policy | PathPolicy):
        raise TypeError(f"{name} must be a Policy, a PathPolicy or a name such as 'autocast_float16', got {policy!r}")
    return policy


def _policy_of(what: str, policy: Policy | str) -> Policy:
    if isinstance(policy, str):
        return get_policy(policy)
    if not isinstance(policy, Policy):
        raise TypeError(f"{what} must be a Policy or the name of one, got {policy!r}")
    return policy
