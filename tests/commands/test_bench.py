"""``quorate bench``: verdicts on made numbers, and real runs with something slow in them."""

from __future__ import annotations

import json
import os
import signal
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
from matplotlib import font_manager
from support.warm import WARM

from quorate.commands.bench import contenders, runs
from quorate.commands.bench.conclusion import conclusion
from quorate.commands.bench.contenders import Contender
from quorate.commands.bench.measured import Measured, WorkerTime, no_seconds
from quorate.commands.bench.plot import plot
from quorate.commands.bench.results import proof, results
from quorate.commands.bench.split import PARTS, split
from quorate.commands.bench.table import below, table
from quorate.commands.bench.verdict import findings, notes
from quorate.commands.child_run import last_error
from quorate.errors import RunError, SettingError, UserError

SCRIPT = Path(__file__).parents[1] / "scripts" / "measured.py"
STEP_S = 0.1


def worker(number: int, shards: int, device: str = "cpu", **seconds: float) -> WorkerTime:
    return WorkerTime(number, device, shards, no_seconds() | seconds)


def made(workers: Sequence[WorkerTime], updates: int = 100, **changes: Any) -> Measured:
    """Updates of 32 rows in ``STEP_S`` each."""
    facts: dict[str, Any] = {
        "update": "sync",
        "keeps_bits": True,
        "engine": "processes",
        "threads": 1,
        "cores": 8,
        "shards": 4,
        "batch_size": 32,
        "loader_workers": 0,
        "updates": updates,
        "rows": updates * 32,
        "seconds": updates * STEP_S,
        "workers": list(workers),
        "device_s": 0.0,
        "exchange_s": 0.0,
        "update_s": 0.0,
        "beside_s": 0.0,
        "evaluation_s": 0.0,
        "others_cores": 0.1,
        "warm_up": 3,
        "digests": {4: "a", 8: "b"},
    }
    return Measured(**(facts | changes))


def alike(count: int, **changes: Any) -> Measured:
    """Workers of 10 s: of 0.1 s waiting for rows, and as long as is left at computing."""
    spent = {"fetching": 0.1, "pushing": 0.1, "waiting": 0.3} | changes.pop("spent", {})
    left = 10.0 - sum(spent.values())
    shards = 400 // count
    return made(
        [worker(n, shards, forward=left / 3, backward=left * 2 / 3, **spent) for n in range(count)],
        **changes,
    )


def words(run: Measured, base: Measured | None = None) -> list[str]:
    return [finding.words for finding in findings([run], split(run), [base or run])]


# --- what is compared, and in which order ---------------------------------------------------------


def test_counts_and_lists_of_devices_give_contenders() -> None:
    assert contenders.contenders([], [1, 2, 2]) == [Contender(None, 1), Contender(None, 2)]
    assert contenders.contenders(["cpu"], [1, 3]) == [Contender("cpu", 1), Contender("cpu", 3)]
    assert contenders.contenders(["cpu", "cpu,cpu"], []) == [
        Contender("cpu", 1),
        Contender("cpu,cpu", 2),
    ]
    assert contenders.contenders([], [])[0] == Contender(None, 1)
    with pytest.raises(SettingError, match="devices"):
        contenders.contenders(["toaster"], [1])
    assert contenders.counts("1,2,4") == [1, 2, 4]
    for text in ("", "two", "1,,2", "0,1"):
        with pytest.raises(SettingError, match="workers"):
            contenders.counts(text)


def test_rounds_turn_round_and_most_workers_begin() -> None:
    one, two = Contender(None, 1), Contender(None, 2)
    assert contenders.rounds([one, two], 3) == [[two, one], [one, two], [two, one]]


# --- the split and the verdict ------------------------------------------------------------------


def test_the_parts_of_a_step_add_up() -> None:
    run = made(
        [
            worker(0, 200, fetching=1.0, forward=2.0, backward=4.0, pushing=0.5, waiting=2.5),
            worker(1, 200, fetching=0.0, forward=2.0, backward=3.0, pushing=0.5, waiting=4.5),
        ],
        exchange_s=0.5,
        update_s=1.0,
        beside_s=0.25,
    )
    assert split(run) == pytest.approx(
        {
            "input": 0.05,
            "compute": 0.55,
            "exchange": 0.10,
            "update": 0.10,
            "waiting": 0.175,
            "other": 0.025,
        }
    )


def test_an_update_beside_computing_workers_takes_no_more_than_they_wait() -> None:
    # The coordinator was busy for 6 s of 10, the workers waited for 1 s.
    run = alike(2, update="async", exchange_s=1.5, update_s=4.5, spent={"waiting": 1.0})
    parts = split(run)
    assert sum(parts.values()) == pytest.approx(1)
    assert parts["waiting"] == 0
    assert parts["update"] == pytest.approx(0.075)
    assert parts["exchange"] == pytest.approx(0.01 + 0.025)


def test_nothing_stands_out_where_workers_compute() -> None:
    (only,) = words(alike(2))
    assert only == "compute: forward and backward take 95% of a step, and nothing else 10%"


def test_a_slow_worker_is_named_with_how_slow_it_is() -> None:
    quick = {"fetching": 0.2, "forward": 4.0, "backward": 4.0, "pushing": 0.2, "waiting": 1.6}
    late = {"fetching": 0.1, "forward": 7.7, "backward": 2.0, "pushing": 0.1, "waiting": 0.1}
    run = made([worker(0, 200, **quick), worker(1, 200, **quick), worker(2, 100, **late)])
    (first, *_) = findings([run], split(run), [run])
    assert first.name == "straggler"
    assert first.words == (
        "straggler: worker 2 (cpu) is slow: 99.0 ms a shard, 2.4 times the median of 42.0 ms; in "
        "forward: 77.0 ms against 20.0 ms"
    )
    # Three workers of which one does 42/99 of what it could: of 3 only 2.42.
    assert first.cost == pytest.approx(1 - (2 + 42 / 99) / 3)


def test_a_straggler_is_one_in_most_of_the_runs() -> None:
    spent = {"forward": 9.5, "waiting": 0.5}
    even = made([worker(n, 200, **spent) for n in range(2)])
    once = made([worker(0, 200, **spent), worker(1, 100, **spent)])
    assert {f.name for f in findings([even, once, even], split(even), [even])} == {"compute"}
    assert "straggler" in {f.name for f in findings([once, once, even], split(once), [even])}


def test_a_worker_that_finishes_nothing_is_named() -> None:
    run = made([worker(0, 400, forward=9.5, waiting=0.5), worker(1, 0, backward=10.0)])
    assert "straggler: worker 1 (cpu) finished nothing in 10 s; in backward" in words(run)


def test_what_costs_most_is_the_bottleneck() -> None:
    for changes, beginning in (
        ({"spent": {"fetching": 6.0}}, "input: workers wait 60% of a step for rows; turn loader_"),
        ({"spent": {"pushing": 3.0}}, "exchange: handing gradients over and adding them up takes "),
        ({"spent": {"waiting": 4.0}, "exchange_s": 3.0}, "exchange: "),
        ({"spent": {"waiting": 4.0}, "update_s": 3.0}, "update: the optimizer takes 30% of a ste"),
        ({"spent": {"waiting": 4.0}, "beside_s": 3.5}, "other: what the program does between two"),
        ({"evaluation_s": 10.0}, "evaluation: it takes 50% of the run; evaluate less often"),
        ({"spent": {"waiting": 3.0}}, "waiting: workers wait 30% of a step for each other and for"),
    ):
        assert words(alike(2, **changes))[0].startswith(beginning)


def test_shards_that_cannot_be_dealt_evenly_are_why_workers_wait() -> None:
    (only,) = words(alike(3, spent={"waiting": 3.0}))
    assert only == (
        "waiting: workers wait 30% of a step for each other: 4 shards cannot be dealt evenly to 3 "
        "workers; choose shards=6"
    )


def test_more_workers_than_cores_are_said() -> None:
    base = alike(1, cores=2)
    run = made([worker(n, 50, forward=4.9, backward=4.9, waiting=0.2) for n in range(4)], cores=2)
    (only,) = words(run, base)
    assert only == (
        "compute: a shard takes 8.25 times as long as with 1 worker, 0.20 s against 23.8 ms: 4 "
        "workers of 1 thread share 2 cores"
    )
    assert notes(run) == ["more workers than cores: 4 workers of 1 thread share 2 cores"]
    (other,) = words(made(run.workers, cores=8), base)
    assert other.endswith("the clock or cores with each other or other programs")
    assert notes(base) == []
    assert notes(alike(2, others_cores=1.26))[0].startswith("other programs used 1.3 of this")
    assert notes(alike(5))[0].startswith("more workers than shards: 1 of 5 only step in")


# --- results --------------------------------------------------------------------------------------


def test_medians_speed_up_and_efficiency() -> None:
    one, two = Contender(None, 1), Contender(None, 2)
    found = results(
        {
            two: [alike(2, rows=rows) for rows in (6_000, 9_000, 6_400)],
            one: [alike(1, rows=rows) for rows in (3_200, 3_000, 4_000)],  # in the same rounds
        }
    )
    assert [result.contender for result in found] == [one, two]
    assert [result.examples_per_s for result in found] == [320, 640]
    assert (found[1].slowest, found[1].fastest) == (600, 900)
    assert found[1].ratios == [1.875, 3.0, 1.6]
    assert (found[1].speed_up, found[1].efficiency) == (1.875, 0.9375)
    assert set(found[1].split) == set(PARTS)
    lines = table(found).splitlines()
    assert lines[2].split()[:5] == ["2", "640", "47%", "1.88", "94%"]
    assert len({len(line) for line in lines}) == 1
    assert "runs that are alike differ by up to 47%" in "\n".join(below(found, None))


def concluded(*runs: Measured) -> str:
    return conclusion(results({Contender(None, len(run.workers)): [run] for run in runs}))


def test_the_conclusion_says_whether_more_workers_are_faster() -> None:
    one = alike(1)  # of 10 s, with 100 updates of 4 shards
    assert concluded(one, alike(2, rows=6_400)) == "2 workers are 2 times as fast as 1 worker here"
    slower = {"rows": 2_540, "spent": {"waiting": 6.0}}
    assert concluded(one, alike(2, **slower)) == (
        "2 workers are slower than 1 worker here (0.794 times the speed): a shard takes 19 ms, and "
        "an update costs 62 ms beside the shards, mostly waiting for other workers and for messages"
    )
    equal = concluded(one, alike(2, rows=3_210, spent={"fetching": 5.0, "waiting": 0.0}))
    assert equal.startswith("2 workers are about as fast as 1 worker here (1 times the speed): ")
    assert equal.endswith(" beside the shards, mostly waiting for rows")


def test_the_conclusion_names_the_fastest_and_the_most_workers() -> None:
    two, four = (
        alike(2, rows=5_760),
        made(
            [worker(n, 50, forward=4.9, backward=4.9, waiting=0.2) for n in range(4)],
            cores=2,
            rows=4_000,
        ),
    )
    assert concluded(alike(1), two, four) == (
        "2 workers are 1.8 times as fast as 1 worker here; 4 workers are slower than 2 workers "
        "here (0.694 times the speed): a shard takes 8.25 times as long as with 1 worker, 0.20 s "
        "against 23.8 ms: 4 workers of 1 thread share 2 cores"
    )


def test_one_number_of_workers_is_compared_with_nothing() -> None:
    assert concluded(alike(1)) == (
        "1 worker: a step takes 100 ms, of which forward and backward take 95 ms; to compare, name "
        "several numbers of workers: --workers 1,2"
    )


def test_runs_that_differ_in_their_bits_are_found_out(tmp_path: Path) -> None:
    one, two = Contender(None, 1), Contender(None, 2)
    same = results({one: [alike(1)], two: [alike(2, digests={4: "a", 8: "b", 16: "c"})]})
    assert proof(same) == (8, 2, ["b"])
    assert below(same, proof(same))[-1] == "  b"
    other = results({one: [alike(1)], two: [alike(2, digests={4: "a", 8: "x"})]})
    assert proof(other) == (8, 2, ["b", "x"])
    assert below(other, proof(other))[-1].startswith(
        "the bits differ after 8 updates: 2 digests in"
    )
    assert proof(results({one: [alike(1)], two: [alike(2, digests={})]})) is None
    # Another kind of device has bits of its own.
    cuda = made([worker(0, 400, "cuda:0", forward=9.0)])
    assert proof(results({one: [alike(1)], Contender("cuda:0", 1): [cuda]})) is None


@pytest.fixture
def no_fonts_left() -> Iterator[None]:
    """Fonts are files that matplotlib keeps open."""
    yield
    font_manager._get_font.cache_clear()


@pytest.mark.usefixtures("no_fonts_left")
def test_the_plot_is_a_picture(tmp_path: Path) -> None:
    found = results({Contender(d, n): [alike(n)] for d in ("cpu", "cuda") for n in (1, 2)})
    plot(found, "made", tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert [path.name for path in tmp_path.iterdir()] == ["a.png"]


def test_what_went_wrong_is_found_in_the_output() -> None:
    trace = "Traceback (most recent call last):\n  File x, line 1, in f\n    f()\n"
    assert last_error(f"noise\n{trace}ValueError: boom\nquorate: worker 0\n") == (
        "ValueError: boom"
    )
    assert last_error(f"{trace}KeyError: 1\n\n{trace}my.Own: 2\n") == "my.Own: 2"
    assert last_error("256 rows\nquorate: shards: got 9\n\n") == "shards: got 9"
    assert last_error("") == "it printed nothing"


# --- real runs ------------------------------------------------------------------------------------


def measured(tmp_path: Path, slow: str, *options: str, seconds: float = 0.6) -> Measured:
    file = tmp_path / "measured.json"
    wanted = ["--profile", str(file), "--profile-s", str(seconds)]
    code, out, err = WARM.run(["run", *options, *wanted, str(SCRIPT), slow], os.environ, 60)
    assert code == 0, out + err
    return Measured.from_json(json.loads(file.read_text()))


def bottleneck(run: Measured) -> str:
    return findings([run], split(run), [run])[0].words


@pytest.mark.slow
def test_a_made_slow_input_is_the_bottleneck(tmp_path: Path) -> None:
    run = measured(tmp_path, "input", "--devices", "cpu", "--workers", "2", "--engine", "towers")
    assert bottleneck(run).startswith("input: workers wait ")
    assert "turn loader_workers up (it is 0)" in bottleneck(run)
    # All of the time is accounted for, in each worker.
    assert run.rows == 32 * run.updates
    assert run.seconds >= 0.6
    for each in run.workers:
        assert sum(each.seconds.values()) == pytest.approx(run.seconds, rel=0.05)
    assert sum(each.shards for each in run.workers) >= 4 * run.updates
    assert 0 <= run.others_cores <= (os.cpu_count() or 1) + 0.5


@pytest.mark.slow
@pytest.mark.parametrize(("slow", "name"), [("loop", "other"), ("evaluation", "evaluation")])
def test_what_is_beside_the_steps_is_found(tmp_path: Path, slow: str, name: str) -> None:
    seconds = 1.2 if slow == "evaluation" else 0.6  # an epoch is 0.8 s
    run = measured(tmp_path, slow, "--devices", "cpu", "--workers", "1", seconds=seconds)
    assert bottleneck(run).startswith(f"{name}: ")
    assert sum(run.workers[0].seconds.values()) == pytest.approx(run.seconds, rel=0.05)


@pytest.mark.slow
def test_updates_that_come_one_by_one_are_measured(tmp_path: Path) -> None:
    on = ("--devices", "cpu", "--workers", "2", "--engine", "towers", "--update", "async")
    run = measured(tmp_path, "straggler", *on)
    assert bottleneck(run).startswith("straggler: worker 1 (cpu) is slow: ")
    assert run.rows == 8 * run.updates
    assert run.digests == {}


@pytest.mark.slow
def test_a_bench_names_a_made_straggler_and_shows_the_same_bits(tmp_path: Path) -> None:
    out = tmp_path / "out"
    words = ["--workers", "1,2", "--repeats", "1", "--seconds", "1.5", "--out", str(out)]
    code, shown, error = WARM.run(["bench", str(SCRIPT), *words, "straggler"], os.environ, 120)
    assert (code, error) == (0, "")
    assert "\n2 workers: straggler: worker 1 (cpu) is slow: " in shown
    assert "times worker 0's" in shown
    assert "same bits: all 2 runs have this digest after " in shown
    record = json.loads((out / "results.json").read_text())
    one, two = record["contenders"]
    assert (one["workers"], two["workers"]) == (1, 2)
    assert (one["speed_up"], one["efficiency"]) == (1, 1)
    assert [run["shards"] for run in one["runs"] + two["runs"]] == [4, 4]
    assert two["runs"][0]["engine"] == "processes"
    assert two["bottleneck"].startswith("straggler: worker 1 ")
    assert sum(two["split"].values()) == pytest.approx(1)
    assert len(record["same_bits"]["digests"]) == 1
    assert (out / "speed-up.png").stat().st_size > 10_000
    assert sorted(path.name for path in out.iterdir()) == ["results.json", "speed-up.png"]


@pytest.mark.slow
def test_json_is_what_is_in_the_file(tmp_path: Path) -> None:
    words = ["--workers", "1", "--repeats", "1", "--seconds", "0.3", "--json", "--out"]
    code, shown, error = WARM.run(
        ["bench", str(SCRIPT), *words, str(tmp_path), "straggler"], os.environ, 120
    )
    assert code == 0, error
    assert json.loads(shown) == json.loads((tmp_path / "results.json").read_text())
    assert error.startswith("run 1 of 1: 1 worker, ")
    assert error.count("\n") == 1


@pytest.mark.slow
def test_a_run_that_fails_ends_the_bench_in_one_line(tmp_path: Path) -> None:
    script, out = tmp_path / "wrong.py", tmp_path / "out"
    script.write_text("raise RuntimeError('no such thing')\n")
    words = ["bench", str(script), "--workers", "1", "--out", str(out)]
    code, _, error = WARM.run(words, os.environ, 60)
    assert code == 1
    assert error.startswith(
        "quorate: the run on 1 worker ended with exit code 1: RuntimeError: no such thing; all of"
    )
    assert error.count("\n") == 1
    assert "Traceback" in (out / "failed.log").read_text()


@pytest.mark.slow
def test_ctrl_c_leaves_no_process_and_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    started = tmp_path / "started"
    script = tmp_path / "long.py"
    script.write_text(f"import time\nopen({str(started)!r}, 'w')\ntime.sleep(60)\n")

    def press(_number: int, _frame: object) -> None:
        if started.exists():
            signal.setitimer(signal.ITIMER_REAL, 0)
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, press)
    signal.setitimer(signal.ITIMER_REAL, 0.1, 0.1)
    try:
        with pytest.raises(KeyboardInterrupt):
            runs.run(
                runs.Program(str(script), None, (), {}, 1.0),
                Contender(None, 1),
                None,
                tmp_path / "log",
            )
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    left = [process.cmdline() for process in psutil.Process().children(recursive=True)]
    assert not [words for words in left if str(script) in words]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["long.py", "started"]


@pytest.mark.slow
def test_precision_and_compile_reach_the_runs(tmp_path: Path) -> None:
    words = ["bench", str(SCRIPT), "--compile", "--precision", "fp8", "--out", str(tmp_path)]
    code, _, error = WARM.run(words, os.environ, 120)
    assert code == 2
    assert "precision: got 'fp8', expected one of fp32, tf32, bf32, bf16, fp16" in error
    assert "unrecognized" not in error


def test_a_script_without_a_training_loop_is_the_users_mistake() -> None:
    assert isinstance(runs._failure(Contender(None, 1), 0, ""), UserError)
    assert isinstance(runs._failure(Contender(None, 1), 2, "x"), UserError)
    assert str(runs._failure(Contender("cpu", 2), -9, "x")) == (
        "the run on 2 workers on cpu was killed by signal 9 (SIGKILL); it printed last: x"
    )
    assert isinstance(runs._failure(Contender(None, 1), 1, "x"), RunError)
