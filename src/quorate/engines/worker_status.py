"""The status of workers: the current phase of each worker, and the time spent in each phase."""

from __future__ import annotations

import time
from typing import NamedTuple

from msgspec import msgpack

from quorate.engines.tracing import Batch, SpanLog, batch
from quorate.engines.two_copies import TwoCopies

# A shard passes through the last four phases in this order.
PHASES = ("starting", "waiting", "fetching", "forward", "backward", "pushing")

# The fields of ``Doing`` as a plain tuple, which is made in a fourth of the time. Each shard makes
# five. Memory of several processes has the tuple as MessagePack.
_Entry = tuple[str, int, int, float, dict[str, float], int, int]
_UNWRITTEN: _Entry = (PHASES[0], 0, 0, 0.0, dict.fromkeys(PHASES, 0.0), 0, -1)
_ENCODER, _DECODER = msgpack.Encoder(), msgpack.Decoder(_Entry)
_LARGEST = max(PHASES, key=len), 1 << 62, 1 << 62, 0.0, _UNWRITTEN[4], 1 << 62, 1 << 62


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
        """True if the worker has ended, and no replacement was started yet."""
        return self.pid is None and self.thread is None and not self.is_elsewhere


class Doing(NamedTuple):
    """The part of a ``WorkerStatus`` written by the worker itself, with the same fields."""

    phase: str
    step: int
    shard: int
    since: float
    seconds: dict[str, float]
    shards: int
    stage: int = -1

    @property
    def is_late(self) -> bool:
        """True if the phase takes 3 times as long as an earlier shard of the worker on average."""
        took_s = time.monotonic() - self.since
        before_s = sum(self.seconds[phase] for phase in PHASES[2:]) - took_s
        return took_s > 3 * before_s / max(1, self.shards - 1)

    def later(self, seconds: float) -> Doing:
        """Return the same some seconds later in the current phase."""
        spent = self.seconds[self.phase] + seconds
        return self._replace(seconds={**self.seconds, self.phase: spent})


class Timesheet:
    """The phases of one worker and their times, written by one thread and read by any thread.

    An entry is one immutable object, so that readers need no lock. ``tell`` the first phase.

    Args:
        copies: memory of several processes, each of which may read at any time. One thread writes
            at a time: the worker's, or the coordinator's without a worker.
    """

    ENTRY_BYTES = len(_ENCODER.encode(_LARGEST))  # of the longest content of ``copies``

    def __init__(self, copies: TwoCopies | None = None) -> None:
        self._copies = copies
        # The version of the entry, and the entry: the seconds are without the current phase, which
        # began at 0 before the first phase.
        self._last = 0, _UNWRITTEN
        self._log: SpanLog | None = None  # of a traced run

    def tell(self, phase: str, step: int | None = None, shard: int | None = None) -> None:
        """Note the beginning of a phase, or that the phase continues. Does not block.

        Args:
            phase: one of ``PHASES``.
            step: of the shard. Default: the shard as before.
            shard: number of the shard.
        """
        version, entry = self._last if self._copies is None else self._newest()
        was, old_step, old_shard, since, before, shards, _ = entry
        if step is None or shard is None:
            step, shard = old_step, old_shard
        if phase == was and since and step == old_step and shard == old_shard:
            return
        now, seconds = time.monotonic(), before.copy()
        if since:
            seconds[was] += now - since
            if self._log is not None:
                self._log.phase(was, old_step, old_shard, since, now)
        if phase == "fetching":
            shards += 1
        entry = phase, step, shard, now, seconds, shards, -1
        if self._copies is None:  # without a call: several times per shard
            self._last = version, entry
        else:
            self._write(version + 1, entry)

    def waits_for(self, stage: int) -> None:
        """Note a pipeline stage that takes long; the phase continues. Does not block."""
        version, entry = self._newest()
        if stage != entry[-1]:
            self._write(version + 1, (*entry[:-1], stage))

    def record(self, job: str | None, step: int = 0, shard: int = 0) -> None:
        """Note phases as spans of a job from now on; None: note no more spans.

        Call ``record`` in the worker's thread.

        Args:
            step: of the shards of the worker.
            shard: the first of the shards.
        """
        if job is not None and self._log is None:
            self._log = SpanLog()
        if self._log is not None:
            self._log.begin(job, step, shard)

    def recorded(self, *, cuts: bool) -> Batch | None:
        """Return the spans since the last call as a message; None: no spans are noted.

        Args:
            cuts: whether the spans include the current phase up to now.
        """
        log = self._log
        if log is None or log.job is None:
            return None
        if cuts:
            doing = self.read()
            log.cut(doing.phase, doing.step, doing.shard, doing.since, time.monotonic())
        return batch(log.take())

    def take(self, doing: Doing) -> None:
        """Copy a timesheet of another host; ``since`` is by this host's clock. Does not block."""
        took_s = max(0.0, time.monotonic() - doing.since)
        self._write(self._newest()[0] + 1, doing.later(-took_s))

    def read(self) -> Doing:
        """Return the current phase and all times. Thread-safe; does not block."""
        doing = Doing(*self._newest()[1])
        return doing.later(max(0.0, time.monotonic() - doing.since))

    def _newest(self) -> tuple[int, _Entry]:
        # Usually no other process has written: five phases of each shard need not read the memory.
        if self._copies is not None and self._copies.last_version() != self._last[0]:
            version, content = self._copies.read()
            self._last = version, _DECODER.decode(content) if content else _UNWRITTEN
        return self._last

    def _write(self, version: int, entry: _Entry) -> None:
        # A thread interrupted between the two lines reads the memory the next time.
        self._last = version, entry
        if self._copies is not None:
            self._copies.write(version, _ENCODER.encode(entry))
