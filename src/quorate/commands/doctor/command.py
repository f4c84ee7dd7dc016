"""``quorate doctor``: what devices and limits there are, and whether a run would work."""

from __future__ import annotations

import json
from dataclasses import fields, is_dataclass
from typing import Any

import click

from quorate.commands.command import Command
from quorate.commands.options import setting_options

HELP = "Show what devices and limits there are, and whether such a run would work."


@click.command(
    "doctor",
    cls=Command,
    help=HELP,
    short_help="show devices and limits, and what would go wrong",
)
@setting_options("devices", "workers", "threads")
@click.option("--json", "as_json", is_flag=True, help="one JSON object")
def command(
    devices: str | None,
    workers: int | None,
    threads: int | None,
    as_json: bool,
) -> int:
    """Print what there is and what is wrong; return 1 if such a run would fail, else 0.

    Raises:
        SettingError: a number is too small.
    """
    from quorate.commands.doctor.examination import examine
    from quorate.commands.doctor.table import shown
    from quorate.commands.doctor.verdict import FAILS
    from quorate.commands.doctor.verdicts import verdicts
    from quorate.commands.doctor.wanted import Wanted, named_devices
    from quorate.settings import whole

    wanted = Wanted(
        devices=named_devices(devices) if devices else None,
        workers=None if workers is None else whole("workers", workers, least=1),
        threads=1 if threads is None else whole("threads", threads, least=1),
    )
    facts = examine()
    listed = verdicts(facts, wanted)
    code = int(any(verdict.level == FAILS for verdict in listed))
    if as_json:
        record = {"works": not code, "verdicts": _plain(listed), **_plain(facts)}
        print(json.dumps(record, indent=1))
    else:
        print(shown(facts, listed))
    return code


def _plain(value: Any) -> Any:
    """Return the same, of objects and lists that JSON has."""
    if is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return {name: _plain(part) for name, part in value._asdict().items()}
    if isinstance(value, (list, tuple)):
        return [_plain(part) for part in value]
    return value
