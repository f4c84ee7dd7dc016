"""Detached runs: started, followed, stopped and listed from any machine of a Ray cluster."""

from __future__ import annotations

import codecs
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from quorate.commands.options import as_typed
from quorate.engines.processes.script import Script
from quorate.engines.selection import RAY, require_ray
from quorate.errors import SettingError, UserError
from quorate.machine.environment import ray_address
from quorate.machine.standard_streams import Steady

if TYPE_CHECKING:
    from quorate.engines.ray.detached import DetachedRun

LOOK_EVERY_S = 0.2


def run_detached(script: Script, settings: Mapping[str, Any]) -> int:
    """Run a script on a cluster's head node, and follow the run until its end. Blocks.

    If the run already exists, only follow. Ctrl-C stops the run; any other end of this process does
    not.

    Args:
        settings: the given options of ``quorate run``.

    Returns:
        The run's exit code.

    Raises:
        UserError: a setting does not allow a detached run.
        RunError: the run is lost.
    """
    address = settings.get("address") or ray_address()
    if settings.get("engine", RAY) != RAY:
        raise SettingError("engine", settings["engine"], "ray for a detached run", "leave it out")
    if address is None:
        fix = "say which, a local one would end with this command: --address HOST:PORT"
        raise SettingError("address", None, "a cluster for a detached run", fix)
    if "run_dir" not in settings:
        fix = (
            "it names the run, and is where a coordinator that is lost goes on from: --run-dir DIR"
        )
        raise SettingError("run_dir", None, "a folder that the head node has", fix)
    require_ray()
    from quorate.engines.ray.detached import started
    from quorate.engines.ray.pool import folder_of

    run_dir = str(Path(settings["run_dir"]).absolute())
    folder = folder_of(script, settings.get("working_dir"))
    elsewhere = {"address": None, "working_dir": None, "engine": RAY, "run_dir": run_dir}
    with started(address, script, folder, as_typed({**settings, **elsewhere}), run_dir) as run:
        print(
            f"quorate: a detached run of {run_dir}; Ctrl-C stops it, and nothing else that becomes "
            "of this command, which looks on when it is given again",
            file=Steady(sys.stderr),
            flush=True,
        )
        return _looked_on(run)


def _looked_on(run: DetachedRun) -> int:
    since = told = 0
    letters = codecs.getincrementaldecoder("utf-8")("backslashreplace")
    with _counting(signal.SIGINT) as asked:
        while True:
            said = run.ask("said", since)
            print(letters.decode(said.text), end="", flush=True)
            since = said.until
            if said.code is not None:
                run.end()
                return int(said.code) if said.code >= 0 else 128 - int(said.code)
            for _ in range(told, len(asked)):  # a second signal ends the run at once
                run.ask("signal", signal.SIGINT)
            told = len(asked)
            time.sleep(LOOK_EVERY_S)


@contextmanager
def _counting(number: signal.Signals) -> Iterator[list[int]]:
    """Yield a list that grows with every arrival of a signal within the block."""
    came = list[int]()

    def note(number: int, _frame: FrameType | None) -> None:
        came.append(number)

    before = signal.signal(number, note)
    try:
        yield came
    finally:
        signal.signal(number, before)


def listed(address: str) -> int:
    """Print a cluster's detached runs, one per line.

    Raises:
        UserError: there is no such cluster.
    """
    require_ray()
    from quorate.engines.ray.detached import running
    from quorate.machine.text import aligned, printable

    with running(address) as runs:
        if not runs:
            print(f"no detached run at {address}")
            return 0
        rows = []
        for run_dir, run in runs.items():
            about = run.ask("about")
            state = "runs" if about["code"] is None else f"ended with {about['code']}"
            since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(about["since"]))
            last = printable("".join(about["last"]), 80)
            rows.append((run_dir, state, f"since {since}", last))
        print(aligned(rows))
    return 0


def inspected(address: str, run_dir: Path, words: Sequence[str]) -> int:
    """Print the output of ``quorate inspect`` on a cluster's head node for a run of the cluster.

    Raises:
        UserError: there is no such cluster, or no such run.
    """
    require_ray()
    from quorate.engines.ray.detached import running

    name = str(run_dir.absolute())
    with running(address) as runs:
        if name not in runs:
            there = f"there are {', '.join(runs)}" if runs else "there is none"
            raise UserError(f"no detached run of {name} is at {address}; {there}")
        code, text = runs[name].ask("inspected", [*words, name])
    print(text, end="")
    return int(code)
