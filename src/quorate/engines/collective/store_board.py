"""The board of ranks that torchrun has started: keys in its store, read and written by a thread.

A rank writes one key a beat, rank 0 reads all of them at once, and the others read rank 0's. So
there are as many requests as ranks, and not their square.

The store outlives the ranks, and torchrun does not count each time that it starts them: when a host
joins or leaves, ranks find what those before them have left. So each writes a word of its own that
nobody could know, and rank 0 shows the words that it has read: whoever finds its own among them is
heard, and has met the ranks of this start.
"""

from __future__ import annotations

import json
import secrets
import threading
import time
from contextlib import suppress
from datetime import timedelta
from typing import Any

from quorate.engines.collective.beat import Beat
from quorate.engines.collective.judge import Heard, Times

_SESSION = "quorate/session"


class StoreBoard:
    """A board in a store of torch.distributed. ``close`` it.

    Args:
        store: that all ranks reach. A connection of its own is taken: one that waits for a key
            lets nobody else ask.
        where: the store, in words.
    """

    def __init__(self, store: Any, rank: int, size: int, times: Times, where: str) -> None:
        self._rank, self._size, self._times, self._where = rank, size, times, where
        self._store = store.clone()
        self._store.set_timeout(timedelta(seconds=times.lost_s))
        self._word = secrets.token_hex(8)
        self._words = [""] * size  # on rank 0, as it has read them
        self.session = ""
        self._beats: list[Beat | None] = [None] * size
        self._reached_at = time.monotonic()
        self._newest: Beat | None = None  # of this rank
        self._untold: Beat | None = None  # the same, if it is not in the store
        self._wake, self._told = threading.Event(), threading.Event()
        self._told.set()
        self._is_closed = False
        self._lock = threading.Lock()  # what is untold, and whether anything is
        self._thread = threading.Thread(target=self._run, name="quorate-board", daemon=True)
        self._thread.start()

    def tell(self, beat: Beat) -> None:
        """See ``Board``."""
        with self._lock:
            self._told.clear()
            self._newest = self._untold = self._beats[self._rank] = beat
        if beat.verdict is not None or beat.left is not None or beat.asked is not None:
            self._wake.set()  # news, and not a sign of life

    def heard(self) -> Heard:
        """See ``Board``."""
        return Heard(tuple(self._beats), self._reached_at, f"the store of torchrun ({self._where})")

    def close(self) -> None:
        """See ``Board``."""
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
                self._beats[rank] = Beat.unpacked(packed.encode())
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
            self._beats[0] = Beat.unpacked(packed.encode())


def _key(rank: int) -> str:
    return f"quorate/beat/{rank}"
