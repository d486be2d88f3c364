import itertools
import json

import numpy as np
import pytest

from jmp_train.tools.aot.hlo import HloModule, Instruction, read_hlo
from jmp_train.tools.aot.hlo_products import Convolution, SpatialAxis, convolution, product

pytestmark = pytest.mark.quick


def program(result: str, call: str, *operands: str) -> tuple[HloModule, Instruction]:
    """Returns a program of one operation on parameters of these types, and the operation."""
    types = [*operands]
    parameters = "".join(f"  %p{i} = {type_} parameter({i})\n" for i, type_ in enumerate(types))
    names = ", ".join(f"%p{i}" for i in range(len(types)))
    line = f"  ROOT %out = {result} {call.replace('(', '(' + names, 1)}\n"
    found = read_hlo(f"ENTRY %main (p: f32[]) -> f32[] {{\n{parameters}{line}}}\n")
    return found, found.instructions["out"]


def gemm(target: str = "__cublas$gemm", batch: int = 0, escaped: bool = False, precision: object = None) -> str:
    dimensions = {"lhs_contracting_dimensions": [str(1 + batch)], "rhs_contracting_dimensions": [str(batch)]}
    text = json.dumps(
        {"gemm_backend_config": {"dot_dimension_numbers": dimensions, "precision_config": precision or {}}}
    )
    text = '"' + text.replace('"', '\\"') + '"' if escaped else text
    return f'custom-call(), custom_call_target="{target}", backend_config={text}'


def operations(result: str, call: str, *operands: str) -> tuple[str, int, bool]:
    found = product(*program(result, call, *operands))
    assert found is not None
    return found.dtype, found.operations, found.precision != "highest"


@pytest.mark.parametrize("escaped", [False, True])
@pytest.mark.parametrize("target", ["__cublas$gemm", "__cublas$lt$matmul", "__cublas$lt$matmul$f8"])
def test_products_of_cublas(target: str, escaped: bool) -> None:
    workspace = "(f16[6,7]{1,0}, s8[33554432]{0})"
    call = gemm(target, escaped=escaped)
    assert operations(workspace, call, "f16[6,5]{1,0}", "f16[5,7]{1,0}", "f16[7]{0}") == ("f16", 2 * 6 * 5 * 7, True)


DOT = "dot(), lhs_contracting_dims={1}, rhs_contracting_dims={0}"
BATCHED_DOT = "dot(), lhs_batch_dims={0}, lhs_contracting_dims={1,3}, rhs_batch_dims={0}, rhs_contracting_dims={2,1}"
PRODUCTS = {
    "a batch": (gemm(batch=1), "bf16[3,6,7]", ("bf16[3,6,5]", "bf16[3,5,7]"), ("bf16", 2 * 3 * 6 * 5 * 7)),
    "contracted axes": (BATCHED_DOT, "f32[2,7,9]", ("f32[2,3,7,5]", "f32[2,5,3,9]"), ("f32", 2 * 2 * 7 * 9 * 3 * 5)),
    "complex, four real ones": (DOT, "c64[6,7]", ("c64[6,5]", "c64[5,7]"), ("c64", 4 * 2 * 6 * 5 * 7)),
    "mixed, the wider dtype": (DOT, "f32[6,7]", ("s8[6,5]", "bf16[5,7]"), ("bf16", 2 * 6 * 5 * 7)),
    "no spatial axes": (
        "convolution(), dim_labels=bf_io->bf", "f32[4,8]", ("f32[4,6]", "f32[6,8]"), ("f32", 2 * 4 * 6 * 8),
    ),
}  # fmt: skip


@pytest.mark.parametrize(("call", "result", "operands", "wanted"), PRODUCTS.values(), ids=PRODUCTS)
def test_other_products(call: str, result: str, operands: tuple[str, str], wanted: tuple[str, int]) -> None:
    assert operations(result, call, *operands) == (*wanted, True)


@pytest.mark.parametrize(
    ("call", "dtype", "allow_tf32"),
    [
        (f"{DOT}, operand_precision={{default,default}}", "f32", True),
        (f"{DOT}, operand_precision={{high,high}}", "f32", True),
        (f"{DOT}, operand_precision={{highest,highest}}", "f32", False),
        (f"{DOT}, algorithm=dot_f32_f32_f32", "f32", False),
        (f"{DOT}, algorithm=dot_tf32_tf32_f32", "f32", True),
        (f"{DOT}, algorithm=dot_bf16_bf16_f32", "bf16", True),
        (gemm(precision={"operand_precision": ["DEFAULT", "DEFAULT"], "algorithm": "ALG_UNSET"}), "f32", True),
        (gemm(precision={"operand_precision": ["HIGHEST", "HIGHEST"], "algorithm": "ALG_UNSET"}), "f32", False),
        (
            gemm(precision={"operand_precision": ["DEFAULT", "DEFAULT"], "algorithm": "ALG_DOT_F32_F32_F32"}),
            "f32", False,
        ),
    ],
)  # fmt: skip
def test_precisions_that_allow_tf32(call: str, dtype: str, allow_tf32: bool) -> None:
    assert operations("f32[6,7]", call, "f32[6,5]", "f32[5,7]") == (dtype, 2 * 6 * 5 * 7, allow_tf32)


IMAGE, FILTER, OUT = "f16[4,9,9,6]", "f16[8,3,3,3]", "f16[4,5,5,8]"  # stride 2, padding 1, two groups
CUDNN = (
    "custom-call(), window={{size=3x3 stride=2x2 pad=1_1x1_1}}, dim_labels=b01f_o01i->b01f, feature_group_count=2, "
    'custom_call_target="__cudnn$conv{}"'
)


def strided_operations() -> int:
    """Returns the operations of that convolution by going through all of it in one dimension: 3 x 5 pairs less one."""
    pairs = sum(0 <= 2 * out + tap - 1 < 9 for out in range(5) for tap in range(3))
    assert pairs == 13
    return 2 * 4 * 8 * 3 * pairs**2


@pytest.mark.parametrize(
    ("kind", "result", "operands"),
    [
        ("Forward", OUT, (IMAGE, FILTER)),
        ("BiasActivationForward", OUT, (IMAGE, FILTER, "f16[8]")),
        ("ForwardGraph", OUT, (IMAGE, FILTER)),
        ("BackwardInput", IMAGE, (OUT, FILTER)),
        ("BackwardFilter", FILTER, (IMAGE, OUT)),
    ],
)
def test_convolutions_of_cudnn(kind: str, result: str, operands: tuple[str, ...]) -> None:
    """A convolution and its gradients multiply the same pairs of an input and an output element."""
    call = CUDNN.format(kind)
    assert operations(f"({result}{{3,2,1,0}}, u8[0]{{0}})", call, *operands) == ("f16", strided_operations(), True)


def test_a_dilated_convolution_that_xla_computes() -> None:
    call = "convolution(), window={size=3 pad=2_2 lhs_dilate=2 rhs_dilate=3}, dim_labels=bf0_io0->f0b"
    found = convolution(*program("f32[8,9,4]", call, "f32[4,6,5]", "f32[6,8,3]"))
    axis = SpatialAxis(length=5, size=3, outputs=9, padding=2, lhs_dilate=2, rhs_dilate=3)
    assert found == Convolution(spatial=(axis,), batch=4, channels=8, channels_in=6)


def test_pairs_of_taps_and_outputs() -> None:
    """Against convolving ones: the output says how many input elements each output meets."""
    for length, size, stride, padding, lhs, rhs in itertools.product((1, 5), (1, 4), (1, 3), (0, 3), (1, 2, 3), (1, 2)):
        dilated = np.zeros(padding + (length - 1) * lhs + 1 + padding, int)
        dilated[padding : len(dilated) - padding : lhs] = 1
        reach = (size - 1) * rhs + 1
        windows = [dilated[i : i + reach : rhs] for i in range(0, len(dilated) - reach + 1, stride)]
        places = {j for i in range(0, len(dilated) - reach + 1, stride) for j in range(i, i + reach, rhs)}
        shapes = Convolution((SpatialAxis(length, size, len(windows), stride, padding, lhs, rhs),), 1, 1, 1)
        assert shapes.operations == 2 * sum(window.sum() for window in windows)
        assert shapes.positions_read == sum(dilated[j] for j in places)


@pytest.mark.parametrize("call", ["add()", 'custom-call(), custom_call_target="__cub$DeviceRadixSort"'])
def test_other_instructions_are_no_products(call: str) -> None:
    assert product(*program("f32[6]", call, "f32[6]", "f32[6]")) is None
