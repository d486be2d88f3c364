"""Links names in prose and types in signatures: ours to the API reference, others' to their projects' pages.

The projects' names are in `docs/inventories`, so that the build needs no network. A page links a name once a section.
"""

import re

from docstrings import all_full_names
from docutils import nodes
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.ext.intersphinx import InventoryAdapter

# What pages and examples import modules as.
IMPORTED_AS = {
    "jnp": "jax.numpy",
    "lax": "jax.lax",
    "np": "numpy",
    "nnx": "flax.nnx",
}
# Under which names a project documents what Python says is elsewhere.
DOCUMENTED_AS = {
    "flax.nnx.Optimizer": "flax.nnx.optimizer.Optimizer",
    "flax.nnx.rnglib.Rngs": "flax.nnx.Rngs",
    "flax.nnx.variablelib.Variable": "flax.nnx.Variable",
    "jax.P": "jax.sharding.PartitionSpec",
    "jax._src.mesh.Mesh": "jax.sharding.Mesh",
    "jax._src.stages.Traced": "jax.stages.Traced",
    "jax.jaxlib._jax.Array": "jax.Array",
    "jaxlib._jax.Sharding": "jax.sharding.Sharding",
    "jraph._src.graph.GraphsTuple": "jraph.GraphsTuple",
    "numpy.random._generator.Generator": "numpy.random.Generator",
    "optax._src.base.GradientTransformation": "optax.GradientTransformation",
    "optax._src.base.GradientTransformationExtraArgs": "optax.GradientTransformationExtraArgs",
    "optax.l2_loss": "optax.losses.l2_loss",
    "optax.softmax_cross_entropy_with_integer_labels": "optax.losses.softmax_cross_entropy_with_integer_labels",
    "optax.transforms._accumulation.MultiSteps": "optax.MultiSteps",
}
_NAME_OR_CALL = re.compile(r"(\w+(?:\.\w+)*)(?:\([^()]*\))?")


def documented_name(code: str, ours: dict[str, str], others: set[str]) -> str | None:
    """Returns the full name of what a piece of code names or calls; None where no reference has it.

    Args:
      code: as prose has it, such as "jt.train_step" or "jnp.where(a, b, c)".
      ours: full names of what the API reference documents, by the names that prose uses.
      others: full names that other projects document.
    """
    match = _NAME_OR_CALL.fullmatch(" ".join(code.split()))
    if match is None:
        return None
    module, dot, name = match[1].rpartition(".")
    first, _, rest = module.partition(".")
    theirs = ".".join(filter(None, (IMPORTED_AS.get(first, first), rest, name)))
    theirs = DOCUMENTED_AS.get(theirs, theirs)
    if dot and theirs in others:
        return theirs
    short = re.sub(r"^(jt|jmp_train)\.(graphs\.)?|^graphs\.", "", match[1])
    # A plain word may be a variable, as `plan` is.
    return ours.get(short) if dot or "_" in short or not short.islower() else None


def _link_prose(app: Sphinx, doctree: nodes.document) -> None:
    ours = all_full_names()
    inventory = InventoryAdapter(app.env).main_inventory
    others = {name for kind, names in inventory.items() if kind.startswith("py:") for name in names}
    linked: set[tuple[int, str]] = set()
    for literal in list(doctree.findall(nodes.literal)):
        if _is_within(literal, (nodes.reference, pending_xref, nodes.title)):
            continue
        full = documented_name(literal.astext(), ours, others)
        place = (id(_section(literal)), full or "")
        if full is None or place in linked:
            continue
        linked.add(place)
        link = pending_xref("", refdomain="py", reftype="obj", reftarget=full, refdoc=app.env.docname, refwarn=True)
        literal.replace_self(link)
        link += literal


def _is_within(node: nodes.Node, kinds: tuple[type[nodes.Node], ...]) -> bool:
    while node.parent is not None:
        node = node.parent
        if isinstance(node, kinds):
            return True
    return False


def _section(node: nodes.Node) -> nodes.Node:
    while node.parent is not None and not isinstance(node, nodes.section):
        node = node.parent
    return node


def _rename(app: Sphinx, env: BuildEnvironment, node: pending_xref, text: nodes.TextElement) -> None:
    """Gives a reference the name that its project documents, for intersphinx, which is asked next."""
    node["reftarget"] = DOCUMENTED_AS.get(node["reftarget"], node["reftarget"])


def setup(app: Sphinx) -> dict[str, bool]:
    """Connects it, before intersphinx resolves what is not ours."""
    app.connect("doctree-read", _link_prose)
    app.connect("missing-reference", _rename, priority=400)
    return {"parallel_read_safe": True}
