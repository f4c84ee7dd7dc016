"""Faults of workers: killed, stopped, slow, wrong, and what of it ends a run."""

from __future__ import annotations

import statistics
from pathlib import Path

import pytest
from support.references import References
from support.runs import SCRIPTS, command, digests, inspected, last_json, run, run_all

pytestmark = pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="looks into /proc")


def test_a_worker_that_is_killed_changes_nothing(references: References) -> None:
    updates = "13"  # an epoch
    expected = references.on_a_tower("faults.py", "0", updates).json
    ended = run(command("faults.py", "1", updates, options=("--workers", "2", "--shards", "6")))
    assert ended.code == 0, ended.said
    assert "was killed by signal 9 (SIGKILL)" in ended.said
    assert "another is starting" in ended.said
    with_a_kill = last_json(ended.out)
    assert with_a_kill["hit"] == {"fetching": 1}
    for name in ("digest", "row_sums"):
        assert with_a_kill[name] == expected[name]


@pytest.mark.slow
def test_workers_that_are_killed_at_any_instant_change_nothing(references: References) -> None:
    kills, updates = 16, 7 * 13  # 7 epochs
    expected = references.on_a_tower("faults.py", "0", str(updates)).json
    ended = run(command("faults.py", str(kills), str(updates), options=("--workers", "3")))
    assert ended.code == 0, ended.said
    found = last_json(ended.out)
    assert found["digest"] == expected["digest"]
    assert set(found["hit"]) == {
        "starting", "fetching", "forward", "backward", "pushing", "waiting"
    }  # fmt: skip
    assert sum(found["hit"].values()) >= 0.6 * kills  # the others came too late
    rows = 300
    assert list(found["row_sums"].values()) == [rows * (rows - 1) / 2] * 7


@pytest.mark.slow
def test_stopped_and_slow_workers_hold_nobody_up(references: References) -> None:
    expected = references.on_a_tower("stragglers.py").json
    ended = run(command("stragglers.py", options=("--workers", "3")))
    assert ended.code == 0, ended.said
    found = last_json(ended.out)
    assert found["digest"] == expected["digest"]
    assert "the run continues without this worker" in ended.said
    times_s = found["times_s"]
    two = statistics.median(times_s["gone"][2:])  # as if there were no third worker
    # Whoever waits for one that is ten times slower takes at least 2.5 times as long. (What a slow
    # worker does cost: benchmarks/straggler.py.)
    assert statistics.median(times_s["slow"][1:]) < 2 * two, times_s


def mischief(tmp_path: Path, name: str, *options: str) -> list[str]:
    folder = tmp_path / name
    folder.mkdir()
    options = (*options, "--run-dir", str(folder / "run"))
    return command("mischief.py", name, str(folder), options=options)


@pytest.mark.slow
def test_what_happens_once_is_made_good(tmp_path: Path, references: References) -> None:
    """An exception, an exit, a segmentation fault, and a hang of all workers at once."""
    expected = references.on_a_tower("mischief.py", "none", str(tmp_path)).digests
    ended = run_all(
        {
            "once": mischief(tmp_path, "once", "--workers", "2"),
            "hang": mischief(tmp_path, "hang", "--workers", "1", "--engine", "processes"),
        }
    )
    for name, run_ in ended.items():
        assert run_.code == 0, run_.said
        assert digests(tmp_path / name / "run") == expected, name
        assert "no answer for 8 s in step 2" in run_.out
    happened = {p.name for p in (tmp_path / "once").iterdir() if "arrived" not in p.name}
    assert happened == {"raised", "ended", "crashed", "hung-0", "hung-1", "run"}
    assert (
        "ended with exit code 3 in step 3, shard 1, forward; another is starting"
        in ended["once"].out
    )
    assert "was killed by signal 11 (SIGSEGV) in step 4, shard 0" in ended["once"].out
    assert "Traceback" not in ended["once"].said


@pytest.mark.slow
def test_mistakes_end_the_run(tmp_path: Path) -> None:
    names = ("raise", "vector", "segfault", "memory")
    ended = run_all({name: mischief(tmp_path, name, "--workers", "2") for name in names})
    for name, run_ in ended.items():
        assert run_.code == (2 if name == "vector" else 1), run_.said
        assert inspected(tmp_path / name / "run")["global_step"] == 3
        assert run_.err.count("Traceback") == (name != "vector"), run_.err
    at = "step 3, shard 1, rows [52, 53, 54, 55]"
    # The user's exception, with the user's frames, whatever its type.
    lines = (SCRIPTS / "mischief.py").read_text().splitlines()
    number = 1 + next(i for i, line in enumerate(lines) if "raise MineError(" in line)
    raised = ended["raise"].err
    assert f'mischief.py", line {number}, in fail\n    raise MineError(3, 4)' in raised
    assert "MineError: 3 and 4\n" in raised
    assert "(cpu), step 3, shard 2, rows [56, 57, 58, 59]" in raised
    assert "a worker's own words" in ended["raise"].out
    # A mistake is one line.
    assert len(ended["vector"].err.splitlines()) == 1
    assert "loss: got a tensor of shape " in ended["vector"].err
    # The death of a process.
    assert "was killed by signal 11 (SIGSEGV)" in ended["segfault"].err.splitlines()[-1]
    assert at in ended["segfault"].err.splitlines()[-1]
    memory = ended["memory"].err
    assert at in memory
    assert "4503599627370496 bytes" in memory
    assert "quorate: out of memory on cpu: " in memory
    assert "MiB free, this process has" in memory
    assert "What helps: more shards than 4 (each is smaller)" in memory


@pytest.mark.slow
def test_scripts_that_are_not_repeatable(tmp_path: Path) -> None:
    commands = {}
    for how in ("data", "model", "fails", "edited"):
        folder = tmp_path / how
        folder.mkdir()
        (folder / "unrepeatable.py").write_text((SCRIPTS / "unrepeatable.py").read_text())
        commands[how] = command(folder / "unrepeatable.py", how, str(folder))
    ended = run_all(commands)
    for how, words in {
        "data": ["has another dataset", "its first shard, rows ["],
        "model": ["made another model: got", "[9, 6]", "expected", "[8, 6]"],
    }.items():
        assert ended[how].code == 2, ended[how].said
        (line,) = ended[how].err.splitlines()
        assert all(word in line for word in [*words, "engine='towers'"]), line
    # What happens in workers alone is shown: a coordinator got this far.
    assert ended["fails"].code == 1
    assert "RuntimeError: only in workers" in ended["fails"].err
    assert "about to fail" in ended["fails"].err
    assert ended["fails"].said.count("Traceback") == 1
    assert ended["fails"].said.count("another is starting") <= 2  # the second time is no accident
    # Edited under way: a worker that is lost cannot be had again, and the others go on.
    assert ended["edited"].code == 0, ended["edited"].said
    said = "unrepeatable.py was edited during the run, so no other worker can start; the run cont"
    assert said in ended["edited"].said


def test_runs_of_shards_are_lost_and_taken_over_shard_by_shard(references: References) -> None:
    expected = references.on_a_tower("runs.py", "none", "40", "0", options=("--shards", "8")).json
    assert expected["runs"] >= 30  # all but where no time is known yet
    for how in ("none", "kill", "stop"):
        words = ("runs.py", how, "40", "0" if how == "none" else "5")
        ended = run(command(*words, options=("--workers", "2", "--shards", "8")))
        assert ended.code == 0, ended.said
        found = last_json(ended.out)
        assert found["digest"] == expected["digest"], how
        assert found["runs"] >= 20
        assert len(found["hit"]) >= (0 if how == "none" else 3)
