"""Measurements: results of `quorate bench`, and files of shard times, checked line by line."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from quorate.coordination.rules import parse
from quorate.errors import DataError, SettingError, cure
from quorate.machine.regular_file import read_regular
from quorate.machine.text import printable
from quorate.services.checkpoints.record import parsed_json
from quorate.simulation.inputs import ENGINES, MOST
from quorate.simulation.simulate import rule_for

WORK = ("fetching", "forward", "backward", "pushing")  # phases of a shard
KINDS = ("towers", *ENGINES)
MOST_BYTES = 8 << 20  # of a file of measurements: the results of a thousand workers take 1 MB
BYTE_ORDER = "\ufeff"  # first character of files written by spreadsheets
COLUMNS = ("shard_s", "worker", "step", "shard")
_BENCH, _AGAIN = "what quorate bench writes", "write it again with quorate bench"


class Measurement(NamedTuple):
    """The measurements for one number of workers; all values are means over the runs."""

    workers: int
    rule: str
    engine: str
    rows_per_shard: float
    shard_s: float  # mean work time of a shard
    update_s: float  # an update: optimizer, and the loop between two updates
    vector_s: float  # receiving and adding the sums of a worker
    latency_s: float  # of a message; measured with a single worker, which never waits for others
    shards: int
    examples_per_s: float  # as measured
    cores: int  # of the host
    threads: int  # per worker
    is_on_cpu: bool
    leaves_off_s: float  # until a worker checks for a cancelled shard: the rest of a phase
    # From ``quorate bench --costs``; None: not requested, or not measurable.
    crowding: float | None = None  # factor of a shard's time if all cores compute
    by_shard: Measurement | None = None  # under ``async``
    save_s: float | None = None  # pause of the loop for a checkpoint
    detection_s: float | None = None  # from a worker's end to its detection
    restart_s: float | None = None  # from the detection until the worker computes again

    def under(self, rule: str) -> Measurement:
        """Return the measurement under a rule of this kind, if there is one."""
        if self.by_shard is None:
            return self
        is_by_shard = rule_for(rule, self.workers).by_shard
        if is_by_shard == parse(self.rule).by_shard:
            return self
        return self.by_shard


def read_bench(path: Path) -> list[Measurement]:
    """Return the measurements of a bench, the fewest workers first.

    Args:
        path: path of ``results.json``, or of a file by ``quorate run --profile``, with a single
            run.

    Raises:
        DataError: the file is missing, is not a bench's, or has an impossible value; with the line.
    """
    text = text_of(path, "the results.json of quorate bench")
    try:
        record = parsed_json(text.encode())
    except ValueError as error:
        if not isinstance(error.__cause__, json.JSONDecodeError):
            got = printable(error).removeprefix("got ")
            raise DataError(path, got=got, expected=_BENCH, fix=_AGAIN) from None
        written = text.strip()
        is_short = not written or (written.startswith("{") and not written.endswith("}"))
        got = "the end of the file" if is_short else "no JSON"
        where = f"{path}, line {error.__cause__.lineno}"
        raise DataError(where, got=got, expected=_BENCH, fix=_AGAIN) from None
    reader = _JsonReader(path, text)
    if isinstance(record, dict) and "contenders" not in record and "updates" in record:
        rows_per_s = reader.positive(record, "rows") / reader.positive(record, "seconds")
        return [_measurement(reader, {"runs": [record], "examples_per_s": rows_per_s})]
    contenders = reader.part(record, "contenders", list)
    if not contenders:
        raise reader.wrong("contenders", [], "at least one")
    found = [_measurement(reader, contender) for contender in contenders]
    costs = reader.part(record, "costs", dict) if "costs" in record else {}
    return sorted((_with(reader, one, costs) for one in found), key=lambda one: one.workers)


def _with(reader: _JsonReader, measured: Measurement, costs: dict[str, Any]) -> Measurement:
    """Return a measurement with its known costs."""
    by_name: dict[str, Any] = {}
    # Shards of several workers were measured on shared cores already.
    if measured.workers == 1 and "crowding" in costs:
        times = reader.number(reader.part(costs, "crowding", dict), "times")
        if times < 1:
            raise reader.wrong("times", times, "a number >= 1")
        by_name["crowding"] = times
    if "by_shard" in costs:
        by_name["by_shard"] = _measurement(reader, reader.part(costs, "by_shard", dict))
    if "saving" in costs:
        by_name["save_s"] = reader.number(reader.part(costs, "saving", dict), "stall_s")
    if "failing" in costs:
        failing = reader.part(costs, "failing", dict)
        by_name |= {name: reader.number(failing, name) for name in ("detection_s", "restart_s")}
    return measured._replace(**by_name)


def _measurement(reader: _JsonReader, contender: Any) -> Measurement:
    runs = reader.part(contender, "runs", list)
    if not runs:
        raise reader.wrong("runs", [], "at least one")
    shard_s, update_s, vector_s, latency_s, leaves_off_s = [], [], [], [], []
    for run in runs:
        rule = reader.rule(run, "update")
        if not (workers := reader.part(run, "workers", list)):
            raise reader.wrong("workers", [], "at least one")
        updates = reader.positive(run, "updates")
        seconds = reader.positive(run, "seconds")
        begun, by_phase_s = 0.0, dict.fromkeys(WORK, 0.0)
        for worker in workers:
            begun += reader.number(worker, "shards")
            phases = reader.part(worker, "seconds", dict)
            for phase in WORK:
                by_phase_s[phase] += reader.number(phases, phase)
        work_s = sum(by_phase_s.values())
        if not begun or not work_s:
            raise reader.wrong("shards", 0, "a worker that has computed something")
        on_device_s = reader.number(run, "device_s")  # not part of the workers' own time
        exchange_s = reader.number(run, "exchange_s")
        between_s = reader.number(run, "update_s") + reader.number(run, "beside_s")
        shard_s.append((work_s + on_device_s * len(workers)) / begun)
        update_s.append(between_s / updates)
        vector_s.append(exchange_s / updates / (1 if parse(rule).by_shard else len(workers)))
        # At a random moment of a shard, half of the current phase is left on average.
        leaves_off_s.append(sum(of_s**2 for of_s in by_phase_s.values()) / work_s / begun / 2)
        gap_s = seconds - work_s - on_device_s - exchange_s - between_s
        latency_s.append(max(0.0, gap_s) / begun / 2 if len(workers) == 1 else 0.0)
    run = runs[0]
    devices = {reader.part(worker, "device", str) for worker in run["workers"]}
    shards = reader.integer(run, "shards")
    return Measurement(
        workers=len(reader.part(run, "workers", list)),
        rule=rule,
        engine=reader.word(run, "engine", KINDS),
        rows_per_shard=reader.integer(run, "batch_size") / shards,
        shard_s=fmean(shard_s),
        update_s=fmean(update_s),
        vector_s=fmean(vector_s),
        latency_s=fmean(latency_s),
        shards=shards,
        examples_per_s=reader.positive(contender, "examples_per_s"),
        cores=reader.integer(run, "cores"),
        threads=reader.integer(run, "threads"),
        is_on_cpu=devices == {"cpu"},
        leaves_off_s=fmean(leaves_off_s),
    )


class _JsonReader:
    """A reader of parts of JSON objects, with the line of each part in the file.

    Args:
        path: path of the file.
        text: content of the file.
    """

    def __init__(self, path: Path, text: str) -> None:
        self._path = path
        self._lines = text.splitlines()

    def part(self, record: Any, name: str, kind: type) -> Any:
        """Return a part of an object.

        Raises:
            DataError: the part is missing, or of another kind.
        """
        if not isinstance(record, dict) or name not in record:
            raise DataError(self._path, got=f"no {name}", expected=_BENCH, fix=_AGAIN)
        if not isinstance(record[name], kind):
            raise self.wrong(name, record[name], f"a {kind.__name__}")
        return record[name]

    def number(self, record: Any, name: str) -> float:
        """Return a number of at least 0.

        Raises:
            DataError: the number is missing or not valid.
        """
        value = self.part(record, name, object)
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number or not value >= 0:
            raise self.wrong(name, value, "a number >= 0")
        if value > MOST:
            raise self.wrong(name, value, f"a number <= {MOST:g}")
        return float(value)

    def positive(self, record: Any, name: str) -> float:
        """Return a number above 0.

        Raises:
            DataError: the number is missing or not valid.
        """
        if not (value := self.number(record, name)):
            raise self.wrong(name, record[name], "a number > 0")
        return value

    def integer(self, record: Any, name: str) -> int:
        """Return a whole number above 0.

        Raises:
            DataError: the number is missing or not valid.
        """
        value = self.positive(record, name)
        if not value.is_integer():
            raise self.wrong(name, record[name], "a whole number")
        return int(value)

    def word(self, record: Any, name: str, words: Sequence[str]) -> str:
        """Return a word out of a list of words.

        Raises:
            DataError: the word is missing, or is not in the list.
        """
        word: str = self.part(record, name, str)
        if word not in words:
            raise self.wrong(name, word, " or ".join(words))
        return word

    def rule(self, record: Any, name: str) -> str:
        """Return an update rule.

        Raises:
            DataError: the rule is missing or not valid.
        """
        word: str = self.part(record, name, str)
        try:
            parse(word)
        except SettingError:
            raise self.wrong(name, word, "a rule of updates") from None
        return word

    def wrong(self, name: str, value: Any, expected: str) -> DataError:
        """Return the error about a value, with the line of the value."""
        shown = json.dumps(value)[:40]
        lines = (n for n, line in enumerate(self._lines, 1) if _says(line, name, shown))
        line = next(lines, 1)
        return DataError(
            f"{self._path}, line {line}", got=f"{name} {shown}", expected=expected, fix=_AGAIN
        )


def _says(line: str, name: str, shown: str) -> bool:
    """Return whether a line of JSON has a value under a name, in any notation of the number."""
    _, is_there, rest = line.partition(f'"{name}": ')
    if not is_there or rest.startswith(shown):
        return bool(is_there)
    try:
        return json.dumps(json.loads(rest.strip().rstrip(",")))[:40] == shown
    except json.JSONDecodeError:
        return False


def read_shard_times(path: Path) -> tuple[float, ...]:
    """Return measured shard times, in seconds, from a CSV file with a column ``shard_s``.

    Columns ``worker``, ``step`` and ``shard`` are allowed and ignored.

    Raises:
        DataError: the file has an invalid part; with the line.
    """
    text = text_of(path, "a CSV file with a column shard_s").removeprefix(BYTE_ORDER)
    lines = csv.reader(io.StringIO(text))
    heads = [head.strip() for head in next(lines, [])]
    for head in heads:
        if heads.count(head) > 1:
            where, got = f"{path}, line 1", f"column {head!r} {heads.count(head)} times"
            raise DataError(where, got=got, expected="each once", fix="leave one out")
        if head not in COLUMNS:
            raise DataError(
                f"{path}, line 1",
                got=f"column {head!r}",
                expected=", ".join(COLUMNS),
                fix=cure(head, COLUMNS, "leave it out"),
            )
    if "shard_s" not in heads:
        fix = "name it in the first line"
        raise DataError(f"{path}, line 1", got="no shard_s", expected="a column of it", fix=fix)
    column, times = heads.index("shard_s"), []
    while True:
        try:
            cells = next(lines, None)
        except csv.Error as error:
            where, got = f"{path}, line {lines.line_num}", str(error)
            raise DataError(where, got=got, expected="a shard time per line") from None
        if cells is None:
            break
        where = f"{path}, line {lines.line_num}"
        if len(cells) != len(heads):
            got = f"{len(cells)} cells"
            fix = "is the file cut off?" if lines.line_num == len(text.splitlines()) else ""
            raise DataError(where, got=got, expected=len(heads), fix=fix)
        try:
            seconds = -1.0 if "_" in cells[column] else float(cells[column])
        except ValueError:
            seconds = -1.0
        if not 0 < seconds <= MOST:
            got = f"shard_s {cells[column]!r}"
            expected = "seconds > 0" if not seconds > MOST else f"seconds <= {MOST:g}"
            raise DataError(where, got=got, expected=expected, fix="mend or remove the line")
        times.append(seconds)
    if not times or not text.endswith("\n"):
        where = f"{path}, line {len(text.splitlines())}"
        got = "a line without an end" if times else "no times"
        raise DataError(where, got=got, expected="a shard time per line", fix="is it cut off?")
    return tuple(times)


def unread(path: Path, error: OSError, expected: str) -> DataError:
    """Return the error about an unreadable file."""
    got = "no file" if isinstance(error, FileNotFoundError) else str(error.strerror or error)
    return DataError(path, got=got, expected=expected)


def text_of(path: Path, expected: str) -> str:
    """Return the text of a regular file of at most ``MOST_BYTES``.

    Raises:
        DataError: the file is missing, unreadable, too large, or not a text.
    """
    try:
        return read_regular(path, MOST_BYTES).decode()
    except OSError as error:
        raise unread(path, error, expected) from None
    except UnicodeDecodeError as error:
        raise DataError(path, got="no text", expected=expected, offset=error.start) from None
