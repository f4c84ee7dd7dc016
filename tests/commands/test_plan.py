"""``quorate plan``: from a bench to a table, and the measured run beside the prediction."""

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from support.keys import keys_in
from support.messages import expect_message
from support.small import DATA, trainer

from quorate.__main__ import main

MOST = 10**400
PHASES = ("starting", "waiting", "fetching", "forward", "backward", "pushing")


def run_of(workers: int, **changes: Any) -> dict[str, Any]:
    """100 updates of 4 shards of 8 rows: 0.1 s a shard, 0.02 s an update, 0.01 s of sums each."""
    shards = 400 // workers
    each = (0, 0, 0.01, 0.03, 0.05, 0.01)
    seconds = {phase: s * shards for phase, s in zip(PHASES, each, strict=True)}
    run = {
        **{"update": "sync", "keeps_bits": True, "engine": "processes", "threads": 1, "cores": 8},
        **{"shards": 4, "batch_size": 32, "loader_workers": 0, "updates": 100, "rows": 3200},
        "seconds": 100 * (0.4 / workers + 0.02 + 0.01 * workers),
        "workers": [
            {"worker": n, "device": "cpu", "shards": shards, "seconds": seconds}
            for n in range(workers)
        ],
        **{"device_s": 0.0, "exchange_s": 100 * 0.01 * workers, "update_s": 1.5, "beside_s": 0.5},
        **{"evaluation_s": 0.0, "others_cores": 0.0, "warm_up": 3, "digests": {}},
    }
    return run | changes


def contender(run: dict[str, Any]) -> dict[str, Any]:
    return {"examples_per_s": run["rows"] / run["seconds"], "runs": [run]}


COSTS = {
    "workers": 1,
    "crowding": {"copies": 2, "times": 1.25},
    "saving": {"stall_s": 0.5, "every_s": 1.0, "took_s": 0.1},
    "failing": {"detection_s": 0.25, "restart_s": 2.0},
    "by_shard": contender(run_of(1, update="async", exchange_s=3.0, updates=400)),
}


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write the results of a bench of 1 and 2 workers, as ``results.json`` of this folder."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "results.json"
    record = {"script": "a.py", "contenders": [contender(run_of(n)) for n in (1, 2)]}
    path.write_text(json.dumps(record, indent=1))
    (tmp_path / "costs.json").write_text(json.dumps({**record, "costs": COSTS}, indent=1))
    (tmp_path / "times.csv").write_text("\ufeffworker,shard_s\r\n0,0.5\r\n1,0.5\r\n")
    return path


def the_line(captured: pytest.CaptureFixture[str]) -> str:
    (line,) = captured.readouterr().err.splitlines()
    return line.replace(", line ", ", at ")  # else the file of messages would lack the number


def planned(*words: str) -> list[dict[str, Any]]:
    """Return the predictions of a plan."""
    assert main(["plan", *words, "--json", "told.json"]) == 0
    found: list[dict[str, Any]] = json.loads(Path("told.json").read_text())["predictions"]
    return found


# Words behind ``quorate plan``: the whole output.
SHOWN = (
    "results.json --workers 1,2,4 --spread 0 --steps 10",
    "results.json --workers 2,4 --update sync,quorum,async --spares 0,1 --mtbf-h 1000 --price 2.5"
    " --steps 10",
    *(f"costs.json --workers 4 --update {rule} --steps 10" for rule in ("quorum:3", "bounded:2")),
    # Assumptions on other runs do not count against the measured run.
    "results.json --workers 4 --steps 20 --held-up 0.5:10 --gradient-mib 500 --gbit-s 0.1",
    # Hosts add up the sums of their workers.
    "results.json --workers 16 --per-host 4 --steps 5 --engine ray",
    "results.json --workers 16 --per-host 4 --steps 5 --engine collective",
    "results.json --workers 1 --trace times.csv",
    # Limits of a run, and remedies.
    *(
        f"results.json --from-workers 1 --workers 8 --steps 30 {bound}"
        for bound in (
            *("--shards 12", "--held-up 0.1:3 --spares 2", "--work-spread 0.4"),
            *("--slow-workers 0.1:2", "--slow-hosts 0.5:2 --per-host 4", "--latency-ms 200"),
            *("--mtbf-h 1 --restart-s 600", "--save-s 10 --save-every-s 20"),
        )
    ),
)


@pytest.mark.parametrize("typed", SHOWN)
def test_what_a_plan_shows(typed: str, bench: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *typed.split()]) == 0
    expect_message(capsys.readouterr().out)


def test_predictions_are_those_of_closed_forms(bench: Path) -> None:
    """A shard takes 100 ms, an update 20 ms, and 10 ms for each worker with sums."""
    plain = ("--spread", "0", "--steps", "10")
    one, two, four = planned(str(bench), "--workers", "1,2,4", "--shards", "4", *plain)
    assert [told["step_s"] for told in (one, two, four)] == pytest.approx(
        [0.4 + 0.02 + 0.01, 0.2 + 0.02 + 0.02, 0.1 + 0.02 + 0.04]
    )
    assert two["examples_per_s"] == pytest.approx(32 / 0.24)
    # Two at a time, each slower by a quarter.
    crowded = ("costs.json", "--from-workers", "1", "--workers", "2,4", "--cores", "2")
    two, four = planned(*crowded, "--shards", "4", "--mtbf-h", "1", *plain)
    assert two["step_s"] == pytest.approx(2 * 0.125 + 0.02 + 0.02)
    assert four["step_s"] == pytest.approx(2 * 0.125 + 0.02 + 0.04)
    assert four["shares"]["cores"] > 0.3
    (failing,) = planned(str(bench), "--workers", "2", "--mtbf-h", "1000", *plain)
    assert failing["failures_per_day"] == pytest.approx(2 * 24 / 1000)
    # Under a rule by shard the costs of the separate run count: 3 s of sums over 400 updates.
    expect_message(keys_in(Path("told.json")))
    (by_shard,) = planned("costs.json", "--workers", "1", "--update", "async", *plain)
    assert by_shard["step_s"] == pytest.approx(0.1 + 0.005 + 3.0 / 400, rel=0.05)


def test_pictures_and_pages(bench: Path) -> None:
    asked = ["plan", str(bench), "--workers", "2,4", "--update", "sync,quorum,async"]
    asked += ["--spares", "0,1", "--steps", "10"]
    assert main([*asked, "--plot", "p.png"]) == 0
    assert Path("p.png").read_bytes().startswith(b"\x89PNG")
    assert main([*asked, "--plot", "p.html"]) == 0
    assert "<svg" in Path("p.html").read_text()
    assert Path("p.html").read_text().count("<tr>") == 11


def test_nothing_is_predicted_from_a_run_whose_replay_is_far_off(
    bench: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = json.loads(bench.read_text())
    two = found["contenders"][1]
    words = ["plan", str(bench), "--workers", "4", "--steps", "10"]
    two["examples_per_s"] *= 1.3
    bench.write_text(json.dumps(found))
    assert main(words) == 2
    expect_message(the_line(capsys))
    assert main([*words, "--from-workers", "1"]) == 0


WRONG_RESULTS = [
    ('"exchange_s": 1.0', '"exchange_s": -1.0'),
    ('"updates": 100', '"updates": 0'),
    ('"update_s": 1.5', '"update_s": NaN'),
    ('"forward"', '"froward"'),
    ('"update": "sync"', '"update": "never"'),
    ('"engine": "processes"', '"engine": "mpi"'),
    ('"shards": 4', '"shards": 2.5'),
    ('"threads": 1', f'"threads": {MOST}'),
    ('"contenders"', '"contestants"'),
    ('"times": 1.25', '"times": 0.5'),
    ('{\n "script"', "[" * 100_000),
    ('"rows"', '"ro'),
]
WRONG_OPTIONS = (
    *("--workers two", "--spares -1", "--from-workers 3", "--shards 9000000", "--held-up often"),
    *("--held-up 2:4", "--spread 4", "--spread 0 --trace times.csv", "--mtbf-h -5"),
    *("--gradient-mib inf", "--steps 2 --json ''", "--update sometimes", "--engine mpi"),
)


@pytest.mark.parametrize(("old", "new"), WRONG_RESULTS, ids=range(len(WRONG_RESULTS)))
def test_a_bench_that_says_what_cannot_be(
    old: str, new: str, bench: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before, found, after = Path("costs.json").read_text().partition(old)
    assert found
    bench.write_text(before + new + ("" if new in ('"ro', "[" * 100_000) else after))
    assert main(["plan", str(bench)]) == 2
    expect_message(the_line(capsys))


@pytest.mark.parametrize("options", WRONG_OPTIONS)
def test_options_that_cannot_work(
    options: str, bench: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", str(bench), *shlex.split(options)]) == 2
    expect_message(the_line(capsys))


# A step has four shards, two on each worker in turn; 10 ms are for all else.
STEP_S, SHARD_S = 0.25, 0.12
PARTS = {"fetching": 0.1, "forward": 0.3, "backward": 0.5, "pushing": 0.1}  # parts of a shard


def spent(seconds: float, shards: int, *, away_s: float = 0.0) -> dict[str, list[float]]:
    """Return the time of each of two workers for so many shards."""
    each = {phase: [part * SHARD_S * shards] * 2 for phase, part in PARTS.items()}
    waited = max(0.0, seconds - SHARD_S * shards - away_s)
    return {"shards": [shards] * 2, "starting": [5.0, 5.0 + away_s], "waiting": [waited] * 2} | each


def updates(steps: int = 100) -> list[dict[str, Any]]:
    """Return the lines of a run's updates, the first and the last with the workers' times."""
    facts = {
        **{"epoch": 0, "rows": 12, "dropped_rows": 0, "weight": 12.0, "staleness": 0},
        **{"stale": [0, 0], "dropped": [0, 0], "not_finite": 0, "lr": 0.1, "loss": -0.5},
    }
    lines = [
        {"global_step": n, "fresh": [2 * n, 2 * n], **facts, "at": 1000 + STEP_S * n}
        for n in range(1, steps + 1)
    ]
    lines[0] |= {"begun_at": 1000.0, "spent": spent(STEP_S, 2)}
    lines[-1] |= {"spent": spent(STEP_S * steps, 2 * steps)}
    return lines


def write(run_dir: Path, lines: list[dict[str, Any]]) -> Path:
    """Write the log of a run."""
    path = run_dir / "metrics.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def profile() -> dict[str, Any]:
    """Return the profile of 100 updates, with an account of the 10 ms beside shards."""
    seconds = {name: values[0] for name, values in spent(25.0, 200).items() if name != "shards"}
    each = [{"worker": n, "device": "cpu", "shards": 200, "seconds": seconds} for n in range(2)]
    return {
        **{"update": "sync", "engine": "processes", "shards": 4, "batch_size": 12, "cores": 2},
        **{"threads": 1, "updates": 100, "rows": 1200, "seconds": 25.0, "workers": each},
        **{"device_s": 0.0, "exchange_s": 0.0, "update_s": 0.75, "beside_s": 0.25},
    }


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run directory with a checkpoint: 4 shards of 12 rows, two workers."""
    run_dir = tmp_path_factory.mktemp("run")
    trainer(run_dir, workers=2).fit(DATA, steps=2)
    return run_dir


@pytest.fixture
def run_dir(trained: Path, tmp_path: Path) -> Path:
    (tmp_path / "checkpoints").symlink_to(trained / "checkpoints")
    return tmp_path


def figures(run_dir: Path, *options: str) -> dict[str, dict[str, Any]]:
    out = run_dir / "told.json"
    asked = ["plan", "--check", str(run_dir), "--spread", "0", "--json", str(out), *options]
    assert main(asked) == 0
    return {figure["name"]: figure for figure in json.loads(out.read_text())["figures"]}


def test_a_run_beside_its_own_shard_times(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Shards are put in as they were; the 10 ms of a step beside them are the error."""
    write(run_dir, updates())
    told = figures(run_dir)
    expect_message(keys_in(run_dir / "told.json"))
    assert told["a shard's work"]["measured"] == pytest.approx(SHARD_S)
    assert told["examples/s"]["predicted"] == pytest.approx(12 / (2 * SHARD_S))
    assert told["examples/s"]["measured"] == pytest.approx(12 / STEP_S)
    assert told["examples/s"]["error"] == pytest.approx(STEP_S / (2 * SHARD_S) - 1)
    assert told["step, median"]["error"] == pytest.approx(2 * SHARD_S / STEP_S - 1)
    shown = capsys.readouterr().out
    assert "not known are updates, sums and messages, taken as 0" in shown
    assert "-4.0%" in shown


def test_a_run_beside_its_profile(run_dir: Path) -> None:
    """With the profile's 10 ms per update nothing is left to be off."""
    write(run_dir, updates())
    (run_dir / "profile.json").write_text(json.dumps(profile()))
    told = figures(run_dir)
    for name in ("a shard's work", "examples/s", "step, median", "step, p99"):
        assert told[name]["error"] == pytest.approx(0.0, abs=1e-6), name
    (run_dir / "profile.json").write_text(json.dumps(profile()).replace("0.75", "-0.75"))
    assert main(["plan", "--check", str(run_dir)]) == 2


def test_restarts_and_workers_that_were_away(run_dir: Path) -> None:
    lines = updates(200)
    for line in lines[100:]:
        line["at"] += 40.0  # killed, and begun again 40 s later
    lines[99]["spent"] = spent(STEP_S * 100, 200, away_s=0.4 * STEP_S * 99)
    lines[100] |= {"begun_at": 1060.0, "spent": spent(STEP_S, 2)}
    lines[199]["spent"] = spent(STEP_S * 100, 200)
    write(run_dir, lines)
    span_h = (199 * STEP_S + 40.0) / 3600
    told = figures(run_dir, "--run-restart-s", "20", "--mtbf-h", str(span_h))
    assert told["restarts of the run"]["measured"] == 1
    assert told["restarts of the run"]["predicted"] == pytest.approx(1.0)
    # A worker is away for 40% of the first half. The 40 s between the halves do not count.
    assert told["workers away"]["measured"] == pytest.approx(0.1)
    assert told["step, median"]["measured"] == pytest.approx(STEP_S)
    assert figures(run_dir)["restarts of the run"]["predicted"] is None  # the number is an input


WRONG_LINES = [
    ('"rows": 12', '"rows": -12'),
    ('"at": 1002.0', '"at": 900'),
    ("1002.0", "1e308"),
    ('"loss": -0.5', '"loss": "x"'),
    ('"waiting"', '"wating"'),
    ('"starting": [5.0', '"starting": [-5'),
    ('{"global_step": 3,', "{"),
    ('step": 7,', 'step": 5,'),
    ('{"global_step": 1,', "x" * (5 << 20)),
    ('"global_step": 100', None),  # torn there
]


@pytest.mark.parametrize(("old", "new"), WRONG_LINES, ids=range(len(WRONG_LINES)))
def test_lines_that_cannot_be(
    old: str, new: str | None, run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(run_dir, updates())
    before, found, after = path.read_text().partition(old)
    assert found
    path.write_text(before if new is None else before + new + after)
    assert main(["plan", "--check", str(run_dir)]) == 2
    expect_message(the_line(capsys))


def test_what_is_missing_is_said(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(run_dir, [line for line in updates() if not line.pop("spent", None)])
    for wanting in ("shard times", "checkpoints", "metrics.jsonl"):
        (run_dir / wanting).unlink(missing_ok=True)
        assert main(["plan", "--check", str(run_dir)]) == 2
        expect_message(capsys.readouterr().err)
