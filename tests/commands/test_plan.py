"""``quorate plan``: from the file of a bench to a table, and what is no such file."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from matplotlib import font_manager

from quorate.commands.bench.contenders import Contender
from quorate.commands.bench.measured import Measured, WorkerTime, no_seconds
from quorate.commands.bench.results import results, to_json
from quorate.commands.main import main
from quorate.commands.plan.advice import bound
from quorate.commands.plan.measurements import read_bench, read_shard_times
from quorate.errors import DataError
from quorate.machine.columns import three_digits
from quorate.simulation.inputs import Failures, Network, ShardTimes, Stragglers
from quorate.simulation.simulate import simulate


def measured(workers: int) -> Measured:
    """100 updates of 4 shards of 8 rows: 0.1 s a shard, 0.02 s an update, 0.01 s of sums each."""
    shards = 400 // workers
    work_s = {"fetching": 0.01, "forward": 0.03, "backward": 0.05, "pushing": 0.01}
    seconds = 100 * (0.4 / workers + 0.02 + 0.01 * workers)
    return Measured(
        update="sync",
        keeps_bits=True,
        engine="processes",
        threads=1,
        cores=8,
        shards=4,
        batch_size=32,
        loader_workers=0,
        updates=100,
        rows=3200,
        seconds=seconds,
        workers=[
            WorkerTime(n, "cpu", shards, no_seconds() | {p: s * shards for p, s in work_s.items()})
            for n in range(workers)
        ],
        device_s=0.0,
        exchange_s=100 * 0.01 * workers,
        update_s=1.5,
        beside_s=0.5,
        evaluation_s=0.0,
        others_cores=0.0,
        warm_up=3,
        digests={},
    )


@pytest.fixture
def bench(tmp_path: Path) -> Path:
    """What a bench of 1 and 2 workers writes, by its own functions."""
    made = results({Contender(None, n): [measured(n)] for n in (1, 2)})
    path = tmp_path / "results.json"
    path.write_text(json.dumps({"script": "a.py", "contenders": to_json(made)}, indent=1))
    return path


def the_line(captured: pytest.CaptureFixture[str]) -> str:
    lines = captured.readouterr().err.splitlines()
    assert len(lines) == 1
    return lines[0]


def test_a_bench_is_read_and_played_again(bench: Path) -> None:
    one, two = read_bench(bench)
    assert (one.workers, two.workers) == (1, 2)
    for found in (one, two):
        assert found.shard_s == pytest.approx(0.1)
        assert found.update_s == pytest.approx(0.02)
        assert found.vector_s == pytest.approx(0.01)
        assert found.latency_s == pytest.approx(0.0, abs=1e-9)
        assert found.rows_per_shard == 8
        told = simulate(
            found.workers,
            shards=4,
            shard_times=ShardTimes(mean_s=found.shard_s),
            rows_per_shard=8,
            update_s=found.update_s,
            network=Network(vector_s=found.vector_s),
        )
        assert told.running_examples_per_s == pytest.approx(found.examples_per_s)


@pytest.fixture
def no_fonts_left() -> Iterator[None]:
    """Fonts are files that matplotlib keeps open."""
    yield
    font_manager._get_font.cache_clear()


@pytest.mark.usefixtures("no_fonts_left")
def test_the_table_and_the_files(bench: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, picture, page = (bench.with_name(name) for name in ("p.json", "p.png", "p.html"))
    asked = ["plan", str(bench), "--workers", "2,4", "--update", "sync,quorum,async"]
    asked += ["--spares", "0,1", "--mtbf-h", "1000", "--price", "2.5", "--steps", "10"]
    assert main([*asked, "--json", str(out), "--plot", str(picture)]) == 0
    shown = capsys.readouterr().out
    assert "(+0.0%)" not in shown  # a spread of 5% is assumed, which costs some
    assert "2 workers, processes: shards of 8 rows take 100 ms, an update 20 ms" in shown
    assert "assumed: a spread of 5%" in shown
    rows = [line.split() for line in shown.splitlines() if " quorum:4 " in line]
    assert [row[:3] for row in rows] == [["4", "0", "quorum:4"], ["4", "1", "quorum:4"]]
    assert "4 workers, sync: network: " in shown  # 4 x 10 ms of sums: a quarter of a step
    told = json.loads(out.read_text())["predictions"]
    assert len(told) == 2 * (2 + 2 + 1)
    assert told[0]["failures_per_day"] == pytest.approx(2 * 24 / 1000)
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert main([*asked, "--plot", str(page)]) == 0
    text = page.read_text()
    assert "<svg" in text
    assert text.count("<tr>") == 11


@pytest.mark.parametrize("rule", ["quorum", "quorum:3", "sync", "async", "bounded:2"])
def test_a_bench_with_costs_is_planned_from_under_each_rule(
    rule: str, bench: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = json.loads(bench.read_text())
    by_shard = found["contenders"][0] | {"runs": [asdict(measured(1)) | {"update": "async"}]}
    bench.write_text(json.dumps(found | {"costs": {"by_shard": by_shard}}))
    words = ["plan", str(bench), "--workers", "4", "--update", rule, "--steps", "10"]
    assert main(words) == 0
    name = "quorum:4" if rule == "quorum" else rule
    assert f" {name} " in capsys.readouterr().out


def test_nothing_is_predicted_from_a_run_whose_replay_is_far_off(
    bench: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = json.loads(bench.read_text())
    one, two = found["contenders"]
    two["examples_per_s"] *= 1.3
    bench.write_text(json.dumps(found))
    words = ["plan", str(bench), "--workers", "4", "--steps", "10"]
    assert main(words) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    assert re.search(r"a run on 2 workers whose replay is -2\d% off \(\d+ examples/s, meas", line)
    assert "or --from-workers 1, whose replay is close enough" in line
    assert main([*words, "--from-workers", "1"]) == 0
    one["examples_per_s"] *= 1.3
    bench.write_text(json.dumps(found))
    assert main(words) == 2
    assert "--from-workers" not in the_line(capsys)


def test_what_is_assumed_of_other_runs_does_not_count_against_the_measured_one(
    bench: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["plan", str(bench), "--workers", "4", "--steps", "20", "--held-up", "0.5:10"]
    assert main([*words, "--gradient-mib", "500", "--gbit-s", "0.1"]) == 0
    assert re.search(r"measured 133 \([+-]\d\.\d%\)", capsys.readouterr().out)


@pytest.mark.parametrize("value", [0.012345, 2.4149, 63.71, 999.6, 14161.0, 1234567.0])
def test_a_figure_has_three_digits(value: float) -> None:
    shown = three_digits(value)
    assert float(shown.replace(",", "")) == pytest.approx(value, rel=5e-3)
    assert len(shown.replace(",", "").replace(".", "").strip("0")) <= 3


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (
            ('"exchange_s": 1.0', '"exchange_s": -1.0'),
            "got exchange_s -1.0, expected a number >= 0",
        ),
        (('"updates": 100', '"updates": 0'), "got updates 0, expected a number > 0"),
        (('"update_s": 1.5', '"update_s": NaN'), "got update_s NaN, expected a number >= 0"),
        (('"forward"', '"froward"'), "got no forward, expected what quorate bench writes"),
        (('"update": "sync"', '"update": 3'), "got update 3, expected a str"),
        (('"update": "sync"', '"update": "never"'), 'got update "never", expected a rule of'),
        (('"engine": "processes"', '"engine": "mpi"'), 'got engine "mpi", expected towers or'),
        (('"shards": 4', '"shards": 2.5'), "got shards 2.5, expected a whole number"),
        (('"threads": 1', f'"threads": {10**400}'), "expected a number <= 1e+12"),
        (('"update_s": 1.5', '"update_s": 1e300'), "got update_s 1e+300, expected a number <="),
        (
            ('"contenders"', '"contestants"'),
            "got no contenders, expected what quorate bench writes",
        ),
    ],
)
def test_a_bench_that_says_what_cannot_be(
    bench: Path, change: tuple[str, str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text = bench.read_text().replace(*change, 1)
    assert change[1] in text
    bench.write_text(text)
    assert main(["plan", str(bench)]) == 2
    said = the_line(capsys)
    assert line in said
    if "got no" not in line:
        number = next(n for n, of in enumerate(text.splitlines(), 1) if change[1] in of)
        assert f"results.json, line {number}: " in said


COSTS = {
    "workers": 1,
    "crowding": {"copies": 2, "times": 1.25},
    "saving": {"stall_s": 0.5, "every_s": 1.0, "took_s": 0.1},
    "failing": {"detection_s": 0.25, "restart_s": 2.0},
}


def with_costs(bench: Path, **changes: Any) -> Path:
    record = json.loads(bench.read_text())
    one = replace(measured(1), update="async", exchange_s=3.0, updates=400)
    by_shard = {"runs": [asdict(one)], "examples_per_s": one.examples_per_s}
    record["costs"] = {**COSTS, "by_shard": by_shard, **changes}
    bench.write_text(json.dumps(record, indent=1))
    return bench


def test_costs_that_a_bench_measured(bench: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, two = read_bench(with_costs(bench))
    assert (one.crowding, two.crowding) == (1.25, None)  # of two it is in their shards' times
    assert (one.save_s, one.detection_s, one.restart_s) == (0.5, 0.25, 2.0)
    assert one.under("quorum:2") is one
    assert one.under("bounded:2").vector_s == pytest.approx(3.0 / 400)
    # Half of what is left of a phase, by how long it is: 0.01, 0.03, 0.05 and 0.01 of 0.1 s.
    assert one.leaves_off_s == pytest.approx((2 * 0.01**2 + 0.03**2 + 0.05**2) / 0.1 / 2)
    out = bench.with_name("told.json")
    asked = ["plan", str(bench), "--from-workers", "1", "--workers", "2,4", "--cores", "2"]
    asked += ["--shards", "4", "--spread", "0", "--mtbf-h", "1", "--json", str(out)]
    assert main(asked) == 0
    told = json.loads(out.read_text())["predictions"]
    # Two at a time, each slower by a quarter; 20 ms, and 10 ms for each that has sums.
    assert told[0]["step_s"] == pytest.approx(2 * 0.125 + 0.02 + 0.02)
    assert told[1]["step_s"] == pytest.approx(2 * 0.125 + 0.02 + 0.04)
    assert told[1]["shares"]["cores"] > 0.3
    shown = capsys.readouterr().out
    assert "4 workers, sync: cores: " in shown
    assert "2 s until a worker is back" in shown
    assert "0.5 s a checkpoint" in shown
    assert "--cores" not in shown


def test_costs_that_cannot_be(bench: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with_costs(bench, crowding={"copies": 2, "times": 0.5})
    assert main(["plan", str(bench)]) == 2
    assert "got times 0.5, expected a number >= 1" in the_line(capsys)
    with_costs(bench, failing={"detection_s": 0.25})
    assert main(["plan", str(bench)]) == 2
    assert "got no restart_s" in the_line(capsys)


def test_a_bench_of_parts_in_parts(bench: Path) -> None:
    bench.write_text("[" * 100_000)
    with pytest.raises(DataError, match="brackets in each other"):
        read_bench(bench)


def test_a_bench_that_stops(bench: Path) -> None:
    text = bench.read_text()[:1000]
    bench.write_text(text)
    with pytest.raises(DataError, match=f"line {len(text.splitlines())}: got the end of the file"):
        read_bench(bench)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("shard_s\n0.1\n-0.2\n", "line 3: got shard_s '-0.2', expected seconds > 0"),
        ("shard_s\n0.1\nnan\n", "line 3: got shard_s 'nan'"),
        ("shard_s,wroker\n0.1,1\n", "line 1: got column 'wroker', expected shard_s, worker, step"),
        ("worker,step\n1,2\n", "line 1: got no shard_s, expected a column of it"),
        ("worker,shard_s\n1,0.1\n2\n", "line 3: got 1 cells, expected 2; is the file cut off?"),
        ("shard_s\n0.1\n0.", "line 3: got shard_s '0.'"),
        ("shard_s\n0.1\n0.2", "line 3: got a line without an end"),
        ("shard_s\n", "line 1: got no times"),
        ("shard_s,shard_s\n1,2\n", "line 1: got column 'shard_s' 2 times, expected each once"),
        ("shard_s\n1_0\n", "line 2: got shard_s '1_0', expected seconds > 0"),
        ("shard_s\n1e300\n", "line 2: got shard_s '1e300', expected seconds <= 1e+12"),
        (f"shard_s\n{'1' * 200_000}\n", "line 2: got field larger than field limit"),
    ],
)
def test_shard_times_that_cannot_be(text: str, line: str, tmp_path: Path) -> None:
    path = tmp_path / "times.csv"
    path.write_text(text)
    with pytest.raises(DataError) as raised:
        read_shard_times(path)
    assert str(raised.value).startswith(f"{path}, {line}")


def test_the_vectors_that_hosts_save_are_told(
    bench: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["plan", str(bench), "--workers", "16", "--per-host", "4", "--steps", "5"]
    line = "hosts add up what their workers have: 4 vectors of sums per update in the place of 16"
    assert main([*asked, "--engine", "ray"]) == 0
    assert line in capsys.readouterr().out
    assert main(asked) == 0
    assert "hosts add up" not in capsys.readouterr().out


def test_shard_times_are_drawn_from(bench: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = bench.with_name("times.csv")
    path.write_text("\ufeffworker,shard_s\r\n0,0.5\r\n1,0.5\r\n")  # as a spreadsheet does
    assert read_shard_times(path) == (0.5, 0.5)
    assert main(["plan", str(bench), "--workers", "1", "--trace", str(path)]) == 0
    assert " 0.53 s  0.53 s " in capsys.readouterr().out  # 0.5 + 0.02 + 0.01


@pytest.mark.parametrize(
    ("option", "line"),
    [
        (("--workers", "two"), "workers: got 'two', expected whole numbers >= 1 such as 1,2,4"),
        (("--spares", "-1"), "spares: got '-1', expected whole numbers >= 0"),
        (("--from-workers", "3"), "from_workers: got 3, expected one of 1, 2"),
        (("--held-up", "often"), "held_up: got 'often', expected a share and how many times"),
        (("--held-up", "2:4"), "held_up: got '2:4', expected a share and how many times"),
        (("--held-up", "0.1:inf"), "held_up: got '0.1:inf', expected a share and how many times"),
        (("--cores", "0"), "cores: got 0, expected a whole number >= 1"),
        (("--shards", "9000000"), "shards: got 9000000, expected a whole number >= 1 and <= 2"),
        (("--spread", "4"), "spread: got 4.0, expected a number <= 3"),
        (("--spread", "0", "--trace", "times.csv"), "spread: got 0.0, expected none beside"),
        (("--latency-ms", "inf"), "latency_ms: got inf, expected a number <= 1e+12"),
        (("--restart-s", "inf"), "restart_s: got inf, expected a number <= 1e+12"),
        (("--gradient-mib", "inf"), "gradient_mib: got inf, expected a number <= 1e+12"),
        (("--steps", "2", "--json", ""), "json: got '.', expected a file that can be written"),
        (("--mtbf-h", "-5"), "mtbf_h: got -5.0, expected a number >= 0"),
        (("--update", "sometimes"), "update: got 'sometimes', expected sync, quorum:R"),
        (("--engine", "mpi"), "engine: got 'mpi', expected processes or ray or collective"),
    ],
)
def test_options_that_cannot_work(
    bench: Path, option: tuple[str, str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", str(bench), *option]) == 2
    assert line in the_line(capsys)


def told_bound(workers: int = 8, **how: Any) -> tuple[str, str]:
    times = how.get("shard_times", ShardTimes())
    stragglers, network = how.get("stragglers", Stragglers()), how.get("network", Network())
    return bound(simulate(workers, steps=30, **how), times, stragglers, network)


def test_what_bounds_a_run_in_words() -> None:
    assert told_bound()[0] == "arithmetic: it takes 100% of the time"
    assert told_bound(update_s=1.0)[0].startswith("updates: 50%")
    assert told_bound(network=Network(vector_s=0.125))[0].startswith("network: 50%")
    ray = Network(engine="ray", vector_s=0.125)
    assert told_bound(network=ray)[1].endswith("--engine collective under sync, --servers")
    assert told_bound(shards=12)[0].startswith("12 shards on 8 workers: 25%")
    held_up = Stragglers(probability=0.1, factor=3.0)
    assert "--update quorum with --spares" in told_bound(stragglers=held_up)[1]
    slow = Stragglers(slow_workers=0.1, slow_factor=2.0)
    assert "which are always the same" in told_bound(stragglers=slow)[1]
    long = ShardTimes(work_spread=0.4)
    assert "spares do not help" in told_bound(shard_times=long)[1]
    assert told_bound(update="bounded:1")[0].startswith("the bound: of 8 workers 2 compute")
    away = Failures(worker_mtbf_h=1.0, restart_s=600.0)
    assert told_bound(failures=away)[0].startswith("failures: ")
