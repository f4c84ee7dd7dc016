"""``quorate bench``: what more workers bring a script, and what keeps them from bringing more."""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quorate.commands.after_script import EPILOG, add_script, take_options
from quorate.errors import SettingError

if TYPE_CHECKING:
    from quorate.commands.bench.contenders import Contender
    from quorate.commands.bench.measured import Measured
    from quorate.commands.bench.results import Proof, Result
    from quorate.commands.bench.runs import Program

    Commands = argparse._SubParsersAction[Any]

REPEATS, SECONDS, OUT = 3, 8.0, "bench"
PASSED_ON = ("engine", "threads", "update", "precision")  # to quorate run
SWITCHES = ("compile",)  # passed on too


def add_to(commands: Commands) -> None:
    parser = commands.add_parser(
        "bench", help="speed against the number of workers", description=__doc__, epilog=EPILOG
    )
    _add_options(parser)
    add_script(parser)
    parser.set_defaults(call=bench)


def bench(options: argparse.Namespace) -> int:
    """Run the script again and again, print a table, write a JSON file and a plot.

    Raises:
        SettingError: an option cannot work.
        UserError: a run ended with exit code 2, or there was nothing to measure.
        RunError: a run failed otherwise.
    """
    from quorate.commands.bench import contenders
    from quorate.commands.bench.results import proof, results
    from quorate.commands.bench.runs import Program
    from quorate.commands.bench.table import below, table
    from quorate.commands.child_run import ended_by_sigterm
    from quorate.settings import directory, real, whole

    # 1. What is asked for.
    take_options(options, _add_options, "quorate bench")
    script = Path(options.script)
    if not script.is_file():
        raise SettingError("script", options.script, "a Python file", "check the path")
    repeats = whole("repeats", REPEATS if options.repeats is None else options.repeats, least=1)
    seconds = real("seconds", SECONDS if options.seconds is None else options.seconds, above=0)
    out = directory("out", options.out or OUT)
    assert out is not None
    workers = [] if options.workers is None else contenders.counts(options.workers)
    compared = contenders.contenders(options.devices or [], workers)
    passed: dict[str, str | bool | None] = {
        n: str(v) for n in PASSED_ON if (v := getattr(options, n)) is not None
    }
    passed |= {name: True for name in SWITCHES if getattr(options, name)}
    program = Program(str(script), tuple(options.arguments), passed, seconds)
    # 2. The runs.
    out.mkdir(parents=True, exist_ok=True)
    log = out / "failed.log"
    log.unlink(missing_ok=True)
    order = contenders.rounds(compared, repeats)
    with ended_by_sigterm():
        measured = _measured(program, order, options.shards, log)
    # 3. What came of them.
    found = results(measured)
    same = proof(found)
    run = found[0].runs[0]
    batch = f"{run.batch_size} rows = {run.shards} shard{'s' if run.shards > 1 else ''}"
    print(
        f"\n{' '.join([options.script, *options.arguments])}: {batch}, {run.update}; medians of "
        f"{repeats} run{'s' if repeats > 1 else ''} of {seconds:g} s each"
    )
    print(f"\n{table(found)}\n")
    for line in below(found, same):
        print(line)
    _write(options, found, same, out)
    return 0


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--workers", metavar="1,2,4", help="numbers of workers to compare")
    parser.add_argument(
        "--devices",
        action="append",
        metavar="LIST",
        help="as for quorate run; give it again to compare lists",
    )
    parser.add_argument("--repeats", type=int, help=f"runs of each, in turn ({REPEATS})")
    parser.add_argument(
        "--seconds", type=float, help=f"to measure in each run, after a warm-up ({SECONDS:g})"
    )
    parser.add_argument("--out", metavar="DIR", help=f"for results.json and speed-up.png ({OUT})")
    parser.add_argument(
        "--shards", type=int, help="pieces of a batch; the script's, else the most workers"
    )
    parser.add_argument("--engine", help="processes, or towers: a thread per worker")
    parser.add_argument("--threads", type=int, help="intra-op threads of each worker")
    parser.add_argument("--update", help="the rule: sync, quorum:R, async, bounded:K")
    parser.add_argument("--precision", help="fp32, tf32, bf16 or fp16")
    for name in SWITCHES:
        parser.add_argument(
            f"--{name}", action="store_const", const=True, help="as for quorate run"
        )


def _measured(
    program: Program, order: Sequence[Sequence[Contender]], shards: int | None, log: Path
) -> dict[Contender, list[Measured]]:
    """Run everything, one after the other, and say how it goes."""
    from quorate.commands.bench.runs import run

    found: dict[Contender, list[Measured]] = {contender: [] for contender in order[0]}
    total = len(order) * len(order[0])
    began = time.monotonic()
    for number, contender in enumerate((each for group in order for each in group), start=1):
        print(f"run {number} of {total}: {contender.label()}", end="", flush=True)
        try:
            measured = run(program, contender, shards, log)
        except BaseException:
            print(flush=True)
            raise
        left_s = (time.monotonic() - began) / number * (total - number)
        left = f"; about {left_s:,.0f} s left" if number < total else ""
        print(f", {measured.examples_per_s:,.4g} examples/s{left}", flush=True)
        shards = measured.shards
        found[contender].append(measured)
    return found


def _write(
    options: argparse.Namespace, found: Sequence[Result], same: Proof | None, out: Path
) -> None:
    import torch

    from quorate.commands.bench.plot import plot
    from quorate.commands.bench.results import to_json
    from quorate.machine.host import host

    machine = host()
    processor = machine.processor or platform.machine()
    record = {
        "script": options.script,
        "arguments": options.arguments,
        "at": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "machine": {
            "processor": processor,
            "cores": machine.cores_allowed,
            "system": platform.system(),
        },
        "torch": torch.__version__,
        "python": platform.python_version(),
        "same_bits": None if same is None else same._asdict(),
        "contenders": to_json(found),
    }
    file = out / "results.json"
    new = file.with_name(file.name + ".new")
    new.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    new.replace(file)
    picture = out / "speed-up.png"
    try:
        plot(found, f"{options.script} on {processor}, {machine.cores_allowed} cores", picture)
    except ImportError:
        cure = "pip install 'quorate-torch[bench]'"
        print(f"written: {file}; no plot, as matplotlib is missing: {cure}")
    else:
        print(f"written: {file}, {picture}")
