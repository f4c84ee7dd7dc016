"""Heartbeats: signs of life of ranks about once a second, and the stores with those of all ranks.

Ranks of one machine map a small file, without a lock, whose owner might be stopped. Ranks that
torchrun has started use keys in torchrun's store, read and written by a thread: a rank writes a key
with each heartbeat, rank 0 reads all keys at once, and all further ranks read the key of rank 0. So
the number of requests is the number of ranks, and not the square of this number.

The store outlives the ranks, and torchrun does not count each start: when a host joins or leaves,
ranks find keys of earlier ranks. So each rank writes a random word, and rank 0 publishes the words
found so far: a rank whose word is among them has met the ranks of this start.

All times follow from ``RANK_SILENCE_S``, how long a rank may be silent.
"""

from __future__ import annotations

import mmap
import secrets
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from quorate.engines.messages import MessageReader, pack, unpack
from quorate.engines.two_copies import TwoCopies
from quorate.engines.worker_status import PHASES, Doing, WorkerStatus
from quorate.machine.limits import RANK_SILENCE_S

MOST_BYTES = 8184  # of a packed heartbeat, whose texts are ``shortened``
_MOST_CHARACTERS = 400


class EndReason(NamedTuple):
    """Why all ranks are to end."""

    text: str
    rank: int | None  # the lost rank; None if no single rank is lost
    has_ended: bool = False  # True: the process that started the rank knows more
    hangs: bool = False  # True: the monitor of the rank is alive, and prints the reason


class Heartbeat(msgspec.Struct, frozen=True):
    """The state of a rank. New fields get defaults: versions of quorate may differ."""

    rank: int
    host: str  # the name of the host
    mark: str  # of the host, see ``this_host.mark``
    pid: int
    device: str
    doing: Doing
    is_late: bool  # see ``Doing``
    sent_at: float  # by the clock of the rank, as ``doing.since``
    number: int = 0  # rises with each heartbeat
    stop_signal: str | None = None  # the signal that requested the end of this rank
    leaves: str | None = None  # why this rank is about to leave
    end: EndReason | None = None  # of rank 0, and of a rank ended by its own monitor
    all_here: bool = False  # of rank 0: whether heartbeats of all ranks have come

    def status(self, heard_at: float, *, own_mark: str, show_host: bool) -> WorkerStatus:
        """Return the status of a worker.

        Args:
            heard_at: ``time.monotonic()`` when the heartbeat came.
            own_mark: mark of this host, where process ids of other hosts mean nothing.
            show_host: whether the run has several hosts.
        """
        is_here = self.mark == own_mark
        doing = self.doing._replace(since=heard_at - self.phase_s)
        pid, host = self.pid if is_here else None, self.host if show_host else None
        return WorkerStatus(self.rank, self.device, pid, None, *doing, host, not is_here)

    @property
    def phase_s(self) -> float:
        """Seconds spent in the current phase of the current shard."""
        return self.sent_at - self.doing.since

    @property
    def place(self) -> str:
        """Rank and host, in words: ``rank 2 on node7``."""
        return f"rank {self.rank} on {self.host}"

    @property
    def activity(self) -> str:
        """Phase, step and shard, in words: ``forward of step 7, shard 3``."""
        doing = self.doing
        if doing.phase == "starting":
            return "the start of its script"
        step = f" of step {doing.step:,}" if doing.shards else ""
        shard = f", shard {doing.shard}" if doing.phase in PHASES[2:] else ""
        return f"{doing.phase}{step}{shard}"


def shortened(text: str) -> str:
    """Return the beginning of a text, short enough for a heartbeat."""
    return text[:_MOST_CHARACTERS]


class SilenceLimits(NamedTuple):
    """Time limits of a run."""

    lost_s: float  # a rank that is silent for so long is lost
    hang_s: float  # a rank that is in one phase of one shard for so long hangs

    @staticmethod
    def of(timeout_s: float) -> SilenceLimits:
        """Return the limits of a run whose workers may take ``timeout_s`` for a shard."""
        return SilenceLimits(min(RANK_SILENCE_S, timeout_s), timeout_s)

    @property
    def beat_s(self) -> float:
        """The time between two heartbeats."""
        return self.lost_s / 10

    @property
    def most_s(self) -> float:
        """The limit for the way to the training loop, and for an exchange of tensors.

        A cold start is slow, and so is a large model over a slow link. A lost rank
        is noticed much earlier.
        """
        return max(6 * RANK_SILENCE_S, self.hang_s)

    @property
    def leave_s(self) -> float:
        """The limit for rank 0 to leave an exchange whose connections are closed."""
        return self.lost_s / 5


class HeartbeatReading(NamedTuple):
    """The newest heartbeats, as this rank has read them."""

    beats: Sequence[Heartbeat | None]  # by rank; None before the first heartbeat
    reached_at: float  # when the store was read last, by ``time.monotonic()``
    store: str  # the store, in words


LAST_TRIES = 5  # to publish the last heartbeat, which may say why the rank leaves
_SLOT = TwoCopies.room(MOST_BYTES)  # bytes of each rank
_HEARTBEATS: MessageReader[Heartbeat] = MessageReader(Heartbeat)


class FileHeartbeats:
    """A store in a file, maybe without a name, that all ranks of one machine map.

    Args:
        path: of a file of ``nbytes`` zeros.
        rank: of this process.
        size: number of ranks.

    Attributes:
        session: a word that only these ranks know; each start of ranks has its own file.
    """

    session = "0"

    def __init__(self, path: Path, rank: int, size: int) -> None:
        self._rank = rank
        with path.open("r+b") as file:
            memory = mmap.mmap(file.fileno(), size * _SLOT)
        self._beats = TwoCopies.row(memory, 0, size, MOST_BYTES)

    @staticmethod
    def nbytes(size: int) -> int:
        """Return the bytes of a file for some number of ranks."""
        return size * _SLOT

    def publish(self, beat: Heartbeat) -> None:
        """Publish a heartbeat of this rank; one thread at a time."""
        self._beats[self._rank].write(beat.number, pack(beat))

    def read(self) -> HeartbeatReading:
        """Return the newest heartbeats of all ranks."""
        texts = [copies.read()[1] for copies in self._beats]
        beats = [_HEARTBEATS.unpack(text) if text else None for text in texts]
        return HeartbeatReading(beats, time.monotonic(), "the file of the ranks")

    def close(self) -> None:
        """Do nothing: other ranks may still read."""


_SESSION = "quorate/session"
# Word of the rank, session, heartbeat.
_ENTRIES: MessageReader[tuple[str, str, Heartbeat]] = MessageReader(tuple[str, str, Heartbeat])


class StoreHeartbeats:
    """Heartbeats in a store of torch.distributed. Close the object at the end.

    Args:
        store: reached by all ranks. The object opens a new connection: while a connection waits
            for a key, all requests on the connection wait.
        rank: of this process.
        size: number of ranks.
        where: the store, in words.

    Attributes:
        session: a word that only these ranks know; "" until the ranks have met.
    """

    def __init__(self, store: Any, rank: int, size: int, limits: SilenceLimits, where: str) -> None:
        self._rank, self._size, self._limits, self._where = rank, size, limits, where
        self._store = store.clone()
        self._store.set_timeout(timedelta(seconds=limits.lost_s))
        self._word = secrets.token_hex(8)
        self._words = [""] * size  # of all ranks, as rank 0 has read them
        self.session = ""
        self._beats: list[Heartbeat | None] = [None] * size
        self._published = 0  # the number of this rank's newest heartbeat in the store
        self._reached_at = time.monotonic()
        self._wake = threading.Event()
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="quorate-heartbeats", daemon=True)
        self._thread.start()

    def publish(self, beat: Heartbeat) -> None:
        """Publish a heartbeat of this rank, soon."""
        self._beats[self._rank] = beat
        if beat.end is not None or beat.leaves is not None or beat.stop_signal is not None:
            self._wake.set()  # news, more than a sign of life

    def read(self) -> HeartbeatReading:
        """Return the newest heartbeats of all ranks."""
        where = f"the store of torchrun ({self._where})"
        return HeartbeatReading([*self._beats], self._reached_at, where)

    def close(self) -> None:
        """Leave the store after publishing the last heartbeat. Blocks for a moment."""
        self._is_closed = True
        self._wake.set()
        self._thread.join(3 * self._limits.beat_s)  # the daemon may be blocked in the store

    def _run(self) -> None:
        beat_s, left = self._limits.beat_s, LAST_TRIES
        while left:
            is_closed = self._is_closed  # then the newest heartbeat is there, and no other follows
            # A failure may pass: the monitor compares ``_reached_at`` with the clock.
            with suppress(Exception):
                self._exchange()
                self._reached_at = time.monotonic()
                left = 0 if is_closed else left
            left -= is_closed and left > 0
            heard = self._beats if self._rank == 0 else self._beats[:1]
            has_met = self.session != "" and None not in heard
            if left:
                self._wake.wait(beat_s if has_met and not is_closed else beat_s / 5)
                self._wake.clear()

    def _exchange(self) -> None:
        beat = self._beats[self._rank]
        if beat is not None and beat.number > self._published:
            self._store.set(_key(self._rank), pack((self._word, self.session, beat)))
            self._published = beat.number
        if self._rank == 0:
            self._read_all()
        else:
            self._read_first()

    def _read_all(self) -> None:
        keys = {rank: _key(rank) for rank in range(1, self._size)}
        found = [r for r, key in keys.items() if self._words[r] or self._store.check([key])]
        texts = self._store.multi_get([keys[rank] for rank in found]) if found else []
        words = [self._word, *self._words[1:]]
        for rank, text in zip(found, texts, strict=True):
            words[rank], session, beat = _ENTRIES.unpack(text)
            if session == self._word:
                self._beats[rank] = beat
        if words != self._words:
            self._words = words
            self._store.set(_SESSION, pack(words))
        self.session = self._word

    def _read_first(self) -> None:
        if not self.session:
            if not self._store.check([_SESSION]):
                return
            words = unpack(self._store.get(_SESSION))
            if len(words) != self._size or words[self._rank] != self._word:
                return  # words of ranks before these ranks
            self.session = words[0]
            self._published = 0  # publish again: rank 0 accepts heartbeats with the session
            self._wake.set()
        word, _, beat = _ENTRIES.unpack(self._store.get(_key(0)))
        if word == self.session:
            self._beats[0] = beat


def _key(rank: int) -> str:
    return f"quorate/beat/{rank}"
