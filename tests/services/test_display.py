"""The output of a run: plain lines without a viewer, a bar on a terminal, one line of an error."""

import contextlib
import json
import os
import re
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support import fits
from support.runs import TOWER, command, on_a_tower, run

import quorate
from quorate.__main__ import main

DATE = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d[+-]\d{4}"
NUMBERS = r"loss [\d.]+  lr 0.01  [\d,]+ examples/s"


def steps(lines: list[str]) -> list[int]:
    return [int(found[1]) for line in lines if (found := re.search(r"step (\d+)/10", line))]


def shown(capsys: pytest.CaptureFixture[str], *options: str) -> list[str]:
    """Return the output of a run of ten updates, four in an epoch, without a terminal."""
    capsys.readouterr()
    on_a_tower("lasting.py", "updates=10", options=options)
    return capsys.readouterr().out.splitlines()


def test_lines_come_at_the_ends_of_epochs_or_as_often_as_they_were_asked_for(
    capsys: pytest.CaptureFixture[str],
) -> None:
    lines = shown(capsys)
    assert steps(lines) == [1, 4, 8]
    assert any(
        re.fullmatch(rf"epoch 1/3  step 1/10  {NUMBERS}  ETA 0:\d\d", each) for each in lines
    )
    assert lines[-1] == "came to step 10"
    assert steps(shown(capsys, "--log-every", "3")) == [3, 6, 9]
    assert shown(capsys, "--quiet") == [lines[0], "came to step 10"]
    assert steps(shown(capsys, "--quiet", "--log-every", "5")) == [5, 10]


def test_lines_have_units_and_dates_or_are_json_where_that_is_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, *lines = shown(capsys, "--log-format", "dated")[:-1]
    assert re.match(f"{DATE}  16 rows = ", first)
    unit = rf"{DATE}  epoch \d/3  step \d+/10 updates  {NUMBERS}(  ETA \d+ s)?"
    assert all(re.fullmatch(unit, line) for line in lines), lines
    script = tmp_path / "script.py"
    script.write_text(ODD)
    code = main(command(script, options=(*TOWER, "--log-format", "json"))[3:])
    assert code == 0
    refused: list[str] = []
    out = capsys.readouterr().out.splitlines()
    found = [json.loads(line, parse_constant=refused.append) for line in out]
    assert refused == []
    assert found[0]["said"].startswith("12 rows = ")
    [last] = [line for line in found if line.get("global_step") == 4]
    assert (last["metrics"]["odd"], last["eta_s"]) == (None, 0.0)
    assert all(re.fullmatch(DATE, line["at"]) for line in found)


ODD = """
import torch, quorate
from support import fits
def loss(model, batch):
    error = fits.squares(model, batch)
    return {"loss": error, "odd": float("nan")}
trainer = quorate.Trainer(torch.nn.Linear(6, 1), loss, optimizer=fits.sgd, batch_size=12, shards=1)
trainer.fit(fits.rows(48), epochs=1)
"""


# --- a terminal -----------------------------------------------------------------------------------


class Terminal:
    """A pseudo-terminal, and the written output."""

    def __init__(self) -> None:
        self._leader, follower = os.openpty()
        self.file = os.fdopen(follower, "w")
        self._shown = b""
        self._reader = threading.Thread(target=self._read)  # the terminal holds only little
        self._reader.start()

    def _read(self) -> None:
        with contextlib.suppress(OSError):  # nobody writes to the terminal any more
            while part := os.read(self._leader, 1 << 16):
                self._shown += part

    def on(self) -> contextlib.AbstractContextManager[object]:
        """Make the terminal the standard output within the block."""
        return contextlib.redirect_stdout(self.file)

    def close(self) -> str:
        """Return the contents of the terminal, without colours."""
        if not self.file.closed:
            self.file.close()
            self._reader.join()
            os.close(self._leader)
        return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", self._shown.decode()).replace("\r", "\n")


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Terminal]:
    for name, value in (("COLUMNS", "120"), ("LINES", "40"), ("TERM", "xterm-256color")):
        monkeypatch.setenv(name, value)
    made = Terminal()
    yield made
    made.close()


class Says(quorate.Callback):
    def updated(self, report: quorate.Report) -> None:
        print(f"{report.global_step} " + "said " * 9)
        time.sleep(0.01)
        if report.global_step == 60:  # as a second bar does: no part is a tag
            print("[b]7[/b] [/i] :smile: 0.25", end="", flush=True)


def test_a_terminal_has_a_bar_with_the_table_below(terminal: Terminal) -> None:
    with terminal.on():
        fits.fit(steps=60, workers=2, engine="towers", callbacks=[Says()])
    lines = [line.rstrip() for line in terminal.close().splitlines()]
    assert any(line.startswith("12 rows = 4 shards x 3 on 2 cpu workers") for line in lines)
    for step in range(1, 61):  # none is lost while another thread draws
        assert f"{step} {'said ' * 9}".rstrip() in lines
    assert any("[b]7[/b] [/i] :smile: 0.25" in line for line in lines)
    bar = max(number for number, line in enumerate(lines) if "step 60/60" in line)
    table = [line for line in lines[bar:] if line][1:4]
    assert (table[0].split()[0], table[0].split()[-1]) == ("worker", "state")
    assert [line.split()[:2] for line in table[1:]] == [["0", "cpu"], ["1", "cpu"]]


def test_a_bar_is_only_where_it_is_wanted(terminal: Terminal) -> None:
    with terminal.on():
        on_a_tower("lasting.py", "updates=10", options=("--log-format", "json", "--log-every", "4"))
    assert "━" not in terminal.close()


# --- exceptions -----------------------------------------------------------------------------------

SCRIPT = """
import sys, torch, quorate
from torch.utils.data import TensorDataset
what = sys.argv[2]
def loss(model, batch):
    step = int(batch[0].min()) // 8
    out = model(batch[0]).square()
    if step == 3 and what == "raise":
        try:
            raise KeyError("a key")
        except KeyError as error:
            raise ValueError("mine") from error
    return out if what == "vector" else out.mean()
trainer = quorate.Trainer(torch.nn.Linear(1, 1), loss, batch_size=8, shards=2, devices="cpu",
    optimizer=lambda params: torch.optim.SGD(params, lr=1e-6),
    workers=quorate.Workers(2, engine=sys.argv[1]))
trainer.fit(TensorDataset(torch.arange(80.0)[:, None]), shuffle=False)
"""


def plain(tmp_path: Path, *arguments: str, **variables: str) -> Any:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    return run([sys.executable, str(script), *arguments], env=variables)


def test_a_plain_script_ends_as_quorate_run_does(tmp_path: Path) -> None:
    ended = plain(tmp_path, "towers", "vector")
    beside = run(command(tmp_path / "train.py", "towers", "vector"))
    assert (beside.code, beside.err) == (ended.code, ended.err)
    [line] = ended.err.splitlines()
    assert ended.code == 2
    assert line.startswith("quorate: loss: got a tensor of shape ")


@pytest.mark.slow
def test_a_traceback_is_of_the_users_frames_unless_it_is_wanted_in_full(tmp_path: Path) -> None:
    package = f"{Path(quorate.__file__).parent}/"  # a clone's folder may have the same name
    ended = plain(tmp_path, "processes", "raise")
    lines = ended.err.splitlines()
    assert ended.code == 1
    assert package not in ended.err
    files = [line for line in lines if line.startswith("  File ")]
    assert len([line for line in files if 'train.py", line ' in line]) == len(files), ended.err
    assert any(line.endswith(", in loss") for line in lines)
    assert "KeyError: 'a key'" in lines
    folds = [line for line in lines if "QUORATE_TRACEBACK=full shows all" in line]
    assert folds
    assert all("frames of quorate" in line for line in folds)
    assert lines[-2] == "ValueError: mine"
    assert re.match(r"quorate: .*step 3, shard \d, rows \[", lines[-1])
    full = plain(tmp_path, "towers", "raise", QUORATE_TRACEBACK="full")
    assert full.code == 1
    assert full.err.count(package) > 10
