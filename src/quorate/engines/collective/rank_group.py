"""The company: this process among the ranks, from the start of the others to the end of all."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial

import torch

from quorate.coordination import rules
from quorate.engines.collective.exchange import GradientExchange
from quorate.engines.collective.liveness_monitor import GO_ON
from quorate.engines.collective.native import NativeExchange
from quorate.engines.collective.rank_control import RankControl
from quorate.engines.collective.rank_place import own_place
from quorate.engines.collective.rank_processes import RankProcesses
from quorate.engines.processes.script import Script
from quorate.engines.workers import NATIVE, Workers
from quorate.errors import RankError, SettingError, UserError
from quorate.machine.descriptors import require_for_ranks
from quorate.machine.devices import Group
from quorate.machine.freed_memory import keep_freed_memory
from quorate.machine.limits import BUSY_EXIT_S, EXIT_REPORT_S
from quorate.replica.flat import Layout
from quorate.replica.torch_internals import backend_name

END = "end"  # the kind of the last record that rank 0 tells

# With what all ranks leave when SIGTERM asked one of them to, as one process would. A shell and
# torchrun take 0 for done: torchrun would not start ranks anew where only one of its hosts goes.
STOP_CODE = 128 + signal.SIGTERM


class RankGroup:
    """The ranks of one training loop, of which this process is one.

    Args:
        groups: the devices that the settings give, on this host.
        workers: how many were asked for, and how they exchange gradients.
        rule: of the updates.

    Raises:
        SettingError: ranks cannot do what was asked for.
    """

    def __init__(self, groups: Sequence[Group], workers: Workers, rule: rules.Rule) -> None:
        if not isinstance(rule, rules.Sync):
            expected = "sync, as the ranks of a collective make each update together"
            raise SettingError("update", rule.name, expected, "or take engine='processes'")
        if (several := next((group for group in groups if len(group) > 1), None)) is not None:
            expected = "one device for each rank of a collective"
            raise SettingError("devices", str(several), expected, "or take engine='towers'")
        for device in (group[0] for group in groups):
            try:
                backend_name(device.type)
            except ValueError as error:
                expected = "devices that torch.distributed has collectives for"
                raise SettingError(
                    "devices", str(device), expected, f"{error}; or take engine='towers'"
                ) from error
        self.ranks: RankControl | None = None  # between ``meet`` and ``leave``
        self._launched: RankProcesses | None = None
        self._workers = workers
        self._place = place = own_place()
        self.groups = tuple(groups)  # of each rank
        self._count = workers.number()
        if place is not None:
            self.groups = tuple(groups[rank % len(groups)] for rank in range(place.size))
            own = groups[place.local_rank % len(groups)]
            self.groups = (*self.groups[: place.rank], own, *self.groups[place.rank + 1 :])

    @property
    def is_of_torchrun(self) -> bool:
        """Whether torchrun has started the ranks, and tells each its place in the environment."""
        return self._place is not None and self._place.endpoint is not None

    @property
    def rank(self) -> int:
        """Which rank this process is."""
        return 0 if self._place is None else self._place.rank

    def begin(self, script: Script | None, threads: int) -> None:
        """Start the other ranks, where nobody else has."""
        if self._place is None:
            assert script is not None
            require_for_ranks(len(self.groups))
            self._launched = RankProcesses(script, len(self.groups), threads)
            self._place = self._launched.place

    def meet(self, device: torch.device, timeout_s: float) -> RankControl:
        """Return the ranks, when all are here. Blocks until they have run the script so far.

        Raises:
            RankError: they do not come.
            UserError: they do not fit together.
            SystemExit: the same, where another rank of this host says so.
        """
        if device.type == "cpu":
            keep_freed_memory()
        if self.ranks is None:
            assert self._place is not None
            if self._launched is None:
                require_for_ranks(self._place.size)
            try:
                ended = (lambda: None) if self._launched is None else self._launched.ended
                self.ranks = RankControl(self._place, device, timeout_s, ended, self._count)
            except RankError as error:
                raise self.named(error) from error
            except UserError as error:  # the same on all ranks: one line for each host
                if self._place.local_rank > 0:
                    raise SystemExit(error.exit_code) from error
                raise
        return self.ranks

    @property
    def bound(self) -> str:
        """What the ranks have bound where, in words; they have met."""
        assert self.ranks is not None
        return self.ranks.bound

    def have_met(self) -> None:
        """Note that all ranks know each other: what they have met by is not needed any more."""
        if self._launched is not None:
            self._launched.met()

    @property
    def shares_memory(self) -> bool:
        """Whether ranks of one host may read each other's memory: those of Linux can."""
        return sys.platform == "linux"

    @property
    def native_order(self) -> str | None:
        """Why the bits depend on the number of ranks, if gradients are added so."""
        if self._workers.exchange != NATIVE or self.ranks is None:
            return None
        return (
            f"exchange='native' has torch.distributed add gradients in an order that depends on "
            f"the number of ranks, here {self.ranks.size}"
        )

    @property
    def exchanging(self) -> Callable[[Layout], GradientExchange] | None:
        """What gives the exchange of vectors of a layout; None before the ranks have met."""
        if self.ranks is None:
            return None
        kind = NativeExchange if self._workers.exchange == NATIVE else GradientExchange
        return partial(kind, self.ranks, bucket_bytes=int(self._workers.bucket_mb * (1 << 20)))

    def named(self, error: RankError) -> RankError | UserError:
        """Return an error that names the rank that is gone, or why it is, where that is known.

        Blocks until ranks have seen of each other who is gone, and the system has told of its end.
        """
        watch = None if self.ranks is None else self.ranks.monitor
        gone = None if watch is None else watch.explained()
        if gone is not None and not gone.has_ended:  # it hangs, or is silent: that is all
            return RankError(gone.text, fix=GO_ON)
        how = None if gone is None else gone.text
        if (launched := self._launched) is not None:
            # Who was killed says most; that a rank has ended, more than what another one printed.
            wait_s = EXIT_REPORT_S if gone is None else BUSY_EXIT_S
            how = launched.killed(wait_s) or how or launched.ended()
            if (why := launched.refused()) is not None:
                return UserError(why)
        how = how or (None if watch is None else watch.farewell())
        if how is None or how in str(error):
            return error
        return RankError(how, fix=f"{error if watch is None else GO_ON}")

    @contextmanager
    def naming(self) -> Iterator[None]:
        """Within the block an error says which rank is gone, where that is known."""
        try:
            yield
        except RankError as error:
            raise self.named(error) from error

    def part(self, why: str) -> None:
        """Tell the others that this process leaves, and does not wait for anybody."""
        if self.ranks is not None:
            self.ranks.monitor.close(why)

    def leave(self, before: Callable[[], None] = lambda: None, code: int = 0) -> None:
        """End the other ranks.

        Args:
            before: done by rank 0 while they are still there.
            code: the exit code that they end with.

        Raises:
            RankError: by ``before``; the ranks have ended nevertheless.
        """
        ranks, self.ranks = self.ranks, None
        launched, self._launched = self._launched, None
        try:
            if ranks is not None and not ranks.is_broken:
                before()
                with suppress(RankError):
                    ranks.tell({"kind": END, "code": code})
        finally:
            if ranks is not None:
                raised = sys.exception()
                over = "its loop is over"
                ranks.close(over if raised is None else f"{type(raised).__name__}: {raised}")
            if launched is not None:
                if ranks is None or ranks.is_broken:
                    launched.kill()
                launched.close()
