"""Sphinx configuration; ``make docs`` builds with warnings as errors."""

from __future__ import annotations

from importlib import metadata

project = "composable_fsdp"
author = "composable_fsdp contributors"
copyright = author
version = release = metadata.version("composable-fsdp")

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
exclude_patterns = ["_build"]
myst_heading_anchors = 3

# Signatures show the hints in short; the parameters' types are repeated where they are described.
autodoc_typehints = "both"
autodoc_typehints_format = "short"
autodoc_member_order = "bysource"
autodoc_default_options = {"members": True, "show-inheritance": True}

html_theme = "furo"
html_title = f"{project} {release}"

# `bytes` in signatures is the type, and also what attributes of ours are called.
suppress_warnings = ["ref.python"]
