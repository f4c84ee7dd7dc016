"""Options of the commands, made from the settings that they override."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

import click

F = TypeVar("F", bound=Callable[..., Any])


class Option(NamedTuple):
    name: str
    help: str
    kind: type | None
    metavar: str | None
    place: str


OPTIONS = {
    option.name: option
    for option in (
        Option("devices", "cpu, cuda, cuda:0,cuda:1, mps", str, "LIST", "Trainer(devices=)"),
        Option("workers", "how many, dealt over the devices in turn", int, None, "Workers(count=)"),
        Option(
            "shards", "pieces of a batch; the result depends on it", int, None, "Trainer(shards=)"
        ),
        Option(
            "engine", "processes, or towers: a thread per worker", str, None, "Workers(engine=)"
        ),
        Option("threads", "intra-op threads of each worker", int, None, "Workers(threads=)"),
        Option(
            "memory_fraction",
            "bound on a worker's share of its GPU's memory",
            float,
            None,
            "Workers(memory_fraction=)",
        ),
        Option("precision", "fp32, tf32, bf16 or fp16", str, None, "Trainer(precision=)"),
        Option(
            "compile",
            "compile the model, once per shape of a shard",
            bool,
            None,
            "Compute(compile=)",
        ),
        Option(
            "soft_placement",
            "operators without a kernel on the device run on the CPU",
            bool,
            None,
            "Compute(soft_placement=)",
        ),
        Option(
            "log_placement",
            "show which module and operator ran where",
            bool,
            None,
            "Compute(log_placement=)",
        ),
        Option(
            "update",
            "the rule: sync, quorum:R, async, bounded:K",
            str,
            "RULE",
            "Trainer(update=)",
        ),
        Option(
            "seed",
            "also of Python's, NumPy's and torch's generators",
            int,
            None,
            "Trainer(seed=)",
        ),
        Option("run_dir", "where state and metrics are saved", str, "DIR", "RunDir(path=)"),
        Option(
            "fresh",
            "begin anew; what is in --run-dir is moved aside",
            bool,
            None,
            "RunDir(fresh=)",
        ),
        Option(
            "init_from",
            "weights to begin from: a file or a run directory",
            str,
            "PATH",
            "RunDir(init_from=)",
        ),
        Option(
            "save_every_s",
            "seconds between checkpoints (600)",
            float,
            None,
            "RunDir(save_every_s=)",
        ),
        Option(
            "save_every_steps",
            "also after every so many updates",
            int,
            None,
            "RunDir(save_every_steps=)",
        ),
        Option(
            "max_time_s",
            "seconds after which to save and stop",
            float,
            None,
            "fit(max_time_s=)",
        ),
        Option(
            "nonfinite",
            "stop, or skip: what to do before such an update",
            str,
            None,
            "Optimize(nonfinite=)",
        ),
        Option("loader_workers", "processes that load rows", int, None, "Loading(processes=)"),
    )
}


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
