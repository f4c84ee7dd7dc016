"""The board: where each rank publishes heartbeats, and reads the heartbeats of others.

Ranks of one machine map a small file, without a lock, whose owner might be stopped. Ranks that
torchrun has started use keys in torchrun's store, read and written by a thread: a rank writes a key
with each beat, rank 0 reads all keys at once, and the others read the key of rank 0. So there are
as many requests as ranks, and not the square.

The store outlives the ranks, and torchrun does not count each start: when a host joins or leaves,
ranks find keys of earlier ranks. So each rank writes a random word, and rank 0 publishes the words
that rank 0 has read: a rank whose word is among them has met the ranks of this start.
"""

from __future__ import annotations

import json
import mmap
import secrets
import threading
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

from quorate.engines.collective.failure_detector import HeartbeatReading, SilenceLimits
from quorate.engines.collective.heartbeat import MOST_BYTES, Heartbeat
from quorate.engines.two_copies import TwoCopies

_SLOT = TwoCopies.room(MOST_BYTES)  # bytes of each rank


class HeartbeatStore(Protocol):
    """A place where ranks publish and read heartbeats. Only ``close`` blocks."""

    session: str  # what only these ranks know; "" as long as they have not met

    def tell(self, beat: Heartbeat) -> None:
        """Publish a beat of this rank, soon."""

    def heard(self) -> HeartbeatReading:
        """Return the newest beats of all ranks."""

    def close(self) -> None:
        """Leave the board after publishing the last beat. Blocks for a moment."""


class FileHeartbeats:
    """A board in a file that all ranks of one machine map, also without a name.

    Args:
        path: of a file of ``nbytes`` zeros.
        rank: of this process.
    """

    session = "0"  # each start of ranks has a file of its own

    def __init__(self, path: Path, rank: int, size: int) -> None:
        self._rank = rank
        with path.open("r+b") as file:
            memory = mmap.mmap(file.fileno(), size * _SLOT)
        self._beats = [TwoCopies(memory, each * _SLOT, MOST_BYTES) for each in range(size)]

    @staticmethod
    def nbytes(size: int) -> int:
        """Return the bytes of a board for some number of ranks."""
        return size * _SLOT

    def tell(self, beat: Heartbeat) -> None:
        """See ``HeartbeatStore``; one thread at a time."""
        own = self._beats[self._rank]
        own.write(own.read()[0] + 1, beat.packed())

    def heard(self) -> HeartbeatReading:
        """See ``HeartbeatStore``."""
        texts = [copies.read()[1] for copies in self._beats]
        beats = [Heartbeat.unpacked(text) if text else None for text in texts]
        return HeartbeatReading(beats, time.monotonic(), "the file of the ranks")

    def close(self) -> None:
        """Do nothing: ranks may still read."""


_SESSION = "quorate/session"


class StoreHeartbeats:
    """A board in a store of torch.distributed. Close the board at the end.

    Args:
        store: reached by all ranks. The board opens a new connection: while a connection waits
            for a key, all requests wait.
        where: the store, in words.
    """

    def __init__(self, store: Any, rank: int, size: int, times: SilenceLimits, where: str) -> None:
        self._rank, self._size, self._times, self._where = rank, size, times, where
        self._store = store.clone()
        self._store.set_timeout(timedelta(seconds=times.lost_s))
        self._word = secrets.token_hex(8)
        self._words = [""] * size  # on rank 0, as it has read them
        self.session = ""
        self._beats: list[Heartbeat | None] = [None] * size
        self._reached_at = time.monotonic()
        self._newest: Heartbeat | None = None  # of this rank
        self._untold: Heartbeat | None = None  # the same, if it is not in the store
        self._wake, self._told = threading.Event(), threading.Event()
        self._told.set()
        self._is_closed = False
        self._lock = threading.Lock()  # what is untold, and whether anything is
        self._thread = threading.Thread(target=self._run, name="quorate-board", daemon=True)
        self._thread.start()

    def tell(self, beat: Heartbeat) -> None:
        """See ``HeartbeatStore``."""
        with self._lock:
            self._told.clear()
            self._newest = self._untold = self._beats[self._rank] = beat
        if beat.verdict is not None or beat.left is not None or beat.asked is not None:
            self._wake.set()  # news, and not a sign of life

    def heard(self) -> HeartbeatReading:
        """See ``HeartbeatStore``."""
        return HeartbeatReading(
            tuple(self._beats), self._reached_at, f"the store of torchrun ({self._where})"
        )

    def close(self) -> None:
        """See ``HeartbeatStore``."""
        self._wake.set()
        self._told.wait(2 * self._times.beat_s)
        self._is_closed = True
        self._wake.set()
        self._thread.join(self._times.beat_s)  # it may be blocked in the store, and is a daemon

    def _run(self) -> None:
        while not self._is_closed:
            # What cannot be reached now may be later: whoever judges looks at the clock.
            with suppress(Exception):
                self._exchange()
                self._reached_at = time.monotonic()
            is_met = self.session and None not in self._beats[: self._size if not self._rank else 1]
            self._wake.wait(self._times.beat_s if is_met else self._times.beat_s / 5)
            self._wake.clear()

    def _exchange(self) -> None:
        if (beat := self._untold) is not None:
            text = beat.packed().decode()
            self._store.set(_key(self._rank), json.dumps([self._word, self.session, text]))
            with self._lock:  # else a beat that is told just now would be taken for this one
                if beat is self._untold:
                    self._untold = None
                    self._told.set()
        if self._rank == 0:
            self._read_all()
        else:
            self._read_first()

    def _read_all(self) -> None:
        ranks = list(range(1, self._size))
        if "" in self._words[1:]:
            ranks = [r for r in ranks if self._words[r] or self._store.check([_key(r)])]
        found = self._store.multi_get([_key(rank) for rank in ranks]) if ranks else []
        words = [self._word, *self._words[1:]]
        for rank, text in zip(ranks, found, strict=True):
            words[rank], session, packed = json.loads(text)
            if session == self._word:
                self._beats[rank] = Heartbeat.unpacked(packed.encode())
        if words != self._words:
            self._words = words
            self._store.set(_SESSION, json.dumps(words))
        self.session = self._word

    def _read_first(self) -> None:
        if not self.session:
            if not self._store.check([_SESSION]):
                return
            words = json.loads(self._store.get(_SESSION))
            if len(words) != self._size or words[self._rank] != self._word:
                return  # of ranks before these
            self.session = words[0]
            with self._lock:
                self._untold = self._newest  # rank 0 hears whoever says this
            self._wake.set()
        word, _, packed = json.loads(self._store.get(_key(0)))
        if word == self.session:
            self._beats[0] = Heartbeat.unpacked(packed.encode())


def _key(rank: int) -> str:
    return f"quorate/beat/{rank}"
