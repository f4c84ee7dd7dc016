"""What a worker is at, and what its time went into."""

from __future__ import annotations

import struct
import time
from mmap import mmap
from typing import Any, NamedTuple

from quorate.coordination.spans import SpanLog
from quorate.engines.tracing import Batch, batch, note_own_spans
from quorate.engines.two_copies import TwoCopies

# In the order in which a shard goes through the last four of them.
PHASES = ("starting", "waiting", "fetching", "forward", "backward", "pushing")

_NUMBERS = {phase: number for number, phase in enumerate(PHASES)}

# Phase, step, shard; when the phase began, time.monotonic(), or 0 if none has; shards
# begun; the stage that is waited for, or -1; seconds in each phase before this one.
_ENTRY = struct.Struct(f"<qqqdqq{len(PHASES)}d")
_EMPTY = bytes(_ENTRY.size)
_BEFORE = 7  # numbers before the seconds: the entry's version, and the above
_STAGE = _BEFORE - 1


class WorkerStatus(NamedTuple):
    """The status of one worker at one moment.

    Attributes:
        number: number of the worker.
        device: name of the device in torch.
        pid: id of the worker's process; None without a process at present.
        thread: the kernel's id of the worker's thread, if the worker is a thread of this process.
        phase: the current phase, one of ``PHASES``.
        step: step of the current or last shard.
        shard: number of the current or last shard.
        since: start of the phase, by ``time.monotonic()``.
        seconds: seconds spent in each phase so far, including the current phase.
        shards: number of shards started so far.
        stage: the pipeline stage that the worker has waited for; -1 for none.
        host: name of the host, if the run has several hosts.
        is_elsewhere: whether the worker is on another host or in another container.
    """

    number: int
    device: str
    pid: int | None
    thread: int | None
    phase: str
    step: int
    shard: int
    since: float
    seconds: dict[str, float]
    shards: int
    stage: int = -1
    host: str | None = None
    is_elsewhere: bool = False

    @property
    def where(self) -> str:
        """The device of the worker, with the host if the run has several hosts."""
        return self.device if self.host is None else f"{self.device} of {self.host}"

    @property
    def is_gone(self) -> bool:
        """Whether the worker has ended, and no replacement was started yet."""
        return self.pid is None and self.thread is None and not self.is_elsewhere


class Doing(NamedTuple):
    """The part of a status that the worker writes; fields as there."""

    phase: str
    step: int
    shard: int
    since: float
    seconds: dict[str, float]
    shards: int
    stage: int = -1

    @property
    def is_late(self) -> bool:
        """Whether its phase takes 3 times as long as its shards before this one usually did."""
        took_s = time.monotonic() - self.since
        before_s = sum(self.seconds[phase] for phase in PHASES[2:]) - took_s
        return took_s > 3 * before_s / max(1, self.shards - 1)


class Timesheet:
    """What one worker is at and was at, in memory that others may read meanwhile.

    One thread writes at a time: the worker's, or the coordinator's while there is no worker. There
    is no lock, as who holds it may be killed, or not run for a while: see ``TwoCopies``.

    Args:
        memory: at first zeroed; tell it what the worker begins with.
        start: of the ``SIZE`` bytes in it, a multiple of 8.
    """

    SIZE = TwoCopies.room(_ENTRY.size)  # bytes

    def __init__(self, memory: bytearray | mmap, start: int = 0) -> None:
        self._copies = TwoCopies(memory, start, _ENTRY.size)
        self._last: list[Any] = [-1]  # what this object wrote last
        self._log: SpanLog | None = None  # of a run that is traced

    def tell(self, phase: str, step: int | None = None, shard: int | None = None) -> None:
        """Note that a phase begins, or goes on; of the same shard as before if none is named.

        Does not block.
        """
        last = self._last
        # Most often nobody else has written: five phases of each shard need not read what is known.
        if self._copies.last_version() != last[0]:
            last = self._last = [*self._newest()]
        _, was, old_step, old_shard, since, shards, *_ = last
        number = _NUMBERS[phase]
        step = old_step if step is None else step
        shard = old_shard if shard is None else shard
        if since and (number, step, shard) == (was, old_step, old_shard):
            return
        now = time.monotonic()
        last[0] += 1  # first: if this thread is interrupted here, it is read anew
        if since:
            last[_BEFORE + was] += now - since
            if self._log is not None:
                self._log.phase(PHASES[was], old_step, old_shard, since, now)
        last[1:_BEFORE] = number, step, shard, now, shards + (phase == "fetching"), -1
        self._write(*last)

    def waits_for(self, stage: int) -> None:
        """Note that the phase goes on, as a stage takes long. Does not block."""
        last = self._last = [*self._newest()]
        if last[_STAGE] != stage:
            last[0] += 1
            last[_STAGE] = stage
            self._write(*last)

    def record(self, job: str | None, step: int = 0, shard: int = 0) -> None:
        """Have what is told from now on be noted as spans, of a job; None: not any more.

        Args:
            step: that the worker, whose thread this is, was given.
            shard: the first that it was given of it.
        """
        if job is not None and self._log is None:
            self._log = SpanLog()
        if self._log is not None:
            note_own_spans(self._log, job, step, shard)

    def recorded(self, *, cuts: bool) -> Batch | None:
        """Return the spans since the last call, for another process; None: nobody wants them.

        Args:
            cuts: whether the phase under way is in them, up to now.
        """
        log = self._log
        if log is None or log.job is None:
            return None
        if cuts:
            doing = self.read()
            log.cut(doing.phase, doing.step, doing.shard, doing.since, time.monotonic())
        return batch(log.take())

    def take(self, doing: Doing) -> None:
        """Note what a sheet elsewhere says; ``since`` by this host's clock. Does not block."""
        version, *_ = self._newest()
        took_s = max(0.0, time.monotonic() - doing.since)
        seconds = [doing.seconds[p] - took_s * (p == doing.phase) for p in PHASES]
        number = _NUMBERS[doing.phase]
        entry = (number, doing.step, doing.shard, doing.since, doing.shards, doing.stage)
        self._write(version + 1, *entry, *seconds)

    def _write(self, version: int, *rest: float) -> None:
        self._copies.write(version, _ENTRY.pack(*rest))

    def read(self) -> Doing:
        """Return what it is at. Any thread of any process may ask; does not block."""
        _, phase, step, shard, since, shards, stage, *seconds = self._newest()
        seconds[phase] += max(0.0, time.monotonic() - since)
        spent = dict(zip(PHASES, seconds, strict=True))
        return Doing(PHASES[phase], step, shard, since, spent, shards, stage)

    def _newest(self) -> tuple[Any, ...]:
        version, content = self._copies.read()
        return (version, *_ENTRY.unpack(content or _EMPTY))


class OwnTimesheet:
    """The same of a worker of this process: what one thread writes, and others read.

    An entry is one object, and is put in the place of the one before as a whole.
    """

    def __init__(self) -> None:
        # Phase, step, shard, since, shards, seconds: see ``Timesheet``.
        self._entry: tuple[str, int, int, float, int, list[float]]
        self._entry = ("starting", 0, 0, time.monotonic(), 0, [0.0] * len(PHASES))
        self.log: SpanLog | None = None  # of a run that is traced

    def tell(self, phase: str, step: int | None = None, shard: int | None = None) -> None:
        """Note that a phase begins, or goes on; of the same shard as before if none is named."""
        was, old_step, old_shard, since, shards, seconds = self._entry
        step = old_step if step is None else step
        shard = old_shard if shard is None else shard
        if phase == was and step == old_step and shard == old_shard:
            return
        now = time.monotonic()
        seconds = [*seconds]
        seconds[_NUMBERS[was]] += now - since
        if self.log is not None:
            self.log.phase(was, old_step, old_shard, since, now)
        self._entry = (phase, step, shard, now, shards + (phase == "fetching"), seconds)

    def read(self) -> Doing:
        """Return what it is at. Any thread may ask; does not block."""
        phase, step, shard, since, shards, seconds = self._entry
        spent = dict(zip(PHASES, seconds, strict=True))
        spent[phase] += max(0.0, time.monotonic() - since)
        return Doing(phase, step, shard, since, spent, shards)
