"""Commands: what click reads of a command line, and what is called when it has been read.

click takes KeyboardInterrupt and EOFError for its own, wherever they come from. So it only reads:
reading yields a call, which ``main`` makes when click is done.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from functools import partial
from importlib import import_module
from typing import Any

import click

HELP = {"help_option_names": ["-h", "--help"], "max_content_width": 100}


class Command(click.Command):
    """A command whose invocation is the call that it stands for: a function to an exit code."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.context_settings = {**HELP, **self.context_settings}

    def invoke(self, ctx: click.Context) -> partial[int]:
        """Return the call, with the options as its keywords."""
        assert self.callback is not None
        return partial(self.callback, **ctx.params)


class ScriptCommand(Command):
    """A command for a script: its options stand before the script, or right behind it.

    The first word behind the script that is no option of the command is the script's, and so is
    all that follows; ``--`` ends the command's options explicitly.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.context_settings["allow_interspersed_args"] = False
        self.params += [
            click.Argument(["script"], type=click.Path()),
            # Paths, so that a shell completes them.
            click.Argument(["arguments"], nargs=-1, type=click.Path(readable=False)),
        ]

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Read a command line on which the options may stand behind the script."""
        return super().parse_args(ctx, self._options_first(ctx, args))

    def _options_first(self, ctx: click.Context, words: Sequence[str]) -> list[str]:
        """Return the same command line with all options before the script."""
        takes_value = {
            name: not (parameter.is_flag or parameter.count)
            for parameter in self.params
            if isinstance(parameter, click.Option)
            for name in (*parameter.opts, *parameter.secondary_opts)
        }
        end = _leading_options(ctx, words, takes_value, unknown=True)
        before, rest = words[:end], words[end:]
        if rest[:1] == ["--"]:
            return [*before, *rest]
        script, behind = rest[:1], rest[1:]
        end = _leading_options(ctx, behind, takes_value, unknown=False)
        arguments = behind[end + 1 :] if behind[end : end + 1] == ["--"] else behind[end:]
        return [*before, *behind[:end], "--", *script, *arguments]


class Commands(click.Group):
    """Commands by name; the module of each is imported when it is wanted.

    Args:
        modules: by the name of a command, the module whose ``command`` it is.
    """

    def __init__(self, name: str, modules: Mapping[str, str], **kwargs: Any) -> None:
        super().__init__(name, no_args_is_help=False, context_settings=HELP, **kwargs)
        self._modules = modules

    def list_commands(self, _ctx: click.Context) -> list[str]:
        """Return the names, in the order of the help."""
        return list(self._modules)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return a command.

        Raises:
            click.UsageError: there is none of this name.
        """
        if cmd_name in self._modules:
            command: click.Command = import_module(self._modules[cmd_name]).command
            return command
        if ctx.resilient_parsing or cmd_name.startswith("-"):
            return None
        near = difflib.get_close_matches(cmd_name, self._modules, n=1)
        hint = f"did you mean {near[0]}?" if near else f"expected {', '.join(self._modules)}"
        raise click.UsageError(f"no such command: {cmd_name}; {hint}", ctx)


def usage_line(error: click.ClickException) -> str:
    """Return what is wrong with a command line, as one line."""
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
    ctx: click.Context, words: Sequence[str], takes_value: Mapping[str, bool], *, unknown: bool
) -> int:
    """Return how many words at the front are options with their values.

    Args:
        takes_value: by the name of each known option.
        unknown: whether an option that is not known counts; it is refused later.

    Raises:
        click.BadOptionUsage: the last option lacks its value.
    """
    end = 0
    while end < len(words) and words[end].startswith("-") and words[end] not in ("-", "--"):
        name, is_whole, _ = words[end].partition("=")
        if name not in takes_value and not unknown:
            break
        end += 1 if is_whole or not takes_value.get(name, False) else 2
    if end > len(words) and not ctx.resilient_parsing:
        name = words[-1]
        raise click.BadOptionUsage(name, f"option {name} lacks its value", ctx)
    return min(end, len(words))
