"""The start of a run: what takes long is named, and nothing else is."""

from __future__ import annotations

import queue
import re
import time
from pathlib import Path

import pytest
from support.runs import command, run

from quorate.services.display.start_progress import StartProgress


def test_a_phase_that_takes_long_is_named_again_and_again() -> None:
    lines: queue.Queue[str] = queue.Queue()
    progress = StartProgress(lines.put, after_s=0.05, every_s=0.05)
    progress.at("loading rows")
    named = [lines.get(timeout=10), lines.get(timeout=10)]
    assert named == ["loading rows ...", "loading rows (0 s so far)"]
    number = iter(range(1, 100))
    progress.at(lambda: f"{next(number)} of 8 workers")
    later = iter(lambda: lines.get(timeout=10), "")
    assert next(line for line in later if "workers" in line) == "1 of 8 workers ..."
    progress.close()
    progress.close()


def test_of_many_short_phases_one_is_named_now_and_then() -> None:
    lines: list[str] = []
    began = time.monotonic()
    progress = StartProgress(lines.append, after_s=0.1)
    for number in range(100):
        progress.at(f"phase {number}")
        time.sleep(0.003)
    assert lines
    assert len(lines) <= (time.monotonic() - began) / 0.1
    began = time.monotonic()
    progress.close()
    assert time.monotonic() - began < 10


def test_what_was_never_begun_has_no_thread() -> None:
    StartProgress(lambda _: None).close()


SCRIPT = """
import time, torch, quorate
from torch.utils.data import Dataset
class Rows(Dataset):
    def __len__(self):
        return 32
    def __getitem__(self, row):
        time.sleep(0.6)  # from a slow disk
        return torch.ones(3)
def loss(model, batch):
    return model(batch).square().mean()
trainer = quorate.Trainer(torch.nn.Linear(3, 1), loss, optimizer=torch.optim.Adam, batch_size=8,
    shards=1, workers=1, devices="cpu", run_dir="run")
trainer.fit(Rows(), steps=1)
"""


@pytest.mark.slow
@pytest.mark.parametrize("quiet", [False, True])
def test_a_run_whose_rows_load_slowly_says_what_it_does(quiet: bool, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    options = ("--run-dir", str(tmp_path / "run"), *(["--quiet"] if quiet else []))
    ended = run(command(tmp_path / "script.py", options=options))
    assert ended.code == 0, ended.said
    lines = re.findall(r"^(.*) (?:\.\.\.|\(\d+ s so far\))$", ended.out, re.MULTILINE)
    assert bool(lines) != quiet, ended.said
    if not quiet:
        assert any("loading a few rows twice" in line for line in lines), lines
