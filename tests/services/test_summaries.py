"""Summaries, read back with TensorBoard's own reader."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from quorate.services.device_use import DeviceUse, Gauges, HostUse
from quorate.services.report import Report
from quorate.services.tensorboard import event_file
from quorate.services.tensorboard.event_file import EventFile
from quorate.services.tensorboard.summaries import Summaries
from quorate.transports.worker_status import PHASES, WorkerStatus

MIB = 1 << 20


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


class Machine(Gauges):
    """Shows what a test says."""

    def __init__(self) -> None:
        super().__init__()
        self.uses: list[DeviceUse] = []
        self.host = HostUse(0.25, 512 * MIB, 2048 * MIB)

    def read(self, workers: Iterable[WorkerStatus]) -> tuple[list[DeviceUse], HostUse]:
        return self.uses, self.host


def report(step: int, loss: float = 1.0, **fields: object) -> Report:
    values: dict[str, object] = {
        "global_step": step,
        "epoch": 0,
        "rows": 8,
        "dropped_rows": 0,
        "weight": 8.0,
        "metrics": {"loss": loss},
        "staleness": 0,
        "fresh": [step, step],
        "stale": [0, 0],
        "dropped": [0, 0],
        "lr": 0.1,
        "grad_norm": None,
        "examples_per_s": 0.0,
        "last_step": 100,
        "epochs": 1,
        "ends_epoch": False,
        "eta_s": None,
        "worker_losses": {},
        "not_finite": 0,
    }
    return Report(**(values | fields))  # type: ignore[arg-type]


def status(worker: int, **seconds: float) -> WorkerStatus:
    spent = dict.fromkeys(PHASES, 0.0) | seconds
    return WorkerStatus(worker, "cpu", 1, None, "forward", 1, 0, 0.0, spent, 1)


class Bench:
    """A service whose surroundings a test sets by hand."""

    def __init__(self, run_dir: Path, global_step: int = 0) -> None:
        self.run_dir = run_dir
        self.clock, self.machine = Clock(), Machine()
        self.workers: list[WorkerStatus] = []
        self.service = Summaries(
            run_dir,
            30.0,
            status=lambda: self.workers,
            gauges=self.machine,
            global_step=global_step,
            clock=self.clock,
        )

    def curves(self) -> dict[str, list[tuple[int, float]]]:
        return curves(self.run_dir)


def read(run_dir: Path, *, hides: bool = False) -> EventAccumulator:
    """All that lies there; ``hides``: without what a restart in the files takes back.

    TensorBoard's fast loader, its default, shows it all.
    """
    everything = dict.fromkeys(("scalars", "images", "tensors"), 0)
    folder = str(run_dir / "summaries")
    return EventAccumulator(folder, everything, purge_orphaned_data=hides).Reload()


def curves(run_dir: Path) -> dict[str, list[tuple[int, float]]]:
    found = read(run_dir)
    return {
        tag: [(point.step, point.value) for point in found.Scalars(tag)]
        for tag in found.Tags()["scalars"]
    }


def approximately(step: int, value: float) -> list[tuple[int, float]]:
    return [(step, pytest.approx(value))]  # curves are float32


def test_every_curve_against_values_computed_by_hand(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.service.tick()  # the one at the start: there is nothing yet but the host
    assert set(bench.curves()) == {"host/cpu", "host/memory_mib"}

    bench.service.updated(
        report(
            1,
            weight=8.0,
            rows=8,
            metrics={"loss": 2.0, "accuracy": 0.5},
            worker_losses={0: (10.0, 5.0), 1: (6.0, 3.0)},
            lr=0.1,
            grad_norm=3.0,
            staleness=1,
            dropped=[0, 1],
            dropped_rows=4,
        )
    )
    bench.service.updated(
        report(
            2,
            weight=2.0,
            rows=2,
            metrics={"loss": 7.0, "accuracy": 1.0},
            worker_losses={1: (14.0, 2.0)},
            lr=0.05,
            grad_norm=5.0,
            staleness=4,
            dropped=[0, 3],
            dropped_rows=8,
            not_finite=2,
        )
    )
    bench.service.evaluated(1, {"loss": 0.75, "accuracy": 0.875})
    bench.clock.now += 4.0
    bench.workers = [
        status(0, waiting=1.0, forward=2.0, backward=1.0),
        status(1, starting=2.0, waiting=2.0),
    ]
    bench.machine.uses = [
        DeviceUse(0, "cpu", None, 0.5, 256 * MIB, None),
        DeviceUse(1, "cpu", None, None, None, None),
    ]
    bench.service.tick()
    shown = bench.curves()
    assert [step for step, _ in shown.pop("host/cpu")] == [0, 2]
    assert shown.pop("host/memory_mib")[-1] == (2, 512.0)
    assert shown == {
        "loss": approximately(2, (2.0 * 8 + 7.0 * 2) / 10),
        "accuracy": approximately(2, (0.5 * 8 + 1.0 * 2) / 10),
        "loss_0": approximately(2, 10.0 / 5),
        "loss_1": approximately(2, (6.0 + 14.0) / 5),
        "validation/loss": approximately(1, 0.75),
        "validation/accuracy": approximately(1, 0.875),
        "learning_rate": approximately(2, 0.05),
        "gradient_norm": approximately(2, 4.0),
        "examples_per_s": approximately(2, 10 / 4.0),
        "global_step/sec": approximately(2, 2 / 4.0),
        "staleness": approximately(2, 2.5),
        "staleness_max": approximately(2, 4),
        "dropped_shards": approximately(2, 3),
        "dropped/0": approximately(2, 0),
        "dropped/1": approximately(2, 3),
        "dropped_rows": approximately(2, 12),
        "not_finite": approximately(2, 2),
        "device/0/use": approximately(2, 0.5),
        "device/0/memory_mib": approximately(2, 256),
        "waiting/0": approximately(2, 0.25),
        "waiting/1": approximately(2, 0.5),
    }


def test_a_point_is_of_its_own_interval(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.workers = [status(0, waiting=10.0, forward=10.0)]
    bench.service.updated(report(1, 5.0))
    bench.clock.now += 1.0
    bench.service.tick()
    bench.clock.now += 10.0
    bench.service.tick()  # an interval without an update: its time belongs to the next point
    bench.workers = [status(0, waiting=13.0, forward=11.0)]
    bench.service.updated(report(2, 3.0))
    bench.clock.now += 6.0
    bench.service.tick()
    bench.workers = [status(0, starting=1.0, waiting=1.0)]  # another process took its place
    bench.service.tick()
    shown = bench.curves()
    assert shown["loss"] == [(1, 5.0), (2, 3.0)]
    assert shown["examples_per_s"] == [(1, 8.0), (2, 0.5)]
    assert shown["waiting/0"] == [(1, 0.5), (2, 0.75), (2, 0.5)]  # nothing where no time passed
    assert not {"gradient_norm", "dropped/0", "not_finite"} & set(shown)


def test_what_is_not_finite_is_written_as_it_is(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.service.updated(report(1, math.nan, worker_losses={0: (math.inf, 8.0)}))
    bench.clock.now += 1.0
    bench.service.tick()
    shown = bench.curves()
    assert math.isnan(shown["loss"][0][1])
    assert shown["loss_0"] == [(1, math.inf)]


def test_metrics_whose_names_are_taken_get_others(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    metrics = {"loss": 1.0, "learning_rate": 2.0, "loss_0": 3.0}
    bench.service.updated(report(1, metrics=metrics, worker_losses={0: (4.0, 8.0)}))
    bench.service.tick()
    shown = bench.curves()
    assert shown["learning_rate"] == approximately(1, 0.1)
    assert shown["loss_0"] == [(1, 0.5)]
    assert shown["metric_learning_rate"] == [(1, 2.0)]
    assert shown["metric_loss_0"] == [(1, 3.0)]


def a_run(run_dir: Path, first: int, last: int, loss: float) -> None:
    bench = Bench(run_dir, first)
    for step in range(first + 1, last + 1):
        bench.service.updated(report(step, loss))
        bench.service.tick()
    bench.service.close()


def test_a_resumed_run_takes_the_place_of_what_came_after_its_checkpoint(tmp_path: Path) -> None:
    a_run(tmp_path, 0, 5, 1.0)
    (first,) = (tmp_path / "summaries").iterdir()
    with first.open("ab") as file:
        file.write(first.read_bytes()[-40:-20])  # a record that a kill -9 tore
    a_run(tmp_path, 3, 6, 2.0)
    assert curves(tmp_path)["loss"] == [(1, 1), (2, 1), (3, 1), (4, 2), (5, 2), (6, 2)]
    a_run(tmp_path, 6, 7, 3.0)  # nothing to take away
    assert [step for step, _ in curves(tmp_path)["loss"]] == [1, 2, 3, 4, 5, 6, 7]
    assert len(list((tmp_path / "summaries").iterdir())) == 3


def test_files_of_others_are_left_alone(tmp_path: Path) -> None:
    folder = tmp_path / "summaries"
    events = EventFile(folder, 0)
    events.add_scalars({"theirs": 1.0}, 9, time.time())
    events.write()
    (ours,) = folder.iterdir()
    theirs = ours.rename(ours.with_suffix(".theirs"))
    before = theirs.read_bytes()
    a_run(tmp_path, 3, 4, 1.0)
    assert theirs.read_bytes() == before
    assert curves(tmp_path)["theirs"] == [(9, 1)]
    assert read(tmp_path, hides=True).Tags()["scalars"].count("loss") == 1
    assert not read(tmp_path, hides=True).Scalars("theirs")


def test_a_disk_that_cannot_be_written_costs_nothing_but_time(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    bench = Bench(run_dir)
    bench.service.updated(report(1, 1.0))
    with pytest.raises(FileNotFoundError):  # the folder of the run is gone
        bench.service.tick()
    run_dir.mkdir()
    (run_dir / "summaries").write_text("in the way")
    bench.service.updated(report(2, 2.0))
    bench.service.evaluated(2, {"loss": 4.0})
    with pytest.raises(FileExistsError):
        bench.service.tick()
    (run_dir / "summaries").unlink()
    bench.service.updated(report(3, 3.0))
    bench.service.tick()
    assert bench.curves()["loss"] == [(1, 1), (2, 2), (3, 3)]
    assert bench.curves()["validation/loss"] == [(2, 4)]
    for file in (run_dir / "summaries").iterdir():
        file.unlink()
    bench.service.updated(report(4, 4.0))
    bench.service.tick()
    assert bench.curves()["loss"] == [(4, 4)]  # somebody tidied up; the run goes on


def test_what_waits_for_a_disk_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_file, "MOST_WAITING_BYTES", 1000)
    events = EventFile(tmp_path / "run" / "summaries", 0)
    for step in range(1, 101):
        events.add_scalars({"loss": float(step)}, step, time.time())
        with pytest.raises(FileNotFoundError):
            events.write()
    (tmp_path / "run").mkdir()
    events.write()
    steps = [step for step, _ in curves(tmp_path / "run")["loss"]]
    assert 10 < len(steps) < 100
    assert steps == list(range(101 - len(steps), 101))  # the oldest had to go


FULL_DISK = """
import resource, signal, sys, time
from pathlib import Path
from quorate.services.tensorboard.event_file import EventFile
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # then a write fails with EFBIG, as on a full disk
events = EventFile(Path(sys.argv[1]), 0)
events.add_scalars({"before": 1.0}, 1, time.time())
events.write()
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
for step in range(2, 5):
    events.add_scalars({f"during_{n}": float(n) for n in range(100)}, step, time.time())
    try:
        events.write()
        raise SystemExit("nothing was raised")
    except OSError as error:
        print(error)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
events.add_scalars({"after": 2.0}, 5, time.time())
events.write()
"""


def test_a_write_that_failed_halfway_is_done_again(tmp_path: Path) -> None:
    command = [sys.executable, "-c", FULL_DISK, str(tmp_path / "summaries")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("File too large") == 3
    shown = curves(tmp_path)
    assert shown["before"] == [(1, 1)]
    assert shown["during_7"] == [(2, 7), (3, 7), (4, 7)]
    assert shown["after"] == [(5, 2)]


def test_updates_are_counted_while_others_are_written(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    over = threading.Event()

    def tick() -> None:
        while not over.is_set():
            bench.service.tick()

    thread = threading.Thread(target=tick)
    thread.start()
    steps, spent = 2000, 0.0
    try:
        for step in range(1, steps + 1):
            bench.clock.now = 100.0 + step
            made = report(step, worker_losses={0: (1.0, 4.0), 1: (1.0, 4.0)})
            began = time.thread_time()
            bench.service.updated(made)
            spent += time.thread_time() - began
            if step % 100 == 0:
                bench.service.evaluated(step, {"loss": 1.0})
                time.sleep(0.005)
    finally:
        over.set()
        thread.join()
    bench.service.tick()
    bench.service.close()
    shown = bench.curves()
    ends = [step for step, _ in shown["global_step/sec"]]
    # Each update is in one point: a point's rate is its updates over its seconds, one second each.
    assert ends[-1] == steps
    assert ends == sorted(set(ends))
    assert {round(value, 3) for _, value in shown["loss_0"]} == {0.25}
    assert len(shown["validation/loss"]) == steps // 100
    assert spent / steps < 100e-6


def test_callbacks_add_images_and_text(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    writer = bench.service.writer
    assert writer is bench.service.writer
    writer.add_image("filters", np.zeros((3, 4, 5), dtype=np.uint8), 1)
    writer.add_text("sample", "Once upon a time", 1)
    writer.add_scalar("mine", 3.0, 1)
    writer.flush()
    assert not (tmp_path / "summaries").exists()  # the loop does not wait for the disk
    bench.service.tick()
    writer.add_scalar("mine", 4.0, 2)
    bench.service.close()
    found = read(tmp_path)
    assert [(image.step, image.width) for image in found.Images("filters")] == [(1, 5)]
    assert found.Tensors("sample/text_summary")[0].step == 1
    assert bench.curves()["mine"] == [(1, 3.0), (2, 4.0)]


def test_many_curves_in_one_card_leave_no_thread_behind(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    for step in range(3):
        bench.service.writer.add_scalars("both", {"a": 1.0, "b": 2.0}, step)
    bench.service.tick()
    bench.service.close()
    files = list((tmp_path / "summaries" / "both_a").iterdir())
    assert len(files) == 1


def test_importing_the_service_does_not_import_tensorboard() -> None:
    module = "quorate.services.tensorboard.summaries"
    check = f"import sys, {module}; assert 'tensorboard' not in sys.modules"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", check], check=True, timeout=60, env=environment)
