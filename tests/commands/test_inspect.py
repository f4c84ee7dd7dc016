"""``quorate inspect``: a run's state and digests, without torch."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from quorate.commands.main import main
from quorate.machine import this_host
from quorate.replica.digest import digest

SAVED = Path(__file__).parents[1] / "services" / "data" / "before-rooms"


def test_a_digest_depends_on_name_shape_dtype_bits_and_order() -> None:
    one = torch.zeros(2, 2)
    different = [
        [("a", one)],
        [("b", one)],
        [("a", one.reshape(4))],
        [("a", one.to(torch.int32))],
        [("a", -one)],
        [("a", one), ("b", one)],
        [("b", one), ("a", one)],
    ]
    assert len(set(map(digest, different))) == len(different)
    assert digest([("a", torch.arange(6.0).reshape(2, 3).T)]) == digest(
        [("a", torch.arange(6.0).reshape(2, 3).T.contiguous())]
    )


def test_a_run_is_inspected_without_torch(capsys: pytest.CaptureFixture[str]) -> None:
    check = (
        "import sys; from quorate.commands.main import main; code = main(sys.argv[1:]);"
        "heavy = {'torch', 'numpy', 'rich'} & sys.modules.keys();"
        "sys.exit(str(heavy) if heavy else code)"
    )
    command = [sys.executable, "-c", check, "inspect", "--json", str(SAVED)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    facts = json.loads(done.stdout)
    assert facts["global_step"] == 10
    assert len(facts["digest"]) == len(facts["averaged_digest"]) == 64
    assert main(["inspect", str(SAVED)]) == 0
    assert facts["digest"] in capsys.readouterr().out


def run_directory(folder: Path, status: dict[str, object] | None = None, log: str = "") -> Path:
    """A copy of a run of before there was a status, with a status and a log."""
    shutil.copytree(SAVED, folder)
    if status is not None:
        born = {"pid": os.getpid(), "born": None, "host": "here", "mark": this_host.mark()}
        (folder / "status.json").write_text(json.dumps(born | {"at": 0.0} | status))
    if log:
        (folder / "metrics.jsonl").write_text(log)
    return folder


def shown(run_dir: Path, capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, str]:
    """The rows that are shown of a run, by the words that they begin with."""
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
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ended = {"global_step": 10, "last_step": 20, "state": "stopped", "reason": "SIGTERM"}
    log = update(9, loss=0.5) + '{"global_step": 9, "validation": {"loss": 0.25}}\n'
    log += update(10, loss="NaN", **{"\x1b[2Jtop": 0.75}) + '{"global_step": 11, "lo'
    script = str(Path.cwd() / "train.py")
    run_dir = run_directory(tmp_path / "run", {**ended, "script": script}, log)
    rows = shown(run_dir, capsys)
    assert len(rows) <= 12
    assert rows["script"] == "train.py"
    assert rows["state"] == "resumable (stopped): SIGTERM"
    assert rows["step"].startswith("10 of ")
    assert rows["training"] == r"step 10: loss nan  \x1b[2Jtop 0.7500"
    assert rows["validation"] == "step 9: loss 0.2500"
    assert len(rows["digest"]) == 64
    assert rows["checkpoints"].startswith("step 10  ")
    every = shown(run_dir, capsys, "--all")
    assert rows.items() <= every.items()
    assert every["optimizer"] == "Adam"
    assert every["global_step"] == "10"


@pytest.mark.parametrize(
    ("state", "reason", "said"),
    [
        ("finished", "all steps are done", "finished: all steps are done"),
        ("running", "", "running"),
        ("failed", "ValueError: no", "resumable (failed): ValueError: no"),
    ],
)
def test_the_state_of_a_run(
    state: str, reason: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status = {"global_step": 10, "last_step": 10, "state": state, "reason": reason}
    assert shown(run_directory(tmp_path / "run", status), capsys)["state"] == said


def test_a_validation_far_back_in_the_log_is_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = '{"global_step": 1, "validation": {"accuracy": 0.5}}\n'
    log += "".join(update(step, loss=1.0) for step in range(1, 9000))
    run_dir = run_directory(tmp_path / "run", None, log)
    rows = shown(run_dir, capsys)
    assert rows["validation"] == "step 1: accuracy 0.5000"
    assert rows["training"] == "step 8,999: loss 1.0000"
    assert rows["state"].startswith("resumable (killed): step 10 is saved, ")
    assert rows["step"].endswith("the newest update was 8,999, and is not saved")
    assert main(["inspect", "--json", str(run_dir)]) == 0
    run = json.loads(capsys.readouterr().out)["run"]
    assert run["validation"] == {"global_step": 1, "metrics": {"accuracy": 0.5}}
