"""Signatures as they were written: types by their short names, and fields with the defaults that the class names.

Python keeps neither: `ArrayLike` becomes the eight types that it stands for, and a default its value.
`docs/api/types.rst` says what the short names are.
"""

import ast
import dataclasses
import functools
import inspect
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, get_type_hints

import jax
import jax.typing
from flax import nnx
from sphinx.application import Sphinx
from sphinx.ext.autodoc.preserve_defaults import update_defvalue
from sphinx.util.inspect import signature, stringify_signature
from sphinx.util.typing import stringify_annotation

import jmp_train as jt
from jmp_train import graphs

TYPES = {
    "jax.typing.ArrayLike": jax.typing.ArrayLike,
    "jax.typing.DTypeLike": jax.typing.DTypeLike,
    "jmp_train.graphs.Ids": jax.typing.ArrayLike | Sequence[int],
    "jmp_train.graphs.Floats": jax.typing.ArrayLike | nnx.Variable[jax.Array],
    "jmp_train.graphs.EndFeatures": get_type_hints(graphs.gat_conv)["features"],
    "jmp_train.graphs.EdgeType": tuple[str, str, str],
    "jmp_train.graphs.EdgeFunction": Callable[[graphs.EdgeBatch], Mapping[str, jax.Array]],
    "jmp_train.graphs.NodeFunction": Callable[[graphs.NodeBatch], Mapping[str, jax.Array]],
    "jmp_train.policies.Rule": get_type_hints(jt.autocast_as)["rule"],
}


class Source:
    """A default that is shown as what the source has."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return self.text


@functools.cache
def _expanded() -> list[tuple[str, str]]:
    """Returns what Python makes of the types, and their names; longest first, as one may be a part of another."""
    return sorted(
        ((stringify_annotation(x, "smart"), f"~{name}") for name, x in TYPES.items()), key=lambda x: -len(x[0])
    )


def shortened(text: str) -> str:
    """Returns a signature's text with the short names of types."""
    for long, short in _expanded():
        text = text.replace(long, short)
    return text


def field_defaults(cls: type) -> dict[str, str]:
    """Returns the defaults of a dataclass's or named tuple's fields as the source has them."""
    found: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if not (dataclasses.is_dataclass(cls) or hasattr(base, "_fields")):  # layers inherit fields of plain classes
            continue
        try:
            (tree,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        except (OSError, TypeError):  # of no file
            continue
        assert isinstance(tree, ast.ClassDef)
        for line in tree.body:
            if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name) and line.value is not None:
                found[line.target.id] = _default(line.value)
    return found


def _default(value: ast.expr) -> str:
    """Returns a default's source: of `field(default=x)` x, and of one that has a factory dots."""
    if isinstance(value, ast.Call) and ast.unparse(value.func).rpartition(".")[2] == "field":
        given = {keyword.arg: keyword.value for keyword in value.keywords}
        return ast.unparse(given["default"]) if "default" in given else "..."
    return ast.unparse(value)


def _is_generated(cls: type) -> bool:
    """Whether nobody wrote the constructor, so that no file has its signature."""
    constructor = cls.__new__ if hasattr(cls, "_fields") else cls.__init__
    return inspect.isfunction(constructor) and not Path(constructor.__code__.co_filename).exists()


def _text(found: inspect.Signature) -> str:
    return stringify_signature(found, show_return_annotation=False, unqualified_typehints=True)


def _process(
    app: Sphinx, what: str, name: str, thing: Any, options: Any, text: str | None, returned: str | None
) -> tuple[str | None, str | None]:
    is_module = what == "class" and bool(text) and text.startswith("(*args")  # of the metaclass of flax nnx's modules
    if what == "class" and text and _is_generated(thing):
        defaults = field_defaults(thing)
        found = signature(thing.__init__, bound_method=True) if is_module else signature(thing)
        parameters = [
            x.replace(default=Source(defaults[x.name])) if x.default is not x.empty and x.name in defaults else x
            for x in found.parameters.values()
        ]
        text = _text(found.replace(parameters=parameters))
    elif is_module:
        update_defvalue(app, thing.__init__, True)
        text = _text(signature(thing.__init__, bound_method=True))
    return shortened(text) if text else text, shortened(returned) if returned else returned


def setup(app: Sphinx) -> dict[str, bool]:
    """Connects it."""
    app.connect("autodoc-process-signature", _process)
    return {"parallel_read_safe": True}
