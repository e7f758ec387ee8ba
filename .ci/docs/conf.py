"""The pages of ``etlstage/docs`` as a site: ``.ci/run docs`` builds it."""

from __future__ import annotations

import re
from pathlib import Path
from types import FunctionType
from typing import Final

from sphinx.application import Sphinx

project = "etlstage"
author = "The etlstage developers"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
source_suffix = {".md": "markdown"}
html_theme = "furo"
html_title = "etlstage"
html_copy_source = False
myst_heading_anchors = 3  # so that links to headings work as in a repository browser
autodoc_member_order = "alphabetical"
autodoc_default_options = {"members": True, "imported-members": True}
autodoc_typehints = "none"
napoleon_use_ivar = True
suppress_warnings = ["ref.python"]  # of names that two modules have, either is linked
PAGES: Final = Path(__file__).parents[2] / "etlstage" / "docs"


def _add_contents(_app: Sphinx, name: str, source: list[str]) -> None:
    """Give the index what a repository browser would show as code."""
    if name == "index":
        for group in ("tutorials", "how-to", "reference", "explanation"):
            pages = sorted(page.stem for page in (PAGES / group).glob("*.md"))
            listed = "\n".join(f"{group}/{page}" for page in pages)
            caption = group.capitalize().replace("How-to", "How-to guides")
            source[0] += (
                f"\n```{{toctree}}\n:hidden:\n:caption: {caption}\n\n{listed}\n```\n"
            )


def _add_docstrings(_app: Sphinx, name: str, source: list[str]) -> None:
    """Give the page of modules what their docstrings say."""
    if name == "reference/python":
        for module in re.findall(r"^\| `(etlstage[.\w]*)` \|", source[0], re.MULTILINE):
            source[0] += (
                f"\n## {module}\n\n```{{eval-rst}}\n.. automodule:: {module}\n```\n"
            )


def _is_described(
    _app: Sphinx, _what: str, _name: str, found: object, skip: bool, _options: object
) -> bool:
    """Describe what several modules export under the first of them."""
    if not isinstance(found, type | FunctionType):
        return skip
    again = found in _DESCRIBED
    _DESCRIBED.add(found)
    return skip or again


_DESCRIBED: Final[set[object]] = set()


def setup(app: Sphinx) -> None:
    """Have the pages completed."""
    app.connect("source-read", _add_contents)
    app.connect("source-read", _add_docstrings)
    app.connect("autodoc-skip-member", _is_described)
