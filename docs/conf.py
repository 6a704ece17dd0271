"""Sphinx configuration; ``make docs`` builds with warnings as errors."""

from __future__ import annotations

from importlib import metadata
from typing import Any

from docutils import nodes

project = "composable_fsdp"
author = "composable_fsdp contributors"
copyright = author
version = release = metadata.version("composable-fsdp")

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
    "sphinx_design",
]
exclude_patterns = ["_build", "generated"]  # generated: parts of pages
myst_heading_anchors = 3
myst_enable_extensions = ["colon_fence"]

# Signatures show the hints in short; the parameters' types are repeated where they are described.
autodoc_typehints = "both"
autodoc_typehints_format = "short"
autodoc_member_order = "bysource"
python_maximum_signature_line_length = 60  # then one argument a line
toc_object_entries_show_parents = "hide"  # `unshard()`, not `FSDPModule.unshard()`, which breaks in mid-word
autodoc_default_options = {"members": True, "show-inheritance": True}

html_theme = "furo"
html_title = f"{project} {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]

# The copy button leaves out prompts and results.
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True

# `bytes` in signatures is the type, and also what attributes of ours are called.
suppress_warnings = ["ref.python"]


class _DarkPictures(nodes.GenericNodeVisitor):
    """Adds the dark form of each picture of ``pictures/``, of which furo shows the one that fits its theme."""

    def default_visit(self, node: nodes.Node) -> None:
        pass

    def visit_image(self, node: nodes.image) -> None:
        uri = node["uri"]
        if "pictures/" not in uri or uri.endswith("-dark.svg"):
            return
        dark = node.deepcopy()
        dark["uri"] = uri.removesuffix(".svg") + "-dark.svg"
        node["classes"] += ["only-light"]
        dark["classes"] += ["only-dark"]
        node.parent.insert(node.parent.index(node) + 1, dark)


def _add_dark_pictures(app: Any, tree: nodes.document) -> None:
    tree.walk(_DarkPictures(tree))


def setup(app: Any) -> None:
    """Register the above, before Sphinx collects the pictures of a page."""
    app.connect("doctree-read", _add_dark_pictures, priority=100)
