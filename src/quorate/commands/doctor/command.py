"""``quorate doctor``: shows devices and limits, and whether a run would work."""

from __future__ import annotations

import json
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Any

import click

from quorate.commands.command import ScriptCommand
from quorate.commands.doctor.verdict import FAILS, Verdict
from quorate.commands.options import setting_options

if TYPE_CHECKING:
    from quorate.commands.doctor.wanted import Wanted

HELP = """Show the devices and limits of this machine, and check whether a run would work.

With a SCRIPT, run one update and show the time and memory of its model. Options may stand before or
after SCRIPT. After SCRIPT, words that are not options of this command go to the script. After --,
all words go to the script.
"""


class DoctorCommand(ScriptCommand):
    """A command with an optional script."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for parameter in self.params:
            parameter.required = False


@click.command(
    "doctor",
    cls=DoctorCommand,
    help=HELP,
    short_help="check the devices and limits of this machine",
)
@setting_options("devices", "workers", "threads")
@click.option(
    "--run-dir", metavar="DIR", help="under torchrun: check that all hosts see the same directory"
)
@click.option("--json", "as_json", is_flag=True, help="print the result as one JSON object")
def command(
    devices: str | None,
    workers: str | None,
    threads: int | None,
    run_dir: str | None,
    as_json: bool,
    script: str | None,
    module: str | None,
    arguments: tuple[str, ...],
) -> int:
    """Print the facts and the problems; return 1 if such a run would fail, else 0.

    Under torchrun one process of each host takes part, and the process of the first host prints.

    Raises:
        SettingError: a number is too small, or an option does not fit.
    """
    from quorate.errors import SettingError

    if script is not None:
        from quorate.commands.doctor.model.command import examine_model

        for option, value in (("workers", workers), ("run_dir", run_dir)):
            if value is not None:
                fix = "leave it out: the model is measured in one update, by one worker"
                raise SettingError(option, value, "none with a script", fix)
        how = {"devices": devices, "threads": threads}
        return examine_model(script, module, arguments, how, as_json=as_json)
    from quorate.commands.doctor.wanted import Wanted, named_devices
    from quorate.engines.workers import Workers
    from quorate.machine.environment import torchrun_environment
    from quorate.settings import integer

    wanted = Wanted(
        devices=named_devices(devices) if devices else None,
        workers=Workers(workers).number(),
        threads=1 if threads is None else integer("threads", threads, least=1),
    )
    environment = torchrun_environment()
    if environment.get("LOCAL_RANK", "0") != "0":
        return 0  # another process reports on this host
    if int(environment.get("GROUP_WORLD_SIZE", "1")) > 1:
        return _several(environment, wanted, run_dir, as_json=as_json)
    if run_dir is not None:
        fix = "leave it out, or start it on each host: torchrun ... -m quorate doctor"
        raise SettingError("run_dir", run_dir, "several hosts to compare it on", fix)
    return _alone(wanted, as_json=as_json)


def _alone(wanted: Wanted, *, as_json: bool) -> int:
    from quorate.commands.doctor.examination import examine
    from quorate.commands.doctor.table import shown
    from quorate.commands.doctor.verdicts import verdicts

    facts = examine()
    listed = verdicts(facts, wanted)
    return _told(facts, listed, shown(facts, listed), as_json=as_json)


def _several(
    environment: dict[str, str], wanted: Wanted, run_dir: str | None, *, as_json: bool
) -> int:
    from quorate.commands.doctor.hosts.meeting import meet
    from quorate.commands.doctor.hosts.table import rows
    from quorate.commands.doctor.hosts.verdicts import verdicts
    from quorate.commands.doctor.table import text

    if (hosts := meet(environment, wanted, run_dir)) is None:
        return 0  # the first host prints
    listed = verdicts(hosts)
    return _told(hosts, listed, text([*rows(hosts)], listed), as_json=as_json)


def _told(facts: Any, listed: list[Verdict], text: str, *, as_json: bool) -> int:
    """Print the findings, and return the exit code."""
    code = int(any(verdict.level == FAILS for verdict in listed))
    record = {"works": not code, "verdicts": _plain(listed), **_plain(facts)}
    print(json.dumps(record, indent=1) if as_json else text)
    return code


def _plain(value: Any) -> Any:
    """Return a value as objects and lists for JSON."""
    if is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return {name: _plain(part) for name, part in value._asdict().items()}
    if isinstance(value, (list, tuple)):
        return [_plain(part) for part in value]
    return value
