"""What workers do not share is named on every engine, by one worker too; what is sound is not."""

from __future__ import annotations

import itertools
import random
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.messages import expect_error
from support.references import References
from support.runs import SCRIPTS, command, inspected, last_json, run

import quorate
from quorate.replica.digest import digest
from quorate.replica.witness.again import advice
from quorate.replica.witness.kept import kept

sys.path.insert(0, str(SCRIPTS))
import unshared


def doubts(kind: str, workers: int, **compute: Any) -> tuple[list[str], str]:
    """Train on towers; return what was doubted, and the digest."""
    trainer, rows = unshared.trainer_of(
        kind,
        devices="cpu",
        workers=quorate.Workers(workers, engine="towers"),
        compute=quorate.Compute(**compute),
    )
    found: list[str] = []
    for report in trainer.updates(rows, epochs=2, shuffle=False):
        found += report.doubts
    return found, digest(trainer.model.state_dict().items())


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("kind", unshared.UNSHARED)
def test_what_is_not_shared_is_named_on_towers(kind: str, workers: int) -> None:
    found, _ = doubts(kind, workers)
    assert any(unshared.UNSHARED[kind][3] in doubt for doubt in found), found
    assert len(found) <= 3, found


@pytest.mark.parametrize("kind", unshared.SOUND)
def test_what_is_sound_is_not_doubted_on_towers(kind: str) -> None:
    expected = doubts(kind, 1, spot_check_every=0)
    assert expected[0] == []
    for workers in (1, 2, 3):
        assert doubts(kind, workers, spot_check_every=1) == expected


def test_a_strict_run_ends() -> None:
    with expect_error(quorate.errors.SameBitsError, name="strict"):
        doubts("counter", 1, strict=True)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["counter", "initialised", "clock", "closure", "rows"])
def test_what_is_not_shared_is_named_on_processes(kind: str, tmp_path: Path) -> None:
    options = ("--workers", "2", "--engine", "processes", "--run-dir", str(tmp_path))
    ended = run(command("unshared.py", kind, options=options))
    assert ended.code == 0, ended.said
    found = inspected(tmp_path)
    assert found["same_bits"] is False
    assert any(unshared.UNSHARED[kind][3] in doubt for doubt in found["doubts"]), found["doubts"]
    options = (*options[:-2], "--strict", "--run-dir", str(tmp_path / "strict"))
    ended = run(command("unshared.py", kind, options=options))
    assert ended.code == 1, ended.said
    assert "strict: the same bits cannot be kept, because" in ended.err


@pytest.mark.slow
def test_processes_that_made_another_model_are_told_apart_by_a_spot_check(tmp_path: Path) -> None:
    options = ("--workers", "2", "--engine", "processes", "--run-dir", str(tmp_path))
    every = ("--spot-check-every", "1")
    ended = run(command("unshared.py", "by_process", options=(*options, *every)))
    assert ended.code == 0, ended.said
    found = inspected(tmp_path)
    assert any(unshared.BY_PROCESS in doubt for doubt in found["doubts"]), ended.said


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["caching", "recurrent", "teacher", "variational"])
def test_what_is_sound_is_not_doubted_on_processes(kind: str, tmp_path: Path) -> None:
    options = ("--workers", "2", "--engine", "processes", "--run-dir", str(tmp_path))
    ended = run(command("unshared.py", kind, options=(*options, "--spot-check-every", "1")))
    assert ended.code == 0, ended.said
    found = inspected(tmp_path)
    assert (found["doubts"], found["digest"]) == ([], doubts(kind, 1)[1])


@pytest.mark.slow
def test_kills_during_spot_checks_change_nothing(references: References) -> None:
    """With a check after every update, most kills hit one."""
    expected = references.on_a_tower("faults.py", "0", "39").json
    options = ("--workers", "3", "--spot-check-every", "1")
    ended = run(command("faults.py", "4", "39", options=options))
    assert ended.code == 0, ended.said
    assert last_json(ended.out)["digest"] == expected["digest"]
    assert "same bits: no" not in ended.said


@pytest.mark.slow
def test_a_worker_that_is_stopped_in_a_spot_check_is_not_waited_for(tmp_path: Path) -> None:
    options = ("--workers", "2", "--engine", "processes", "--run-dir", str(tmp_path))
    words = command("unshared.py", "stopping", options=(*options, "--spot-check-every", "1"))
    began = time.monotonic()
    ended = run(words)
    assert ended.code == 0, ended.said
    assert time.monotonic() - began < 60
    found = inspected(tmp_path)
    assert (found["doubts"], found["digest"]) == ([], doubts("plain", 1)[1])


def test_what_to_do_depends_on_what_holds_the_state() -> None:
    model = torch.nn.Module()
    model.calls, model.own = 1, torch.Generator()
    model.random, model.count = random.Random(1), itertools.count()
    counter, numbers = {"n": 0}, np.random.default_rng(0)

    def loss(_model: torch.nn.Module, _batch: Any) -> float:
        counter["n"] += 1
        return float(numbers.uniform())

    found = kept(model, loss)
    texts = {name: advice(name, found) for name in found}
    assert texts["calls (Module)"] == "make it a buffer (register_buffer)"
    closed = "in the closure of the loss function"
    for name in ("own (Module)", "random (Module)", f"'numbers' {closed}"):
        assert texts[name].startswith("draw from the default generators"), name
    for name in ("count (Module)", f"'counter' {closed}"):
        assert texts[name].startswith("compute it from at.step"), name
