"""The list of faults in `planted_faults.toml` keeps up with the modules that it changes."""

import ast
from pathlib import Path

import pytest
from mutations import CHECK_OF_THE_LIST, MUTATIONS, ROOT, Mutation

pytestmark = pytest.mark.quick


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_a_fault_can_still_be_planted(mutation: Mutation) -> None:
    planted = compile(mutation.source(), mutation.file, "exec", ast.PyCF_ONLY_AST)
    assert ast.dump(planted) != ast.dump(ast.parse((ROOT / mutation.file).read_text()))
    assert (ROOT / mutation.mirror).exists()


def test_what_cannot_be_planted_is_named() -> None:
    with pytest.raises(ValueError, match=r"'none': its old text is 0 times in Makefile"):
        Mutation("none", "Makefile", "no such text", "", "tests").source()


def test_names_differ_and_this_file_is_left_out_of_mutated_copies() -> None:
    assert len({mutation.name for mutation in MUTATIONS}) == len(MUTATIONS) == 20
    assert Path(__file__) == ROOT / CHECK_OF_THE_LIST
