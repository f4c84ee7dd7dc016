"""SVG for a page: matplotlib's, with text as text and colours from the page's style sheet."""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Mapping
from html import escape
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Placeholder colours of a figure. In the page each becomes a variable of the style sheet, with a
# value for light pages and a value for dark pages.
_NAMES = (
    *("ink", "muted", "grid", "page", "accent", "second", "good", "bad", "warn"),
    *("starting", "waiting", "fetching", "forward", "backward", "pushing"),
)
COLOURS = {name: f"#0000{number:02x}" for number, name in enumerate(_NAMES, start=1)}

# rcParams of every figure.
STYLE: Any = {
    "svg.fonttype": "none",  # text stays text
    "text.parse_math": False,  # a metric may have $ in its name
    "font.family": "DejaVu Sans",  # part of matplotlib; the page replaces the font
    "text.color": COLOURS["ink"],
    "axes.edgecolor": COLOURS["grid"],
    "axes.labelcolor": COLOURS["muted"],
    "axes.titlecolor": COLOURS["ink"],
    "xtick.color": COLOURS["grid"],
    "ytick.color": COLOURS["grid"],
    "xtick.labelcolor": COLOURS["muted"],
    "ytick.labelcolor": COLOURS["muted"],
    "axes.facecolor": "none",
    "axes.grid": True,
    "grid.color": COLOURS["grid"],
    "grid.linewidth": 0.5,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.formatter.useoffset": False,
    "lines.linewidth": 1.2,
    "lines.solid_capstyle": "round",
    "legend.frameon": False,
}
LINK = "mark:"  # prefix of the key of a mark's title, in the URL of an artist


def svg(figure: Figure, name: str, label: str, titles: Mapping[str, tuple[str | None, str]]) -> str:
    """Return a figure as SVG for embedding in a page.

    Args:
        name: name of the figure, unique on the page: prefix of all ids.
        label: description of the figure, for readers who cannot see it.
        titles: by the key in an artist's URL: the id of a row of the page, or None, and the text of
            the tooltip.
    """
    file = io.StringIO()
    nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    with warnings.catch_warnings():
        # About scripts missing in matplotlib's font. The page's font may have the glyphs.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        figure.savefig(file, format="svg", transparent=True, metadata=nothing)
    text = file.getvalue()
    text = text[text.index("<svg") :]
    # 1. Ids: keep the referenced ids, and make them unique on the page.
    text = text.replace("xlink:href", "href")
    used = {*re.findall(r"(?:url\(#|href=\"#)([^\")]+)", text)}
    text = re.sub(
        r"\sid=\"([^\"]*)\"",
        lambda found: f' id="{name}-{found[1]}"' if found[1] in used else "",
        text,
    )
    text = re.sub(r"(url\(#|href=\"#)", rf"\g<1>{name}-", text)
    # 2. Use the colours and fonts of the style sheet.
    text = re.sub(r"#0000([0-9a-f]{2})", _variable, text)
    text = re.sub(r"font: ([\d.]+px) [^;\"]*", r"font-size: \1", text)
    text = re.sub(r"<style type=\"text/css\">.*?</style>", "", text, flags=re.DOTALL)

    # 3. Link marks to their rows, and show their texts.
    def mark(found: re.Match[str]) -> str:
        row, title = titles[found[1]]
        address = "" if row is None else f' href="#{escape(row)}"'
        return f"<a{address}><title>{escape(title)}</title>"

    text = re.sub(rf'<a href="{LINK}([^"]*)"[^>]*>', mark, text)
    text = re.sub(r"<!--.*?-->\s*", "", text, flags=re.DOTALL)
    # 4. Leave the size to the page, and add the description.
    opening = re.match(r"<svg [^>]*?viewBox=\"([^\"]*)\"[^>]*>", text)
    assert opening is not None
    shown = f'<svg viewBox="{opening[1]}" role="img" aria-label="{escape(label)}">'
    return shown + re.sub(r"\n\s*", "\n", text[opening.end() :])


def _variable(found: re.Match[str]) -> str:
    number = int(found[1], 16)
    return f"var(--{_NAMES[max(0, number - 1)]})" if number <= len(_NAMES) else found[0]
