"""How Sphinx builds the documentation. It needs hal installed, the docs extra, and no network."""

from __future__ import annotations

import sys
from pathlib import Path

import hal

# hal's own Sphinx extensions, which generate the tables of the reference pages.
sys.path.insert(0, str(Path(__file__).parent / "extensions"))

project = "torch-hal"
author = "The torch-hal authors"
project_copyright = author
version = release = hal.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_click",
    "sphinx_copybutton",
    "declarations",
    "conformance_matrix",
    "emulated",
    "generations",
    "what_works",
]
exclude_patterns = ["_build"]

html_theme = "furo"
html_title = f"torch-hal {release}"

# What the button copies of a console block: the commands, without the prompt and without their output.
copybutton_prompt_text = "$ "
copybutton_line_continuation_character = "\\"

myst_heading_anchors = 3
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autoclass_content = "class"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_attr_annotations = False  # signatures carry the types
napoleon_use_ivar = True  # attributes as a list; autodoc would otherwise describe them a second time

nitpicky = True
nitpick_ignore = [
    # Names of torch and the standard library: links to other projects' documentation would need the network to build.
    ("py:class", "Tensor"),
    ("py:class", "Path"),
    ("py:class", "Config"),
    ("py:class", "Mask"),
    # Constants of a class's own module, which docstrings name without it; the API page shows the class as hal.X.
    ("py:data", "DUMMY_BLOCK"),
    ("py:data", "DEFAULT_TOLERANCE"),
]
nitpick_ignore_regex = [
    # The same, for names written in full.
    (r"py:.*", r"(torch|collections|contextlib|importlib|os|pathlib|types|typing|tokenizers|inspect)\..*"),
    # Type variables, which stand for any type and have no page.
    (r"py:class", r"(hal\..*\.)?[PRT]"),
]
