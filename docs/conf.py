"""Sphinx configuration."""

import re
from importlib.metadata import version as installed_version

project = "lightning-hiertrain"
author = "The lightning-hiertrain authors"
copyright = "2026, the lightning-hiertrain authors"
release = version = installed_version("lightning-hiertrain")

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.doctest",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = "lightning-hiertrain"

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_class_signature = "separated"
autodoc_default_options = {"members": True, "show-inheritance": True}
napoleon_google_docstring = True
napoleon_numpy_docstring = False
myst_enable_extensions = ["colon_fence", "dollarmath"]
myst_heading_anchors = 3
doctest_test_doctest_blocks = ""


def double_backticks(app, what, name, obj, options, lines):
    """Reads code in single backticks, as docstrings write it, before napoleon looks for colons."""
    lines[:] = [re.sub(r"(?<![`:])`([^`]+)`(?![`_])", r"``\1``", line) for line in lines]


def setup(app):
    app.connect("autodoc-process-docstring", double_backticks, priority=400)
