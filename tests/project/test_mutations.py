"""The faults of `planted_faults.toml` keep up with the modules that they change."""

import ast

import pytest
from mutate import ROOT, _planted, planted_faults

pytestmark = pytest.mark.quick


def test_each_fault_can_still_be_planted() -> None:
    faults = planted_faults()
    assert len({fault.planted_line for fault in faults}) == len(faults) == 20
    for fault in faults:
        text = (ROOT / fault.file).read_text()
        planted = compile(fault.planted(text), fault.file, "exec", ast.PyCF_ONLY_AST)
        assert ast.dump(planted) != ast.dump(ast.parse(text)), fault


def test_what_cannot_be_planted_is_named() -> None:
    with pytest.raises(ValueError, match=r"'none': its old text is 0 times in Makefile"):
        _planted("none", "Makefile", "no such text", "")
