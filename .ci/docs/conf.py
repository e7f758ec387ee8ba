"""The pages of ``etlstage/docs`` as a site: ``.ci/run docs`` builds it."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from sphinx.application import Sphinx

project = "etlstage"
author = "The etlstage developers"
extensions = ["myst_parser"]
source_suffix = {".md": "markdown"}
html_theme = "furo"
html_title = "etlstage"
html_copy_source = False
myst_heading_anchors = 3  # so that links to headings work as in a repository browser
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


def setup(app: Sphinx) -> None:
    """Have the index completed."""
    app.connect("source-read", _add_contents)
