"""The directive `api`: documents the names of a module, with a table of them before.

    .. api:: jmp_train

       train_step
       TrainState
       TORCH_CUDA: The table of torch on GPUs.
       loss_scaling.*

Each name is given once. Of functions and classes the docstrings are shown. The last line stands for all names from this
package that no page gives.
"""

import importlib
import inspect
from typing import Any

from documented_names import listed_names, names_from
from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective


class Api(SphinxDirective):
    """Documents each name of its content, which a module offers; of a value it is given what it is, behind a colon."""

    required_arguments = 1
    has_content = True

    def run(self) -> list[nodes.Node]:
        """Returns a table of the names, then what is said of each."""
        module = self.arguments[0]
        offered = importlib.import_module(module)
        lines = [line for entry in self.content if entry.strip() for line in _named(module, entry)]
        entries = [line.partition(": ") for line in lines]
        described = [name for name, _, text in entries if not text]
        lines = [f".. currentmodule:: {module}", "", ".. autosummary::", "   :nosignatures:", ""]
        lines += [f"   {name}" for name in described]
        lines += [line for name in described for line in ("", *_directive(name, getattr(offered, name)))]
        lines += [line for name, _, text in entries if text for line in ("", f".. py:data:: {name}", "", f"   {text}")]
        return self.parse_text_to_nodes("\n".join(lines))


def _named(module: str, entry: str) -> list[str]:
    if not entry.endswith(".*"):
        return [entry]
    listed = listed_names()
    return [name for name in names_from(module, entry) if name not in listed]


def _directive(name: str, thing: Any) -> list[str]:
    return [f".. autoclass:: {name}", "   :members:"] if inspect.isclass(thing) else [f".. autofunction:: {name}"]


def _skip_field_aliases(app: Sphinx, what: str, name: str, thing: Any, skip: bool, options: Any) -> bool | None:
    """Leaves out the fields of named tuples and dataclasses, which the class's own text names."""
    is_alias = (inspect.getdoc(thing) or "").startswith("Alias for field number")
    is_value = isinstance(thing, type) or (not callable(thing) and not isinstance(thing, property))  # jnp.float16 too
    return True if what == "class" and (is_alias or is_value) else None


def setup(app: Sphinx) -> dict[str, bool]:
    """Registers the directive."""
    app.add_directive("api", Api)
    app.connect("autodoc-skip-member", _skip_field_aliases)
    return {"parallel_read_safe": True}
