"""metrics.jsonl: whatever happens to it, training goes on, and a resume cuts it right."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.disks import disk, fill
from support.runs import SCRIPTS
from support.small import DATA, trainer

import quorate
from quorate.services import line_file, log_cut, metrics_log
from quorate.services.checkpoints import files
from quorate.services.log_cut import Cut, cut
from quorate.services.metrics_log import MetricsLog
from quorate.services.report import Report
from quorate.transports.worker_status import PHASES, WorkerStatus


def line(step: int, **more: Any) -> bytes:
    return (json.dumps({"global_step": step, "epoch": 0, "loss": 0.25, **more}) + "\n").encode()


def report(step: int) -> Report:
    return Report(
        **{"global_step": step, "epoch": 0, "rows": 12, "dropped_rows": 0, "weight": 12.0},
        **{"metrics": {"loss": step / 8}, "worker_losses": {}, "staleness": 0, "fresh": [step]},
        **{"stale": [0], "dropped": [0], "not_finite": 0, "lr": 0.01, "grad_norm": None},
        **{"examples_per_s": 9.5, "last_step": 9, "epochs": 1, "ends_epoch": False, "eta_s": None},
    )


def steps(path: Path) -> list[int]:
    return [json.loads(text)["global_step"] for text in path.read_text().splitlines()]


# --- the cut --------------------------------------------------------------------------------------


def plain_cut(data: bytes, global_step: int) -> tuple[bytes, list[bytes]]:
    """What stays of a log and what is damaged in it, found by parsing every line."""
    kept, damaged = [], []
    for text in data.splitlines(keepends=True):
        try:
            step = json.loads(text.decode("ascii"))["global_step"]
            if type(step) is not int:
                raise TypeError
            if step <= global_step:
                kept.append(text)
        except (ValueError, KeyError, TypeError):
            if text.endswith(b"\n"):
                damaged.append(text)
    return b"".join(kept), damaged


def odd_line(chance: random.Random) -> bytes:
    whole = line(chance.randrange(60))
    return chance.choice(
        [
            whole,
            line(chance.randrange(60), validation={"loss": 1.5}),
            line(chance.randrange(60), text="\u2028 \x85 ü"),
            b'{"epoch": 1, "global_step": 3}\n',
            b'{"global_step": 3}\n',
            b"\n",
            b"{}\n",
            b"[]\n",
            b"null\n",
            b'{"global_step": true, "a": 1}\n',
            b'{"global_step": 3.0, "a": 1}\n',
            b'{"global_step": -1, "a": "bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb"}\n',
            b'{"global_step": "3", "a": "bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb"}\n',
            b'{"global_step": , "a": "bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb"}\n',
            b'{"global_step": 99999999999999999999999999, "a": "bbbbbb"}\n',
            b"\x00" * 40 + b"\n",
            b"\xff\xfe" + whole,
            whole.replace(b"l", b"\xec"),
            whole[: chance.randrange(len(whole))] + b"\n",
        ]
    )


@pytest.mark.parametrize("block_bytes", [16, 64, 1 << 18])
@pytest.mark.parametrize("parsed_bytes", [0, 200, 1 << 20])
def test_a_cut_log_is_what_parsing_every_line_gives(
    block_bytes: int, parsed_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_cut, "BLOCK_BYTES", block_bytes)
    monkeypatch.setattr(log_cut, "PARSED_BYTES", parsed_bytes)
    chance = random.Random(block_bytes + parsed_bytes)
    path, beside = tmp_path / "log", tmp_path / "log.damaged"
    for _ in range(300):
        count = chance.randrange(30)
        first = chance.randrange(40)
        data = b"".join(line(first + n) for n in range(count))  # as a run writes it
        if chance.random() < 0.5:  # two runs that interleaved, hands, kills, flipped bits
            texts = data.splitlines(keepends=True) + [odd_line(chance) for _ in range(5)]
            chance.shuffle(texts)
            data = b"".join(texts)
        if chance.random() < 0.5:
            data = data[: chance.randrange(len(data) + 1)]
        global_step = chance.randrange(70)
        path.write_bytes(data)
        beside.unlink(missing_ok=True)
        done = cut(path, global_step)
        kept, damaged = plain_cut(data, global_step)
        assert path.read_bytes() == kept
        assert done == Cut(
            damaged=len(damaged),
            kept_in=beside if damaged else None,
            ends_in_a_line=bool(kept) and not kept.endswith(b"\n"),
        )
        assert (beside.read_bytes() if damaged else b"") == b"".join(damaged)
        assert set(tmp_path.iterdir()) <= {path, beside}


def test_what_is_no_log_is_found_without_reading_all_of_it(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.touch()
    os.truncate(path, 1 << 40)  # a terabyte without a byte on the disk
    tracemalloc.start()
    try:
        assert cut(path, 5) == Cut(is_a_log=False)
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()
    assert path.stat().st_size == 1 << 40
    path.write_bytes(line(1) + b"x" * (5 << 20) + b"\n" + line(2))
    assert cut(path, 5) == Cut(is_a_log=False)


def test_a_log_after_a_hole_is_cut_at_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_cut, "MOST_BYTES", 1 << 20)
    path = tmp_path / "log"
    path.touch()
    os.truncate(path, 1 << 40)
    ours = [line(n, text="x" * 500) for n in range(1, 2500)]  # more than is looked at
    with path.open("ab") as file:
        file.writelines(ours)
    size = path.stat().st_size
    done = cut(path, 2490)
    assert done == Cut()
    assert path.stat().st_size == size - sum(map(len, ours[2490:]))


@pytest.mark.slow
def test_a_long_log_is_cut_in_constant_memory(tmp_path: Path) -> None:
    path = tmp_path / "log"
    count = 300_000
    with path.open("wb") as file:
        file.writelines(line(n, text="x" * 100) for n in range(1, count + 1))
    tracemalloc.start()
    try:
        for global_step in (count, count - 1000, 100):
            assert cut(path, global_step) == Cut()
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()
    assert steps(path) == list(range(1, 101))


@pytest.mark.parametrize("is_mixed", [False, True])
def test_mode_owner_and_link_stay(is_mixed: bool, tmp_path: Path) -> None:
    run_dir, disk_ = tmp_path / "run", tmp_path / "elsewhere"
    run_dir.mkdir()
    disk_.mkdir()
    real = disk_ / "log"
    real.write_bytes(line(1) + (line(9) + line(2) if is_mixed else line(2)) + line(3) + line(8))
    real.chmod(0o640)
    if os.geteuid() == 0:
        os.chown(real, 12, 34)
    before = real.stat()
    path = run_dir / "metrics.jsonl"
    path.symlink_to(real)
    log = MetricsLog(run_dir, 3, print)
    log.update(report(4))
    log.close()
    assert path.is_symlink()
    assert steps(real) == [1, 2, 3, 4]
    after = real.stat()
    assert (after.st_mode, after.st_uid, after.st_gid) == (
        before.st_mode,
        before.st_uid,
        before.st_gid,
    )
    assert list(disk_.iterdir()) == [real]


# --- a resume -------------------------------------------------------------------------------------


def flip(run_dir: Path) -> None:
    path = run_dir / "metrics.jsonl"
    data = bytearray(path.read_bytes())
    data[data.index(b"loss")] ^= 0x80
    path.write_bytes(data)


def sparse(run_dir: Path) -> None:
    (run_dir / "metrics.jsonl").unlink()
    (run_dir / "metrics.jsonl").touch()
    os.truncate(run_dir / "metrics.jsonl", 1 << 40)


@pytest.mark.parametrize(
    ("damage", "said", "left"),
    [
        (flip, "metrics.jsonl: moved 1 damaged line to ", [2, 3, 4, 5, 6]),
        (sparse, "metrics.jsonl is damaged or not a log; moved the file to ", [5, 6]),
    ],
)
def test_a_damaged_log_keeps_no_run_from_going_on(
    damage: Callable[[Path], None],
    said: str,
    left: list[int],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    trainer(tmp_path, summary_every_s=None).fit(DATA, steps=4)
    damage(tmp_path)
    again = trainer(tmp_path, summary_every_s=None)
    again.fit(DATA, steps=6)
    assert again.global_step == 6
    assert capsys.readouterr().out.count(said) == 1
    assert steps(tmp_path / "metrics.jsonl") == left
    [aside] = tmp_path.glob("metrics.jsonl.damaged*")
    assert aside.stat().st_size > 0


# --- a disk that is full --------------------------------------------------------------------------


def test_lines_wait_while_a_disk_is_full_and_none_is_torn_or_lost(tmp_path: Path) -> None:
    said: list[str] = []
    with disk(tmp_path / "disk", "1m") as place:
        log = MetricsLog(place, 0, said.append)
        log.update(report(1))
        filler = fill(place)
        for step in range(2, 100):
            log.update(report(step))
        assert len(said) == 1
        assert said[0].startswith("metrics.jsonl cannot be written, training continues: [Errno 28]")
        assert not (place / "metrics.jsonl").read_bytes().endswith(b"\n")  # the rest waits
        filler.unlink()
        log.update(report(100))
        log.update(report(101))
        log.close()
        assert said[1:] == ["metrics.jsonl can be written again"]
        assert steps(place / "metrics.jsonl") == list(range(1, 102))


def test_numbers_that_are_not_finite_are_json(tmp_path: Path) -> None:
    metrics = {"loss": float("nan"), "most": float("inf"), "least": -float("inf"), "sound": 0.5}
    log = metrics_log.MetricsLog(tmp_path, 0, print)
    log.evaluation(1, metrics)
    log.close()
    text = (tmp_path / "metrics.jsonl").read_text()
    refused: list[str] = []
    read = json.loads(text, parse_constant=refused.append)["validation"]
    assert refused == []
    assert read == {"loss": "NaN", "most": "Infinity", "least": "-Infinity", "sound": 0.5}
    assert str({name: float(value) for name, value in read.items()}) == str(metrics)


def test_closing_a_log_on_a_full_disk_is_said_and_raises_nothing(tmp_path: Path) -> None:
    said: list[str] = []
    with disk(tmp_path / "disk", "1m") as place:
        log = MetricsLog(place, 0, said.append)
        fill(place)
        for step in range(1, 100):
            log.update(report(step))
        log.close()
        path = place / "metrics.jsonl"
        whole = path.read_bytes().count(b"\n")
        assert said[1:] == [
            f"{path} lacks the last {99 - whole} lines: [Errno 28] No space left on device"
        ]


def test_what_waits_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(line_file, "MOST_WAITING_BYTES", 2000)
    said: list[str] = []
    log = MetricsLog(tmp_path, 0, said.append)
    log.update(report(1))
    shutil.rmtree(tmp_path)
    monkeypatch.setattr(line_file, "LOOK_EVERY_S", 0.0)
    for step in range(2, 100):
        log.update(report(step))
    tmp_path.mkdir()
    log.update(report(100))
    log.close()
    path = tmp_path / "metrics.jsonl"
    there = steps(path)
    assert 3 < len(there) < 20
    assert there == sorted(there)
    assert len(said) == 2
    assert said[1] == f"metrics.jsonl can be written again, {99 - len(there)} lines are lost"


@pytest.mark.slow
def test_a_limit_on_the_size_of_files_ends_no_run(tmp_path: Path) -> None:
    """metrics.jsonl and the event file come to the limit; the checkpoints are small."""
    run_dir, limit = tmp_path / "run", 20_000
    program = (
        "import resource, runpy, sys; "
        f"resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit})); "
        f"sys.argv[:] = [{str(SCRIPTS / 'lasting.py')!r}, '400', '0']; "
        "from quorate.commands.main import main; "
        "sys.exit(main(['run', '--devices', 'cpu', '--engine', 'towers', '--workers', '1', "
        f"'--summary-every-s', '0.05', '--run-dir', {str(run_dir)!r}, *sys.argv]))"
    )
    words = [sys.executable, "-c", program]
    ended = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr == ""
    assert "came to step 400" in ended.stdout
    assert (
        ended.stdout.count("metrics.jsonl cannot be written, training continues: [Errno 27]") == 1
    )
    assert ended.stdout.count("metrics.jsonl lacks the last ") == 1
    found = files.find(run_dir)
    assert found is not None
    assert found.record["global_step"] == 400
    assert (run_dir / "metrics.jsonl").stat().st_size == limit
    # Without the limit it goes on, and the line that was torn is gone.
    trained = steps_of_a_resume(run_dir)
    assert trained == [*range(1, len(trained)), 401]


def steps_of_a_resume(run_dir: Path) -> list[int]:
    words = [sys.executable, "-m", "quorate", "run", "--devices", "cpu", "--engine", "towers"]
    words += ["--workers", "1", "--run-dir", str(run_dir), str(SCRIPTS / "lasting.py"), "401", "0"]
    ended = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    return steps(run_dir / "metrics.jsonl")


# --- a file that was removed ----------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["removed", "replaced", "fifo"])
def test_a_log_that_is_taken_away_is_begun_again(kind: str, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    path = run_dir / "metrics.jsonl"

    class Removing(quorate.Callback):
        def updated(self, report: Report) -> None:
            if report.global_step == 3:
                path.unlink()
                if kind == "replaced":
                    path.write_bytes(line(0))
                if kind == "fifo":
                    os.mkfifo(path)
            if report.global_step == 6 and kind == "fifo":
                path.unlink()

    look_every_s, line_file.LOOK_EVERY_S = line_file.LOOK_EVERY_S, 0.0
    try:
        trainer(run_dir, summary_every_s=None).fit(DATA, steps=8, callbacks=[Removing()])
    finally:
        line_file.LOOK_EVERY_S = look_every_s
    assert steps(path) == ([0] if kind == "replaced" else []) + [4, 5, 6, 7, 8]


# --- times ----------------------------------------------------------------------------------------


def test_times_and_what_workers_spent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock of 0.5 s per update, set back by a day meanwhile: that is in no line."""
    clock = {"now": 100.0, "today": 1e9}
    clocks = SimpleNamespace(monotonic=lambda: clock["now"], time=lambda: clock["today"])
    monkeypatch.setattr(metrics_log, "time", clocks)

    def status() -> list[WorkerStatus]:
        spent = dict.fromkeys(PHASES, 0.0) | {"forward": clock["now"] - 100}
        return [WorkerStatus(0, "cpu", 1, None, "forward", 0, 0, 0.0, spent, 7)]

    log = MetricsLog(tmp_path, 0, print, status=status)
    for step in range(1, 121):
        clock["now"] += 0.5
        clock["today"] = 1e9 - 86_400
        log.update(report(step))
    log.close()
    lines = [json.loads(text) for text in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["at"] for line in lines] == [1e9 + 0.5 * step for step in range(1, 121)]
    assert [line.get("begun_at") for line in lines] == [1e9] + [None] * 119
    noted = {line["global_step"] / 2: line["spent"] for line in lines if "spent" in line}
    assert [*noted][:4] == [1.0, 2.0, 3.0, 4.0]
    assert [*noted][-1] - [*noted][-2] == 10.0  # each 10 s by then
    assert noted[4.0]["forward"] == [4.0]
    assert noted[4.0]["shards"] == [7]
    assert noted[4.0]["starting"] == [0.0]
