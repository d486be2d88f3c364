import pytest

from jmp_train.tools.aot.hlo import ArrayType, array_types, split_outside, tuple_types

pytestmark = pytest.mark.quick


@pytest.mark.parametrize(
    ("dtype", "n_bytes"),
    [("pred", 6), ("s4", 3), ("f8e4m3fn", 6), ("bf16", 12), ("f32", 24), ("c128", 96)],
)
def test_bytes_come_from_the_name_of_the_dtype(dtype: str, n_bytes: int) -> None:
    (array,) = array_types(f"{dtype}[2,3]{{1,0:T(8,128)(2,1)S(1)}}")
    assert array == ArrayType(dtype, (2, 3))
    assert (array.size, array.n_bytes) == (6, n_bytes)


@pytest.mark.parametrize(
    ("type_", "stored"),
    [
        ("f32[1000,500]{1,0:T(8,128)}", 4 * 1000 * 512),  # sizes that libtpu has assigned
        ("f32[500,3]{0,1:T(4,128)S(1)}", 4 * 512 * 4),
        ("bf16[128,3]{0,1:T(4,128)(2,1)}", 2 * 128 * 4),
        ("f32[]{:T(128)}", 512),
        ("f32[10]{0:T(128)}", 512),
        ("bf16[10,1000,3]{2,1,0:T(8,128)(2,1)}", 2 * 10 * 1000 * 128),
        ("f32[1000,500]{1,0}", 4 * 1000 * 500),  # GPUs have no tiles
    ],
)
def test_tpus_store_whole_tiles(type_: str, stored: int) -> None:
    (array,) = array_types(type_)
    assert array.stored_bytes == stored


def test_memories_of_a_tpu_core_are_not_the_main_one() -> None:
    types = ("f32[8]{0:T(128)}", "f32[8]{0:T(128)S(1)}", "s32[]{:T(128)S(6)}", "f32[8]{0}", "f32[8]{0:S(1)}")
    found = [array_types(type_)[0].is_in_main_memory for type_ in types]
    assert found == [True, False, False, True, True], "on GPUs, S(1) is memory of collectives"


def test_dynamic_lengths_count_as_their_bounds_and_tokens_are_no_arrays() -> None:
    type_ = "((s32[], token[]), /*index=1*/f32[<=8,4]{1,0}, u8[0]{0})"
    assert array_types(type_) == (ArrayType("s32", ()), ArrayType("f32", (8, 4)), ArrayType("u8", (0,)))
    assert tuple_types(type_) == ("(s32[], token[])", "f32[<=8,4]{1,0}", "u8[0]{0}")
    assert tuple_types("f32[8,4]{1,0}") == ("f32[8,4]{1,0}",)
    assert tuple_types("()") == ()


def test_a_text_is_split_outside_of_brackets_and_strings() -> None:
    text = r'a={x, "}, "}, b="\", {", c=(1, 2), d={{0, 1}, {2, 3}}, e'
    assert list(split_outside(text)) == [r'a={x, "}, "}', r'b="\", {"', "c=(1, 2)", "d={{0, 1}, {2, 3}}", "e"]
