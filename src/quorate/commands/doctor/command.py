"""``quorate doctor``: what devices and limits there are, and whether a run would work."""

from __future__ import annotations

import argparse
import json
import re
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[Any]


def add_to(commands: Commands) -> None:
    parser = commands.add_parser(
        "doctor", help="show devices and limits, and what would go wrong", description=__doc__
    )
    parser.add_argument("--devices", help="of the run that is to be judged; as for run")
    parser.add_argument("--workers", type=int, help="likewise")
    parser.add_argument("--threads", type=int, default=1, help="likewise")
    parser.add_argument("--loader-workers", type=int, help="likewise; 0: it has none")
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.set_defaults(call=doctor)


def doctor(options: argparse.Namespace) -> int:
    """Print what there is and what is wrong. 1 if such a run would fail, else 0.

    Raises:
        SettingError: a number is too small.
    """
    from quorate.commands.doctor.examination import examine
    from quorate.commands.doctor.table import shown
    from quorate.commands.doctor.verdict import FAILS
    from quorate.commands.doctor.verdicts import verdicts
    from quorate.commands.doctor.wanted import Wanted
    from quorate.settings import whole

    workers, loader_workers = options.workers, options.loader_workers
    wanted = Wanted(
        devices=options.devices and tuple(map(str.strip, re.split(r"[,+]", options.devices))),
        workers=None if workers is None else whole("workers", workers, least=1),
        threads=whole("threads", options.threads, least=1),
        loader_workers=loader_workers and whole("loader_workers", loader_workers, least=0),
    )
    facts = examine()
    found = verdicts(facts, wanted)
    code = int(any(verdict.level == FAILS for verdict in found))
    if options.json:
        told = {"works": not code, "verdicts": _plain(found), **_plain(facts)}
        print(json.dumps(told, indent=1))
    else:
        print(shown(facts, found))
    return code


def _plain(value: Any) -> Any:
    """The same of objects and lists that JSON has."""
    if is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return {name: _plain(one) for name, one in value._asdict().items()}
    if isinstance(value, (list, tuple)):
        return [_plain(one) for one in value]
    return value
