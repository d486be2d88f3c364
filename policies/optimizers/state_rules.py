"""The stored dtypes of an optimizer's arrays: by the states' fields, or by paths."""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.tree_util import GetAttrKey, KeyPath
from jax.typing import DTypeLike

from jmp_train.policies.pytrees import check_regexes, dtype_name, is_float_array, path_name
from jmp_train.policies.quantizing import BLOCK_DTYPES, BlockQuantized
from jmp_train.policies.types import Params, PyTree

_DTYPES = ("bfloat16", "float16", *BLOCK_DTYPES)


@dataclasses.dataclass(frozen=True)
class StateRules:
    """The rules of `with_state_dtypes`.

    Args:
      rules: pairs of a field's name, or a regular expression, and a dtype's name.
      block_size: largest number of elements per block.
      min_size: arrays of fewer elements stay unchanged.

    Example:
      >>> StateRules.of({"nu": "bfloat16"}, 256, 4096).rules
      (('nu', 'bfloat16'),)
    """

    rules: tuple[tuple[str, str], ...]
    block_size: int
    min_size: int

    @classmethod
    def of(cls, dtypes: Mapping[str, DTypeLike], block_size: int, min_size: int) -> "StateRules":
        """Returns the rules of a user; raises TypeError or ValueError if they are invalid."""
        check_regexes(dtypes)
        for argument, value in (("block_size", block_size), ("min_size", min_size)):
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{argument}={value!r} must be a whole number above 0")
        return cls(tuple((name, _dtype_name(name, dtype)) for name, dtype in dtypes.items()), block_size, min_size)

    def dtype_of(self, path: KeyPath, x: object, owners: "Owners") -> str | None:
        """Returns the name of the stored dtype of an array of the state; None for one that stays unchanged.

        Args:
          path: its path in the state.
          x: the array, in stored form or in float32.
          owners: the paths of the parameters.
        """
        size = x.codes.size if isinstance(x, BlockQuantized) else x.size if is_float_array(x) else 0
        return self._rule(path, owners) if size >= self.min_size else None

    def check(self, state: PyTree, params: Params) -> None:
        """Raises ValueError if a rule matches no array of an optimizer's first state, or one that is not float32."""
        if not jax.tree_util.tree_leaves(params):  # optax.tree_map_params has placeholders in place of parameters
            return
        owners = Owners(params)
        leaves = [(path, x) for path, x in state_leaves(state) if not _is_integer(x)]
        for number, (name, _) in enumerate(self.rules):
            alone = dataclasses.replace(self, rules=self.rules[number : number + 1])
            if not any(alone._rule(path, owners) for path, _ in leaves):
                fields = sorted({field for path, _ in leaves for field in owners.fields(path)})
                raise ValueError(
                    f"with_state_dtypes: {name!r} matches no floating array of the optimizer's state; the fields are "
                    f"{', '.join(fields) or '(none)'}, and the paths are:\n  "
                    + "\n  ".join([path_name(path) for path, _ in leaves] or ["(none)"])
                )
        for path, x in leaves:
            dtype = self.dtype_of(path, x, owners)
            kept = "in blocks" if isinstance(x, BlockQuantized) else getattr(x, "dtype", None)
            if dtype is not None and kept != jnp.float32:
                raise ValueError(
                    f"with_state_dtypes: {path_name(path)!r} of the optimizer's state is already {kept} and cannot "
                    f"become {dtype}; set its dtype only once, here or in the optimizer (mu_dtype, accumulator_dtype)"
                )

    def _rule(self, path: KeyPath, owners: "Owners") -> str | None:
        fields, name = owners.fields(path), path_name(path)
        return next(
            (
                dtype
                for rule, dtype in self.rules
                if (rule in fields if rule.isidentifier() else re.search(rule, name) is not None)
            ),
            None,
        )


class Owners:
    """Finds the parameter of an array in the state: the path of the array ends with that of its parameter."""

    def __init__(self, params: Params) -> None:
        """Takes the parameters, or their gradients."""
        self._paths = {path for path, _ in jax.tree_util.tree_leaves_with_path(params)}

    def fields(self, path: KeyPath) -> list[str]:
        """Returns the names of the fields on the path of an array, without those of the parameter's own path."""
        return [key.name for key in path[: self._start(path)] if isinstance(key, GetAttrKey)]

    def name_without_numbers(self, path: KeyPath) -> str:
        """Returns the name of the parameter to which an array belongs, or of the array, without digits."""
        start = self._start(path)
        return re.sub(r"\d+", "", path_name(path[start:] or path))

    def _start(self, path: KeyPath) -> int:
        """Returns the position at which the parameter's own path begins in that of an array."""
        return next((start for start in range(len(path) + 1) if path[start:] in self._paths), len(path))


def state_leaves(state: PyTree) -> list[tuple[KeyPath, Any]]:
    """Returns the paths and leaves of an optimizer's state, with quantized arrays as leaves."""
    return jax.tree_util.tree_leaves_with_path(state, is_leaf=is_quantized)


def is_quantized(x: object) -> bool:
    """Returns whether a part of a state is a quantized array."""
    return isinstance(x, BlockQuantized)


def with_blocks(state: PyTree) -> Any:
    """Returns a state with quantized arrays restored from mappings of their fields, as from flax nnx or a checkpoint.

    Args:
      state: an optimizer's state, without variables of nnx.
    """

    def as_blocks(x: Any) -> Any:
        return BlockQuantized(x["codes"], x["scales"]) if _has_fields_of_blocks(x) else x

    return jax.tree_util.tree_map(as_blocks, state, is_leaf=_has_fields_of_blocks)


def with_blocks_as_in(state: PyTree, old: PyTree) -> Any:
    """Returns a state with quantized arrays in the same form as in the old one, the inverse of `with_blocks`.

    Args:
      state: an optimizer's next state.
      old: the state passed to the optimizer.
    """
    before, structure = jax.tree_util.tree_flatten(old, is_leaf=lambda x: is_quantized(x) or _has_fields_of_blocks(x))
    if not any(map(_has_fields_of_blocks, before)):
        return state
    kinds: list[Any] = [type(x) if _has_fields_of_blocks(x) else None for x in before]
    leaves = jax.tree_util.tree_leaves(state, is_leaf=is_quantized)
    return structure.unflatten([kind(x._asdict()) if kind else x for kind, x in zip(kinds, leaves, strict=True)])


def _has_fields_of_blocks(x: Any) -> bool:
    if not isinstance(x, Mapping) or set(x) != set(BlockQuantized._fields):
        return False
    return str(getattr(x["codes"], "dtype", None)) in BLOCK_DTYPES  # excludes moments of parameters with these names


def _is_integer(x: object) -> bool:
    return hasattr(x, "dtype") and not jnp.issubdtype(x.dtype, jnp.floating)  # pyright: ignore


def _dtype_name(name: str, dtype: DTypeLike) -> str:
    found = dtype_name(dtype)
    if found is None or found not in _DTYPES:
        raise ValueError(f"dtypes[{name!r}]={dtype!r} must be one of {', '.join(_DTYPES)}")
    return found
