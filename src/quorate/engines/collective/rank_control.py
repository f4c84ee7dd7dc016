"""Communication among ranks: small messages, and tensors. No pickle travels.

Rank 0 leads: before each step or further common work, rank 0 calls a method on all ranks: the name
and the arguments are sent. Tensors go directly from the memory of a rank to the memory of another
rank.
"""

from __future__ import annotations

import sys
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from itertools import zip_longest
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from quorate.coordination.ownership import Hosts
from quorate.engines.collective.heartbeats import SilenceLimits
from quorate.engines.collective.liveness_monitor import GO_ON, LivenessMonitor
from quorate.engines.collective.network import (
    Addressed,
    GlooMessages,
    TensorGroup,
    is_loopback,
    listening_address,
    open_sockets,
)
from quorate.engines.collective.one_host import HostPipes
from quorate.engines.collective.rank_facts import gather_facts, require_alike
from quorate.engines.collective.rank_place import RankPlace
from quorate.engines.messages import pack, unpack, unpack_apart
from quorate.errors import QuorateError, RankError
from quorate.machine.environment import gloo_interface
from quorate.replica.digest import flat_bytes

_dist: Any = dist  # documented, and not declared to be exported

END = "end"  # the last call of rank 0
_FOR_EVER = timedelta(days=365)  # messages: user code of rank 0 between two steps has no time limit

# Two long messages on one connection, one in each direction, take up to twice as long as several
# short messages in flight.
MESSAGE_BYTES = 1 << 20
_PIECE_BYTES = 16 << 20  # of a large tensor, sent to all ranks
_MOST_UNDER_WAY = 2  # transfers besides the transfer that is waited for; bounds memory


class RankControl:
    """The connections of this process to all ranks. Close the object at the end.

    Args:
        place: of this process among the ranks.
        device: of the tensors in exchanges.
        timeout_s: time limit for the computation of a shard; see ``SilenceLimits``.
        ended: returns the end of a rank started by this process, in words; None if all run.
        workers: the number of ranks in the user's settings; None if the settings name no number.

    Attributes:
        methods: by name, the methods that rank 0 may call on this rank.
        raised: an error that all ranks have raised, if any.
        named: returns an error with the name of the lost rank, if known.

    Raises:
        RankError: ranks do not meet.
        UserError: ranks do not fit together.
    """

    def __init__(
        self,
        place: RankPlace,
        device: torch.device,
        timeout_s: float,
        ended: Callable[[], str | None] = lambda: None,
        workers: int | None = None,
    ) -> None:
        self.rank, self.size, self.device = place.rank, place.size, device
        self.methods: dict[str, Callable[..., Any]] = {}
        self.named: Callable[[RankError], QuorateError] = lambda error: error
        self.raised: BaseException | None = None
        self._is_broken = False
        self._pipes: HostPipes | None = None  # to ranks of this host, if ranks can open pipes
        self._groups: list[TensorGroup] = []
        limits = SilenceLimits.of(timeout_s)
        with _as_rank_error("to reach the others"):
            store = place.rendezvous(limits.most_s)
            self.monitor = LivenessMonitor(place, device, store, limits)
        try:
            self.monitor.wait_for_all(ended)
            store = _dist.PrefixStore(f"quorate-{self.monitor.store.session}", store)
            with self._waiting("to meet"):
                self._connect(store, place, limits.most_s, workers)
        except BaseException as error:
            self.monitor.close(f"{type(error).__name__} while ranks were connected")
            self._disconnect()
            raise

    def _connect(self, store: Any, place: RankPlace, limit_s: float, workers: int | None) -> None:
        # 1. Refuse ranks that differ.
        facts = gather_facts(store, place, self.device, workers)
        require_alike(facts, place)
        self.hosts = Hosts([each.host for each in facts])
        # 2. Connect all ranks. The store may end with the first rank that leaves.
        address = None
        if sys.platform == "linux" and gloo_interface() is None:
            addresses = [each.address for each in facts]
            address = listening_address(place.endpoint, addresses[self.rank], addresses)
        self.bound = _bound(place, address)

        def group(name: str, timeout: timedelta, kind: str = "cpu") -> TensorGroup:
            made = TensorGroup(store, name, self.rank, self.size, timeout, kind, address)
            self._groups.append(made)
            return made

        kinds = dict.fromkeys(("cpu", self.device.type))
        others = open_sockets()
        self._data = {kind: group(kind, timedelta(seconds=limit_s), kind) for kind in kinds}
        self._all: GlooMessages | HostPipes
        self._all, self._beside = (
            GlooMessages(group(name, _FOR_EVER), self.size) for name in ("messages", "beside")
        )
        self.monitor.sockets = open_sockets() - others
        # 3. Ranks of one host use pipes, for barriers and, if no other host exists, for messages.
        members = self.hosts.ranks[self.hosts.of[self.rank]]
        pipes = self._pipes = HostPipes(members, self.rank, self.gather, self.require_all)
        if not pipes.are_complete:
            pipes.close()
            self._pipes = None
        elif len(members) == self.size:
            self._all = pipes

    def close(self, why: str) -> None:
        """Leave the collective.

        Args:
            why: the reason, for messages of remaining ranks.
        """
        self.monitor.close(why)
        self._disconnect()

    def _disconnect(self) -> None:
        while self._groups:
            self._groups.pop().close(is_broken=self.is_broken)
        if self._pipes is not None:
            self._pipes.close()

    @property
    def is_broken(self) -> bool:
        """True if a rank is lost, or an exchange was left in the middle."""
        return self._is_broken or self.monitor.end is not None

    @property
    def leads(self) -> bool:
        """True if this is rank 0."""
        return self.rank == 0

    @property
    def has_pipes(self) -> bool:
        """True if the ranks of this host can open each other's descriptors."""
        return self._pipes is not None

    def break_off(self) -> None:
        """Note an unfinished exchange: from now on no rank receives a call."""
        self._is_broken = True

    @contextmanager
    def in_step(self) -> Iterator[None]:
        """Break off if the block raises: the other ranks wait for an exchange, not for a call.

        Raises:
            RankError: with the name of the lost rank, if the block raised as a rank was lost.
        """
        try:
            yield
        except BaseException as error:
            self.break_off()
            if isinstance(error, RankError):
                self.require_all()
            raise

    def raise_together(self, error: BaseException) -> NoReturn:
        """Raise an error that all ranks have received, and raise at the same place."""
        self.raised = error
        raise error

    def require_all(self) -> None:
        """Raise if a rank is lost.

        Raises:
            RankError: with the name of the lost rank.
        """
        if self.monitor.end is not None:
            self.monitor.heed()
            raise self.named(RankError(self.monitor.end.text, fix=GO_ON))

    # --- messages ---------------------------------------------------------------------------------

    def tell(self, name: str, *arguments: Any) -> None:
        """Call a method on all ranks but rank 0, who alone calls. Blocks until the call is sent.

        Args:
            arguments: of kinds allowed in messages.
        """
        self._spread(pack([name, *arguments]))

    def call(self, name: str, *arguments: Any) -> Any:
        """Call a method on all ranks, and return the result on rank 0, who alone calls. Blocks."""
        self.tell(name, *arguments)
        return self.methods[name](*arguments)

    def obey(self) -> int:
        """Carry out the calls of rank 0 up to the last, and return this process's exit code.

        Blocks without a time limit.
        """
        while True:
            name, *arguments = unpack(self._spread(None))
            if name == END:
                return int(arguments[0])
            self.methods[name](*arguments)

    def _spread(self, own: bytes | None) -> bytes:
        """Return the message of rank 0; the others pass None. All ranks call. Blocks."""
        with self._waiting("to hear what comes next" if self.leads else "to say what comes next"):
            return self._all.spread(own)

    def gather(self, own: Any, *, beside: bool = False) -> list[Any]:
        """Return the values passed by all ranks, by rank. All ranks call. Blocks.

        Args:
            own: the value of this rank, of a kind allowed in messages.
            beside: True in the only thread besides the main thread.
        """
        # The monitor counts waits of the main thread alone.
        with _as_rank_error("for the others") if beside else self._waiting("to end the step"):
            gathered = (self._beside if beside else self._all).gather(pack(own))
        return [unpack(each) for each in gathered]

    def wait_for_host(self) -> None:
        """Return when all ranks of this host, who have pipes, have called this method. Blocks."""
        assert self._pipes is not None
        with self._waiting("of its host"):
            self._pipes.arrive()

    # --- tensors ----------------------------------------------------------------------------------

    def spread(self, tensors: Iterable[torch.Tensor]) -> None:
        """Copy the values of rank 0's tensors to the same tensors of all ranks. Blocks.

        All ranks call.
        """
        others = range(1, self.size)
        for tensor in tensors:
            dense = tensor.detach().contiguous()
            for piece in torch.split(flat_bytes(dense), _PIECE_BYTES):
                if self.leads:
                    self.swap([(rank, piece) for rank in others], [])
                else:
                    self.swap([], [(0, piece)])
            if not self.leads and dense.data_ptr() != tensor.data_ptr():
                tensor.detach().copy_(dense)

    def collect(self, own: Any) -> list[Any]:
        """Return the values passed by all ranks, by rank; their tensors reach rank 0 alone. Blocks.

        All ranks call. On further ranks the tensors of other ranks are on "meta".
        """
        apart: list[torch.Tensor] = []
        heads = self.gather(pack(own, apart))
        place = self.device if self.leads else torch.device("meta")
        found, takes = [], list[Addressed]()
        for rank, head in enumerate(heads):
            value, tensors = (own, []) if rank == self.rank else unpack_apart(head, place)
            found.append(value)
            takes += [(rank, flat_bytes(tensor)) for tensor in tensors if self.leads]
        sends = [] if self.leads else [(0, flat_bytes(tensor)) for tensor in apart]
        self.swap(sends, takes)
        return found

    def deal(self, values: Sequence[Any] = ()) -> Any:
        """Send each rank its value from rank 0, and return this rank's value. Blocks.

        All ranks call.

        Args:
            values: by rank; passed on rank 0.
        """
        apart: list[list[torch.Tensor]] = [[] for _ in values]
        own = [pack(value, tensors) for value, tensors in zip(values, apart, strict=True)]
        heads = unpack(self._spread(pack(own) if self.leads else None))
        if self.leads:
            others = enumerate(apart[1:], start=1)
            self.swap([(r, flat_bytes(t)) for r, tensors in others for t in tensors], [])
            return values[0]
        value, tensors = unpack_apart(heads[self.rank], self.device)
        self.swap([], [(0, flat_bytes(tensor)) for tensor in tensors])
        return value

    # A method that begins a transfer returns a function to wait for the end of the transfer. The
    # tensors must live until the function has returned.

    def swap(self, sends: Sequence[Addressed], takes: Sequence[Addressed]) -> None:
        """Send tensors to ranks, and receive tensors; see ``begin_swap``. Blocks."""
        if self.device.type != "cpu":
            self.begin_swap(sends, takes)()
            return
        pairs = zip_longest(rounds(sends), rounds(takes))
        in_turn(self.begin_swap(given or [], taken or []) for given, taken in pairs)

    def begin(self, call: Callable[[TensorGroup], list[Any]]) -> Callable[[], None]:
        """Begin a transfer of tensors on the device of the ranks.

        Args:
            call: begins the transfer in a group of all ranks, and returns the works.
        """
        with self._waiting("to exchange its slices"):
            return partial(self._end, call(self._data[self.device.type]))

    def begin_swap(
        self, sends: Sequence[Addressed], takes: Sequence[Addressed]
    ) -> Callable[[], None]:
        """Begin to send tensors to ranks, and to receive tensors.

        Between two ranks the tensors sent first are received first.

        Args:
            sends: pairs of a rank and a contiguous tensor.
            takes: pairs of a rank and the memory for the tensor from this rank.
        """
        with self._waiting("to exchange its slices"):
            begun = [group.begin_swap(sends, takes) for group in self._data.values()]
        return partial(self._end, [work for works in begun for work in works])

    def _end(self, works: list[Any]) -> None:
        """Return when tensors have arrived. Blocks; on a GPU the current stream waits."""
        with self._waiting("to exchange its slices"):
            for work in works:
                work.wait()

    @contextmanager
    def _waiting(self, what: str) -> Iterator[None]:
        """Within the block this rank waits for a rank. Errors name the lost rank, if known."""
        monitor = self.monitor
        self.require_all()
        monitor.waits += 1
        try:
            yield
        except (RuntimeError, ValueError, ConnectionError) as error:  # of torch.distributed; pipes
            self._is_broken = True
            self.require_all()
            text = str(error).strip() or type(error).__name__
            line = text.splitlines()[0].partition(". This is typically")[0]
            lost = RankError(
                f"rank {self.rank} of {self.size} waited for another {what}, and it is gone",
                f"{line:.300}",
            )
            raise self.named(lost) from error
        except BaseException:  # of a signal, maybe in the middle of a message
            self._is_broken = True
            raise
        finally:
            monitor.waits -= 1


@contextmanager
def _as_rank_error(what: str) -> Iterator[None]:
    """Within the block errors of torch.distributed become ``RankError``."""
    try:
        yield
    except (RuntimeError, ValueError) as error:
        line = next(iter(str(error).splitlines()), type(error).__name__)
        raise RankError(f"this rank waited {what}, in vain", f"{line:.300}") from error


def _bound(place: RankPlace, address: str | None) -> str:
    """Return where the ranks met and where gloo listens, in words."""
    at = address or gloo_interface() or "this machine's own address"
    if is_loopback(at):
        at += " (this machine alone)"
    met = f"{place.size} rank{'s' if place.size > 1 else ''} met"
    if place.endpoint is None:
        return f"{met} through a file; gloo listens on {at}"
    return f"{met} at {place.where} (torchrun's store, on all interfaces); gloo listens on {at}"


def in_turn(begun: Iterable[Callable[[], None]]) -> None:
    """Begin transfers one after the other, some of them at the same time. Blocks until all end.

    Args:
        begun: begins a transfer with each iteration, and yields a function to wait for the end.
    """
    under_way: deque[Callable[[], None]] = deque()
    for wait in begun:
        under_way.append(wait)
        if len(under_way) > _MOST_UNDER_WAY:
            under_way.popleft()()
    for wait in under_way:
        wait()


def rounds(tensors: Sequence[Addressed]) -> list[list[Addressed]]:
    """Cut contiguous tensors into short pieces: first pieces for all ranks, then second pieces."""
    found: list[list[Addressed]] = []
    begun: Counter[int] = Counter()  # pieces by rank
    for rank, tensor in tensors:
        for piece in torch.split(tensor.view(-1), MESSAGE_BYTES // tensor.element_size()):
            if begun[rank] == len(found):
                found.append([])
            found[begun[rank]].append((rank, piece))
            begun[rank] += 1
    return found
