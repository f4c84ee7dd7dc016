"""``quorate plan --check``: a run's own lines beside what is predicted of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.forgery.places import PLACES
from support.small import DATA, trainer

from quorate.commands.main import main
from quorate.commands.plan.check import observed
from quorate.commands.plan.trace import read_trace

STEP_S, SHARD_S = (
    0.25,
    0.12,
)  # two shards, one after the other, and 10 ms for which nothing is known


def update(step: int, at_s: float, **more: Any) -> dict[str, Any]:
    """A line of a run of two workers, three shards each of 100 updates."""
    counts = {"fresh": [2 * step, 2 * step], "stale": [0, 0], "dropped": [0, 0]}
    return {
        **{"global_step": step, "epoch": 0, "rows": 12, "dropped_rows": 0, "weight": 12.0},
        **{"staleness": 0, **counts, "not_finite": 0, "lr": 0.1, "examples_per_s": 48.0},
        **{"at": at_s, **more, "loss": -0.5},
    }


def spent(seconds: float, shards: int, *, away_s: float = 0.0) -> dict[str, list[float]]:
    phases = {"fetching": 0.1, "forward": 0.3, "backward": 0.5, "pushing": 0.1}
    each = {phase: [part * SHARD_S * shards] * 2 for phase, part in phases.items()}
    waited = max(0.0, seconds - SHARD_S * shards - away_s)
    return {"shards": [shards] * 2, "starting": [5.0, 5.0 + away_s], "waiting": [waited] * 2} | each


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


def write(run_dir: Path, lines: list[dict[str, Any]]) -> Path:
    path = run_dir / "metrics.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def made(steps: int = 100) -> list[dict[str, Any]]:
    lines = [update(n, 1000 + STEP_S * n) for n in range(1, steps + 1)]
    lines[0] |= {"begun_at": 1000.0, "spent": spent(STEP_S, 2)}
    lines[-1] |= {"spent": spent(STEP_S * steps, 2 * steps)}
    return lines


def figures(run_dir: Path, *options: str) -> dict[str, dict[str, Any]]:
    out = run_dir / "told.json"
    asked = ["plan", "--check", str(run_dir), "--spread", "0", "--json", str(out), *options]
    assert main(asked) == 0
    return {figure["name"]: figure for figure in json.loads(out.read_text())["figures"]}


def test_a_run_beside_its_own_shard_times(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Shards are put in as they were; the 10 ms of a step beside them are the error."""
    write(run_dir, made())
    told = figures(run_dir)
    assert told["a shard's work"]["measured"] == pytest.approx(SHARD_S)
    assert told["a shard's work"]["error"] == pytest.approx(0.0)
    assert told["examples/s"]["predicted"] == pytest.approx(12 / (2 * SHARD_S))
    assert told["examples/s"]["measured"] == pytest.approx(12 / STEP_S)
    assert told["examples/s"]["error"] == pytest.approx(STEP_S / (2 * SHARD_S) - 1)
    assert told["step, median"]["error"] == pytest.approx(2 * SHARD_S / STEP_S - 1)
    assert told["workers away"]["measured"] == pytest.approx(0.0)
    assert told["restarts of the run"]["predicted"] is None
    shown = capsys.readouterr().out
    assert "not known are updates, sums and messages, taken as 0" in shown
    assert "step, median" in shown
    assert "-4.0%" in shown


def test_a_run_beside_its_profile(run_dir: Path) -> None:
    """With the profile's 10 ms per update nothing is left to be off."""
    write(run_dir, made())
    seconds = {name: values[0] for name, values in spent(25.0, 200).items() if name != "shards"}
    each = [{"worker": n, "device": "cpu", "shards": 200, "seconds": seconds} for n in range(2)]
    profile = {
        **{"update": "sync", "engine": "processes", "shards": 4, "batch_size": 12},
        **{"cores": 2, "threads": 1},
        **{"updates": 100, "rows": 1200, "seconds": 25.0, "workers": each, "device_s": 0.0},
        **{"exchange_s": 0.0, "update_s": 0.75, "beside_s": 0.25},
    }
    (run_dir / "profile.json").write_text(json.dumps(profile))
    told = figures(run_dir)
    for name in ("a shard's work", "examples/s", "step, median", "step, p99"):
        assert told[name]["error"] == pytest.approx(0.0, abs=1e-6), name
    (run_dir / "profile.json").write_text(json.dumps(profile, indent=1).replace("0.75", "-0.75"))
    assert main(["plan", "--check", str(run_dir)]) == 2


def test_restarts_and_workers_that_were_away(run_dir: Path) -> None:
    lines = made(200)
    for line in lines[100:]:
        line["at"] += 40.0  # killed, and begun again 40 s later
    lines[99]["spent"] = spent(STEP_S * 100, 200, away_s=0.4 * STEP_S * 99)
    lines[100] |= {"begun_at": 1060.0, "spent": spent(STEP_S, 2)}
    lines[199]["spent"] = spent(STEP_S * 100, 200)
    seen = observed(read_trace(write(run_dir, lines)), warm_up=3)
    assert seen.updates == 2 * (100 - 3)
    assert seen.restarts == 1
    assert seen.lost_s == pytest.approx(40.0)
    assert seen.away == pytest.approx(0.1)  # one of two, for 40% of the first half
    assert seen.rows_per_s == pytest.approx(12 / STEP_S)
    span_h = (199 * STEP_S + 40.0) / 3600
    told = figures(run_dir, "--run-restart-s", "20", "--mtbf-h", str(span_h))
    assert told["restarts of the run"]["predicted"] == pytest.approx(1.0)
    assert told["restarts of the run"]["error"] == pytest.approx(0.0)
    assert told["workers away"]["predicted"] > 0
    assert figures(run_dir)["restarts of the run"]["predicted"] is None  # it is put in


def test_only_processes_with_as_many_workers_count(run_dir: Path) -> None:
    lines = made(60)
    for line in lines[:20]:  # the first one had another worker, and was three times as fast
        line |= {name: [0, 0, 0] for name in ("fresh", "stale", "dropped")}
        line["at"] -= 100 - STEP_S / 3 * line["global_step"]
        line.pop("spent", None)
    lines[20] |= {"begun_at": 1005.0, "spent": spent(STEP_S, 2)}
    write(run_dir, lines)
    told = figures(run_dir)
    assert told["step, median"]["measured"] == pytest.approx(STEP_S)
    assert told["restarts of the run"]["measured"] == 0


def test_evaluations_and_lines_without_times_are_not_counted(run_dir: Path) -> None:
    lines = made(20)
    lines.insert(10, {"global_step": 10, "validation": {"loss": 0.1}, "at": 1003.0})
    for line in lines[11:]:
        line["at"] += 100.0
    seen = observed(read_trace(write(run_dir, lines)), warm_up=3)
    assert seen.updates == 20 - 3 - 1
    assert seen.intervals_s[-1] == pytest.approx(STEP_S)
    for line in lines:
        line.pop("at", None)
        line.pop("begun_at", None)
    assert observed(read_trace(write(run_dir, lines)), warm_up=3).rows_per_s is None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda text: text[:-20], "line 100: got a line without an end, expected a whole one"),
        (lambda text: text.replace('"rows": 12', '"rows": -12', 1), "line 1: got rows -12"),
        (lambda text: text.replace('"at": 1002.0', '"at": 900', 1), "line 8: got at 900, expected"),
        (lambda text: text.replace('"loss": -0.5', '"loss": "x"', 1), "line 1: got column 'loss'"),
        (lambda text: text.replace('"stale":', '"stall":', 1), "line 1: got no stale"),
        (lambda text: text.replace('"waiting"', '"wating"', 1), "line 1: got column 'wating'"),
        (lambda text: text.replace('"starting": [5.0', '"starting": [-5', 1), "got starting -5"),
        (lambda text: text.replace('{"global_step": 3,', "{", 1), "line 3: got global_step null"),
        (lambda text: text.replace('step": 7,', 'step": 5,', 1), "line 7: got global_step 5"),
        (lambda text: "\x00" * 40 + "\n" + text, "line 1: got no JSON object"),
        (lambda text: "", "got no update, expected a line per update"),
        (lambda text: text.replace('"rows": 12', f'"rows": {10**400}', 1), "line 1: got rows 1000"),
        (lambda text: text.replace("1002.0", "1e308", 1), "line 8: got at 1e+308, expected"),
        (lambda text: "x" * (5 << 20) + text, "got a line of more than the 4,194,304 bytes"),
    ],
)
def test_lines_that_cannot_be(
    run_dir: Path,
    change: Callable[[str], str],
    words: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = write(run_dir, made())
    before = path.read_text()
    path.write_text(change(before))
    assert path.read_text() != before
    assert main(["plan", "--check", str(run_dir)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert str(path) in line
    assert words in line


@pytest.mark.parametrize("place", ["a FIFO", "a link to /dev/zero", "a sparse terabyte"])
@pytest.mark.parametrize("name", ["metrics.jsonl", "profile.json"])
def test_what_has_no_end_is_refused_at_once(
    run_dir: Path, name: str, place: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write(run_dir, made())
    (run_dir / name).unlink(missing_ok=True)
    PLACES[place](run_dir / name)
    assert main(["plan", "--check", str(run_dir)]) == 2
    assert str(run_dir / name) in "".join(capsys.readouterr().err.splitlines())


def test_metrics_that_are_not_finite_are_read(run_dir: Path) -> None:
    """As strings, and as the NaN of logs from before, which is no JSON."""
    lines = made()
    for line, value in zip(lines, ("NaN", "-Infinity", float("nan"), float("inf")), strict=False):
        line["loss"] = value
    assert len(read_trace(write(run_dir, lines))) == len(lines)


def test_what_is_missing_is_said(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = made()
    for line in lines:
        line.pop("spent", None)
    write(run_dir, lines)
    for words in ("nothing about shard times, expected a bench", "no checkpoint, expected one"):
        assert main(["plan", "--check", str(run_dir)]) == 2
        assert words in capsys.readouterr().err
        (run_dir / "checkpoints").unlink(missing_ok=True)
    assert main(["plan", "--check", str(run_dir / "nowhere")]) == 2
    assert "metrics.jsonl: got no file" in capsys.readouterr().err
    assert main(["plan"]) == 2
    assert "file: got None, expected the results.json of quorate bench" in capsys.readouterr().err
