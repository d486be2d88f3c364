"""Policies per parameter: regular expressions over the paths of a tree."""

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import TypeVar

import jax
from jax.tree_util import KeyPath
from jax.typing import DTypeLike

from jmp_train.policies.dtype_policies.policy import AutocastPolicy, Policy, dtype_of_arguments, get_policy
from jmp_train.policies.pytrees import cast_leaf, check_regexes, check_rules, is_float_array, named_leaves, path_name

Tree = TypeVar("Tree")


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
