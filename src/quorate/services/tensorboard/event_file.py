"""Event files of TensorBoard: added events wait in memory until ``write`` puts them on disk.

TensorBoard's own writer is unsuitable: it blocks the caller while the disk is slow, and stops for
good at the first error, with a traceback from its own thread.
"""

from __future__ import annotations

import io
import os
import socket
import stat
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from google.protobuf.message import DecodeError
from tensorboard.compat.proto.attr_value_pb2 import AttrValue
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.graph_pb2 import GraphDef
from tensorboard.compat.proto.node_def_pb2 import NodeDef
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
from tensorboard.compat.proto.versions_pb2 import VersionDef
from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c
from tensorboard.summary.writer.record_writer import RecordWriter

from quorate.machine.atomic_file import write_atomically
from quorate.replica.witness.forward_graph import GraphNode

SUFFIX = ".quorate"  # of files written by this module, which alone it may cut
MOST_WAITING_BYTES = 64 << 20  # while writing fails; older events are dropped
PRODUCER = 22  # the GraphDef version of torch's own writer
MOST_EVENT_BYTES = 512 << 20  # a greater length means a damaged record


class EventFile:
    """An event file. Any thread adds; one thread writes. No file is open between two writes.

    A run resumed at ``global_step`` computes later steps again: at the first write, later events,
    left by an interrupted run, are removed from the folder's other files.

    Args:
        folder: created if missing; its parent must exist.
        global_step: the step at which the run resumes.
        graph: returns the model's serialized GraphDef; written if no other file has a graph.
    """

    def __init__(
        self, folder: Path, global_step: int, graph: Callable[[], bytes] | None = None
    ) -> None:
        self.folder = folder
        self._global_step = global_step
        self._graph = graph
        # Readers process a folder's files in the order of their names.
        place = f"{socket.gethostname()}.{os.getpid()}"
        self._path = folder / f"events.out.tfevents.{time.time():.6f}.{place}{SUFFIX}"
        self._lock = threading.Lock()
        self._waiting: list[bytes] = []  # serialized events
        self._size = 0  # bytes of complete records on disk
        self._cut = False  # whether events after global_step have been removed

    def add(self, event: Event) -> None:
        """Add an event for the next write. Does not block."""
        data = event.SerializeToString()
        with self._lock:
            self._waiting.append(data)

    def add_scalars(self, values: Mapping[str, float], global_step: int, wall_time: float) -> None:
        """Add values by name for the next write, including NaN and infinity. Does not block."""
        summary = Summary(value=[Summary.Value(tag=n, simple_value=v) for n, v in values.items()])
        self.add(Event(wall_time=wall_time, step=global_step, summary=summary))

    def write(self) -> None:
        """Append the waiting events. Blocks. After an OSError they wait for the next write."""
        with self._lock:
            taken, self._waiting = self._waiting, []
        try:
            self._prepare()
            self._append(taken)
        except OSError:
            newest, size = [], 0
            for data in reversed(taken):
                size += len(data)
                if size > MOST_WAITING_BYTES:
                    break
                newest.append(data)
            with self._lock:
                self._waiting[:0] = reversed(newest)
            raise

    def _prepare(self) -> None:
        self.folder.mkdir(exist_ok=True)
        if not self._cut:
            for path in sorted(self.folder.glob(f"*tfevents*{SUFFIX}")):
                if drop_after(path, self._global_step):
                    self._graph = None
            self._cut = True

    def _append(self, events: list[bytes]) -> None:
        with self._path.open("ab") as file:
            end = file.tell()
            if end > self._size:  # a write failed halfway: no reader gets past a partial record
                end = file.truncate(self._size)
            records = io.BytesIO()
            writer = RecordWriter(records)
            for data in events if end else [*self._head(), *events]:
                writer.write(data)
            file.write(records.getvalue())
        self._size = end + len(records.getvalue())  # the file is closed: no more errors

    def _head(self) -> list[bytes]:
        """Return the first events of a file: its version, and a mark voiding later steps.

        The mark serves for events in files that quorate may not cut, and for a reader that has
        already read the removed events.
        """
        now, step = time.time(), self._global_step + 1
        start = SessionLog(status=SessionLog.START)
        head = [
            Event(wall_time=now, file_version="brain.Event:2"),
            Event(wall_time=now, step=step, session_log=start),
        ]
        if self._graph is not None:
            head.append(Event(wall_time=now, graph_def=self._graph()))
        return [event.SerializeToString() for event in head]


def drop_after(path: Path, global_step: int) -> bool:
    """Remove events of later steps, and a partial record at the end, from an event file.

    TensorBoard itself hides such events only without its fast loader. The file keeps its mode and
    its links. A path that is no regular file is ignored.

    Returns:
        Whether the file still contains the graph of a model.
    """
    with suppress(FileNotFoundError):  # a dangling link
        path = path.resolve(strict=True)
        status = path.stat()
        if stat.S_ISREG(status.st_mode):
            return _drop_after(path, global_step, status)
    return False


def _drop_after(path: Path, global_step: int, status: os.stat_result) -> bool:
    has_graph = False
    with path.open("rb") as file:
        end, is_mixed = None, False  # end of the events to keep, if all later ones go
        for record, event in _records(file):
            if event.step > global_step:
                end = file.tell() - len(record) if end is None else end
            else:
                is_mixed = is_mixed or end is not None
                has_graph = has_graph or event.HasField("graph_def")
        if is_mixed:
            file.seek(0)
            records = (record for record, event in _records(file) if event.step <= global_step)
            write_atomically(path, records, like=status)
            return has_graph
        end = file.tell() if end is None else end
    if end < status.st_size:
        os.truncate(path, end)  # in place: works on a full disk too
    return has_graph


def _records(file: io.BufferedReader) -> Iterator[tuple[bytes, Event]]:
    """Yield the records of a file, up to its end or the first incomplete record.

    The file's position is then the end of the last complete record. A record: 8 bytes length, 4
    bytes CRC of the length, the event, 4 bytes CRC of the event (not checked: the check takes a
    second per 5 MB).
    """
    end, size = file.tell(), os.fstat(file.fileno()).st_size
    while len(head := file.read(12)) == 12:
        (length,) = struct.unpack("<Q", head[:8])
        if struct.unpack("<I", head[8:]) != (masked_crc32c(head[:8]),):
            break
        if length > min(MOST_EVENT_BYTES, size - end - 16):
            break
        body = file.read(length + 4)
        if len(body) < length + 4:
            break
        try:
            event = Event.FromString(body[:-4])
        except DecodeError:
            break
        end = file.tell()
        yield head + body, event
    file.seek(end)


# --- the graph of the model -----------------------------------------------------------------------


def graph_def(nodes: Sequence[GraphNode]) -> bytes:
    """Return a graph in TensorFlow's GraphDef format, serialized for an event.

    TensorBoard draws a node's name (by its scopes), inputs and device, and lists its attributes.
    TensorBoard shows the attribute ``_output_shapes`` along the edges.
    """
    versions = VersionDef(producer=PRODUCER)
    return bytes(GraphDef(node=map(_node_def, nodes), versions=versions).SerializeToString())


def _node_def(node: GraphNode) -> NodeDef:
    attributes = {}
    if node.shapes:
        shapes = [
            TensorShapeProto(dim=[TensorShapeProto.Dim(size=size) for size in shape])
            for shape in node.shapes
        ]
        attributes["_output_shapes"] = AttrValue(list=AttrValue.ListValue(shape=shapes))
    if node.dtype:
        attributes["dtype"] = AttrValue(s=node.dtype.encode())
    return NodeDef(
        name=node.name,
        op=node.kind,
        input=node.inputs,
        device=_device(node.device),
        attr=attributes,
    )


def _device(name: str) -> str:
    """Return ``/device:CUDA:0`` for ``cuda:0``."""
    kind, _, number = name.partition(":")
    return f"/device:{kind.upper()}:{number or 0}" if kind else ""
