"""The text of ``--help``: options in groups, in columns that fit a narrow terminal too."""

from __future__ import annotations

import shutil
from collections.abc import Sequence

import click

UNNAMED = "Options"  # the group of those that are in none
NARROWEST = 36  # columns of a text; click's own narrowest is 50, which a narrow terminal breaks
MOST_TERM = 26  # columns of the left one
NARROW = 50  # columns below which two of them leave no room for a word like Trainer(devices=)


class Formatter(click.HelpFormatter):
    """A text as wide as the terminal, within bounds."""

    def __init__(
        self, indent_increment: int = 2, width: int | None = None, max_width: int | None = None
    ) -> None:
        if width is None:
            columns = min(shutil.get_terminal_size().columns, max_width or 80)
            width = max(NARROWEST, columns - 2)
        super().__init__(indent_increment, width, max_width)


class HelpContext(click.Context):
    """A command line whose help is of this module."""

    formatter_class = Formatter


class GroupedOption(click.Option):
    """An option that the help shows under a heading.

    Args:
        group: the heading.
    """

    def __init__(self, *args: object, group: str = UNNAMED, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]
        self.group = group


def write_groups(
    parameters: Sequence[click.Parameter], ctx: click.Context, formatter: click.HelpFormatter
) -> None:
    """Write options, each group under its heading, in the order in which groups come first."""
    groups: dict[str, list[tuple[str, str]]] = {}
    for parameter in parameters:
        record = parameter.get_help_record(ctx)
        if record is not None and isinstance(parameter, click.Option):
            group = getattr(parameter, "group", UNNAMED)
            groups.setdefault(group, []).append((_term(parameter, record[0]), record[1]))
    every = [term for rows in groups.values() for term, _ in rows]
    for title, rows in groups.items():
        with formatter.section(title):
            write_columns(formatter, rows, every)


def write_columns(
    formatter: click.HelpFormatter,
    rows: Sequence[tuple[str, str]],
    beside: Sequence[str] = (),
) -> None:
    """Write terms, and beside each what it means; where that leaves too little room, below it.

    In a narrow text whose terms are long it stands below all of them.

    Args:
        beside: the terms of all sections whose columns are to begin below each other.
    """
    bound = min(MOST_TERM, formatter.width // 3)
    longest = max(len(term) for term in [*beside, *(term for term, _ in rows)])
    if formatter.width < NARROW and longest > bound:
        for term, meaning in rows:
            formatter.write(f"{'':{formatter.current_indent}}{term}\n")
            with formatter.indentation():
                formatter.write_text(meaning)
        return
    own = min(bound, max(len(term) for term, _ in rows))
    wanted = min(bound, max(map(len, beside), default=own))
    formatter.write_dl(rows, col_max=bound, col_spacing=2 + wanted - own)


def write_to_copy(formatter: click.HelpFormatter, rows: Sequence[tuple[str, str]]) -> None:
    """Write terms with commands, each on one line, however narrow the terminal is."""
    widest = max(len(term) for term, _ in rows)
    for term, command in rows:
        formatter.write(f"{'':{formatter.current_indent}}{term:{widest}}  {command}\n")


def _term(parameter: click.Parameter, term: str) -> str:
    """Return ``--[no-]compile`` for a switch, whose two names fill a line otherwise."""
    if parameter.secondary_opts and len(parameter.opts) == 1:
        return f"--[no-]{parameter.opts[0].removeprefix('--')}"
    return term
