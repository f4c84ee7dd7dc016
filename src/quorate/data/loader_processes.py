"""Loader processes: they load shards ahead, and hand them over through a socket each.

A process owns nothing that outlives it: no file, no folder, no segment with a name. So it may end
at any instant, and it does with its parent (signal 9, which also ends one that is stopped). What it
was to load then, or cannot hand over, is loaded by whoever needs it.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import struct
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from multiprocessing.util import Finalize
from typing import Protocol

import torch

from quorate.data.parcel import pack, unpack
from quorate.data.source import Batch, Source, Ticket
from quorate.machine.dies_with_parent import JOB_SIGNALS, die_with
from quorate.machine.freed_memory import keep_freed_memory
from quorate.machine.limits import BUSY_EXIT_S, EXIT_REPORT_S
from quorate.machine.signal_handlers import ignore_job_signals
from quorate.machine.standard_streams import Steady

# Shards that each process was asked for and has not handed over.
PREFETCHED = 2
# How long processes may take to end, which may be in the middle of a row; then they are killed.

_TICKET = struct.Struct("<qq")

Load = tuple[Ticket, Batch | None]
Told = Callable[[Ticket | None], None]  # what is loaded from now on


def nobody_told(_ticket: Ticket | None) -> None:
    """Tell nobody."""


class Loads(Protocol):
    """What is loaded, in the order of the tickets; None where it could not be."""

    def __iter__(self) -> Iterator[Load]: ...

    def end(self) -> None:
        """Have whoever waits for the next one wait no longer. Any thread may; does not block."""

    def close(self) -> None:
        """Free what it holds. Only when nobody waits for it. Blocks until processes have ended."""


def load_all(
    source: Source,
    tickets: Iterable[Ticket],
    loader_workers: int,
    threads: int,
    told: Told = nobody_told,
) -> Loads:
    """Load one ticket after the other; None where the dataset raised.

    Processes start before this returns, in the thread that calls it.

    Args:
        loader_workers: how many processes load; 0 is the thread that iterates.
        threads: intra-op threads of each process.
        told: of what the thread that iterates loads, and when it is done.
    """
    if not loader_workers:
        return _InThread(source, tickets, told)
    return LoaderProcesses(source, tickets, loader_workers, threads)


class _InThread:
    """Loads in the thread that iterates."""

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
    """Processes that load tickets in turn. Iterate over them once; ``close`` them.

    Args:
        source: what loads.
        tickets: asked for in the thread that iterates, ``PREFETCHED`` per process ahead.
        count: how many.
        threads: intra-op threads of each.
    """

    def __init__(self, source: Source, tickets: Iterable[Ticket], count: int, threads: int) -> None:
        self._tickets = iter(tickets)
        self._processes: list[_LoaderProcess] = []
        # Where it is left behind: before multiprocessing waits for its processes at the exit.
        self._at_exit = Finalize(None, _kill, (self._processes,), exitpriority=10)
        try:
            for _ in range(count):
                self._processes.append(_LoaderProcess(source, threads))
        except BaseException:
            self.close()
            raise

    def __iter__(self) -> Iterator[Load]:
        asked: deque[tuple[_LoaderProcess, Ticket]] = deque()
        turn = 0
        while True:
            while len(asked) < PREFETCHED * len(self._processes):
                ticket = next(self._tickets, None)
                if ticket is None:
                    break
                process = self._processes[turn % len(self._processes)]
                process.ask(ticket)
                asked.append((process, ticket))
                turn += 1
            if not asked:
                return
            process, ticket = asked.popleft()
            yield ticket, process.take()

    def end(self) -> None:
        """Have whoever waits for the next one wait no longer. Any thread may; does not block."""
        for process in self._processes:
            process.end()

    def close(self) -> None:
        """End the processes. Blocks for ``BUSY_EXIT_S`` at most."""
        self.end()
        deadline = time.monotonic() + BUSY_EXIT_S
        for process in self._processes:
            process.close(deadline)
        self._at_exit.cancel()


class _LoaderProcess:
    """A process that loads, and the parent's end of its socket."""

    def __init__(self, source: Source, threads: int) -> None:
        # A fork: datasets cannot be pickled in general. Elsewhere than on Linux it is not safe.
        context = multiprocessing.get_context("fork" if sys.platform == "linux" else None)
        self._socket, theirs = socket.socketpair()
        self._is_ended = False
        self._is_lost = False
        try:
            self._process = context.Process(
                target=_serve,
                # The parent's number is taken here: a process whose parent is gone would be told
                # that of who took it over, and stay for ever.
                args=(theirs, os.getpid(), source, threads, self._socket),
                name="quorate-loader",
                daemon=True,
            )
            # One that comes before the process ignores it waits until it does.
            mask = signal.pthread_sigmask(signal.SIG_BLOCK, JOB_SIGNALS)
            try:
                self._process.start()
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        except BaseException:
            self._socket.close()
            raise
        finally:
            theirs.close()

    def ask(self, ticket: Ticket) -> None:
        """Ask for a ticket. Does not block: few fit into the socket, and fewer are asked for."""
        with suppress(OSError):
            self._socket.sendall(_TICKET.pack(*ticket))

    def take(self) -> Batch | None:
        """Return the next of those that were asked for; None if it cannot be had. Blocks."""
        if self._is_lost:  # and whoever asks nothing of it, waits for nothing
            return None
        try:
            loaded: Batch | None
            loaded, problem = unpack(self._socket)
        except (OSError, EOFError):
            self._lost()
            return None
        except Exception as error:  # the edge of a thread: too many files, no memory
            # What is left in the socket may be the rest of this batch: nothing more can be had.
            self._lost(f"{type(error).__name__}: {error}".splitlines()[0])
            return None
        if problem is not None:
            _say(f"a loader process cannot send rows of this dataset ({problem})")
        return loaded

    def end(self) -> None:
        """Tell it to end, and wait for nothing more. Does not block."""
        self._is_ended = True
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self, deadline: float) -> None:
        """Wait for its end until a time of the monotonic clock, then kill it."""
        self._process.join(max(0.0, deadline - time.monotonic()))
        self.kill()
        self._process.join()
        self._process.close()
        self._socket.close()

    def kill(self) -> None:
        """Kill it, unless it has ended."""
        with suppress(ValueError):  # it is closed
            self._process.kill()

    def _lost(self, problem: str = "") -> None:
        """Say once why nothing more comes from this process.

        Args:
            problem: with what it sent, for which the process is ended; empty: it is gone.
        """
        if self._is_ended or self._is_lost:
            return
        self._is_lost = True
        if problem:
            self.kill()
            _say(f"rows from loader process {self._process.pid} cannot be read ({problem})")
            return
        self._process.join(EXIT_REPORT_S)
        code = self._process.exitcode
        how = "ended" if code is None or code >= 0 else f"was killed by signal {-code}"
        _say(f"loader process {self._process.pid} {how}")


def attempt(source: Source, ticket: Ticket) -> Batch | None:
    """Load a ticket; None where the dataset raises: whoever needs it loads it again, and raises."""
    try:
        return source.load(ticket)
    except Exception:  # the edge of a thread or process
        return None


def _serve(
    end: socket.socket, parent: int, source: Source, threads: int, parents_end: socket.socket
) -> None:
    """Load what is asked for, until the parent is gone or wants no more. Runs in the process."""
    die_with(parent)
    ignore_job_signals()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, JOB_SIGNALS)
    parents_end.close()
    keep_freed_memory()
    torch.set_num_threads(threads)
    source.is_sent = True
    with suppress(OSError):  # the parent's end is closed
        while len(asked := end.recv(_TICKET.size, socket.MSG_WAITALL)) == _TICKET.size:
            step, shard = _TICKET.unpack(asked)
            pack(end, attempt(source, (step, shard)))


def _kill(processes: list[_LoaderProcess]) -> None:
    for process in processes:
        process.kill()


_said: set[str] = set()
_saying = threading.Lock()


def _say(line: str) -> None:
    """Say something once, wherever this process's errors go: there is no way to the coordinator."""
    with _saying:
        if line in _said:
            return
        _said.add(line)
    errors = Steady(sys.stderr)
    print(f"quorate: {line}; the workers load the rows themselves", file=errors, flush=True)
