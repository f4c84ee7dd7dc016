"""events.jsonl: what a run shows, and what happens to it, line by line."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

import quorate
from quorate.coordination.run_event import LOST, RunEvent
from quorate.services.event_log import EventLog

DATA = TensorDataset(torch.arange(24.0)[:, None] / 24)


def events(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()]


def fit(run_dir: Path, steps: int, *, fresh: bool = False) -> None:
    trainer = quorate.Trainer(
        lambda: torch.nn.Linear(1, 1),
        lambda model, batch: model(batch[0]).square().mean(),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        batch_size=8,
        shards=2,
        workers=1,
        devices="cpu",
        run_dir=quorate.RunDir(run_dir, save_every_steps=2, fresh=fresh),
    )
    trainer.fit(DATA, steps=steps, validation=DATA)


def opened(run_dir: Path, log: EventLog | None = None) -> EventLog:
    log = log or EventLog()
    log.open(run_dir, lambda: 7, "training starts", {"settings": {"shards": 2}}, print)
    return log


def test_a_fit_logs_its_start_saves_evaluations_and_its_end(tmp_path: Path) -> None:
    fit(tmp_path, 3)
    found = events(tmp_path)
    kinds = [event["kind"] for event in found]
    assert (kinds[0], kinds[-1]) == ("start", "end")
    assert found[0]["settings"]["shards"] == 2
    assert found[0]["command"]
    assert [event["saved_step"] for event in found if event["kind"] == "save"] == [2, 3]
    [evaluation] = [event for event in found if event["kind"] == "evaluation"]
    assert evaluation["text"].startswith("epoch 1: validation  loss ")
    assert evaluation["global_step"] == 3
    assert "warning" not in kinds
    assert found[-1]["state"] == "finished"
    assert found[-1]["spent"]["shards"]
    times = [event["at"] for event in found]
    assert times == sorted(times)


def test_a_resumed_run_continues_the_log(tmp_path: Path) -> None:
    fit(tmp_path, 2)
    before = events(tmp_path)
    with (tmp_path / "events.jsonl").open("a") as file:
        file.write('{"at": 5, "global')  # as a full disk and a kill leave it
    fit(tmp_path, 4)
    lines = (tmp_path / "events.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines[: len(before)]] == before
    assert lines[len(before)] == '{"at": 5, "global'
    later = [json.loads(line) for line in lines[len(before) + 1 :]]
    assert later[0]["kind"] == "start"
    assert later[0]["global_step"] == 2
    [resume] = [event for event in later if event["kind"] == "resume"]
    assert resume["text"].startswith("resumed step 2 ")


def test_a_fit_with_nothing_to_do_logs_nothing(tmp_path: Path) -> None:
    fit(tmp_path, 2)
    before = events(tmp_path)
    fit(tmp_path, 2)
    assert events(tmp_path) == before


def test_a_fresh_run_moves_the_log_aside(tmp_path: Path) -> None:
    fit(tmp_path, 2)
    before = events(tmp_path)
    fit(tmp_path, 2, fresh=True)
    assert events(tmp_path / "aside-1") == before
    assert [event["kind"] for event in events(tmp_path)].count("start") == 1


def test_a_warning_of_the_run_is_an_event(tmp_path: Path) -> None:
    def loss(model: torch.nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
        return model[0](batch[0]).square().mean()  # type: ignore[index,operator,no-any-return]

    model = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.Linear(1, 1))
    quorate.Trainer(
        model,
        loss,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        batch_size=8,
        workers=1,
        devices="cpu",
        run_dir=tmp_path,
    ).fit(DATA, steps=1)
    warnings = [event["text"] for event in events(tmp_path) if event["kind"] == "warning"]
    assert any("no gradient in step 0" in text for text in warnings)


def test_events_before_the_log_is_opened_wait(tmp_path: Path) -> None:
    log = EventLog()
    log.add("early")
    log.add(RunEvent("worker 1 was killed", LOST, 1, is_shown=False))
    opened(tmp_path, log).close()
    log.add("late")
    start, early, lost = events(tmp_path)
    assert start["kind"] == "start"
    assert start["settings"] == {"shards": 2}
    assert (early["kind"], early["text"], early["global_step"]) == ("warning", "early", 7)
    assert (lost["kind"], lost["worker"], lost["text"]) == ("lost", 1, "worker 1 was killed")


def test_threads_add_whole_lines(tmp_path: Path) -> None:
    log = opened(tmp_path)
    threads = [
        threading.Thread(target=lambda: [log.add("x" * 100) for _ in range(50)]) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    log.close()
    assert len(events(tmp_path)) == 201


def test_a_log_that_cannot_be_written_stops_nobody(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "events.jsonl").mkdir()
    log = opened(tmp_path)
    log.add("lost")
    log.close()
    assert "events.jsonl cannot be written, training continues" in capsys.readouterr().out
