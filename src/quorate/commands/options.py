"""Options of the commands, made from the settings that they override."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import click

from quorate.training.recipe import OPTIONS

F = TypeVar("F", bound=Callable[..., Any])


def flag(name: str) -> str:
    """Return the flag of an option: ``--memory-fraction`` of ``memory_fraction``."""
    return f"--{name.replace('_', '-')}"


def setting_options(*names: str) -> Callable[[F], F]:
    """Decorate a command with options that override settings, each None where it is not given.

    Args:
        names: of settings; none: all that have a flag, in their order.
    """
    options = [OPTIONS[name] for name in names] if names else list(OPTIONS.values())

    def decorate(function: F) -> F:
        for option in reversed(options):
            if option.kind is None:
                continue
            flags = flag(option.name)
            if option.kind is bool:
                flags += f"/--no-{flags[2:]}"
            function = click.option(
                flags,
                type=option.kind,
                default=None,
                metavar=option.metavar,
                help=f"{option.help}  [{option.place}]",
            )(function)
        return function

    return decorate


def given(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return those options that were given, by name."""
    return {name: value for name, value in options.items() if value is not None}


def as_typed(options: Mapping[str, Any]) -> list[str]:
    """Return what is typed at the command for options by name: ``--shards 4 --no-compile``."""
    words: list[str] = []
    for name, value in given(options).items():
        if isinstance(value, bool):
            words.append(flag(name) if value else f"--no-{flag(name)[2:]}")
        else:
            words += [flag(name), str(value)]
    return words
