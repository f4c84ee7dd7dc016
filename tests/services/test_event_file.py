"""Event files of an earlier run: cut where they have to be, and otherwise as they were."""

from __future__ import annotations

import io
import os
import struct
import time
import tracemalloc
from collections.abc import Iterable
from pathlib import Path

import pytest
from support.disks import disk, fill
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c
from tensorboard.summary.writer.record_writer import RecordWriter

from quorate.services.tensorboard.event_file import EventFile, drop_after

NAME = "events.out.tfevents.1.host.7.quorate"


def records(steps: Iterable[int]) -> bytes:
    data = io.BytesIO()
    writer = RecordWriter(data)
    writer.write(Event(wall_time=1.0, file_version="brain.Event:2").SerializeToString())
    for step in steps:
        writer.write(Event(wall_time=1.0, step=step).SerializeToString())
    return data.getvalue()


def steps(path: Path) -> list[int]:
    """As TensorBoard reads them."""
    return [event.step for event in EventFileLoader(str(path)).Load()][1:]


def head(length: int) -> bytes:
    size = struct.pack("<Q", length)
    return size + struct.pack("<I", masked_crc32c(size))


HALF = records([2])[len(records([])) : -1]


@pytest.mark.parametrize(
    "tail",
    [b"", b"\x07", HALF, head(10), bytes(99)],
    ids=["whole", "byte", "half", "head", "zeros"],
)
@pytest.mark.parametrize("order", [[1, 2, 3, 4, 5], [5, 1, 4, 2, 3], [1, 2], [4, 5], []])
def test_events_of_later_steps_go_with_mode_and_link_as_they_were(
    order: list[int], tail: bytes, tmp_path: Path
) -> None:
    real, path = tmp_path / "elsewhere", tmp_path / NAME
    real.write_bytes(records(order) + tail)
    real.chmod(0o640)
    path.symlink_to(real)
    drop_after(path, 3)
    assert path.is_symlink()
    assert real.read_bytes() == records(step for step in order if step <= 3)
    assert real.stat().st_mode & 0o777 == 0o640
    assert set(tmp_path.iterdir()) == {real, path}


def test_a_full_disk_keeps_no_tail_from_being_cut(tmp_path: Path) -> None:
    with disk(tmp_path / "disk", "1m") as place:
        path = place / NAME
        path.write_bytes(records(range(1, 9)) + b"half")
        fill(place)
        drop_after(path, 5)
        assert steps(path) == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("begin", [b"", records([1]), records([1]) + head(900 << 30)])
def test_a_sparse_file_of_a_terabyte_takes_no_memory(begin: bytes, tmp_path: Path) -> None:
    path = tmp_path / NAME
    path.write_bytes(begin)
    os.truncate(path, 1 << 40)
    tracemalloc.start()
    try:
        drop_after(path, 3)
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()
    assert path.stat().st_size == len(records([1]) if begin else b"")


def test_what_is_no_regular_file_is_left_alone(tmp_path: Path) -> None:
    folder = tmp_path / "summaries"
    folder.mkdir()
    for number, target in enumerate(("/dev/zero", tmp_path / "nothing", tmp_path)):
        (folder / f"{number}{NAME}").symlink_to(target)
    os.mkfifo(folder / f"fifo{NAME}")
    (folder / f"folder{NAME}").mkdir()
    before = sorted(folder.iterdir())
    events = EventFile(folder, 3)
    events.add_scalars({"loss": 1.0}, 4, time.time())
    events.write()
    [written] = set(folder.iterdir()) - set(before)
    assert steps(written)[-1] == 4
