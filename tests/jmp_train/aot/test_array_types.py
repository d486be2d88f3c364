import pytest

from jmp_train.aot.array_types import ArrayType, array_types, split_outside, tuple_types

pytestmark = pytest.mark.quick


@pytest.mark.parametrize(
    ("dtype", "n_bytes"),
    [("pred", 6), ("s4", 3), ("f8e4m3fn", 6), ("bf16", 12), ("f32", 24), ("c128", 96)],
)
def test_bytes_come_from_the_name_of_the_dtype(dtype: str, n_bytes: int) -> None:
    (array,) = array_types(f"{dtype}[2,3]{{1,0:T(8,128)(2,1)S(1)}}")
    assert array == ArrayType(dtype, (2, 3))
    assert (array.size, array.n_bytes) == (6, n_bytes)


def test_dynamic_lengths_count_as_their_bounds_and_tokens_are_no_arrays() -> None:
    type_ = "((s32[], token[]), /*index=1*/f32[<=8,4]{1,0}, u8[0]{0})"
    assert array_types(type_) == (ArrayType("s32", ()), ArrayType("f32", (8, 4)), ArrayType("u8", (0,)))
    assert tuple_types(type_) == ("(s32[], token[])", "f32[<=8,4]{1,0}", "u8[0]{0}")
    assert tuple_types("f32[8,4]{1,0}") == ("f32[8,4]{1,0}",)
    assert tuple_types("()") == ()


def test_a_text_is_split_outside_of_brackets_and_strings() -> None:
    text = r'a={x, "}, "}, b="\", {", c=(1, 2), d={{0, 1}, {2, 3}}, e'
    assert list(split_outside(text)) == [r'a={x, "}, "}', r'b="\", {"', "c=(1, 2)", "d={{0, 1}, {2, 3}}", "e"]
