"""Options of the commands, derived from the overridden settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

import click

from quorate.commands.help_text import GroupedOption
from quorate.services.display.shown import OutputSettings
from quorate.settings import NONE, Option, options
from quorate.training.config import OPTIONS as OF_THE_TRAINER

F = TypeVar("F", bound=Callable[..., Any])

# All settings with an option, by name, including the settings of the display.
OPTIONS: dict[str, Option] = OF_THE_TRAINER | {
    option.name: replace(option, place="") for option in options(OutputSettings).values()
}

# The headings of the help, the most common first, and the options under each.
GROUPS = {
    "Common options": (
        *("devices", "workers", "shards", "seed", "update", "precision"),
        *("run_dir", "fresh", "max_time_s"),
    ),
    "Output": ("quiet", "log_every", "log_format"),
    "Workers": ("engine", "threads", "loader_workers", "worker_timeout_s", "memory_fraction"),
    "Computation": (
        *("compile", "kernels", "deterministic", "random", "strict", "spot_check_every"),
        *("soft_placement", "log_placement", "split", "pipeline"),
    ),
    "Updates": ("clip_norm", "ema_decay", "nonfinite"),
    "Saving": (
        *("save_every_s", "save_every_steps", "keep", "keep_every_h", "summary_every_s"),
        *("init_from", "trace", "trace_steps"),
    ),
    "Several machines and ranks": (
        *("address", "working_dir", "worker_resources", "servers"),
        *("exchange", "bucket_mb", "shard_optimizer"),
    ),
}
UNITS = {"_s": "SECONDS", "_h": "HOURS", "_mb": "MB"}
VALUES: dict[type, str] = {int: "N", float: "X", str: "WORD"}


def flag(name: str) -> str:
    """Return the flag of an option: ``--memory-fraction`` for ``memory_fraction``."""
    return f"--{name.replace('_', '-')}"


def setting_options(*names: str) -> Callable[[F], F]:
    """Decorate a command with options that override settings; an option not given is None.

    Args:
        names: names of settings, in any order; empty: all settings with a flag. The help shows the
            options in the order of ``GROUPS``.
    """

    def decorate(function: F) -> F:
        listed = [(group, name) for group, members in GROUPS.items() for name in members]
        for group, name in reversed(listed):
            if names and name not in names:
                continue
            option = OPTIONS[name]
            flags = flag(name)
            if option.kind is bool:
                flags += f"/--no-{flags[2:]}"
            function = click.option(
                flags,
                cls=GroupedOption,
                group=group,
                type=_NumberOrNone(option.kind) if option.may_be_none else option.kind,
                default=None,
                metavar=_metavar(option),
                help=f"{option.help}  [{option.place}]" if option.place else option.help,
            )(function)
        return function

    return decorate


class _NumberOrNone(click.ParamType[Any]):
    """A number, or the word that stands for None: no summaries, no saves by the clock."""

    def __init__(self, kind: type | None) -> None:
        self._number = click.types.convert_type(kind)
        self.name = self._number.name

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the number, or ``NONE``."""
        return NONE if value == NONE else self._number.convert(value, param, ctx)


def _metavar(option: Option) -> str | None:
    """Return the placeholder for the value: the unit, if the name ends in a unit."""
    if option.metavar is not None or option.kind is None:
        return option.metavar
    unit = next((unit for end, unit in UNITS.items() if option.name.endswith(end)), None)
    return unit or VALUES.get(option.kind)


def given(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the given options, by name."""
    return {name: value for name, value in options.items() if value is not None}


def as_typed(options: Mapping[str, Any]) -> list[str]:
    """Return the words typed for options by name: ``--shards 4 --no-compile``."""
    words: list[str] = []
    for name, value in given(options).items():
        if isinstance(value, bool):
            words.append(flag(name) if value else f"--no-{flag(name)[2:]}")
        else:
            words += [flag(name), str(value)]
    return words
