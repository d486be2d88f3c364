"""Rules of autocast: immutable tables of operations and precisions, including those of torch and Apex.

A rule is one of these words:

* `lower`: floating inputs become the half type, and so does the result;
* `float32`: floating inputs and the result become float32. Products and their gradients compute in float32 on every
  device (`precision=HIGHEST`), unless the code or `jax_default_matmul_precision` requests another precision;
* `tf32`, `tf32_x3`, `bf16_x3`, `bf16_x6`, `bf16_x9`: as `float32`, with matrix products that a device computes faster;
  see `PRESETS`. `tf32` is jax's default: TF32 on GPUs, one pass in bfloat16 on TPUs, float32 on CPUs;
* `promote`: floating inputs become the highest-precision type among them;
* `demote`: floating inputs become the half type if one of them is of that type, and stay as they are otherwise;
  literals and integers that half cannot hold keep them in float32, and scalars are promoted;
* `fp8`: the matrix products of layers and their gradients multiply in 8 or 4 bits by autocast's recipe: those without
  batch dimensions, ragged ones, and those with batch dimensions of which one operand is a weight. Others with batch
  dimensions, such as attention's, are `lower` unless `operations` names them; so are convolutions unless the recipe
  has one scale per tensor. Other operations in a path or function have the rule that they would have without this one;
* `keep`: the traced dtypes, which are those of the plain function for float32 inputs.

Operations that no table names are promoted if they are elementwise or move data, and kept otherwise.

Tables are written and read as TOML files, arrays of [name, rule] pairs in order, and written as Python code to copy.
"""

import dataclasses
import re
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self, get_args

from jax import lax

from jmp_train.policies.autocasting.known_names import check_function, check_primitive
from jmp_train.policies.files import escaped, read_toml, write_atomically
from jmp_train.policies.pytrees import checked_path, shown

Rule = Literal[
    "lower", "float32", "promote", "demote", "keep", "fp8", "tf32", "tf32_x3", "bf16_x3", "bf16_x6", "bf16_x9"
]
PRESETS = {
    "tf32_x3": lax.DotAlgorithmPreset.TF32_TF32_F32_X3,
    "bf16_x3": lax.DotAlgorithmPreset.BF16_BF16_F32_X3,
    "bf16_x6": lax.DotAlgorithmPreset.BF16_BF16_F32_X6,
    "bf16_x9": lax.DotAlgorithmPreset.BF16_BF16_F32_X9,
}
"""Sums of 3, 6 or 9 products of parts of the operands, for `dot_general` only; other products are float32.

CPUs and TPUs have no `tf32_x3` and `bf16_x9`, and compute float32 instead.
"""
# The primitives that the rule "fp8" may name.
FEW_BITS_PRODUCTS = "dot_general", "ragged_dot_general", "conv_general_dilated"
_RULED = "primitives", "functions", "paths", "operations"
FLOAT32_RULES = frozenset(("float32", "tf32", *PRESETS))


def kind_of(rule: Rule | None) -> Rule | None:
    """Returns a rule, "float32" for all rules by which operations other than products are float32."""
    return "float32" if rule in FLOAT32_RULES else rule


def _is_pair(pair: object) -> bool:
    return isinstance(pair, tuple | list) and len(pair) == 2 and all(isinstance(text, str) for text in pair)


@dataclasses.dataclass(frozen=True)
class AutocastRules:
    """An immutable, hashable table of rules; entries for operations precede paths, functions and primitives.

    Args:
      primitives: (name of a jax primitive, rule) pairs, such as ("dot_general", "lower").
      functions: (name of a jitted function, rule) pairs, such as ("logsumexp", "float32"). `lower` and `float32` apply
        to every operation of the function. The name of one of jax's modules, such as "jax.numpy.linalg", stands for all
        functions of that module that jax compiles or gives a custom derivative.
      paths: (regular expression, rule) pairs, searched in the path of modules and `jax.named_scope`, such as
        ("decoder/attention", "float32"). The first match applies.
      banned: (name of a primitive or a jitted function, advice) pairs.
      operations: (regular expression, rule) pairs, searched in the address of a single operation,
        `path:primitive@file.py:line`. If that line is in an installed package, the user's line follows:
        ` from file.py:line`. Jitted functions, loops and branches do not count as operations, but the operations in
        them do.

    Raises:
      ValueError: a rule is not one of these words; a primitive other than `dot_general`, `ragged_dot_general` and
        `conv_general_dilated` has the rule `fp8`; a regular expression is not valid; jax has no primitive of that name;
        or the name of a function looks like a misspelled jax function.

    Example:
      >>> rules = TORCH_CUDA.replace(primitives={"tanh": "float32"}, paths={"head$": "float32"})
      >>> dict(rules.primitives)["tanh"], dict(rules.primitives)["dot_general"]
      ('float32', 'lower')

    Reference: aten/src/ATen/autocast_mode.h of PyTorch; apex/amp/lists of Apex.
    """

    primitives: tuple[tuple[str, Rule], ...] = ()
    functions: tuple[tuple[str, Rule], ...] = ()
    paths: tuple[tuple[str, Rule], ...] = ()
    banned: tuple[tuple[str, str], ...] = ()
    operations: tuple[tuple[str, Rule], ...] = ()

    def __post_init__(self) -> None:
        for field in _RULED:
            pairs = getattr(self, field)
            if not isinstance(pairs, tuple | list) or not all(_is_pair(pair) for pair in pairs):
                raise ValueError(f"{field}={shown(pairs)} must be pairs of a name and a rule")
            for name, rule in pairs:
                if rule not in get_args(Rule):
                    raise ValueError(
                        f"{field}: the rule of {name!r} must be one of {', '.join(get_args(Rule))}, got {rule!r}"
                    )
        for name, rule in self.primitives:
            if rule == "fp8" and name not in FEW_BITS_PRODUCTS:
                known = ", ".join(FEW_BITS_PRODUCTS)
                raise ValueError(f"primitives: the rule of {name!r} cannot be 'fp8': only {known} multiply in 8 bits")
        for field in ("paths", "operations"):
            for expression, _ in getattr(self, field):
                try:
                    re.compile(expression)
                except (re.error, OverflowError, RecursionError) as error:
                    raise ValueError(f"{field}: {expression!r} is not a regular expression: {error}") from None
        for pairs, check in ((self.primitives, check_primitive), (self.functions, check_function)):
            for name, _ in pairs:
                if name not in _NAMED:
                    check(name)

    @property
    def has_fp8(self) -> bool:
        """True if an entry has the rule "fp8", which needs a recipe."""
        return any(rule == "fp8" for field in _RULED for _, rule in getattr(self, field))

    def replace(
        self,
        *,
        primitives: Mapping[str, Rule] | None = None,
        functions: Mapping[str, Rule] | None = None,
        paths: Mapping[str, Rule] | None = None,
        banned: Mapping[str, str] | None = None,
        operations: Mapping[str, Rule] | None = None,
    ) -> "AutocastRules":
        """Returns a copy of the table in which these entries replace, or are added to, its own.

        Args:
          primitives: rules by name of the primitive.
          functions: rules by name of the jitted function.
          paths: rules by regular expression; they precede the table's own.
          banned: advice by name.
          operations: rules by regular expression; they precede the table's own.

        Raises:
          TypeError: an argument is not a mapping.
          ValueError: there is no such rule, or a regular expression is not valid.
        """
        given = {"primitives": primitives, "functions": functions, "paths": paths}
        given |= {"banned": banned, "operations": operations}
        for name, rules in given.items():
            if not isinstance(rules, Mapping | None):
                raise TypeError(f"{name} must be a dict from names or expressions to rules, got {rules!r}")
        return AutocastRules(
            **{
                name: (_before if name in ("paths", "operations") else _merged)(getattr(self, name), new or {})
                for name, new in given.items()
            }
        )

    def save(self, path: str | Path, *, comment: str = "") -> None:
        r"""Writes all entries atomically to a TOML file that people can read and edit.

        Args:
          path: the path of the file, which is replaced if it exists. Its folder must exist.
          comment: lines at its beginning, such as the purpose of the rules; `load` ignores them.

        Raises:
          ValueError: a name has an unpaired surrogate, which UTF-8 cannot encode.
          OSError: the file cannot be written.

        Example:
          >>> import tempfile
          >>> file = Path(tempfile.mkdtemp()) / "rules.toml"
          >>> AutocastRules(paths=((r"head\.0$", "float32"), ("head", "lower"))).save(file)
          >>> print(file.read_text().partition("version = 1")[2].strip())
          paths = [
            ['head\.0$', "float32"],
            ["head", "lower"],
          ]
        """
        write_tables(path, {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}, comment)

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Returns the rules of a file that `save` or a person wrote.

        Args:
          path: the path of the file.

        Raises:
          ValueError: the file is not TOML or has no rules, or a table or an entry is wrong. The message names them and
            the expected value.
          OSError: the file is missing or cannot be read.

        Example:
          >>> import tempfile
          >>> file = Path(tempfile.mkdtemp()) / "rules.toml"
          >>> TORCH_CUDA.save(file)
          >>> AutocastRules.load(file) == TORCH_CUDA
          True
        """
        tables = read_tables(path, [field.name for field in dataclasses.fields(cls)])
        try:
            return cls(**tables)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None


def _merged(old: Sequence[tuple[str, Any]], new: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    return tuple((dict(old) | dict(new)).items())


def _before(old: Sequence[tuple[str, Any]], new: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    """Returns pairs with the new ones first; the first pair that matches applies."""
    return (*new.items(), *(pair for pair in old if pair[0] not in new))


def _table(**rules: str) -> tuple[tuple[str, Rule], ...]:
    return tuple((name, rule) for rule, names in rules.items() for name in names.split())  # pyright: ignore[reportReturnType]


PRODUCTS = "dot_general conv_general_dilated ragged_dot_general"
# Sums in half precision stagnate or overflow, even in a type with the range of float32.
_SUMS = (
    "reduce_sum reduce_prod cumsum cumprod cumlogsumexp reduce_window_sum reduce_window reduce "
    "scatter-add scatter-mul scatter_add scatter_mul select_and_scatter_add"
)
_SOLVERS = (
    "svd qr geqrf householder_product cholesky lu eigh eig schur hessenberg tridiagonal "
    "tridiagonal_solve triangular_solve lu_pivots_to_permutation fft"
)
TRANSCENDENTAL = (
    "exp exp2 expm1 log log1p log2 pow integer_pow square rsqrt cbrt erf_inv acos asin cosh sinh tan acosh asinh atanh"
)
_SPECIAL = "log10 lgamma digamma polygamma igamma igammac regularized_incomplete_beta bessel_i0e bessel_i1e"

# Linear algebra, whose products cancel or overflow, log-probabilities, and functions whose gradients are differences of
# much larger terms. The products of `jnp.linalg` (`multi_dot`, `vecdot`) are not among them: they are ordinary matrix
# products.
_EXACT = (
    "jax.numpy.linalg jax.scipy.linalg jax.scipy.stats jax.scipy.special jax.numpy.polynomial "
    "cov corrcoef i0 sinc _multivariate_normal"
)

_OUR_FUNCTIONS = "graph_storage"
_DEMOTED = (
    "add sub mul div add_any max min select_n clamp concatenate tanh logistic erf erfc sqrt sin cos atan "
    f"atan2 {TRANSCENDENTAL}"
)
_FUNCTIONS = f"_resize log_sigmoid quantile nanquantile gelu _var var std {_OUR_FUNCTIONS} {_EXACT}"
_NAMED = frozenset(
    f"{PRODUCTS} {_SUMS} {_SOLVERS} {_SPECIAL} {_DEMOTED} {_FUNCTIONS}".split()
)  # in some releases of jax

# A product is float32 instead of `lower` if it requests `precision=HIGHEST`, is a sum (an inner product, a squared
# norm) or has an operand of integers that half cannot hold. An outer product is promoted, like any multiplication.

# torch.autocast for float16 on CUDA. In all tables, values of nodes and edges of graphs are half, as in DGL.
TORCH_CUDA = AutocastRules(
    primitives=_table(lower=PRODUCTS, float32=f"{TRANSCENDENTAL} {_SPECIAL} {_SUMS} {_SOLVERS}"),
    functions=_table(float32=f"_resize {_EXACT}", lower=_OUR_FUNCTIONS),
    banned=(("binary_cross_entropy", "use optax.sigmoid_binary_cross_entropy on the logits"),),
)

# torch.autocast for bfloat16 on CPUs. bfloat16 has the range of float32, so exp and similar functions stay in half.
# Unlike in torch, sums are float32, because they stagnate at 256 in bfloat16. log_sigmoid is float32 too, because
# losses, which are float32 in torch, are written with it. (Squares are float32 if no table names them.)
TORCH_CPU = AutocastRules(
    primitives=_table(lower=PRODUCTS, float32=f"{_SUMS} {_SOLVERS}"),
    functions=_table(float32=f"log_sigmoid quantile nanquantile {_EXACT}", lower=_OUR_FUNCTIONS),
)

# Apex's O1: the rules of torch, with gelu, var and std in float32 too.
APEX_O1 = TORCH_CUDA.replace(
    functions={"gelu": "float32", "_var": "float32", "var": "float32", "std": "float32"},
    primitives={"erf": "float32", "erfc": "float32"},
)

# As much in half as possible: only sums, solvers, and operations whose inputs are all float32 run in float32. These
# rules do not depend on the numbers of a model: `tune` finds the entries that a model needs in addition.
MOSTLY_HALF = AutocastRules(
    primitives=_table(lower=PRODUCTS, demote=_DEMOTED, float32=f"{_SPECIAL} {_SUMS} {_SOLVERS}"),
    functions=TORCH_CUDA.functions,
    banned=TORCH_CUDA.banned,
)


_FORMAT, _VERSION = "jmp_train autocast rules", 1
_HEADER = """\
# Rules of jmp_train's autocast, which AutocastRules.load(FILE) reads.
# Of paths and operations, which are regular expressions, the first entry that matches counts.
"""
_SHORT_ESCAPES = {"\b": r"\b", "\t": r"\t", "\n": r"\n", "\f": r"\f", "\r": r"\r", '"': r"\"", "\\": r"\\"}

Pairs = Sequence[tuple[str, str]]


def write_tables(path: str | Path, tables: Mapping[str, Pairs], comment: str = "") -> None:
    """Writes tables atomically to a file, without those that are empty.

    Args:
      path: the path of the file, which is replaced if it exists. Its folder must exist.
      tables: (name, rule) pairs by name of the table.
      comment: lines that come first, as comments; characters that comments cannot hold are escaped.

    Raises:
      ValueError: a name has a character that UTF-8 cannot encode.
      OSError: the file cannot be written.
    """
    content = [f"{_comment(comment)}{_HEADER}format = {_quoted(_FORMAT)}\nversion = {_VERSION}\n"]
    for table, pairs in tables.items():
        if pairs:
            entries = "".join(f"  [{_quoted(name)}, {_quoted(rule)}],\n" for name, rule in pairs)
            content.append(f"\n{table} = [\n{entries}]\n")
    write_atomically(checked_path("path", path), "".join(content).encode())


def read_tables(path: str | Path, tables: Iterable[str]) -> dict[str, tuple[tuple[str, Any], ...]]:
    """Returns the tables in a file, as (name, rule) pairs of strings.

    Args:
      path: the path of the file.
      tables: the known names of tables.

    Raises:
      ValueError: the file is not TOML, has another kind or version, or has an unknown table or an entry that is not a
        pair of strings. The message names the file, the table and the entry.
      OSError: the file is missing or cannot be read.
    """
    content = read_toml(checked_path("path", path))
    kind, version = content.pop("format", None), content.pop("version", None)
    if kind != _FORMAT:
        found = "none" if kind is None else reprlib.repr(kind)
        raise ValueError(f"{path} is not a file of autocast rules: format must be {_FORMAT!r}, got {found}")
    if version != _VERSION:
        found = "none" if version is None else reprlib.repr(version)
        raise ValueError(f"{path}: version must be {_VERSION}, got {found}")
    tables = tuple(tables)
    for table in content:
        if table not in tables:
            raise ValueError(f"{path} has an unknown table {reprlib.repr(table)}; choose from {', '.join(tables)}")
    return {table: _pairs(f"{path}: {table}", entries) for table, entries in content.items()}


def _comment(text: str) -> str:
    return "".join(f"{f'# {escaped(line)}'.rstrip()}\n" for line in text.splitlines())


def _pairs(where: str, entries: object) -> tuple[tuple[str, Any], ...]:
    wanted = 'such as ["exp", "float32"]'
    if not isinstance(entries, list):
        raise ValueError(f"{where} must be a list of pairs {wanted}, got {reprlib.repr(entries)}")
    for number, entry in enumerate(entries, 1):
        is_pair = isinstance(entry, list) and len(entry) == 2 and all(isinstance(text, str) for text in entry)
        if not is_pair:
            raise ValueError(f"{where}: entry {number} must be a pair of strings, {wanted}, got {reprlib.repr(entry)}")
    return tuple((name, rule) for name, rule in entries)


def _quoted(text: str) -> str:
    r"""Returns a TOML string, in single quotes without escapes if it has backslashes, as regular expressions do.

    Example:
      >>> print(_quoted("exp"), _quoted(r"head\.0$"), _quoted("\\ '\n"))
      "exp" 'head\.0$' "\\ '\n"
    """
    if "\\" in text and "'" not in text and text.isprintable():
        return f"'{text}'"
    return f'"{"".join(map(_escaped, text))}"'


def _escaped(character: str) -> str:
    if character in _SHORT_ESCAPES:
        return _SHORT_ESCAPES[character]
    if character.isprintable():
        return character
    code = ord(character)
    if 0xD800 <= code <= 0xDFFF:
        raise ValueError(f"{character!r} is half of a surrogate pair, which cannot be written to a file")
    return f"\\u{code:04X}" if code < 0x10000 else f"\\U{code:08X}"


_WIDTH = 100  # most characters of a line that holds a whole table
_FIRST_COUNTS = ("paths", "operations")  # of two entries for one name; in other tables, the last one


def rules_code(rules: AutocastRules, base: str = "jt.TORCH_CUDA") -> str:
    """Returns code that adds entries to a table of rules; "" if there are none.

    Args:
      rules: the entries only.
      base: the code of the table to which they are added.

    Example:
      >>> print(rules_code(AutocastRules(primitives=(("exp", "float32"),))))
      rules = jt.TORCH_CUDA.replace(
          primitives={"exp": "float32"},
      )
    """
    lines = [f"    {_argument(table, entries)},\n" for table, entries in _tables(rules).items()]
    return f"rules = {base}.replace(\n{''.join(lines)})" if lines else ""


def replace_arguments(rules: AutocastRules) -> str:
    r"""Returns the arguments of `AutocastRules.replace` in one line.

    Args:
      rules: the entries only.

    Example:
      >>> print(replace_arguments(AutocastRules(functions=(("var", "float32"),), paths=((r"a\.b$", "lower"),))))
      functions={"var": "float32"}, paths={r"a\.b$": "lower"}
    """
    return ", ".join(f"{table}={{{', '.join(entries)}}}" for table, entries in _tables(rules).items())


def _tables(rules: AutocastRules) -> dict[str, list[str]]:
    """Returns the entries of each table that has any, as the items of a dictionary display."""
    found = {}
    for field in dataclasses.fields(rules):
        pairs: Sequence[tuple[str, str]] = getattr(rules, field.name)
        entries = dict(reversed(pairs)) if field.name in _FIRST_COUNTS else dict(pairs)
        names = dict.fromkeys(name for name, _ in pairs)
        if names:
            found[field.name] = [f"{_python_text(name)}: {_python_text(entries[name])}" for name in names]
    return found


def _argument(table: str, entries: Sequence[str]) -> str:
    line = f"{table}={{{', '.join(entries)}}}"
    if len(line) <= _WIDTH:
        return line
    return "\n        ".join([f"{table}={{", *(f"{entry}," for entry in entries)]) + "\n    }"


def _python_text(text: str) -> str:
    if not text.isprintable() or '"' in text:
        return repr(text)
    if "\\" in text:
        return repr(text) if text.endswith("\\") else f'r"{text}"'
    return f'"{text}"'
