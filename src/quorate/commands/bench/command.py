"""``quorate bench``: measures the gain from more workers for a script, and the bottleneck."""

from __future__ import annotations

import json
import platform
import sys
import time
from collections.abc import Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from quorate.commands.command import ScriptCommand
from quorate.commands.options import given, setting_options
from quorate.commands.program import require_program
from quorate.machine.standard_streams import Steady

if TYPE_CHECKING:
    from quorate.commands.bench.contenders import Contender
    from quorate.commands.bench.measured import Measured
    from quorate.commands.bench.results import Proof, Result
    from quorate.commands.bench.runs import BenchProgram

REPEATS, SECONDS, OUT = 3, 8.0, "bench"

HELP = """Measure how the speed of a script grows with the number of workers, and what limits it.

Options may stand before or after SCRIPT. After SCRIPT, words that are not options of this command
go to the script. After --, all words go to the script.
"""


@click.command(
    "bench",
    cls=ScriptCommand,
    help=HELP,
    short_help="measure the speed for several numbers of workers",
)
@click.option("--workers", metavar="1,2,4", help="numbers of workers to compare")
@click.option(
    "--devices",
    multiple=True,
    metavar="LIST",
    help="devices, as for quorate run; repeat the option to compare several lists",
)
@click.option(
    "--repeats",
    type=int,
    metavar="N",
    default=REPEATS,
    help=f"runs of each configuration, interleaved (default: {REPEATS})",
)
@click.option(
    "--seconds",
    type=float,
    metavar="SECONDS",
    default=SECONDS,
    help=f"seconds to measure in each run, after a warm-up (default: {SECONDS:g})",
)
@click.option(
    "--out",
    metavar="DIR",
    default=OUT,
    help=f"folder for results.json and speed-up.png (default: {OUT})",
)
@click.option(
    "--json", "as_json", is_flag=True, help="print the content of results.json instead of the table"
)
@click.option(
    "--costs",
    "with_costs",
    is_flag=True,
    help="also measure the costs that quorate plan reads: shared cores, updates under async, "
    "checkpoints, the return of a worker; takes four more runs",
)
@setting_options(
    *("shards", "engine", "threads", "address", "worker_resources"),
    *("update", "precision", "kernels", "compile", "split", "pipeline"),
)
def command(
    script: str,
    module: str | None,
    arguments: tuple[str, ...],
    workers: str | None,
    devices: tuple[str, ...],
    repeats: int,
    seconds: float,
    out: str,
    as_json: bool,
    with_costs: bool,
    shards: int | None,
    **settings: Any,
) -> int:
    """Run the script repeatedly, print a table, write a JSON file and a plot.

    If neither ``shards`` nor the script sets the number of shards, all runs use the number of the
    run with the most workers.

    Raises:
        SettingError: an option is not valid.
        UserError: a run ended with exit code 2, or there was nothing to measure.
        RunError: a run failed otherwise.
    """
    from quorate.commands.bench import contenders
    from quorate.commands.bench.conclusion import conclusion
    from quorate.commands.bench.results import proof, results
    from quorate.commands.bench.runs import BenchProgram
    from quorate.commands.bench.table import below, table
    from quorate.commands.child_run import ended_by_sigterm
    from quorate.settings import directory, integer, real

    # 1. Check the options.
    require_program(script, module)
    integer("repeats", repeats, least=1)
    real("seconds", seconds, above=0)
    folder = directory("out", out)
    assert folder is not None
    numbers = [] if workers is None else contenders.counts(workers)
    compared = contenders.contenders(devices, numbers)
    program = BenchProgram(script, module, arguments, given(settings), seconds)
    # 2. Make the runs.
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / "failed.log"
    log.unlink(missing_ok=True)
    order = contenders.rounds(compared, repeats)
    with ended_by_sigterm():
        measured = _measured(program, order, shards, log, as_json=as_json)
        found = _costs(program, measured, log, as_json=as_json) if with_costs else None
    # 3. Report the results.
    compared_results = results(measured)
    same = proof(compared_results)
    if as_json:
        print(_write(program, compared_results, same, folder, found)[0])
        return 0
    run = compared_results[0].runs[0]
    batch = f"{run.batch_size} rows = {run.shards} shard{'s' if run.shards > 1 else ''}"
    print(f"\n{conclusion(compared_results)}")
    print(
        f"\n{' '.join([script, *arguments])}: {batch}, {run.update}; medians of "
        f"{repeats} run{'s' if repeats > 1 else ''} of {seconds:g} s each"
    )
    print(f"\n{table(compared_results)}\n")
    for line in below(compared_results, same):
        print(line)
    print(_write(program, compared_results, same, folder, found)[1])
    return 0


def _measured(
    program: BenchProgram,
    order: Sequence[Sequence[Contender]],
    shards: int | None,
    log: Path,
    *,
    as_json: bool,
) -> dict[Contender, list[Measured]]:
    """Run all contenders one after another, and print progress, on standard error with JSON."""
    from quorate.commands.bench.runs import run
    from quorate.machine.text import three_digits

    say = partial(print, flush=True, file=Steady(sys.stderr if as_json else sys.stdout))
    by_contender: dict[Contender, list[Measured]] = {contender: [] for contender in order[0]}
    total = len(order) * len(order[0])
    began = time.monotonic()
    for number, contender in enumerate(chain.from_iterable(order), start=1):
        say(f"run {number} of {total}: {contender.label()}", end="")
        try:
            measured = run(program, contender, shards, log)
        except BaseException:
            say()
            raise
        left_s = (time.monotonic() - began) / number * (total - number)
        left = f"; about {left_s:,.0f} s left" if number < total else ""
        say(f", {three_digits(measured.examples_per_s)} examples/s{left}")
        shards = measured.shards
        by_contender[contender].append(measured)
    return by_contender


def _costs(
    program: BenchProgram, measured: dict[Contender, list[Measured]], log: Path, *, as_json: bool
) -> dict[str, Any]:
    """Measure the costs that a plan needs, with the fewest workers."""
    from quorate.commands.bench.costs import costs

    say = partial(print, flush=True, file=Steady(sys.stderr if as_json else sys.stdout))
    least = min(measured, key=lambda contender: contender.workers)
    base = measured[least]
    return costs(program, least, base[0].shards, base, log, say)


def _write(
    program: BenchProgram,
    results: Sequence[Result],
    same: Proof | None,
    folder: Path,
    costs: dict[str, Any] | None,
) -> tuple[str, str]:
    """Write the JSON file and the plot; return the text of the file, and a message."""
    import torch

    from quorate.commands.bench.plot import plot
    from quorate.commands.bench.results import to_json
    from quorate.machine.atomic_file import write_atomically
    from quorate.machine.host import host

    machine = host()
    processor = machine.processor or platform.machine()
    record = {
        "script": program.script,
        "arguments": list(program.arguments),
        "at": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "machine": {
            "processor": processor,
            "cores": machine.cores_allowed,
            "system": platform.system(),
        },
        "torch": torch.__version__,
        "python": platform.python_version(),
        "same_bits": None if same is None else same._asdict(),
        "contenders": to_json(results),
        **({} if costs is None else {"costs": costs}),
    }
    file = folder / "results.json"
    text = json.dumps(record, indent=1)
    write_atomically(file, f"{text}\n")
    picture = folder / "speed-up.png"
    try:
        plot(results, f"{program.script} on {processor}, {machine.cores_allowed} cores", picture)
    except ImportError:
        cure = "pip install 'quorate-torch[bench]'"
        return text, f"written: {file}; no plot, as matplotlib is missing: {cure}"
    return text, f"written: {file}, {picture}"
