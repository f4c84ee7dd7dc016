"""Update rules on worker processes: whole reads, each row once, one worker is plain SGD."""

from __future__ import annotations

import math
import subprocess
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from support.books import each_row_was_there_once_an_epoch, lines_of
from support.references import References
from support.runs import (
    LIMIT_S,
    command,
    digests,
    inspected,
    last_json,
    on_a_tower,
    processes_of,
    run_all,
    started,
)

from quorate.commands.main import main

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="looks into /proc"),
]


def test_what_a_worker_reads_is_what_one_update_left_behind(
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Hundreds of updates while others read; each shard says which state it read."""
    rules = {"async": None, "bounded:2": 2}

    def words(update: str, engine: str, updates: int) -> list[str]:
        options = ("--workers", "3", "--shards", "6", "--update", update, "--engine", engine)
        return command("torn.py", str(updates), options=options)

    ended = run_all({update: words(update, "processes", 150) for update in rules})
    for update, most in rules.items():
        assert ended[update].code == 0, ended[update].said
        were_read_late(last_json(ended[update].out), 150, most)
        assert main(words(update, "towers", 100)[3:]) == 0
        were_read_late(last_json(capfd.readouterr().out), 100, most)


def were_read_late(found: dict[str, Any], updates: int, most: int | None) -> None:
    """The test is one only if updates were made while shards were computed."""
    staleness = dict(found["staleness"])
    assert found["updates"] == updates
    assert sum(count for age, count in staleness.items() if age) > updates / 2, staleness
    assert most is None or max(staleness) <= most


class Ending(NamedTuple):
    """How a run ended."""

    code: int
    said: str
    fit_s: float  # from the last update to the end of ``fit``
    process_s: float  # ... to that of the process
    killed: list[int]  # workers
    left: dict[int, str]  # processes


def ending(folder: Path, words: list[str]) -> Ending:
    folder.mkdir(exist_ok=True)
    with started(folder, words) as (process, mark):
        try:
            said, _ = process.communicate(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            raise AssertionError(process.communicate()[0]) from None
        ended_at = time.time()
        left = processes_of(mark)
    found = last_json(said)
    times = (at - found["last_at"] for at in (found["ended_at"], ended_at))
    return Ending(process.returncode, said, *times, found["killed"], left)


def endings(tmp_path: Path, commands: Mapping[str, list[str]]) -> dict[str, Ending]:
    with ThreadPoolExecutor(2) as pool:
        found = pool.map(lambda name: ending(tmp_path / name, commands[name]), commands)
        return dict(zip(commands, found, strict=True))


def exactly_once(
    folder: Path, update: str, workers: int, pattern: str, steps: int, *faults: int
) -> list[str]:
    options = ("--update", update, "--workers", str(workers), "--run-dir", str(folder / "run"))
    kills, stop_at = faults or (0, 0)
    arguments = (pattern, str(steps), str(kills), str(stop_at), str(folder))
    return command("exactly_once.py", *arguments, options=(*options, "--shards", "4"))


def was_in_time(run: Ending, code: int) -> None:
    assert run.code == code, run.said
    assert run.fit_s < 2.0, run
    assert run.process_s < 10.0, run  # Python and torch take a second, or more on a busy machine
    assert not run.left


def test_nobody_waits_for_who_is_late_at_the_end(tmp_path: Path) -> None:
    """One of two workers takes 3 s for each shard; a quorum does without it, or a copy."""
    steps, rules = 12, ("sync", "quorum:3")
    words = {u: exactly_once(tmp_path / u, u, 2, "slow", steps) for u in rules}
    ended = endings(tmp_path, words)
    for update in rules:
        was_in_time(ended[update], 0)
        assert inspected(tmp_path / update / "run")["global_step"] == steps


def test_each_row_counts_once_whoever_is_killed_and_after_a_resume_elsewhere(
    tmp_path: Path,
) -> None:
    per_epoch, epochs = 24, 6  # 6 batches of 4 shards
    steps = epochs * per_epoch
    stop_at, most = steps - 10, {"async": math.inf, "bounded:4": 4}
    # 1. Three workers, of which some are killed; SIGTERM in the middle of an epoch.
    words = {u: exactly_once(tmp_path / u, u, 3, "random", steps, 2, stop_at) for u in most}
    for update, run in endings(tmp_path, words).items():
        was_in_time(run, 143)
        assert len(run.killed) == 2, run.said
        assert stop_at <= inspected(tmp_path / update / "run")["global_step"] < steps, run.said
    # 2. On two workers, of which one is slow.
    words = {u: exactly_once(tmp_path / u, u, 2, "slow", steps) for u in most}
    for update, run in endings(tmp_path, words).items():
        was_in_time(run, 0)
        assert inspected(tmp_path / update / "run")["global_step"] == steps
        lines = lines_of(tmp_path / update / "run")
        assert len(lines) == steps
        each_row_was_there_once_an_epoch(lines, epochs, most[update])


def test_on_one_worker_async_is_sync_with_batches_of_a_shard(
    tmp_path: Path, references: References
) -> None:
    def options(name: str, update: str, shards: int) -> tuple[str, ...]:
        return ("--update", update, "--shards", str(shards), "--run-dir", str(tmp_path / name))

    expected = references.on_a_tower("alone.py", "3", options=("--shards", "1")).digests
    for update in ("async", "bounded:0", "bounded:3"):
        on_a_tower("alone.py", "12", options=options(update, update, 4))
        assert digests(tmp_path / update) == expected
    process = ("--workers", "1", "--engine", "processes")
    words = command("alone.py", "12", options=(*process, *options("process", "async", 4)))
    ended = run_all({"process": words})["process"]
    assert ended.code == 0, ended.said
    assert digests(tmp_path / "process") == expected
    assert inspected(tmp_path / "process")["global_step"] == 32
