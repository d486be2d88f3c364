"""Rules of autocast with any names that hypothesis thinks of: quotes, backslashes, line ends, control characters.

Primitives are some of jax's own.
"""

import dataclasses
import re
from typing import get_args

from hypothesis import strategies as st

import jmp_train as jt
from jmp_train.policies.autocasting import Rule

_NAMES = st.text() | st.text("\"'\\\n\r\t\0\x1b\x7f\x85\u2028\u202e#[]{}=, ae\U0001f600")
_EXPRESSIONS = _NAMES.map(re.escape) | st.sampled_from([r"a\.b\d+$", "['\"]", "\\\\", r"\"", "", "(?x) a # b\n"])
_PRIMITIVE_RULES = st.sampled_from([rule for rule in get_args(Rule) if rule != "fp8"])  # of dot_general only
_RULES = st.sampled_from(get_args(Rule))
_PRIMITIVES = st.sampled_from(["exp", "scatter-add", "dot_general", "erf_inv", "reduce_window_sum", "add", "top_k"])
_KEYS = {"paths": _EXPRESSIONS, "operations": _EXPRESSIONS, "primitives": _PRIMITIVES}
_VALUES = {"banned": _NAMES, "primitives": _PRIMITIVE_RULES}


def any_rules() -> st.SearchStrategy[jt.AutocastRules]:
    """Returns a strategy of rules, no name twice in a table."""
    tables = {
        field.name: st.lists(
            st.tuples(_KEYS.get(field.name, _NAMES), _VALUES.get(field.name, _RULES)),
            unique_by=lambda pair: pair[0],
            max_size=4,
        ).map(tuple)
        for field in dataclasses.fields(jt.AutocastRules)
    }
    return st.builds(jt.AutocastRules, **tables)
