"""Curves of runs, read back with TensorBoard's own reader; cut event files."""

import io
import json
import shutil
import struct
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
from support import fits
from support.small import DATA, trainer
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c
from tensorboard.summary.writer.record_writer import RecordWriter

import quorate
from quorate.services.tensorboard.event_file import EventFile, drop_after
from quorate.services.tensorboard.summaries import Summaries

Curves = dict[str, list[tuple[int, float]]]


def curves(run_dir: Path) -> Curves:
    folder = str(run_dir / "summaries")
    found = EventAccumulator(folder, {"scalars": 0}, purge_orphaned_data=False).Reload()
    return {
        tag: [(point.step, point.value) for point in found.Scalars(tag)]
        for tag in found.Tags()["scalars"]
    }


def logged(run_dir: Path, kind: str = "loss") -> list[dict[str, Any]]:
    """Return the lines of metrics.jsonl of updates, or of validations."""
    lines = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if kind in line]


def mean(lines: list[dict[str, Any]], name: str) -> float:
    """Return the mean over all rows of some updates."""
    total = sum(line["weight"] for line in lines)
    return float(sum(line[name] * line["weight"] for line in lines) / total)


def loss(model: Any, batch: Any) -> dict[str, torch.Tensor]:
    error = model(batch[0]) - batch[1]
    squares = error.square().mean()
    return {"loss": squares, "error": error.abs().mean(), "learning_rate": squares * 0 + 2}


class Writes(quorate.Callback):
    """Adds a curve."""

    def started(self, run: Any) -> None:
        self.trainer = run

    def updated(self, report: quorate.Report) -> None:
        self.trainer.summaries.add_scalar("mine", report.global_step, report.global_step)


def test_curves_are_what_the_log_says(tmp_path: Path) -> None:
    """One point, written at the end, of ten updates; two updates have fewer rows."""
    begun = time.monotonic()
    settings = {"clip_norm": 0.5, "workers": 2, "engine": "towers", "summary_every_s": 1e9}
    fits.fit(
        None, loss, fits.rows(56), run_dir=tmp_path, steps=10, validation=fits.rows(12), **settings
    )
    wall_s = time.monotonic() - begun
    shown, lines = curves(tmp_path), logged(tmp_path)
    assert {line["rows"] for line in lines} == {8, 12}

    def at_10(value: float) -> list[tuple[int, float]]:
        return [(10, pytest.approx(value, rel=1e-6))]  # curves are float32

    for name, value in {
        "loss": mean(lines, "loss"),
        "error": mean(lines, "error"),
        "metric_learning_rate": 2.0,  # the name was taken
        "learning_rate": 0.1,
        "gradient_norm": sum(line["grad_norm"] for line in lines) / 10,
        **dict.fromkeys(("staleness", "staleness_max", "dropped_shards", "dropped_rows"), 0.0),
    }.items():
        assert shown.pop(name) == at_10(value), name
    # Two workers share the shards.
    per_worker = [shown.pop(f"loss_{worker}")[0][1] for worker in (0, 1)]
    assert min(per_worker) <= mean(lines, "loss") <= max(per_worker)
    rates = shown.pop("examples_per_s")[0][1], shown.pop("global_step/sec")[0][1]
    assert rates[0] / rates[1] == pytest.approx(sum(line["rows"] for line in lines) / 10)
    assert 10 / wall_s < rates[1] < 10 / (lines[-1]["at"] - lines[0]["at"])
    evaluated = [line["validation"] for line in logged(tmp_path, "validation")]
    assert shown.pop("validation/error") == [
        (step, pytest.approx(each["error"])) for step, each in zip((5, 10), evaluated, strict=True)
    ]
    for tag in ("host/cpu", "waiting/0", "waiting/1"):
        assert all(0 <= value <= 1 for _, value in shown.pop(tag)), tag


def test_each_update_is_in_one_point(tmp_path: Path) -> None:
    """Points come while updates are made; some shards are dropped, or old."""

    def slowly(model: Any, batch: Any, at: Any) -> torch.Tensor:
        time.sleep(0.002 * (int(at.rows[0]) % 3))
        return fits.squares(model, batch)

    settings = {"update": "quorum:2", "workers": 3, "engine": "towers", "summary_every_s": 0.01}
    made = fits.fit(loss=slowly, run_dir=tmp_path, steps=60, callbacks=[Writes()], **settings)
    shown, lines = curves(tmp_path), logged(tmp_path)
    steps = [step for step, _ in shown["loss"]]
    assert len(steps) > 3
    assert (steps[-1], steps) == (made.global_step, sorted(set(steps)))
    for before, (step, value) in zip([0, *steps], shown["loss"], strict=False):
        points = lines[before:step]
        assert value == pytest.approx(mean(points, "loss"), rel=1e-5)
        dropped = sum(line["dropped_rows"] for line in points)
        assert dict(shown["dropped_rows"])[step] == dropped
        stale = [line["staleness"] for line in points]
        assert dict(shown["staleness"])[step] == pytest.approx(sum(stale) / len(stale))
        assert dict(shown["staleness_max"])[step] == max(stale)
        assert dict(shown["dropped_shards"])[step] == sum(lines[step - 1]["dropped"])
    dropped_by = lines[-1]["dropped"]
    assert max(dropped_by) > 0
    for worker in (worker for worker, count in enumerate(dropped_by) if count):
        assert shown[f"dropped/{worker}"][-1][1] == dropped_by[worker]
    assert shown["mine"] == [(step, step) for step in range(1, made.global_step + 1)]


def test_a_resumed_run_takes_the_place_of_what_came_after_its_checkpoint(tmp_path: Path) -> None:
    folder = tmp_path / "summaries"

    def fit(steps: int) -> None:
        trainer(tmp_path, 1, save_every_steps=3).fit(DATA, steps=steps, callbacks=[Writes()])

    fit(5)
    [first] = folder.iterdir()
    with first.open("ab") as file:
        file.write(first.read_bytes()[-40:-20])  # a record torn by a kill -9
    theirs = folder / "events.out.tfevents.1.host.7.theirs"  # others' files are left alone
    theirs.write_bytes(records([9]))
    shutil.rmtree(tmp_path / "checkpoints" / "step-000000000005")
    (folder / f"link{NAME}").symlink_to("/dev/zero")  # an irregular file, too
    before = set(folder.iterdir())
    fit(6)
    assert before <= set(folder.iterdir())
    assert theirs.read_bytes() == records([9])
    for path in before - {first}:
        path.unlink()
    assert [step for step, _ in curves(tmp_path)["mine"]] == [1, 2, 3, 4, 5, 6]


def test_many_curves_in_one_card_leave_no_thread_behind(tmp_path: Path) -> None:
    class Draws(quorate.Callback):
        def started(self, run: Any) -> None:
            for step in range(3):
                run.summaries.add_scalars("both", {"a": 1.0, "b": 2.0}, step)

    fits.fit(run_dir=tmp_path, steps=1, callbacks=[Draws()], summary_every_s=1e9, workers=1)
    assert len(list((tmp_path / "summaries" / "both_a").iterdir())) == 1


# --- cut event files ------------------------------------------------------------------------------

NAME = "events.out.tfevents.1.host.7.quorate"


def records(steps: Iterable[int]) -> bytes:
    data = io.BytesIO()
    writer = RecordWriter(data)
    writer.write(Event(wall_time=1.0, file_version="brain.Event:2").SerializeToString())
    for step in steps:
        writer.write(Event(wall_time=1.0, step=step).SerializeToString())
    return data.getvalue()


def head(length: int) -> bytes:
    size = struct.pack("<Q", length)
    return size + struct.pack("<I", masked_crc32c(size))


def test_an_update_waits_for_a_tick_that_begins_a_new_interval(tmp_path: Path) -> None:
    def clock() -> float:  # read by a tick between the points and the interval after them
        if threads and threads[0].ident is None:
            threads[0].start()
            threads[0].join(0.2)
            assert threads[0].is_alive()
        return 1.0

    threads: list[Thread] = []
    told = Summaries(tmp_path, 60.0, status=list, global_step=0, clock=clock)
    threads.append(Thread(target=told.evaluated, args=(1, {"loss": 0.5})))
    told.tick()
    threads[0].join()
    told.close()


HALF = records([2])[len(records([])) : -1]


def test_a_callback_and_a_tick_at_the_same_time_make_one_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[EventFile] = []

    def slowly(*arguments: Any) -> EventFile:
        time.sleep(0.2)  # for the second thread to come
        made.append(EventFile(*arguments))
        return made[-1]

    monkeypatch.setattr("quorate.services.tensorboard.event_file.EventFile", slowly)
    told = Summaries(tmp_path, 60.0, status=list, global_step=0)
    with ThreadPoolExecutor(2) as pool:
        [*pool.map(lambda does: does(), (told.tick, lambda: told.writer))]
    told.close()
    assert len(made) == 1


@pytest.mark.parametrize("tail", [b"", HALF, head(10), bytes(99)])
def test_events_of_later_steps_go_with_mode_and_link_as_they_were(
    tail: bytes, tmp_path: Path
) -> None:
    real, path = tmp_path / "elsewhere", tmp_path / NAME
    path.symlink_to(real)
    for order in ([1, 2, 3, 4, 5], [5, 1, 4, 2, 3], [4, 5]):
        real.write_bytes(records(order) + tail)
        real.chmod(0o640)
        drop_after(path, 3)
        assert path.is_symlink()
        assert real.read_bytes() == records(step for step in order if step <= 3)
        assert real.stat().st_mode & 0o777 == 0o640
        assert set(tmp_path.iterdir()) == {real, path}
