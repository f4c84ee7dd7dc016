"""The ranks: what one of them says to the others, by gloo, NCCL and their like. No pickle travels.

Rank 0 leads: it tells all what comes next, in one small record. Vectors go between each two ranks
directly, from the memory where they are to the memory where they are wanted.
"""

from __future__ import annotations

import sys
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from datetime import timedelta
from itertools import zip_longest
from typing import Any

import torch

from quorate.coordination.ownership import Hosts
from quorate.engines.collective.failure_detector import SilenceLimits
from quorate.engines.collective.host_pipes import HostPipes, pipes
from quorate.engines.collective.interface import Interface, chosen
from quorate.engines.collective.liveness_monitor import GO_ON
from quorate.engines.collective.meeting import meet
from quorate.engines.collective.rank_facts import RankFacts, gather_facts, own_facts, require_alike
from quorate.engines.collective.rank_place import RankPlace
from quorate.engines.collective.tensor_group import Addressed, TensorGroup
from quorate.engines.messages import Message, pack, unpack
from quorate.errors import RankError
from quorate.machine.environment import gloo_on

Record = Message

_FOR_EVER = timedelta(days=365)  # what rank 0 does between two steps has no bound
_SMALL = 1024  # bytes of a record that travel with its length

# Two long messages that share one connection, one each way, take up to twice the time of short ones
# of which a few are under way.
MESSAGE_BYTES = 1 << 20
MOST_UNDER_WAY = 2  # others beside the one that is waited for, so that memory stays bounded


class RankControl:
    """This process's end of a collective. ``close`` it.

    Args:
        place: of this process.
        device: that vectors are on.
        timeout_s: how long the others may take for a shard; see ``SilenceLimits``.
        ended: says which rank that this process has started has ended, if one has.
        workers: how many ranks were asked for, if that was said.

    Raises:
        RankError: the ranks do not meet.
        UserError: they do not fit together.
    """

    def __init__(
        self,
        place: RankPlace,
        device: torch.device,
        timeout_s: float,
        ended: Callable[[], str | None] = lambda: None,
        workers: int | None = None,
    ) -> None:
        self.rank, self.size = place.rank, place.size
        self._is_broken = False  # whether an exchange was
        self._near: HostPipes | None = None  # among the ranks of this host
        self._all: HostPipes | None = None  # the same, if all ranks are of this host
        self._host: TensorGroup | None = None  # of this host's ranks, where not all have pipes
        self._groups: list[TensorGroup] = []  # all that this rank is in
        self.device = device
        self._place = place
        self._interface: Interface | None = None
        timeout = timedelta(seconds=SilenceLimits.of(timeout_s).most_s)
        with _refusing("to reach the others"):
            self.monitor, store = meet(place, device, timeout_s, ended)
        try:
            with self._lost_is_an_error("to meet"), ExitStack() as stack:
                stack.enter_context(self._listening(store, own_facts(place, device, workers)))
                stack.enter_context(self.monitor.links.noting())
                # Here, where gloo listens on the right interface, and what the ranks meet by is
                # sure to be there until the last of them has its connections.
                self._data = {"cpu": self._group(store, "data", timeout)}  # by kind of device
                if (kind := device.type) != "cpu":
                    self._data[kind] = self._group(store, kind, timeout, device_type=kind)
                self._control = self._group(store, "control", _FOR_EVER)
                self._beside = self._group(store, "beside", _FOR_EVER)
            self._reach_own_host(store, SilenceLimits.of(timeout_s).most_s)
        except BaseException as error:
            self.monitor.close(f"{type(error).__name__} while ranks were connected")
            self._disconnect()
            raise

    def close(self, why: str) -> None:
        """Leave the collective.

        Args:
            why: for the others.
        """
        self.monitor.close(why)
        self._disconnect()

    def _group(
        self,
        store: Any,
        name: str,
        timeout: timedelta,
        members: Sequence[int] | None = None,
        device_type: str = "cpu",
    ) -> TensorGroup:
        """Return a new group of all ranks, or of some with this one among them. Blocks.

        Args:
            name: that no other group of these ranks has.
        """
        members = range(self.size) if members is None else members
        own = members.index(self.rank)
        self._groups.append(TensorGroup(store, name, own, len(members), timeout, device_type))
        return self._groups[-1]

    def _disconnect(self) -> None:
        """Close whatever connects this rank with others."""
        while self._groups:
            self._groups.pop().close(is_broken=self.is_broken)
        if self._near is not None:
            self._near.close()

    @property
    def is_broken(self) -> bool:
        """Whether another is gone."""
        return self._is_broken or self.monitor.verdict is not None

    @property
    def leads(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    def break_off(self) -> None:
        """Note that the others are in an exchange that this rank has left: they hear no record."""
        self._is_broken = True

    def _reach_own_host(self, store: Any, limit_s: float) -> None:
        """Find what the ranks of one host wait for each other by; all if there are no others."""
        hosts = self.hosts.ranks
        gather = self._gathered_by_gloo  # as a part of the meeting
        self._near, have_all = pipes(hosts, self.rank, gather, limit_s, self.require_all)
        if len(hosts) == 1:
            self._all = self._near
        if not have_all:
            with self._lost_is_an_error("to meet"), self.monitor.links.noting():
                own = next(each for each in hosts if self.rank in each)
                timeout = timedelta(seconds=limit_s)
                self._host = self._group(store, f"host-{own[0]}", timeout, own)

    @contextmanager
    def _listening(self, store: Any, own: RankFacts) -> Iterator[None]:
        """Within the block gloo listens where the others reach this rank, if they all fit."""
        hellos = gather_facts(store, self._place, own)
        require_alike(hellos, self._place)
        self.hosts = Hosts([each.host for each in hellos])
        if sys.platform == "linux":
            addresses = [each.address for each in hellos]
            self._interface = chosen(self._place.endpoint, own.address, addresses)
        with gloo_on(None if self._interface is None else self._interface.name):
            yield

    @property
    def bound(self) -> str:
        """What is bound where, in words."""
        at = "this machine's own address" if self._interface is None else str(self._interface)
        if self._place.endpoint is None:
            return f"{self.size} ranks met through a file; gloo listens on {at}"
        host, port = self._place.endpoint
        return (
            f"{self.size} ranks met at {host}:{port} (torchrun's store, on all interfaces); "
            f"gloo listens on {at}"
        )

    def require_all(self) -> None:
        """Raise if a rank is gone.

        Raises:
            RankError: one is.
        """
        if self.monitor.verdict is not None:
            self.monitor.heed()
            raise RankError(self.monitor.verdict.text, fix=GO_ON)

    def tell(self, record: Record) -> None:
        """Have all ranks hear a record; rank 0 alone calls it. Blocks until it is sent."""
        text = pack(record)
        if self._all is not None:
            with self._lost_is_an_error("to hear what comes next"):
                self._all.spread(text)
            return
        head = torch.zeros(8 + _SMALL, dtype=torch.uint8)
        head[:8] = torch.tensor([len(text)]).view(torch.uint8)
        head[8 : 8 + len(text[:_SMALL])] = _bytes(text[:_SMALL])
        with self._lost_is_an_error("to hear what comes next"):
            self._control.broadcast(head, 0)
            if len(text) > _SMALL:
                self._control.broadcast(_bytes(text[_SMALL:]), 0)

    def hear(self) -> Record:
        """Return the next record of rank 0. Blocks until there is one, for however long."""
        if self._all is not None:
            with self._lost_is_an_error("to say what comes next"):
                said: Record = unpack(self._all.spread(None))
            return said
        head = torch.empty(8 + _SMALL, dtype=torch.uint8)
        with self._lost_is_an_error("to say what comes next"):
            self._control.broadcast(head, 0)
            size = int(head[:8].clone().view(torch.int64))
            text = head[8 : 8 + min(size, _SMALL)].numpy().tobytes()
            if size > _SMALL:
                rest = torch.empty(size - _SMALL, dtype=torch.uint8)
                self._control.broadcast(rest, 0)
                text += rest.numpy().tobytes()
        record: Record = unpack(text)
        return record

    def gather(self, own: Any, *, beside: bool = False) -> list[Any]:
        """Return what each rank has given, in the order of ranks. All ranks call it. Blocks.

        Args:
            own: what this rank gives, of the kinds of values that messages hold.
            beside: whether a thread beside the main one calls it, of which there is one.
        """
        if self._all is not None and not beside:
            with self._lost_is_an_error("to end the step"):
                return [unpack(each) for each in self._all.gather(pack(own))]
        return self._gathered_by_gloo(own, beside)

    def _gathered_by_gloo(self, value: Any, beside: bool = False) -> list[Any]:
        own = pack(value)
        heads = self._gathered(len(own).to_bytes(8, "little") + own[:_SMALL], 8 + _SMALL, beside)
        sizes = [int.from_bytes(head[:8], "little") for head in heads]
        texts = [head[8 : 8 + size] for head, size in zip(heads, sizes, strict=True)]
        if (rest := max(sizes) - _SMALL) > 0:
            more = self._gathered(own[_SMALL:], rest, beside)
            texts = [text + each for text, each in zip(texts, more, strict=True)]
        return [unpack(text[:size]) for text, size in zip(texts, sizes, strict=True)]

    def _gathered(self, own: bytes, size: int, beside: bool) -> list[bytes]:
        given = torch.zeros(size, dtype=torch.uint8)
        given[: len(own)] = _bytes(own)
        taken = [torch.zeros(size, dtype=torch.uint8) for _ in range(self.size)]
        if not beside:
            with self._lost_is_an_error("to end the step"):
                self._data["cpu"].begin_gather(given, taken).wait()
        else:  # what the watch knows of waiting is of the main thread
            with _refusing("for the others"):
                self._beside.begin_gather(given, taken).wait()
        return [tensor.numpy().tobytes() for tensor in taken]

    def wait_for_host(self) -> None:
        """Return when all ranks of this host have come here. Blocks."""
        with self._lost_is_an_error("of its host"):
            if self._near is not None:
                self._near.arrive()
            elif self._host is not None:
                self._host.wait_for_all()

    def arrive(self) -> None:
        """Return when all ranks have come here, however long one of them takes. Blocks."""
        with self._lost_is_an_error("to write or read files"):
            self._control.wait_for_all()  # the only one that takes however long

    def swap(
        self,
        sends: Sequence[Addressed],
        takes: Sequence[Addressed],
    ) -> None:
        """Send tensors to ranks, and take others in; in the same order on both ends. Blocks.

        See ``begin_swap``.
        """
        if self.device.type != "cpu":
            self.begin_swap(sends, takes).wait()
            return
        under_way: deque[TensorTransfer] = deque()
        for given, taken in zip_longest(rounds(sends), rounds(takes)):
            under_way.append(self.begin_swap(given or [], taken or []))
            if len(under_way) > MOST_UNDER_WAY:
                under_way.popleft().wait()
        for swap in under_way:
            swap.wait()

    def begin_sum(self, parts: Sequence[torch.Tensor], own: torch.Tensor) -> TensorTransfer:
        """Begin to add one part for each rank over all ranks, in torch's own order.

        Args:
            own: takes the sum of the parts for this rank.
        """
        with self._lost_is_an_error("to exchange its slices"):
            work = self._data[own.device.type].begin_sum(parts, own)
        return TensorTransfer([work], self._lost_is_an_error)

    def begin_spread(self, own: torch.Tensor, taken: Sequence[torch.Tensor]) -> TensorTransfer:
        """Begin to have all ranks get what each has: vectors of one length, by rank."""
        with self._lost_is_an_error("to exchange its slices"):
            work = self._data[own.device.type].begin_gather(own, taken)
        return TensorTransfer([work], self._lost_is_an_error)

    def begin_swap(
        self,
        sends: Sequence[Addressed],
        takes: Sequence[Addressed],
    ) -> TensorTransfer:
        """Begin to send tensors to ranks, and to take others in; in the same order on both ends.

        Args:
            sends: rank and a contiguous tensor; between two ranks the first sent is taken first.
            takes: rank and the memory that it goes to.
        """
        works: list[Any] = []
        with self._lost_is_an_error("to exchange its slices"):
            for kind, group in self._data.items():
                given, taken = _on(kind, sends), _on(kind, takes)
                if given or taken:
                    works += group.begin_swap(given, taken)
        return TensorTransfer(works, self._lost_is_an_error)

    @contextmanager
    def _lost_is_an_error(self, what: str) -> Iterator[None]:
        watch = self.monitor
        self.require_all()
        watch.waits += 1
        try:
            yield
        except (RuntimeError, ValueError, ConnectionError) as error:  # of torch.distributed; pipes
            self._is_broken = True
            self.require_all()
            text = str(error).strip() or type(error).__name__
            line = text.splitlines()[0].partition(". This is typically")[0]
            raise RankError(
                f"rank {self.rank} of {self.size} waited for another {what}, and it is gone",
                f"{line:.300}",
            ) from error
        except BaseException:  # of a signal, maybe in the midst of a message
            self._is_broken = True
            raise
        finally:
            watch.waits -= 1


@contextmanager
def _refusing(what: str) -> Iterator[None]:
    """Have what torch.distributed raises be a ``RankError``."""
    try:
        yield
    except (RuntimeError, ValueError) as error:
        line = next(iter(str(error).splitlines()), type(error).__name__)
        raise RankError(f"this rank waited {what}, in vain", f"{line:.300}") from error


class TensorTransfer:
    """Tensors on their way."""

    def __init__(
        self, works: Sequence[Any], lost: Callable[[str], AbstractContextManager[None]]
    ) -> None:
        self._works, self._lost = works, lost

    def wait(self) -> None:
        """Return when all are where they are to be. Blocks."""
        with self._lost("to exchange its slices"):
            for work in self._works:
                work.wait()


def _on(device_type: str, tensors: Sequence[Addressed]) -> list[Addressed]:
    """Return those of some tensors that lie on a kind of device, and have elements."""
    return [(r, t) for r, t in tensors if t.numel() and t.device.type == device_type]


def rounds(tensors: Sequence[Addressed]) -> list[list[Addressed]]:
    """Return short pieces of contiguous tensors: the first for each rank, the second ones, ..."""
    found: list[list[Addressed]] = []
    begun: Counter[int] = Counter()  # pieces by rank
    for rank, tensor in tensors:
        for piece in torch.split(tensor.view(-1), MESSAGE_BYTES // tensor.element_size()):
            if begun[rank] == len(found):
                found.append([])
            found[begun[rank]].append((rank, piece))
            begun[rank] += 1
    return found


def _bytes(text: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(text or b"\0"), dtype=torch.uint8)[: len(text)]
