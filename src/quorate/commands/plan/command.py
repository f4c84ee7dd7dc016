"""``quorate plan``: predicts runs of other sizes, from a bench and assumptions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from quorate.commands.command import Command
from quorate.commands.help_text import GroupedOption
from quorate.errors import DataError, SettingError
from quorate.machine.valid_json import dumped

if TYPE_CHECKING:
    from quorate.commands.plan.measurements import Measurement
    from quorate.simulation.prediction import Prediction

HELP = """Predict runs of other sizes: speed, cost, number of spares, interval between checkpoints.

FILE is the results.json of quorate bench. The prediction keeps the rows per shard of the bench and
gives each worker one shard per batch (see --shards). The coordinator of quorate run is simulated in
virtual time. docs/plan.md lists the measurements, the assumptions and the limits of a prediction.
With --check, FILE may be left out.
"""

MOST_OFF = 0.15  # share of the measured speed: no prediction if the replay is further off

# By heading: option, type, metavar, default, help.
OPTIONS: dict[str, list[tuple[str, type, str, Any, str]]] = {
    "Comparison": [
        ("--workers", str, "8,64,1024", "8,64", "numbers of workers to predict (default: 8,64)"),
        ("--update", str, "WORDS", "", "rules: sync,quorum,async,bounded:8 (default: the bench's)"),
        ("--spares", str, "0,1,2", "0", "numbers of spares, beyond --workers (default: 0)"),
        ("--shards", int, "V", None, "shards of a batch (default: one per worker)"),
        ("--from-workers", int, "N", None, "workers of the measured run (default: the largest)"),
    ],
    "Stragglers": [
        ("--spread", float, "X", None, "log-normal spread of shard times (default: 0.05)"),
        ("--trace", str, "FILE", None, "CSV file with measured shard times, column shard_s"),
        ("--work-spread", float, "X", 0.0, "log-normal spread of work per shard (default: 0)"),
        ("--held-up", str, "P:FACTOR", None, "chance and slowdown of a delayed shard: 0.01:4"),
        ("--slow-workers", str, "SHARE:FACTOR", None, "workers that are always slower: 0.02:1.5"),
        ("--slow-hosts", str, "SHARE:FACTOR", None, "hosts that are always slower: 0.02:1.5"),
    ],
    "Failures": [
        ("--mtbf-h", float, "HOURS", float("inf"), "MTBF of each worker (default: no failures)"),
        ("--host-mtbf-h", float, "HOURS", float("inf"), "MTBF of each host (default: no failures)"),
        ("--detection-s", float, "SECONDS", None, "time to detection (default: the bench's, or 1)"),
        (
            "--restart-s",
            float,
            "SECONDS",
            None,
            "restart of a worker (default: the bench's, or 30)",
        ),
        ("--run-restart-s", float, "SECONDS", 60.0, "restart of the whole run (default: 60)"),
    ],
    "Machines": [
        ("--per-host", int, "N", 8, "workers per host (default: 8)"),
        ("--cores", int, "N", None, "cores of a host, for all its workers (default: enough)"),
        ("--engine", str, "WORD", "", "processes, ray or collective (default: the bench's)"),
        ("--gradient-mib", float, "MIB", 0.0, "size of a gradient sent between hosts (default: 0)"),
        ("--gbit-s", float, "X", float("inf"), "bandwidth of a host's link (default: infinite)"),
        ("--ray-gbit-s", float, "X", 4.0, "throughput of Ray between two hosts (default: 4)"),
        ("--bisection-gbit-s", float, "X", float("inf"), "bandwidth between halves of the hosts"),
        ("--servers", int, "S", 0, "parameter servers, with --engine ray (default: 0)"),
        ("--latency-ms", float, "MS", None, "one-way latency of a message (default: the bench's)"),
        ("--price", float, "DOLLARS", 0.0, "price of one worker per hour (default: 0)"),
    ],
    "Saving": [
        ("--save-s", float, "SECONDS", None, "pause for a checkpoint (default: the bench's, or 1)"),
        ("--save-every-s", float, "SECONDS", None, "time between checkpoints (default: the best)"),
    ],
    "Results": [
        ("--check", str, "RUN_DIR", None, "compare the prediction with a real run"),
        ("--json", str, "FILE", None, "write all figures to FILE"),
        ("--plot", str, "FILE", None, "draw the figures to a .png or .html file"),
        ("--steps", int, "N", None, "batches to simulate (default: enough for 8,000 shards)"),
        ("--seed", int, "N", 0, "seed of the random numbers (default: 0)"),
    ],
}


def _name(flag: str) -> str:
    return "as_json" if flag == "--json" else flag[2:].replace("-", "_")


def _options(function: Callable[..., int]) -> Callable[..., int]:
    for group, rows in reversed(OPTIONS.items()):
        for flag, kind, metavar, default, text in reversed(rows):
            function = click.option(
                flag,
                _name(flag),
                cls=GroupedOption,
                group=group,
                type=kind,
                metavar=metavar,
                default=default,
                help=text,
            )(function)
    return function


@click.command("plan", cls=Command, help=HELP, short_help="predict runs of other sizes")
@click.argument("file", type=click.Path(path_type=Path), required=False)
@_options
def command(file: Path | None, **asked: Any) -> int:
    """Simulate the requested runs, and print a table.

    Raises:
        SettingError: an option is not valid.
        DataError: a file is not valid, or the replay of the measured run is far off.
    """
    from quorate.commands.plan.assumptions import Assumptions
    from quorate.commands.plan.measurements import read_bench
    from quorate.commands.plan.table import below, table
    from quorate.simulation.simulate import simulate

    # 1. Check the options, and replay the measured run.
    assumptions = Assumptions(asked)
    if asked["check"] is not None:
        from quorate.commands.plan.check import check

        record = check(Path(asked["check"]), file, asked, assumptions)
        if asked["as_json"] is not None:
            _written("json", Path(asked["as_json"]), dumped(record, indent=1) + "\n")
        return 0
    if file is None:
        expected = "the results.json of quorate bench, or --check RUN_DIR"
        raise SettingError("file", None, expected, "run quorate bench first")
    workers = _whole_numbers("workers", asked["workers"], least=1)
    spares = _whole_numbers("spares", asked["spares"], least=0)
    picture = _picture(asked["plot"])
    listed = read_bench(file)
    measured = _one_of(listed, asked["from_workers"])
    rules = [word.strip() for word in (asked["update"] or measured.rule).split(",")]
    of_itself = _replayed(measured, asked)
    _require_close(file, measured, of_itself, listed, asked)
    # 2. Simulate the runs.
    rows = [
        simulate(
            number,
            update=rule,
            spares=spare,
            shards=asked["shards"],
            dollars_per_worker_h=asked["price"],
            **assumptions.about(measured, rule),
        )
        for number, rule, spare in _compared(workers, rules, spares)
    ]
    common = assumptions.about(measured, measured.rule)
    # 3. Print and write the results.
    print(_known(file, measured, of_itself))
    print(f"assumed: {assumptions.words(measured)}\n\n{table(rows)}\n")
    for line in below(rows, common["shard_times"], common["stragglers"], common["network"]):
        print(line)
    if asked["as_json"] is not None:
        record = {
            "measured": measured._asdict(),
            "asked": {name: value for name, value in asked.items() if value != float("inf")},
            "of_itself": of_itself.to_json(),
            "predictions": [told.to_json() for told in rows],
        }
        _written("json", Path(asked["as_json"]), dumped(record, indent=1) + "\n")
    if picture is not None:
        from quorate.commands.plan.plot import plot

        try:
            plot(rows, f"{file}, {asked['workers']} workers", picture)
        except OSError as error:
            raise _unwritten("plot", picture, error) from error
        print(f"written: {picture}")
    return 0


def _compared(
    workers: list[int], rules: list[str], spares: list[int]
) -> Iterator[tuple[int, str, int]]:
    """Yield the combinations to compare. Spares only exist under rules that can skip a worker."""
    for number in workers:
        for rule in rules:
            for spare in spares if rule in ("sync", "quorum") else (0,):
                yield number, rule, spare


def _one_of(measured: list[Measurement], workers: int | None) -> Measurement:
    """Return the measurement for a number of workers; None: the largest number."""
    if workers is None:
        return measured[-1]
    known = {one.workers: one for one in measured}
    if workers not in known:
        listed = ", ".join(map(str, known))
        raise SettingError("from_workers", workers, f"one of {listed}", "that is in the bench")
    return known[workers]


def _replayed(measured: Measurement, asked: Mapping[str, Any]) -> Prediction:
    """Replay the measured run with default assumptions: the options describe other runs."""
    from quorate.commands.plan.assumptions import Assumptions
    from quorate.simulation.simulate import simulate

    defaults = {
        _name(flag): default for rows in OPTIONS.values() for flag, _, _, default, _ in rows
    }
    replay = Assumptions({**defaults, "steps": asked["steps"], "seed": asked["seed"]})
    about = replay.about(measured, measured.rule)
    return simulate(measured.workers, update=measured.rule, shards=measured.shards, **about)


def _require_close(
    file: Path,
    measured: Measurement,
    of_itself: Prediction,
    listed: list[Measurement],
    asked: Mapping[str, Any],
) -> None:
    """Refuse predictions from a measurement whose own replay is too far off.

    Raises:
        DataError: the replay is more than ``MOST_OFF`` off.
    """
    from quorate.machine.text import three_digits

    if abs(off := _off(measured, of_itself)) <= MOST_OFF:
        return
    close = [
        other.workers
        for other in listed
        if other is not measured and abs(_off(other, _replayed(other, asked))) <= MOST_OFF
    ]
    other = f", or --from-workers {close[-1]}, whose replay is close enough" if close else ""
    raise DataError(
        file,
        got=f"a run on {_workers(measured)} whose replay is {off:+.0%} off "
        f"({three_digits(of_itself.running_examples_per_s)} examples/s, measured "
        f"{three_digits(measured.examples_per_s)})",
        expected=f"at most {MOST_OFF:.0%}, to predict other runs from it",
        fix="run quorate bench again on a machine that nobody else uses, with longer runs "
        f"(--seconds){other}",
    )


def _off(measured: Measurement, of_itself: Prediction) -> float:
    return of_itself.running_examples_per_s / measured.examples_per_s - 1


def _known(file: Path, measured: Measurement, of_itself: Prediction) -> str:
    from quorate.machine.text import three_digits

    return (
        f"from {file}, {_workers(measured)}, {measured.engine}: shards of "
        f"{three_digits(measured.rows_per_shard)} rows "
        f"take {three_digits(measured.shard_s * 1e3)} ms, "
        f"an update {three_digits(measured.update_s * 1e3)} ms, "
        f"{three_digits(measured.vector_s * 1e3)} ms per worker's sums; played again: "
        f"{three_digits(of_itself.running_examples_per_s)} examples/s, measured "
        f"{three_digits(measured.examples_per_s)} ({_off(measured, of_itself):+.1%})"
    )


def _workers(measured: Measurement) -> str:
    return f"{measured.workers} worker{'s' if measured.workers > 1 else ''}"


def _whole_numbers(name: str, text: str, least: int) -> list[int]:
    try:
        numbers = [int(word) for word in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < least:
        expected = f"whole numbers >= {least} such as 1,2,4"
        raise SettingError(name, text, expected, "list them")
    return list(dict.fromkeys(numbers))


def _picture(text: str | None) -> Path | None:
    if text is None:
        return None
    path = Path(text)
    if path.suffix not in (".png", ".html"):
        raise SettingError("plot", text, "a name that ends in .png or .html", "choose one")
    if find_spec("matplotlib") is None:
        fix = "pip install 'quorate-torch[bench]'"
        raise SettingError("plot", text, "matplotlib, which is not installed", fix)
    return path


def _written(name: str, path: Path, text: str) -> None:
    from quorate.machine.atomic_file import write_atomically

    try:
        write_atomically(path, text)
    except (OSError, ValueError) as error:  # "" is not a valid path
        raise _unwritten(name, path, error) from error
    print(f"written: {path}")


def _unwritten(name: str, path: Path, error: OSError | ValueError) -> SettingError:
    expected = "a file that can be written"
    why = getattr(error, "strerror", None) or error
    return SettingError(name, str(path), expected, str(why))
