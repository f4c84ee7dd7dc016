"""The feed: rows of the dataset, loaded ahead of the shards that need them."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from itertools import chain, islice

import torch

from quorate.data.loader_processes import Told, load_all, nobody_told
from quorate.data.source import Batch, Source, Ticket
from quorate.machine.limits import ABANDONED_S, BUSY_EXIT_S
from quorate.replica.transfer import pinned

CPU = torch.device("cpu")

# A shard that takes no longer to load is loaded by whoever wants it: to hand it over from one
# thread to another takes as long.
CHEAP_S = 3e-4
FIRST_LOAD = 30  # times as long as usual a first load may take
SLOW_LOADS = 16  # in turn, after which shards are loaded ahead: some may have waited for a core


class Feed:
    """Loads shards ahead of their use, in the order of the tickets; cheap ones when they are taken.

    Args:
        source: what loads them.
        tickets: the shards in the order in which they will be wanted.
        ahead: how many shards are held ready at most.
        behind: shards so many steps before one that was taken may still be wanted; older ones are
            dropped, or not loaded.
        covers: whether a shard is, or was, among the tickets; others are loaded when asked for.
        loader_workers: processes that load; 0 means a thread of this process. Turn it up if rows
            take long to decode and the workers wait for input.
        threads: intra-op threads of what loads, as workers have them: bits depend on it.
        moves_to: a device that batches will be moved to, for which they are made ready.
        told: of what is loaded ahead by the feed's own thread.

    ``take`` may be called by any thread; ``close`` ends the thread and the processes.
    """

    def __init__(
        self,
        source: Source,
        tickets: Iterable[Ticket],
        *,
        ahead: int,
        behind: int = 0,
        covers: Callable[[Ticket], bool] = lambda _: True,
        loader_workers: int = 0,
        threads: int = 1,
        moves_to: torch.device = CPU,
        told: Told = nobody_told,
    ) -> None:
        self._source = source
        self._moves_to = moves_to
        self._ahead = ahead
        self._behind = behind
        self._covers = covers
        self._threads = threads
        self._wanted: Ticket = (-1, -1)  # the last one that somebody waits for
        self._ready: dict[Ticket, Batch | None] = {}
        self._loaded: Ticket = (-1, -1)  # the last one put into _ready
        self._ended = False
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None  # once something is loaded ahead
        self._tickets = iter(tickets)
        self._taken: Ticket = (-1, -1)  # the last one, while nothing is loaded ahead
        self._told = told
        self._has_warned = False  # of memory that cannot be page-locked
        self._slow = 0  # loads in turn that were not cheap
        if loader_workers or moves_to.type != "cpu" or not self._is_cheap():
            # Loader processes start here, in the caller's thread: of a training loop before the
            # workers' threads. A fork of a process with running threads may inherit a locked lock.
            self._load_ahead(loader_workers)

    def _is_cheap(self) -> bool:
        """Return whether a shard is cheap to load; tried where a first load may have been slow."""
        source = self._source
        if source.load_s > FIRST_LOAD * CHEAP_S:
            return False
        first = list(islice(self._tickets, 1))
        self._tickets = chain(first, self._tickets)
        for ticket in [*first, *first]:
            if source.load_s > CHEAP_S:
                source.load(ticket)
        return source.load_s <= CHEAP_S

    def _load_ahead(self, loader_workers: int = 0) -> None:
        still_wanted = (t for t in self._tickets if t[0] >= self._wanted[0] - self._behind)
        self._loads = load_all(
            self._source, still_wanted, loader_workers, self._threads, self._told
        )
        self._thread = threading.Thread(target=self._run, name="quorate-feed", daemon=True)
        self._thread.start()

    def take(self, ticket: Ticket) -> Batch:
        """Return the rows of a shard; wait for them if need be.

        A shard that was taken before (its worker died, or is slow) is loaded again, by the caller,
        and so is one whose loading failed: what the dataset raises, it raises here.
        """
        if self._thread is None:
            return self._loaded_now(ticket)
        with self._changed:
            if self._covers(ticket):
                self._wanted = max(self._wanted, ticket)
                self._changed.notify_all()
                while ticket > self._loaded and not self._ended:
                    self._changed.wait()
            batch = self._ready.pop(ticket, None)
            for old in [t for t in self._ready if t[0] < ticket[0] - self._behind]:
                del self._ready[old]  # of a step that is over: nobody will come for it
            self._changed.notify_all()
        return self._source.load(ticket) if batch is None else batch

    def take_run(self, tickets: Sequence[Ticket]) -> list[Batch]:
        """Return the rows of neighbouring shards of one step, as ``take`` of each."""
        if self._thread is not None or tickets[0] in self._ready:
            return [self.take(ticket) for ticket in tickets]
        batches = self._source.load_run(tickets)
        self._note_time(tickets[-1])
        return batches

    def load_following(self) -> None:
        """Load the shard after the one that was taken last, if no thread loads ahead.

        For whoever alone takes from this feed, while nobody waits for it. What the dataset raises
        it raises when the shard is taken. One that is not cheap is loaded so a few times at most:
        see ``SLOW_LOADS``.
        """
        if self._thread is not None or any(ticket > self._taken for ticket in self._ready):
            return
        following = (ticket for ticket in self._tickets if ticket > self._taken)
        try:
            for ticket, batch in load_all(self._source, following, 0, self._threads, self._told):
                self._ready = {ticket: batch}
                return
        except SystemExit:
            self._told(None)

    def _loaded_now(self, ticket: Ticket) -> Batch:
        if (ready := self._ready.pop(ticket, None)) is not None:
            batch = ready
        else:
            batch = self._source.load(ticket)
        self._note_time(ticket)
        return batch

    def _note_time(self, taken: Ticket) -> None:
        """Load ahead from now on, if it was not cheap again and again."""
        self._taken = taken
        if self._source.last_s <= CHEAP_S:
            self._slow = 0
            return
        with self._changed:  # several towers have one feed
            self._wanted = max(self._wanted, taken)
            self._slow += 1
            if self._slow >= SLOW_LOADS and self._thread is None and not self._ended:
                self._load_ahead()

    def following(self, ticket: Ticket) -> Batch | None:
        """Return the next batch after a ticket's that is loaded and not taken, if there is one."""
        with self._changed:
            later = min((t for t in self._ready if t > ticket), default=None)
            return None if later is None else self._ready[later]

    def close(self) -> None:
        """End the thread and the processes; a row that takes long keeps nobody for long."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()
        if self._thread is None:
            return
        self._loads.end()
        # After a second Ctrl-C nobody waits for a dataset that may be stuck.
        at_once = isinstance(sys.exc_info()[1], (KeyboardInterrupt, SystemExit))
        self._thread.join(timeout=ABANDONED_S if at_once else BUSY_EXIT_S)
        if self._thread.is_alive() and not at_once:
            logging.getLogger("quorate").warning(
                "a thread still loads rows that no worker needs, and was abandoned: the dataset "
                "takes more than %g s for the rows",
                BUSY_EXIT_S,
            )
        self._ready.clear()

    def _pinned(self, loaded: Batch) -> Batch | None:
        """Return a batch in page-locked memory; None where that fails.

        Whoever wants the batch then loads it again, and moves it as it is: there may be no more
        such memory now, and be some for the next batch.
        """
        try:
            return loaded._replace(data=pinned(loaded.data, self._moves_to))
        except Exception as error:  # the edge of a thread; a batch has the user's own classes
            if not self._has_warned:
                self._has_warned = True
                logging.getLogger("quorate").warning(
                    "batches move to %s without page-locked memory, so copies are slower (%s: %s)",
                    *(self._moves_to, type(error).__name__, str(error).partition("\n")[0]),
                )
            return None

    def _run(self) -> None:
        torch.set_num_threads(self._threads)  # OpenMP keeps this number per thread
        try:
            for ticket, loaded in self._loads:
                batch = loaded and self._pinned(loaded)
                with self._changed:
                    # Nobody may come for what is ready: others computed it. So a ticket that
                    # somebody waits for is loaded even beyond the bound.
                    while (
                        len(self._ready) >= self._ahead
                        and self._wanted <= self._loaded
                        and not self._ended
                    ):
                        self._changed.wait()
                    if self._ended:
                        return
                    self._ready[ticket], self._loaded = batch, ticket
                    self._changed.notify_all()
        finally:
            self._loads.close()
            with self._changed:
                self._ended = True
                self._changed.notify_all()
