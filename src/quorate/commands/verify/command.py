"""``quorate verify``: whether a script gives the same bits on any number of workers; why not."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quorate.commands.after_script import EPILOG, add_script, take_options
from quorate.errors import SettingError

if TYPE_CHECKING:
    from quorate.commands.verify.verdict import Run

    Commands = argparse._SubParsersAction[Any]

WORKERS, UPDATES = "1,2,3", 20
PASSED_ON = ("devices", "engine", "threads", "update", "seed", "precision", "memory-fraction")
SWITCHES = ("compile", "soft-placement")  # passed on too


def add_to(commands: Commands) -> None:
    parser = commands.add_parser(
        "verify", help="same bits on any number of workers?", description=__doc__, epilog=EPILOG
    )
    _add_options(parser)
    add_script(parser)
    parser.set_defaults(call=verify)


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--workers", metavar="1,2,3", help=f"numbers to compare ({WORKERS})")
    parser.add_argument("--updates", type=int, help=f"after each of which to compare ({UPDATES})")
    parser.add_argument("--devices", help="as for quorate run")
    parser.add_argument(
        "--shards", type=int, help="pieces of a batch; the script's, else the most workers"
    )
    parser.add_argument("--engine", help="processes, or towers: a thread per worker")
    parser.add_argument("--threads", type=int, help="intra-op threads of each worker")
    parser.add_argument("--update", help="the rule: sync, or quorum:R of all shards")
    parser.add_argument("--seed", type=int, help="as for quorate run")
    parser.add_argument("--precision", help="fp32, tf32, bf16 or fp16")
    parser.add_argument("--memory-fraction", type=float, help="as for quorate run")
    for name in SWITCHES:
        parser.add_argument(
            f"--{name}", action="store_const", const=True, help="as for quorate run"
        )


def verify(options: argparse.Namespace) -> int:
    """Run the script once per number of workers, compare, and say where they part and why.

    Returns:
        0: the same bits. 1: a difference was found.

    Raises:
        SettingError: an option cannot work.
        UserError: the script fails on any number of workers, or has nothing to compare.
    """
    from quorate.commands.child_run import ended_by_sigterm
    from quorate.commands.verify.verdict import verdict
    from quorate.settings import whole

    take_options(options, _add_options, "quorate verify")
    if not Path(options.script).is_file():
        raise SettingError("script", options.script, "a Python file", "check the path")
    updates = UPDATES if options.updates is None else options.updates
    whole("updates", updates, least=1)
    counts = _counts(WORKERS if options.workers is None else options.workers)
    with ended_by_sigterm():
        runs = _runs(options, counts, updates)
    found = verdict(runs)
    print("\n" + "\n".join(found.lines))
    return 0 if found.is_same else 1


def _counts(text: str) -> list[int]:
    """Numbers of workers; a single one is run twice."""
    try:
        found = [int(word) for word in text.split(",")]
    except ValueError:
        found = []
    if not found or min(found) < 1:
        raise SettingError("workers", text, "numbers of workers such as 1,2,3", "list them")
    return found * 2 if len(found) == 1 else found


def _runs(options: argparse.Namespace, counts: Sequence[int], updates: int) -> list[Run]:
    """One run per number, in the order given."""
    # The largest is the first: where the script leaves the number of shards open, it has as many
    # as workers, and all others get that number.
    order = sorted(range(len(counts)), key=lambda n: -counts[n])
    shards: int | None = options.shards
    found: dict[int, Run] = {}
    for n in order:
        again = sum(counts[before] == counts[n] for before in found) > 0
        run = _run(options, counts[n], updates, shards, is_again=again)
        run.refuse_a_mistake()
        print(f"{run.label}: {run.summary()}", flush=True)
        shards = run.recording.facts.get("shards", shards)
        found[n] = run
    return [found[n] for n in range(len(counts))]


def _run(
    options: argparse.Namespace, workers: int, updates: int, shards: int | None, *, is_again: bool
) -> Run:
    from quorate.commands.child_run import NO_SAVES_S, child_run, last_error
    from quorate.commands.verify import records
    from quorate.commands.verify.verdict import Run

    label = f"{workers} worker{'s' if workers > 1 else ''}{' again' if is_again else ''}"
    with tempfile.TemporaryDirectory(prefix="quorate-verify-", ignore_cleanup_errors=True) as name:
        folder = Path(name) / "records"
        folder.mkdir()
        words = {
            **{name: _given(options, name) for name in (*PASSED_ON, *SWITCHES)},
            "workers": str(workers),
            "shards": None if shards is None else str(shards),
            "run-dir": str(Path(name) / "run"),
            "save-every-s": str(NO_SAVES_S),
            "record": str(folder),
            "record-updates": str(updates),
        }
        output = Path(name) / "output"
        with output.open("wb") as file:
            code = child_run(
                words,
                options.script,
                options.arguments,
                file,
                lambda: records.has_ended(folder),
            )
        text = output.read_text(encoding="utf-8", errors="replace")
        return Run(label, workers, records.read(folder), code, last_error(text))


def _given(options: argparse.Namespace, name: str) -> str | bool | None:
    value = getattr(options, name.replace("-", "_"))
    return value if value is None or value is True else str(value)
