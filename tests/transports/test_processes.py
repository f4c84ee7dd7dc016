"""Worker processes run a script up to its first loop, and no further."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from support.messages import expect_error
from support.runs import SCRIPTS, last_json, run
from torch import nn
from torch.utils.data import TensorDataset

import quorate
from quorate.errors import SettingError

pytestmark = pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="looks into /proc")


@pytest.mark.slow
def test_what_follows_the_first_loop_runs_once(tmp_path: Path) -> None:
    ended = run([sys.executable, str(SCRIPTS / "second_loop.py"), str(tmp_path)])
    assert ended.code == 0, ended.said
    assert (tmp_path / "notes").read_text().splitlines() == [
        *["before"] * 3,
        "after fit",
        "finally",
        "at exit",
    ]
    first, second = ended.out.split("other data\n")
    assert "towers" not in first
    assert "computes on towers (threads), because worker processes compute only the first" in second
    # The same in one process; evaluation after the loop uses what was trained.
    expected = second_loop()
    assert last_json(ended.out) == expected


def second_loop() -> list[dict[str, float]]:
    def rows(seed: int) -> TensorDataset:
        return TensorDataset(torch.randn(64, 6, generator=torch.Generator().manual_seed(seed)))

    torch.manual_seed(0)
    trainer = quorate.Trainer(
        nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)),
        lambda model, batch: model(batch[0]).square().mean(),
        optimizer=lambda params: torch.optim.Adam(params, lr=1e-2),
        batch_size=16,
        shards=4,
        devices="cpu",
    )
    data, other = rows(0), rows(1)
    trainer.fit(data, epochs=1)
    values = [trainer.evaluate(data), trainer.evaluate(other)]
    trainer.fit(other, epochs=2)
    return [*values, trainer.evaluate(other)]


def test_without_a_script_there_are_towers() -> None:
    trainer = quorate.Trainer(
        nn.Linear(1, 1),
        lambda m, b: m(b).mean(),
        optimizer=torch.optim.SGD,
        batch_size=2,
        workers=2,
    )
    assert trainer._crew.engine == "towers"
    with expect_error(SettingError, name="engine", got="processes"):
        quorate.Trainer(
            nn.Linear(1, 1),
            lambda m, b: m(b).mean(),
            optimizer=torch.optim.SGD,
            batch_size=2,
            workers=quorate.Workers(engine="processes"),
        )
    code = (
        "import quorate, torch\n"
        "for engine in (None, 'processes'):\n"
        "    t = quorate.Trainer(torch.nn.Linear(1, 1), print, optimizer=print, batch_size=2,\n"
        "        devices='cpu', workers=quorate.Workers(2, engine=engine))\n"
        "    print(t._crew.engine)\n"
    )
    ended = run([sys.executable, "-c", code])
    assert (ended.code, ended.out) == (2, "towers\n")
    assert "quorate: engine: got 'processes', expected a script" in ended.err.splitlines()[-1]
