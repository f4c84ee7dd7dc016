"""``quorate bench``: real runs, and the conclusions from measurements."""

import json
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from support.at_the_command import QUORATE
from support.keys import keys_of
from support.messages import expect_message
from support.runs import processes_of, started
from support.warm_child import WarmRuns

from quorate.__main__ import main
from quorate.commands.bench import contenders
from quorate.commands.bench.conclusion import conclusion
from quorate.commands.bench.contenders import Contender
from quorate.commands.bench.measured import Measured, WorkerTime, no_seconds
from quorate.commands.bench.results import proof
from quorate.commands.bench.results import results as compared
from quorate.commands.bench.split import split
from quorate.commands.bench.table import below, table
from quorate.commands.bench.verdict import findings, notes

SCRIPT = str(Path(__file__).parents[1] / "scripts" / "measured.py")


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> WarmRuns:
    return WarmRuns("bench", monkeypatch, capfd)


def results(folder: Path) -> Any:
    return json.loads((folder / "results.json").read_text())


def test_a_made_slow_input_is_the_bottleneck(tmp_path: Path) -> None:
    file = tmp_path / "measured.json"
    words = ("--engine", "towers", "--workers", "2", "--profile", str(file), "--profile-s", "0.4")
    with pytest.raises(SystemExit) as end:
        main(["run", "--devices", "cpu", *words, SCRIPT, "input"])
    assert not end.value.code
    run = Measured.from_json(json.loads(file.read_text()))
    for each in run.workers:  # all of the time is accounted for, in each worker
        assert sum(each.seconds.values()) == pytest.approx(run.seconds, rel=0.05)
    bottleneck = findings([run], split(run), [run])[0].words
    assert bottleneck.startswith("input: workers wait ")
    assert "turn loader_workers up (it is 0)" in bottleneck
    assert run.rows == 32 * run.updates
    assert run.seconds >= 0.4
    assert sum(each.shards for each in run.workers) >= 4 * run.updates
    assert 0 <= run.others_cores <= (os.cpu_count() or 1) + 0.5


def test_one_device_and_stages(tmp_path: Path, bench: WarmRuns) -> None:
    words = ("--devices", "cpu", "--devices", "cpu+cpu", "--engine", "processes")
    shown = bench(
        SCRIPT, *words, "--repeats", "1", "--seconds", "0.3", "--out", str(tmp_path), code=0
    )
    assert "stages: busy 0 " in shown
    assert "1f1b, 4 shards: idle 20% if stages took the same time, " in shown
    assert "same bits: all 2 runs have this digest after " in shown
    record = results(tmp_path)
    whole, staged = record["contenders"]
    assert (whole["speed_up"], whole["efficiency"]) == (1, 1)
    assert staged["efficiency"] == pytest.approx(staged["speed_up"] / 2)
    assert sum(staged["split"].values()) == pytest.approx(1)
    assert len(record["same_bits"]["digests"]) == 1
    assert (tmp_path / "speed-up.png").stat().st_size > 10_000
    assert sorted(path.name for path in tmp_path.iterdir()) == ["results.json", "speed-up.png"]
    (run,) = staged["runs"]
    assert [stage["stage"] for stage in run["stages"]] == [0, 1]
    for stage in run["stages"]:
        # All shards of a step are dealt at once, to let the shards flow.
        assert stage["shards"] == 4 * stage["steps"]
        assert 0 < stage["forward_s"] + stage["backward_s"] < run["seconds"]
    assert whole["runs"][0]["stages"] == []


def test_costs_are_measured_and_json_is_what_is_in_the_file(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], bench: WarmRuns
) -> None:
    words = ("--workers", "1", "--engine", "processes", "--repeats", "1", "--seconds", "0.3")
    assert main(["bench", SCRIPT, *words, "--costs", "--json", "--out", str(tmp_path)]) == 0
    shown = capfd.readouterr()
    assert json.loads(shown.out) == results(tmp_path)
    told = shown.err.splitlines()
    assert told[0].startswith("run 1 of 1: 1 worker, ")
    record = results(tmp_path)
    found = record["costs"]
    # Whether cores are shared, and saves were seen, is the machine's affair.
    always = {name: found[name] for name in ("by_shard", "failing", "workers")}
    expect_message(keys_of({**record, "costs": always}))
    copies = min(results(tmp_path)["contenders"][0]["runs"][0]["cores"], 8)
    assert ("crowding" in found) == (copies > 1)
    if copies > 1:
        assert found["crowding"]["times"] >= 1.0
        assert len(found["copies"]) == copies
        assert told[1] == f"costs: {copies} copies at once"
    assert found["by_shard"]["runs"][0]["update"] == "async"
    # The number of saves in the measured time depends on the machine.
    assert found.get("saving", {"stall_s": 0.0})["stall_s"] >= 0
    assert found["failing"]["restart_s"] > 0
    assert found["failing"]["detection_s"] > 0


# A script, with options, and the resulting exit code.
FAILURES = {
    "an error": ("raise RuntimeError('no such thing')", (), 1),
    "a mistake": (Path(SCRIPT).read_text(), ("--compile", "--precision", "fp8"), 2),
}


@pytest.mark.parametrize("name", FAILURES)
def test_a_run_that_fails_ends_the_bench_in_one_line(
    name: str, tmp_path: Path, bench: WarmRuns
) -> None:
    text, options, code = FAILURES[name]
    (tmp_path / "wrong.py").write_text(text + "\n")
    words = (str(tmp_path / "wrong.py"), "--workers", "1", *options, "--out", str(tmp_path / "out"))
    expect_message(bench(*words, code=code))
    assert ("Traceback" in (tmp_path / "out" / "failed.log").read_text()) == (name == "an error")


@pytest.mark.slow
def test_ctrl_c_leaves_no_process_and_no_file(tmp_path: Path) -> None:
    script = tmp_path / "long.py"
    script.write_text(f"import time\nopen({str(tmp_path / 'begun')!r}, 'w')\ntime.sleep(60)\n")
    words = [*QUORATE, "bench", str(script), "--out", str(tmp_path / "out")]
    with started(tmp_path, words) as (process, mark):
        while not (tmp_path / "begun").exists():
            assert process.poll() is None
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
        while processes_of(mark):  # they are ended, and the kernel may not know yet
            time.sleep(0.05)
        assert [*(tmp_path / "temporary").iterdir()] == []


STEP_S = 0.1


def worker(number: int, shards: int, device: str = "cpu", **seconds: float) -> WorkerTime:
    return WorkerTime(number, device, shards, no_seconds() | seconds)


def made(workers: Sequence[WorkerTime], updates: int = 100, **changes: Any) -> Measured:
    """Updates of 32 rows in ``STEP_S`` each."""
    facts: dict[str, Any] = {
        **{"update": "sync", "keeps_bits": True, "engine": "processes", "threads": 1, "cores": 8},
        **{"shards": 4, "batch_size": 32, "loader_workers": 0, "warm_up": 3},
        **{"updates": updates, "rows": updates * 32, "seconds": updates * STEP_S},
        **{"device_s": 0.0, "exchange_s": 0.0, "update_s": 0.0, "beside_s": 0.0},
        **{"evaluation_s": 0.0, "others_cores": 0.1, "digests": {4: "a", 8: "b"}},
    }
    return Measured(workers=list(workers), **(facts | changes))


def alike(count: int, **changes: Any) -> Measured:
    """Workers of 10 s: of 0.1 s waiting for rows, and as long as is left at computing."""
    spent = {"fetching": 0.1, "pushing": 0.1, "waiting": 0.3} | changes.pop("spent", {})
    left = 10.0 - sum(spent.values())
    of_each = {"forward": left / 3, "backward": left * 2 / 3, **spent}
    return made([worker(n, 400 // count, **of_each) for n in range(count)], **changes)


def said(*runs: Measured, base: Measured | None = None) -> str:
    """Return findings with their costs, and notes on the first run, as text."""
    found = findings(runs, split(runs[0]), [base or runs[0]])
    return "\n".join([*(f"{each.words}: {each.cost:.4f}" for each in found), *notes(runs[0])])


QUICK = {"fetching": 0.2, "forward": 4.0, "backward": 4.0, "pushing": 0.2, "waiting": 1.6}
LATE = {"fetching": 0.1, "forward": 7.7, "backward": 2.0, "pushing": 0.1, "waiting": 0.1}
BUSY = {"forward": 9.5, "waiting": 0.5}
EVEN = made([worker(n, 200, **BUSY) for n in range(2)])
ONCE = made([worker(0, 200, **BUSY), worker(1, 100, **BUSY)])
CROWD = [worker(n, 50, forward=4.9, backward=4.9, waiting=0.2) for n in range(4)]


def test_the_parts_of_a_step_add_up() -> None:
    one = worker(0, 200, fetching=1.0, forward=2.0, backward=4.0, pushing=0.5, waiting=2.5)
    two = worker(1, 200, fetching=0.0, forward=2.0, backward=3.0, pushing=0.5, waiting=4.5)
    parts = {"input": 0.05, "compute": 0.55, "exchange": 0.10, "update": 0.10}
    parts |= {"waiting": 0.175, "other": 0.025}
    run = made([one, two], exchange_s=0.5, update_s=1.0, beside_s=0.25)
    assert split(run) == pytest.approx(parts)
    # Beside computing workers an update takes no more than they wait, 1 s of 10.
    beside = alike(2, update="async", exchange_s=1.5, update_s=4.5, spent={"waiting": 1.0})
    parts = split(beside)
    assert sum(parts.values()) == pytest.approx(1)
    assert parts["waiting"] == 0
    assert parts["update"] == pytest.approx(0.075)
    assert parts["exchange"] == pytest.approx(0.01 + 0.025)


FINDINGS: dict[str, tuple[Measured, ...]] = {
    # Three workers: one does 42/99 of its possible shards. Of 3 workers only 2.42 are left.
    "a slow worker": (
        made([worker(0, 200, **QUICK), worker(1, 200, **QUICK), worker(2, 100, **LATE)]),
    ),
    "slow in two runs of three": (ONCE, ONCE, EVEN),
    "a worker that finishes nothing": (
        made([worker(0, 400, forward=9.5, waiting=0.5), worker(1, 0, backward=10.0)]),
    ),
    "input": (alike(2, spent={"fetching": 6.0}),),
    "exchange": (alike(2, spent={"waiting": 4.0}, exchange_s=3.0),),
    "update": (alike(2, spent={"waiting": 4.0}, update_s=3.0),),
    "beside": (alike(2, spent={"waiting": 4.0}, beside_s=3.5),),
    "evaluation": (alike(2, evaluation_s=10.0),),
    "waiting": (alike(2, spent={"waiting": 3.0}),),
    "shards that cannot be dealt evenly": (alike(3, spent={"waiting": 3.0}),),
    "more workers than shards": (alike(5),),
}


@pytest.mark.parametrize("name", FINDINGS)
def test_what_takes_the_time(name: str) -> None:
    expect_message(said(*FINDINGS[name]))


@pytest.mark.parametrize("cores", [2, 8])
def test_shards_that_take_longer_beside_others(cores: int) -> None:
    expect_message(said(made(CROWD, cores=cores), base=alike(1, cores=cores)))


# --- results --------------------------------------------------------------------------------------

ONE, TWO = Contender(None, 1), Contender(None, 2)


def test_counts_and_lists_of_devices_give_contenders() -> None:
    found = contenders.contenders
    assert found([], [1, 2, 2]) == [ONE, TWO]
    assert found(["cpu"], [1, 3]) == [Contender("cpu", 1), Contender("cpu", 3)]
    assert found(["cpu", "cpu,cpu"], []) == [Contender("cpu", 1), Contender("cpu,cpu", 2)]
    assert found([], [])[0] == ONE
    # They turn round, and most workers begin.
    assert contenders.rounds([ONE, TWO], 3) == [[TWO, ONE], [ONE, TWO], [TWO, ONE]]


def test_medians_speed_up_and_efficiency() -> None:
    runs = {
        TWO: [alike(2, rows=rows) for rows in (6_000, 9_000, 6_400)],
        ONE: [alike(1, rows=rows) for rows in (3_200, 3_000, 4_000)],  # in the same rounds
    }
    found = compared(runs)
    assert [(result.contender, result.examples_per_s) for result in found] == [
        (ONE, 320),
        (TWO, 640),
    ]
    assert (found[1].slowest, found[1].fastest) == (600, 900)
    assert found[1].ratios == [1.875, 3.0, 1.6]
    assert (found[1].speed_up, found[1].efficiency) == (1.875, 0.9375)
    expect_message("\n".join([table(found), *below(found, None)]))


CONCLUSIONS = {
    "twice as fast": (alike(1), alike(2, rows=6_400)),
    "as fast": (alike(1), alike(2, rows=3_210, spent={"fetching": 5.0, "waiting": 0.0})),
    "the fastest, and the most": (
        *(alike(1), alike(2, rows=5_760), made(CROWD, cores=2, rows=4_000)),
    ),
    "one alone": (alike(1),),
}


@pytest.mark.parametrize("name", CONCLUSIONS)
def test_the_conclusion(name: str) -> None:
    runs = CONCLUSIONS[name]
    found = compared({Contender(None, len(run.workers)): [run] for run in runs})
    expect_message(conclusion(found))


def test_runs_that_differ_in_their_bits_are_found_out() -> None:
    cuda = made([worker(0, 400, "cuda:0", forward=9.0)])  # another kind of device: different bits
    told = []
    for other, expected in (
        ({TWO: [alike(2, digests={4: "a", 8: "b", 16: "c"})]}, (8, 2, ["b"])),
        ({TWO: [alike(2, digests={4: "a", 8: "x"})]}, (8, 2, ["b", "x"])),
        ({TWO: [alike(2, digests={})]}, None),
        ({Contender("cuda:0", 1): [cuda]}, None),
    ):
        found = compared({ONE: [alike(1)], **other})
        assert proof(found) == expected
        told += below(found, proof(found))
    expect_message("\n".join(told))
