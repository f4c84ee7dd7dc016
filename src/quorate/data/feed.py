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

# A shard that loads faster is loaded by the thread that needs the rows: handing rows over between
# threads takes as long.
CHEAP_S = 3e-4
FIRST_LOAD = 30  # a first load may take so many times as long as usual
SLOW_LOADS = 16  # slow loads in a row before loading ahead: a few may have waited for a core


class Feed:
    """A loader of shards ahead of their use, in the order of the tickets; cheap shards on demand.

    Any thread may call ``take``; ``close`` ends the thread and the processes.

    Args:
        source: loads a shard.
        tickets: the shards in the order of their later use.
        ahead: largest number of shards held ready.
        behind: shards up to so many steps before a taken shard may still be needed; older shards
            are dropped, or not loaded.
        covers: returns whether a shard is, or was, among the tickets; all other shards are loaded
            on demand.
        loader_workers: number of loading processes; 0 means a thread of this process. Increase if
            rows take long to decode and the workers wait for input.
        threads: intra-op threads of the loading code, equal to the workers': bits depend on the
            number.
        moves_to: the device that batches will be moved to, for page-locking.
        told: called with each ticket loaded ahead by the feed's own thread.
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
        self._wanted: Ticket = (-1, -1)  # the last ticket that a thread waits for
        self._ready: dict[Ticket, Batch | None] = {}
        self._loaded: Ticket = (-1, -1)  # the last ticket put into _ready
        self._ended = False
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None  # started with the first load ahead
        self._tickets = iter(tickets)
        self._taken: Ticket = (-1, -1)  # the last ticket taken, while nothing is loaded ahead
        self._told = told
        self._has_warned = False  # about memory that cannot be page-locked
        self._slow = 0  # number of consecutive loads that were not cheap
        if loader_workers or moves_to.type != "cpu" or not self._is_cheap():
            # Loader processes start at this point, in the caller's thread: in a training loop
            # before the workers' threads. A fork of a process with running threads may inherit a
            # locked lock.
            self._load_ahead(loader_workers)

    def _is_cheap(self) -> bool:
        """Return whether a shard is cheap to load; repeats a slow first measurement."""
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
        """Return the rows of a shard; wait for the rows if necessary.

        A shard already taken (by a worker that died or is slow) is loaded again, by the caller. So
        is a shard whose loading failed: the dataset's exception is raised in the caller.
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
                del self._ready[old]  # the step is over: no worker will need the shard
            self._changed.notify_all()
        return self._source.load(ticket) if batch is None else batch

    def take_run(self, tickets: Sequence[Ticket]) -> list[Batch]:
        """Return the rows of neighbouring shards of one step, like ``take`` for each."""
        if self._thread is not None or tickets[0] in self._ready:
            return [self.take(ticket) for ticket in tickets]
        batches = self._source.load_run(tickets)
        self._note_time(tickets[-1])
        return batches

    def load_following(self) -> None:
        """Load the shard after the last taken shard, unless a thread loads ahead.

        For a feed with a single user, while no worker waits. An exception of the dataset is raised
        when the shard is taken. Expensive shards are loaded by this method only a few times, until
        a thread loads ahead: see ``SLOW_LOADS``.
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
        """Note a load; start loading ahead after several consecutive expensive loads."""
        self._taken = taken
        if self._source.last_s <= CHEAP_S:
            self._slow = 0
            return
        with self._changed:  # several towers share a feed
            self._wanted = max(self._wanted, taken)
            self._slow += 1
            if self._slow >= SLOW_LOADS and self._thread is None and not self._ended:
                self._load_ahead()

    def following(self, ticket: Ticket) -> Batch | None:
        """Return the next loaded batch after a ticket's, without taking it; None without one."""
        with self._changed:
            later = min((t for t in self._ready if t > ticket), default=None)
            return None if later is None else self._ready[later]

    def close(self) -> None:
        """End the thread and the processes; a slow row delays the end only briefly."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()
        if self._thread is None:
            return
        self._loads.end()
        # After a second Ctrl-C, do not wait for a dataset that may hang.
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
        """Return a batch in page-locked memory; None if page-locking fails.

        After a failure the caller loads the batch again, and moves it from ordinary memory:
        page-locked memory may be exhausted now and available for the next batch.
        """
        try:
            return loaded._replace(data=pinned(loaded.data, self._moves_to))
        except Exception as error:  # the edge of a thread; the user's classes may raise
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
                    # The ready shards may never be taken, because other workers computed them. So a
                    # ticket that a thread waits for is loaded even beyond the bound.
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
