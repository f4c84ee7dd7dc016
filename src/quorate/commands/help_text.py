"""The text of ``--help``: options in groups, in columns that fit a narrow terminal too."""

from __future__ import annotations

import shutil
from collections.abc import Sequence

import click

UNNAMED = "Options"  # the group of options without a group
NARROWEST = 36  # least columns of a text; click's own minimum is 50, too wide for a narrow terminal
MOST_TERM = 26  # largest width of the left column
NARROW = 50  # fewer columns leave too little room for two, with words like Trainer(devices=)


class TerminalFormatter(click.HelpFormatter):
    """A formatter of texts as wide as the terminal, within bounds."""

    def __init__(
        self, indent_increment: int = 2, width: int | None = None, max_width: int | None = None
    ) -> None:
        if width is None:
            columns = min(shutil.get_terminal_size().columns, max_width or 80)
            width = max(NARROWEST, columns - 2)
        super().__init__(indent_increment, width, max_width)


class HelpContext(click.Context):
    """A context whose help is formatted by this module."""

    formatter_class = TerminalFormatter


class GroupedOption(click.Option):
    """An option shown under a heading of the help.

    Args:
        group: the heading.
    """

    def __init__(self, *args: object, group: str = UNNAMED, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]
        self.group = group


def write_groups(
    parameters: Sequence[click.Parameter], ctx: click.Context, formatter: click.HelpFormatter
) -> None:
    """Write options, each group under its heading, in the order of the groups' first options."""
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
    """Write terms with their meanings beside them, or below them if the room is too small.

    In a narrow text with long terms, every meaning is written below its term.

    Args:
        beside: the terms of all sections, to align their columns.
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
    """Return ``--[no-]compile`` for a switch: the two separate names would fill a line."""
    if parameter.secondary_opts and len(parameter.opts) == 1:
        return f"--[no-]{parameter.opts[0].removeprefix('--')}"
    return term
