"""Settings of Sphinx: `make docs` builds this folder into build/docs, without a network."""

import re
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]

project = "quorate"
author = "the quorate authors"
release = version = PROJECT["version"]

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["conf.py"]

html_theme = "furo"
html_title = f"quorate {release}"
html_show_copyright = False
html_copy_source = False
html_static_path = ["_static"]
html_css_files = ["quorate.css"]
# Of the machine and not of an address: a page that is opened as a file has all it needs.
html_theme_options = {
    "light_css_variables": {
        "color-brand-primary": "#1f5fa8",
        "color-brand-content": "#1f5fa8",
        "font-stack": "system-ui, -apple-system, 'Segoe UI', Roboto, 'Noto Sans SC', sans-serif",
        "font-stack--monospace": "ui-monospace, Menlo, Consolas, 'DejaVu Sans Mono', monospace",
    },
    "dark_css_variables": {
        "color-brand-primary": "#7db4f0",
        "color-brand-content": "#7db4f0",
    },
}

myst_heading_anchors = 4
pygments_style = "friendly"
pygments_dark_style = "monokai"
highlight_language = "text"  # of what says no other: output

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
maximum_signature_line_length = 80
napoleon_google_docstring = True
napoleon_numpy_docstring = False

# Public names have to be there. What is inside, and other projects' names, may be without a page:
# those pages would be a network.
nitpick_ignore_regex = [(r"py:.*", r"(?!quorate\.(\w+|errors\.\w+|data\.\w+)$).*")]


def link_pages(
    _app: Any, _what: str, _name: str, _obj: Any, _options: Any, lines: list[str]
) -> None:
    """Make a link of each ``docs/PAGE.md`` in a docstring: ``help()`` shows the file's name."""
    lines[:] = [re.sub(r"\bdocs/([\w-]+)\.md\b", r":doc:`/\1`", line) for line in lines]


def setup(app: Any) -> None:
    app.connect("autodoc-process-docstring", link_pages)
