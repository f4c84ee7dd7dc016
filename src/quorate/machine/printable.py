"""Text from a file or another process, made fit for a terminal: on one line, and short."""

from __future__ import annotations

MOST_CHARACTERS = 300


def printable(text: object, most: int = MOST_CHARACTERS) -> str:
    """Return a text with what is not to be seen in it escaped, as ``repr`` does it.

    What a terminal would obey must not reach it: control characters (a sequence could clear the
    screen, rename the window, type an answer), line ends, marks that turn the direction of writing,
    surrogates, which no terminal's encoding has. Ordinary text of any language stays as it is.

    Args:
        text: of an unknown origin; anything else by its ``str``.
        most: characters of it to show. Of a longer text the middle is left out, and how much that
            is stands in its place.
    """
    whole = str(text)
    if len(whole) <= most:
        return _escaped(whole)
    first, last = whole[: most * 2 // 3], whole[len(whole) - most // 3 :]
    left_out = len(whole) - len(first) - len(last)
    return f"{_escaped(first)}... {left_out:,} characters ...{_escaped(last)}"


def _escaped(text: str) -> str:
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
