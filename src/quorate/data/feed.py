"""The feed: rows of the dataset, fetched ahead of the shards that need them.

A sample's randomness is keyed by (seed, epoch, sample index): while ``dataset[i]`` runs, torch's
default generator, Python's ``random`` and NumPy's global generator are seeded for that sample, in
whichever thread or process it is loaded. So a shard that is loaded twice is the same twice. What
augments whole batches gets numbers that are keyed in the same way (``quorate.data.draws``).
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Generator, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset
from torch.utils.data import default_collate as torch_collate

from quorate.coordination.keys import key
from quorate.coordination.plan import Plan, Rows
from quorate.data.draws import Augment, Draws
from quorate.errors import DataError, SettingError
from quorate.machine.dies_with_parent import JOB_SIGNALS, die_with
from quorate.replica.fingerprint import fingerprint
from quorate.replica.streams import Stream
from quorate.replica.transfer import pinned
from quorate.replica.turns import Turns

Collate = Callable[[list[Any]], Any]
Ticket = tuple[int, int]  # (step, shard)
CPU = torch.device("cpu")

# Python names the sockets of loader processes TMPDIR/pymp-12345678/listener-12345678, and the
# kernel takes 107 bytes of a name.
SOCKET_NAME = 32
LONGEST_TEMPORARY = 107 - SOCKET_NAME


class Batch(NamedTuple):
    """The rows of one shard."""

    rows: Rows  # (b,) int64, indices into the dataset
    data: Any  # what collate made of them
    samples: Sequence[str] = ()  # a hash of each row's content, if that is wanted


def check_loader_processes() -> None:
    """Refuse a temporary folder in which loader processes cannot hand over what they loaded.

    They would not say so: whoever waits for the rows would wait for ever.

    Raises:
        SettingError: its path is too long for a socket's name.
    """
    folder = tempfile.gettempdir()
    long = len(os.fsencode(folder))
    strategy = torch.multiprocessing.get_sharing_strategy()  # type: ignore[no-untyped-call]
    if long > LONGEST_TEMPORARY and strategy == "file_descriptor":
        raise SettingError(
            "the temporary folder",
            folder,
            f"a path of at most {LONGEST_TEMPORARY} bytes (it has {long}): loader_workers have"
            " their sockets there",
            "set TMPDIR to a shorter one, or loader_workers=0",
        )


def length(dataset: Any, name: str = "the dataset") -> int:
    """Its number of rows.

    Raises:
        DataError: it is no map-style dataset, or is empty.
    """
    map_style = "a map-style dataset, with __getitem__ and __len__"
    if not hasattr(dataset, "__getitem__") or isinstance(dataset, torch.utils.data.IterableDataset):
        raise DataError(name, got=type(dataset).__name__, expected=map_style)
    try:
        rows = len(dataset)
    except (TypeError, NotImplementedError):
        got = f"{type(dataset).__name__} without a length"
        raise DataError(name, got=got, expected=map_style) from None
    if rows == 0:
        raise DataError(name, got="0 rows", expected="at least one row")
    return rows


class Source:
    """Loads the rows of any shard: a pure function of (step, shard)."""

    def __init__(
        self,
        dataset: Any,
        plan: Plan,
        collate: Collate | None = None,
        augment: Augment | None = None,
    ) -> None:
        self.dataset = dataset
        self.plan = plan
        self._collate = collate or torch_collate
        self._augment = augment
        self._tensors = type(dataset) is TensorDataset and collate is None
        self._turns = Turns()
        self._draws = False  # from torch's generator
        self.hashes_samples = False  # whether batches tell what each row held

    def load(self, ticket: Ticket) -> Batch:
        """Fetch, collate and augment one shard's rows; may raise whatever user code raises."""
        rows = self.plan.shard(*ticket)
        if self._tensors and self._augment is None:
            indexed = self._indexed(rows)
            return Batch(rows, indexed, self._hashes(lambda: zip(*indexed, strict=True)))
        # A turn also keeps other threads out of the dataset, which need not be thread-safe.
        with Stream() as stream:
            return Batch(rows, *self._turns.run(lambda reseed: self._load(ticket, stream, reseed)))

    def _load(
        self, ticket: Ticket, stream: Stream, reseed: Callable[[int], None]
    ) -> tuple[Any, Sequence[str]]:
        step, shard = ticket
        rows, epoch = self.plan.shard(step, shard), self.plan.epoch(step)
        seed = self.plan.seed

        def rekey(*parts: int | str) -> None:
            reseed(key(*parts))
            stream.reseed(key(*parts))

        if self._tensors:
            batch: Any = self._indexed(rows)
            hashes = self._hashes(lambda: zip(*batch, strict=True))
        else:
            batch, hashes = self._collated(ticket, rows.tolist(), stream, rekey)
        if self._augment is None:
            return batch, hashes
        # Its own generators too, in case it draws from them: but those are the shard's.
        rekey("augment", seed, step, shard)
        batch = self._augment(batch, Draws(seed, epoch, rows))
        if batch is None:
            raise DataError("what augment returned", got=None, expected="the batch")
        return batch, hashes

    def _indexed(self, rows: Rows) -> list[torch.Tensor]:
        index = torch.from_numpy(rows)
        return [tensor[index] for tensor in self.dataset.tensors]

    def _collated(
        self, ticket: Ticket, rows: list[int], stream: Stream, rekey: Callable[..., None]
    ) -> tuple[Any, Sequence[str]]:
        seed, epoch = self.plan.seed, self.plan.epoch(ticket[0])
        rekey("rows", seed, *ticket)
        samples = self._load_together(rows)
        if samples is None or stream.drawn:
            # Samples that draw are loaded one by one, so that each has a stream of its own.
            self._draws = self._draws or stream.drawn
            samples = []
            for row in rows:
                rekey("sample", seed, epoch, row)
                try:
                    samples.append(self.dataset[row])
                except Exception as error:
                    error.add_note(f"quorate: while loading row {row} of the dataset")
                    raise
        hashes = self._hashes(lambda: samples)
        rekey("collate", seed, *ticket)
        return self._collate(samples), hashes

    def _hashes(self, samples: Callable[[], Iterable[Any]]) -> Sequence[str]:
        return [fingerprint(each) for each in samples()] if self.hashes_samples else ()

    def _load_together(self, rows: list[int]) -> list[Any] | None:
        fetch = getattr(self.dataset, "__getitems__", None)
        if fetch is None or self._draws or self._turns.draws:
            return None
        samples: list[Any] = fetch(rows)
        return samples


class Feed:
    """Loads shards ahead of their use, in the order of the tickets.

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
        # DataLoader's processes start here, in the caller's thread: of a training loop before the
        # workers' threads. A fork of a process with running threads may inherit a locked lock.
        still_wanted = (t for t in tickets if t[0] >= self._wanted[0] - behind)
        self._loads = _loads(source, still_wanted, loader_workers, threads)
        self._thread = threading.Thread(target=self._run, name="quorate-feed", daemon=True)
        self._thread.start()

    def take(self, ticket: Ticket) -> Batch:
        """The rows of a shard; waits for them if need be.

        A shard that was taken before (its worker died, or is slow) is loaded again, by the caller,
        and so is one whose loading failed: what the dataset raises, it raises here.
        """
        with self._changed:
            if self._covers(ticket):
                self._wanted = max(self._wanted, ticket)
                self._changed.notify_all()
                while ticket > self._loaded and not self._ended:
                    self._changed.wait()
            found = self._ready.pop(ticket, None)
            for old in [t for t in self._ready if t[0] < ticket[0] - self._behind]:
                del self._ready[old]  # of a step that is over: nobody will come for it
            self._changed.notify_all()
        return self._source.load(ticket) if found is None else found

    def following(self, ticket: Ticket) -> Batch | None:
        """The next batch after a ticket's that is loaded and was not taken, if there is one."""
        with self._changed:
            later = min((t for t in self._ready if t > ticket), default=None)
            return None if later is None else self._ready[later]

    def close(self) -> None:
        with self._changed:
            self._ended = True
            self._changed.notify_all()
        # After a second Ctrl-C nobody waits for a dataset that may be stuck.
        at_once = isinstance(sys.exc_info()[1], (KeyboardInterrupt, SystemExit))
        self._thread.join(timeout=0.1 if at_once else None)
        self._ready.clear()

    def _run(self) -> None:
        torch.set_num_threads(self._threads)  # OpenMP keeps this number per thread
        try:
            for ticket, loaded in self._loads:
                batch = loaded and loaded._replace(data=pinned(loaded.data, self._moves_to))
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


def _loads(
    source: Source, tickets: Iterable[Ticket], loader_workers: int, threads: int
) -> Generator[tuple[Ticket, Batch | None]]:
    """Load one ticket after the other; None where the dataset raised."""
    attempt = _Attempt(source)
    if not loader_workers:
        return (attempt[ticket] for ticket in tickets)
    loader = DataLoader(
        attempt,
        sampler=tickets,
        batch_size=None,
        collate_fn=_as_it_is,
        num_workers=loader_workers,
        worker_init_fn=partial(_begin_process, threads),
        generator=torch.Generator(),  # else the process-wide one is drawn from
    )
    iterator = iter(loader)
    return (load for load in iterator)


class _Attempt(Dataset[tuple[Ticket, "Batch | None"]]):
    def __init__(self, source: Source) -> None:
        self._source = source

    def __getitem__(self, ticket: Ticket) -> tuple[Ticket, Batch | None]:
        try:
            return ticket, self._source.load(ticket)
        except Exception:  # the edge of a thread or process: take() loads it again and raises
            return ticket, None


def _as_it_is(load: Any) -> Any:
    return load


def _begin_process(threads: int, _worker: int) -> None:
    # Not by SIGKILL: torch passes batches on in segments that have a name for a moment, and a kill
    # then would leave one behind. Python handles a signal when the call is over.
    signal.signal(signal.SIGTERM, lambda *_: os._exit(1))
    die_with(os.getppid(), signal.SIGTERM)
    for number in set(JOB_SIGNALS) - {signal.SIGTERM}:
        signal.signal(number, signal.SIG_IGN)
    torch.set_num_threads(threads)
