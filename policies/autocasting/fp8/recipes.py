"""All recipes by name."""

from collections.abc import Mapping

from jmp_train.policies.autocasting.fp8.blockwise import Float8BlockScaling, MXFP8BlockScaling
from jmp_train.policies.autocasting.fp8.nvfp4 import NVFP4BlockScaling
from jmp_train.policies.autocasting.fp8.per_tensor import DelayedScaling, Float8CurrentScaling
from jmp_train.policies.autocasting.fp8.protocol import Recipe
from jmp_train.policies.autocasting.fp8.rowwise import Float8RowwiseScaling, Int8RowwiseScaling

RECIPES: Mapping[str, type[Recipe]] = {
    recipe.__name__: recipe
    for recipe in (
        *(Float8CurrentScaling, DelayedScaling, Float8RowwiseScaling, Float8BlockScaling),
        *(MXFP8BlockScaling, NVFP4BlockScaling, Int8RowwiseScaling),
    )
}
DEFAULT_RECIPE = Float8CurrentScaling()
