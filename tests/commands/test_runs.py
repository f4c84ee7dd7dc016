"""``quorate runs`` and ``inspect``: the outcomes of runs, torn runs too."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from support.small import DATA, trainer

from quorate.__main__ import main

SAVED = Path(__file__).parents[1] / "services" / "data" / "before-rooms"


def listed(folder: Path, capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    """Return the runs by their paths, in order."""
    capsys.readouterr()
    assert main(["runs", str(folder), "--json", *words]) == 0
    return {run["path"]: run for run in json.loads(capsys.readouterr().out)}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return run directories of many kinds, and other folders."""
    shutil.copytree(SAVED, tmp_path / "stopped")
    shutil.copytree(SAVED, tmp_path / "deep" / "er" / "killed")
    with (tmp_path / "deep" / "er" / "killed" / "metrics.jsonl").open("a") as log:
        log.write('{"global_step": 12, "loss": 0.25}\n{"global_step": 13, "lo')
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "run.lock").touch()
    torn = tmp_path / "torn" / "checkpoints" / "step-000000000007"
    torn.mkdir(parents=True)
    (torn / "state.json").write_text('{"format": 2, "glo')
    (tmp_path / "data" / "images").mkdir(parents=True)  # no run
    (tmp_path / "stopped" / "aside-1").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "deep")
    return tmp_path


def test_what_became_of_runs(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = listed(folder, capsys)
    states = {"stopped": "stopped", "deep/er/killed": "killed", "empty": "empty", "torn": "damaged"}
    assert {name: run["state"] for name, run in runs.items()} == states
    killed = runs["deep/er/killed"]
    assert (killed["global_step"], killed["saved_step"], killed["loss"]) == (12, 10, 0.25)
    assert killed["why"] == "step 10 is saved, 2 updates to do again"
    assert "step-000000000007/state.json: got no JSON" in runs["torn"]["why"]
    assert runs["empty"]["global_step"] is None
    # The table and its order.
    assert main(["runs", str(folder), "--sort", "step"]) == 0
    shown = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert shown[0] == ["run", "state", "step", "loss", "age", "why"]  # none has a best checkpoint
    assert [line[0] for line in shown[1:]] == ["deep/er/killed", "stopped", "empty", "torn"]
    assert [*listed(folder, capsys, "--sort", "name")] == sorted(runs)
    assert main(["runs", str(folder / "data")]) == 0
    assert capsys.readouterr().out == f"no run directory in {folder / 'data'} or below it\n"
    assert listed(folder / "data", capsys) == {}


# --- a single run ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A stopped run, with the status written at its end."""
    run_dir = tmp_path_factory.mktemp("stopped") / "run"
    trainer(run_dir, summary_every_s=None).fit(DATA, steps=10)
    return run_dir


def shown(run_dir: Path, capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, str]:
    """Return the rows shown for a run, by their first words."""
    capsys.readouterr()
    assert main(["inspect", str(run_dir), *words]) == 0
    rows, name = dict[str, str](), ""
    for line in capsys.readouterr().out.splitlines():
        first, _, rest = line.partition("  ")
        name = first or name
        rows[name] = "\n".join(filter(None, [rows.get(name), rest.strip()]))
    return rows


def update(step: int, **metrics: object) -> str:
    fields = {"global_step": step, "epoch": 0, "rows": 8, "lr": 0.1, "fresh": [1]}
    return json.dumps(fields | metrics) + "\n"


def test_about_ten_rows_say_how_a_run_stands(
    stopped: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = shutil.copytree(stopped, tmp_path / "run")
    status = json.loads((run_dir / "status.json").read_text())
    told = {"state": "stopped", "reason": "SIGTERM", "last_step": 20}
    script = {"script": str(Path.cwd() / "train.py")}
    (run_dir / "status.json").write_text(json.dumps(status | told | script))
    log = update(9, loss=0.5) + '{"global_step": 9, "validation": {"loss": 0.25}}\n'
    log += update(10, loss="NaN", **{"\x1b[2Jtop": 0.75}) + '{"global_step": 11, "lo'
    (run_dir / "metrics.jsonl").write_text(log)
    rows = shown(run_dir, capsys)
    assert len(rows) <= 12
    assert rows["script"] == "train.py"
    assert rows["state"] == "resumable (stopped): SIGTERM"
    assert rows["step"].startswith("10 of ")
    assert rows["training"] == r"step 10: loss nan  \x1b[2Jtop 0.7500"
    assert rows["validation"] == "step 9: loss 0.2500"
    assert rows["checkpoints"].startswith("step 10  ")
    every = shown(run_dir, capsys, "--all")
    assert rows.items() <= every.items()
    assert (every["optimizer"], every["global_step"]) == ("AdamW", "10")
    assert main(["inspect", str(run_dir), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["digest"] == rows["digest"]
    assert len(facts["digest"]) == len(facts["averaged_digest"]) == 64
