"""Configuration of the site; `make docs` builds it."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "extensions"))

from refresh_inventories import SITES

import jmp_train

project = "jmp_train"
author = "the authors of jmp_train"
version = release = jmp_train.__version__

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.intersphinx",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
    "api_reference",
    "benchmark_results",
    "diagrams",
    "docstrings",
    "linked_names",
    "page_summaries",
    "plots",
    "repository_pages",
    "side_by_side",
    "signatures",
    "source_pages",
]
exclude_patterns = ["README.md", "_build"]
nitpicky = True
nitpick_ignore_regex = [  # types in signatures that no reference has
    ("py:class", r"jmp_train\.(\w+\.)+\w+"),  # type variables, and what is private to a folder
    ("py:class", r"jax\._src\..*|jax\.numpy\.float(16|32)|flax\.core\..*|dataclasses\.InitVar"),
    ("py:class", r"Args|ArrayTree|Image|collections\.abc\.Mapping\[str"),  # of quoted annotations
    ("py:class", r"flax\.nnx\.module\.Module|flax\.typing\..*|jax\.nn\.initializers\.Initializer"),
    ("py:class", r"SupportsDType"),  # parts of what api/types.rst describes
]

# Python
add_module_names = False
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 88
toc_object_entries_show_parents = "hide"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
autodoc_member_order = "bysource"
autosummary_generate = False
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_custom_sections = [
    ("Reference", "returns_style"),
    ("References", "returns_style"),
    ("Source", "returns_style"),
]

# Other projects' names; `make inventories` looks up anew where they are documented.
intersphinx_mapping = {name: (site, f"inventories/{name}.inv") for name, site in SITES.items()}

# Pages
linkcheck_anchors = False  # of pages that scripts fill
linkcheck_timeout = 30
myst_enable_extensions = ["colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3
nb_execution_mode = "cache"
nb_execution_in_temp = True
nb_execution_timeout = 600
nb_execution_raise_on_error = True
nb_merge_streams = True
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True

html_theme = "sphinx_book_theme"
html_title = f"jmp_train {version}"
html_static_path = ["static"]
html_favicon = "static/icon.svg"
html_css_files = ["site.css"]
html_show_sourcelink = False
html_theme_options = {
    "logo": {"text": html_title, "image_light": "static/icon.svg", "image_dark": "static/icon.svg", "alt_text": ""},
    "footer_content_items": [],
    "show_navbar_depth": 1,
    "show_toc_level": 2,
    "home_page_in_toc": True,
    "use_download_button": False,
    "use_fullscreen_button": False,
}
