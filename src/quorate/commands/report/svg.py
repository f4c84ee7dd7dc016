"""SVG for a page: matplotlib's, with text as text and colours that the page's style sheet sets."""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Mapping
from html import escape
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# A figure is drawn in these colours; in the page each is a variable of the style sheet, which has
# one value for light pages and one for dark ones.
_NAMES = (
    *("ink", "muted", "grid", "page", "accent", "second", "good", "bad", "warn"),
    *("starting", "waiting", "fetching", "forward", "backward", "pushing"),
)
COLOURS = {name: f"#0000{number:02x}" for number, name in enumerate(_NAMES, start=1)}

# rcParams of every figure.
STYLE: Any = {
    "svg.fonttype": "none",  # text stays text
    "text.parse_math": False,  # a metric may have $ in its name
    "font.family": "DejaVu Sans",  # comes with matplotlib; the page replaces the font
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
LINK = "mark:"  # before the key of a mark's title, in the URL that an artist is given


def svg(figure: Figure, name: str, label: str, titles: Mapping[str, tuple[str | None, str]]) -> str:
    """Return a figure as SVG for the middle of a page.

    Args:
        name: of the figure, unlike that of any other figure of the page: ids begin with it.
        label: what the figure shows, for readers who do not see it.
        titles: by the key in an artist's URL, the id of a row of the page, if there is one, and the
            text that a pointer shows.
    """
    file = io.StringIO()
    nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    with warnings.catch_warnings():
        # Of scripts that matplotlib's font lacks. The page's font may have them.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        figure.savefig(file, format="svg", transparent=True, metadata=nothing)
    text = file.getvalue()
    text = text[text.index("<svg") :]
    # 1. Ids: those that something refers to, and unlike those of other figures.
    text = text.replace("xlink:href", "href")
    used = {*re.findall(r"(?:url\(#|href=\"#)([^\")]+)", text)}
    text = re.sub(
        r"\sid=\"([^\"]*)\"",
        lambda found: f' id="{name}-{found[1]}"' if found[1] in used else "",
        text,
    )
    text = re.sub(r"(url\(#|href=\"#)", rf"\g<1>{name}-", text)
    # 2. Colours and fonts of the style sheet.
    text = re.sub(r"#0000([0-9a-f]{2})", _variable, text)
    text = re.sub(r"font: ([\d.]+px) [^;\"]*", r"font-size: \1", text)
    text = re.sub(r"<style type=\"text/css\">.*?</style>", "", text, flags=re.DOTALL)

    # 3. Marks lead to their rows, and show their texts.
    def mark(found: re.Match[str]) -> str:
        row, title = titles[found[1]]
        address = "" if row is None else f' href="#{escape(row)}"'
        return f"<a{address}><title>{escape(title)}</title>"

    text = re.sub(rf'<a href="{LINK}([^"]*)"[^>]*>', mark, text)
    text = re.sub(r"<!--.*?-->\s*", "", text, flags=re.DOTALL)
    # 4. The size is the page's, and the page says what is shown.
    opening = re.match(r"<svg [^>]*?viewBox=\"([^\"]*)\"[^>]*>", text)
    assert opening is not None
    shown = f'<svg viewBox="{opening[1]}" role="img" aria-label="{escape(label)}">'
    return shown + re.sub(r"\n\s*", "\n", text[opening.end() :])


def _variable(found: re.Match[str]) -> str:
    number = int(found[1], 16)
    return f"var(--{_NAMES[max(0, number - 1)]})" if number <= len(_NAMES) else found[0]
