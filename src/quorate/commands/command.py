"""Commands: the parsing of a command line by click, and the call made afterwards.

click catches KeyboardInterrupt and EOFError of any origin. Therefore click only parses: the result
is a call, which ``main`` makes after click has returned.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple

import click

from quorate.commands.help_text import (
    UNNAMED,
    GroupedOption,
    HelpContext,
    write_columns,
    write_groups,
    write_to_copy,
)
from quorate.commands.namesakes import say_namesakes
from quorate.errors import nearest

HELP = {"help_option_names": ["-h", "--help"], "max_content_width": 100}
TO_COPY = "Completion of commands and options"  # a section of commands, whose lines are not wrapped
IN_ITS_PLACE = "module"  # the option that names a module in the place of a script


class Command(click.Command):
    """A command whose invocation returns its call: a function that returns an exit code."""

    context_class = HelpContext

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.context_settings = {**HELP, **self.context_settings}

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse a command line; errors refer to this command."""
        try:
            return super().parse_args(ctx, args)
        except click.UsageError as error:
            error.ctx = error.ctx or ctx
            raise

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options, in groups if the options have groups."""
        write_groups(self.get_params(ctx), ctx, formatter)

    def invoke(self, ctx: click.Context) -> partial[int]:
        """Return the call, with the options as keywords."""
        assert self.callback is not None
        return partial(self.callback, **ctx.params)


class ScriptLine(NamedTuple):
    """A command line for a script, divided into parts; each part in the order of typing."""

    ours: list[str]  # options of the command, with their values
    behind: list[str]  # names of the options after the script
    script: list[str]  # the script or module; empty: none
    arguments: list[str]  # arguments of the script


class ScriptCommand(Command):
    """A command for a script: its options stand before or after the script.

    After the script, a word that is an option of the command belongs to the command, and any other
    word to the script; ``--`` ends the command's options. Before the script, an unknown option is
    an error. ``-m`` names a module in the place of the script, as in Python.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.context_settings["allow_interspersed_args"] = False
        first = getattr(self.params[0], "group", UNNAMED)
        module = GroupedOption(
            ["-m", IN_ITS_PLACE],
            group=first,
            metavar="MODULE",
            help="run a module instead of a script, as python -m does",
        )
        self.params += [
            module,
            click.Argument(["script"], type=click.Path()),
            # The type is a path, so that a shell completes the words.
            click.Argument(["arguments"], nargs=-1, type=click.Path(readable=False)),
        ]

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse a command line whose options may stand after the script."""
        line = self._taken_apart(ctx, args)
        ctx.meta[__name__] = line.behind
        return super().parse_args(ctx, [*line.ours, "--", *line.script, *line.arguments])

    def invoke(self, ctx: click.Context) -> partial[int]:
        """Return the call; the call first warns about options that the script may have too."""
        call = super().invoke(ctx)
        return partial(_called, call, ctx.command_path, ctx.meta[__name__])

    def _taken_apart(self, ctx: click.Context, words: Sequence[str]) -> ScriptLine:
        takes_value = {
            name: not (parameter.is_flag or parameter.count)
            for parameter in self.params
            if isinstance(parameter, click.Option)
            for name in (*parameter.opts, *parameter.secondary_opts)
        }
        # 1. The words before the script.
        end = _leading_options(ctx, words, takes_value)
        ours, rest = [*words[:end]], words[end:]
        del takes_value["-m"]  # after the script, -m belongs to the script
        if rest[:1] == ["--"]:
            return ScriptLine(ours, [], [*rest[1:2]], [*rest[2:]])
        # 2. The script, or a module in its place: click receives the module's name for both.
        module = rest[0][2:] if rest and rest[0] != "-m" and rest[0].startswith("-m") else ""
        if rest[:1] == ["-m"]:
            if len(rest) < 2:
                raise _lacking(ctx, "-m")
            module, rest = rest[1], rest[1:]
        if module:
            ours += ["-m", module]
        script, rest = [module] if module else [*rest[:1]], rest[1:]
        # 3. The words after the script.
        behind: list[str] = []
        arguments: list[str] = []
        position = 0
        while position < len(rest):
            name, is_whole, _ = rest[position].partition("=")
            if rest[position] == "--":
                arguments += rest[position + 1 :]
                break
            if name not in takes_value:
                arguments.append(rest[position])
                position += 1
                continue
            end = position + (1 if is_whole or not takes_value[name] else 2)
            if end > len(rest) and not ctx.resilient_parsing:
                raise _lacking(ctx, name)
            ours += rest[position:end]
            behind.append(name)
            position = end
        return ScriptLine(ours, behind, script, arguments)


def _called(call: partial[int], command: str, behind: Sequence[str]) -> int:
    if behind:
        say_namesakes(call.keywords["script"], call.keywords[IN_ITS_PLACE], command, behind)
    return call()


class Commands(click.Group):
    """A group of commands; the module of each is imported on first use.

    Args:
        modules: maps the name of a command to the module with its ``command``.
        sections: the sections at the end of the help: terms and meanings, by title.
    """

    context_class = HelpContext

    def __init__(
        self,
        name: str,
        modules: Mapping[str, str],
        sections: Mapping[str, Sequence[tuple[str, str]]],
        **kwargs: Any,
    ) -> None:
        super().__init__(name, no_args_is_help=True, context_settings=HELP, **kwargs)
        self._modules = modules
        self._sections = sections

    def format_epilog(self, _ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the sections at the end of the help."""
        for title, rows in self._sections.items():
            with formatter.section(title):
                if title == TO_COPY:
                    write_to_copy(formatter, rows)
                else:
                    write_columns(formatter, rows)

    def list_commands(self, _ctx: click.Context) -> list[str]:
        """Return the names, in the order of the help."""
        return list(self._modules)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return a command.

        Raises:
            click.UsageError: there is no command of this name.
        """
        if cmd_name in self._modules:
            command: click.Command = import_module(self._modules[cmd_name]).command
            return command
        if ctx.resilient_parsing or cmd_name.startswith("-"):
            return None
        if cmd_name.endswith(".py"):
            near: str | None = f"quorate run {cmd_name}"
        else:
            near = nearest(cmd_name, self._modules)
        hint = f"did you mean {near}?" if near else f"expected {', '.join(self._modules)}"
        raise click.UsageError(f"no such command: {cmd_name}; {hint}", ctx)


def usage_line(error: click.ClickException) -> str:
    """Return the error in a command line, as one line."""
    command = "quorate"
    if isinstance(error, click.UsageError) and error.ctx is not None:
        command = error.ctx.command_path
    if isinstance(error, click.NoSuchOption):
        near = error.possibilities or ()  # the best first
        hint = f"; did you mean {near[0]}?" if near else ""
        text = f"no such option: {error.option_name}{hint}"
    else:
        text = " ".join(error.format_message().split()).rstrip(".")
        text = text[:1].lower() + text[1:]
    return f"quorate: {text}{'' if text.endswith('?') else ';'} see {command} --help"


def _leading_options(
    ctx: click.Context, words: Sequence[str], takes_value: Mapping[str, bool]
) -> int:
    """Return the number of words at the front that are options with their values, except ``-m``.

    Unknown options count too, and are refused later.

    Args:
        takes_value: whether an option takes a value, by name, for the known options.

    Raises:
        click.BadOptionUsage: the last option lacks its value.
    """
    end = 0
    while end < len(words) and words[end].startswith("-") and words[end] not in ("-", "--"):
        if words[end].startswith("-m"):
            break
        name, is_whole, _ = words[end].partition("=")
        end += 1 if is_whole or not takes_value.get(name, False) else 2
    if end > len(words) and not ctx.resilient_parsing:
        raise _lacking(ctx, words[-1])
    return min(end, len(words))


def _lacking(ctx: click.Context, name: str) -> click.BadOptionUsage:
    return click.BadOptionUsage(name, f"option {name} lacks its value", ctx)
