"""Loader processes: load shards ahead, and send each batch through a socket.

A process leaves nothing behind: no file, no folder, no segment with a name. So a loader may end at
any instant, and ends with its parent (by signal 9, which also ends a stopped process). The workers
load all batches that are then missing, or that cannot be sent.
"""

from __future__ import annotations

import socket
import struct
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from itertools import cycle
from typing import Protocol

from quorate.data.parcel import UnsentError, pack, unpack
from quorate.data.source import Batch, Source, Ticket
from quorate.machine.forked_child import ForkedChild, end_children
from quorate.machine.limits import BUSY_EXIT_S, EXIT_REPORT_S
from quorate.machine.standard_streams import Steady

# Requested and not yet delivered shards per process.
PREFETCHED = 2

_TICKET = struct.Struct("<qq")

Load = tuple[Ticket, Batch | None]
Told = Callable[[Ticket | None], None]  # called with the ticket being loaded, or None


def nobody_told(_ticket: Ticket | None) -> None:
    """Do nothing with a ticket."""


class LoadedBatches(Protocol):
    """Batches in the order of the tickets; None for a batch that could not be loaded."""

    def __iter__(self) -> Iterator[Load]: ...

    def end(self) -> None:
        """End any wait for the next batch. Any thread may call this; does not block."""

    def close(self) -> None:
        """End the processes, when nobody waits for a batch. Blocks."""


def load_all(
    source: Source,
    tickets: Iterable[Ticket],
    loader_workers: int,
    threads: int,
    told: Told = nobody_told,
) -> LoadedBatches:
    """Load the tickets in turn; None where the dataset raised.

    Processes start before the return, in the calling thread.

    Args:
        loader_workers: number of processes; with 0 the iterating thread loads.
        threads: intra-op threads of each process.
        told: called before and after each load of the iterating thread.
    """
    if not loader_workers:
        return _InThread(source, tickets, told)
    return LoaderProcesses(source, tickets, loader_workers, threads)


class _InThread:
    """A loader in the iterating thread."""

    def __init__(self, source: Source, tickets: Iterable[Ticket], told: Told) -> None:
        self._source = source
        self._tickets = tickets
        self._told = told

    def __iter__(self) -> Iterator[Load]:
        for ticket in self._tickets:
            self._told(ticket)
            batch = attempt(self._source, ticket)
            self._told(None)
            yield ticket, batch

    def end(self) -> None:
        pass

    def close(self) -> None:
        pass


class LoaderProcesses:
    """Processes that load tickets in turn. Iterate once, then ``close``.

    Args:
        source: loads a ticket.
        tickets: drawn in the iterating thread, ``PREFETCHED`` per process ahead.
        count: number of processes.
        threads: intra-op threads of each process.
    """

    def __init__(self, source: Source, tickets: Iterable[Ticket], count: int, threads: int) -> None:
        self._tickets = iter(tickets)
        self._loaders: list[_LoaderProcess] = []
        try:
            for _ in range(count):
                self._loaders.append(_LoaderProcess(source, threads))
        except BaseException:
            self.close()
            raise

    def __iter__(self) -> Iterator[Load]:
        asked: deque[tuple[_LoaderProcess, Ticket]] = deque()
        turns = cycle(self._loaders)
        while True:
            while len(asked) < PREFETCHED * len(self._loaders):
                ticket = next(self._tickets, None)
                if ticket is None:
                    break
                loader = next(turns)
                loader.ask(ticket)
                asked.append((loader, ticket))
            if not asked:
                return
            loader, ticket = asked.popleft()
            yield ticket, loader.take()

    def end(self) -> None:
        """End any wait for the next batch. Any thread may call this; does not block."""
        for loader in self._loaders:
            loader.end()

    def close(self) -> None:
        """End the processes. Blocks for ``BUSY_EXIT_S``, and for the kernel if some are killed."""
        self.end()
        end_children([loader.child for loader in self._loaders], BUSY_EXIT_S)
        for loader in self._loaders:
            loader.close()


class _LoaderProcess:
    """A loader process, and the parent's end of the socket."""

    def __init__(self, source: Source, threads: int) -> None:
        self._socket, theirs = socket.socketpair()
        self._is_ended = False
        self._is_lost = False
        try:
            self.child = ForkedChild(
                "loader", _serve, theirs, source, closes=[self._socket], threads=threads
            )
        except BaseException:
            self._socket.close()
            raise
        finally:
            theirs.close()

    def ask(self, ticket: Ticket) -> None:
        """Request a ticket. Does not block: the socket has room for all requests."""
        with suppress(OSError):
            self._socket.sendall(_TICKET.pack(*ticket))

    def take(self) -> Batch | None:
        """Return the next requested batch; None if the batch is lost. Blocks."""
        if self._is_lost:  # no request was sent, so there is no answer to wait for
            return None
        try:
            loaded: Batch | None = unpack(self._socket)
        except UnsentError as error:
            _say(f"a loader process cannot send rows of this dataset ({error})")
            return None
        except (OSError, EOFError):
            self._lost()
            return None
        except Exception as error:  # the edge of a thread: too many files, no memory
            # The socket may still contain the rest of this batch: no later batch can be read.
            self._lost(f"{type(error).__name__}: {error}".splitlines()[0])
            return None
        return loaded

    def end(self) -> None:
        """Close the conversation, which ends the process and any wait. Does not block."""
        self._is_ended = True
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the socket. The process must have ended."""
        self._socket.close()

    def _lost(self, problem: str = "") -> None:
        """Print once why no more batches come from this process.

        Args:
            problem: the fault of a received batch, for which the process is killed; empty: the
                process has ended.
        """
        if self._is_ended or self._is_lost:
            return
        self._is_lost = True
        if problem:
            self.child.kill()
            _say(f"rows from loader process {self.child.pid} cannot be read ({problem})")
            return
        code = self.child.wait(EXIT_REPORT_S)
        how = "ended" if code is None or code >= 0 else f"was killed by signal {-code}"
        _say(f"loader process {self.child.pid} {how}")


def attempt(source: Source, ticket: Ticket) -> Batch | None:
    """Return the batch of a ticket; None if the dataset raises: the worker's load raises again."""
    try:
        return source.load(ticket)
    except Exception:  # the edge of a thread or process
        return None


def _serve(end: socket.socket, source: Source) -> None:
    """Load the requested tickets, until the parent's end is closed. Runs in the loader process."""
    source.is_sent = True
    with suppress(OSError):  # the parent's end is closed
        while len(asked := end.recv(_TICKET.size, socket.MSG_WAITALL)) == _TICKET.size:
            step, shard = _TICKET.unpack(asked)
            pack(end, attempt(source, (step, shard)))


_said: set[str] = set()
_saying = threading.Lock()


def _say(line: str) -> None:
    """Print a line once to standard error: there is no connection to the coordinator."""
    with _saying:
        if line in _said:
            return
        _said.add(line)
    errors = Steady(sys.stderr)
    print(f"quorate: {line}; the workers load the rows themselves", file=errors, flush=True)
