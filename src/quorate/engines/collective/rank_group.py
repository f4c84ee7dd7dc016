"""The ranks of a training loop: this process, and processes started as further ranks.

Torchrun starts ranks on one or several hosts. Without torchrun, rank 0 of one machine starts all
higher ranks.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from quorate.coordination import rules
from quorate.engines.collective.exchange import GradientExchange, NativeExchange
from quorate.engines.collective.heartbeats import FileHeartbeats
from quorate.engines.collective.liveness_monitor import GO_ON
from quorate.engines.collective.rank_control import END, RankControl
from quorate.engines.collective.rank_place import RankPlace, own_place
from quorate.engines.processes.pool import WorkerHandle
from quorate.engines.processes.process_start import ProcessStarter
from quorate.engines.processes.script import Script
from quorate.engines.processes.script_as_worker import raised_in
from quorate.engines.processes.worker_messages import ScriptRaised, ScriptRefused
from quorate.engines.workers import NATIVE, Workers
from quorate.errors import RankError, SettingError, UserError
from quorate.machine.descriptors import require_for_ranks
from quorate.machine.devices import Group
from quorate.machine.freed_memory import keep_freed_memory
from quorate.machine.limits import BUSY_EXIT_S, EXIT_REPORT_S, FILE_POLL_S, FIRST_RANK_S
from quorate.machine.resources import oom_kills
from quorate.replica.flat import Layout
from quorate.replica.torch_internals import backend_name


class RankProcesses:
    """The ranks that this process has started. Close the object at the end.

    The ranks meet by two files. On Linux the files have no name, and are opened under /proc by
    number: after any kill no file is left. On other systems a folder of this user has the files.

    Args:
        script: run by the ranks.
        size: number of ranks, rank 0 included.
        threads: intra-op threads of each rank.

    Raises:
        OSError: the ranks cannot be started; no process and no file is left.
    """

    def __init__(self, script: Script, size: int, threads: int) -> None:
        self._folder: str | None = None
        if sys.platform == "linux":
            board, meet = _nameless("board"), _nameless("meet")
        else:
            self._folder = tempfile.mkdtemp(prefix="quorate-ranks-")
            board, meet = (Path(self._folder, name) for name in ("board", "meet"))
        board.write_bytes(bytes(FileHeartbeats.nbytes(size)))
        self.place = RankPlace(0, size, 0, f"file://{meet}", board=str(board))
        self._starter = ProcessStarter(script, size, threads=threads)
        self._processes: list[WorkerHandle] = []
        # By rank: why its script ended before the ranks had met.
        self._reasons: dict[int, ScriptRaised | ScriptRefused] = {}
        self._have_met = False
        self._oom_kills = oom_kills()  # before these
        try:
            for rank in range(1, size):
                place = replace(self.place, rank=rank, local_rank=rank)
                process = WorkerHandle(rank)
                process.begin(self._starter, place=place)
                self._processes.append(process)
        except BaseException:
            self.close()
            raise

    def ended(self) -> str | None:
        """Return in words how a rank ended, the most telling end first; None if all ranks run."""
        return next((text for _, text in self._endings()), None)

    def killed(self, wait_s: float) -> str | None:
        """Return in words how a rank was killed; ranks that miss a lost rank end by themselves.

        Args:
            wait_s: limit for the system's report of a death; no wait if all ranks have ended.
        """
        until = time.monotonic() + wait_s
        while True:
            endings = self._endings()
            found = next((text for is_own, text in endings if not is_own), None)
            is_all = len(endings) == len(self._processes)
            if found is not None or is_all or time.monotonic() > until:
                return found
            time.sleep(FILE_POLL_S)

    def refused(self) -> str | None:
        """Return the message of a rank that has ended for a mistake of the user's; None if none."""
        reasons = [self._reason(process) for process in self._processes if process.has_ended()]
        return next((each.message for each in reasons if isinstance(each, ScriptRefused)), None)

    def _reason(self, process: WorkerHandle) -> ScriptRaised | ScriptRefused | None:
        """Return why the script of an ended rank ended, if the rank has told."""
        for message in process.arrived():
            if isinstance(message, ScriptRaised | ScriptRefused):
                self._reasons[process.number] = message
        return self._reasons.get(process.number)

    def _endings(self) -> list[tuple[bool, str]]:
        """Return whether a rank ended by itself, and how, by rank; killed ranks first."""
        found: list[tuple[bool, int, str]] = []
        for process in self._processes:
            if process.has_ended():
                ending = process.ending().explained(self._oom_kills)
                how = ending.text(had_joined=self._have_met)
                if isinstance(reason := self._reason(process), ScriptRaised):
                    how = f"raised {raised_in(process.number, reason).text} while starting"
                text = f"rank {process.number} {how}"
                found.append((ending.code in (0, 1), process.number, text))
        return [(is_own, text) for is_own, _, text in sorted(found)]

    def close(self) -> None:
        """Wait for the ends of the ranks, then kill the rest. Removes processes and files."""
        deadline = time.monotonic() + BUSY_EXIT_S
        for process in self._processes:
            if process.pid is not None:
                process.wait(max(0.0, deadline - time.monotonic()))
        for process in self._processes:
            process.close()
        self._starter.close()
        self.met()

    def met(self) -> None:
        """Note that all ranks have joined, and remove the files by which the ranks have met."""
        self._have_met = True
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def kill(self) -> None:
        """Kill the ranks. Does not block."""
        for process in self._processes:
            process.kill()


def _nameless(what: str) -> Path:
    """Return the path of a new file in memory, for all processes of this user.

    The file stays open until this process ends, and a process launches ranks once: at destruction
    torch's ``FileStore`` opens the path again, and must not find a different file of this number.
    """
    return Path(f"/proc/{os.getpid()}/fd/{os.memfd_create(f'quorate-{what}')}")


# The exit code of all ranks after SIGTERM to one rank, as a single process would end. A shell and
# torchrun take 0 for done: torchrun would not restart ranks when one of several hosts leaves.
STOP_CODE = 128 + signal.SIGTERM


class RankGroup:
    """The ranks of a training loop.

    Args:
        groups: the devices of the settings, on this host.
        workers: the number of ranks, and the way to exchange gradients.
        rule: the update rule.

    Raises:
        SettingError: ranks cannot train with these settings.
    """

    def __init__(self, groups: Sequence[Group], workers: Workers, rule: rules.Rule) -> None:
        if not isinstance(rule, rules.Sync):
            expected = "sync, as the ranks of a collective make each update together"
            raise SettingError("update", rule.name, expected, "or take engine='processes'")
        for group in groups:
            if len(group) > 1:
                expected = "one device for each rank of a collective"
                raise SettingError("devices", str(group), expected, "or take engine='towers'")
            try:
                backend_name(group[0].type)
            except ValueError as error:
                expected = "devices that torch.distributed has collectives for"
                raise SettingError(
                    "devices", str(group[0]), expected, f"{error}; or take engine='towers'"
                ) from error
        self.ranks: RankControl | None = None  # between ``meet`` and ``leave``
        self._launched: RankProcesses | None = None
        self._workers = workers
        self._place = place = own_place()
        self._count = workers.number()
        self.groups = tuple(groups)  # by rank
        if place is not None:
            own = groups[place.local_rank % len(groups)]
            self.groups = tuple(
                own if rank == place.rank else groups[rank % len(groups)]
                for rank in range(place.size)
            )

    @property
    def is_of_torchrun(self) -> bool:
        """True if torchrun has started the ranks."""
        return self._place is not None and self._place.endpoint is not None

    @property
    def rank(self) -> int:
        """The rank of this process."""
        return 0 if self._place is None else self._place.rank

    def begin(self, script: Script | None, threads: int) -> None:
        """Start the other ranks, unless torchrun has started them."""
        if self._place is None:
            assert script is not None
            require_for_ranks(len(self.groups))
            self._launched = RankProcesses(script, len(self.groups), threads)
            self._place = self._launched.place

    def meet(self, device: torch.device, timeout_s: float) -> RankControl:
        """Return the connections to all ranks. Blocks until all ranks have run the script so far.

        Raises:
            RankError: a rank does not come.
            UserError: ranks do not fit together.
            SystemExit: ranks do not fit together, and another rank of this host has said so.
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
                self.ranks.named = self._named
            except RankError as error:
                raise self._named(error) from error
            except UserError as error:  # the same on all ranks: one line for each host
                if self._place.local_rank > 0:
                    # The first rank prints the line. Torchrun, or the first rank itself, ends all
                    # ranks once one of them has ended.
                    time.sleep(FIRST_RANK_S)
                    raise SystemExit(error.exit_code) from error
                raise
        return self.ranks

    @property
    def bound(self) -> str:
        """The addresses of the meeting and of gloo, in words. Call after ``meet``."""
        assert self.ranks is not None
        return self.ranks.bound

    def have_met(self) -> None:
        """Remove the files of the meeting. Call after the first exchange on each device."""
        if self._launched is not None:
            self._launched.met()

    @property
    def native_order(self) -> str | None:
        """The reason why bits depend on the number of ranks; None if they do not."""
        if self._workers.exchange != NATIVE or self.ranks is None:
            return None
        return (
            f"exchange='native' has torch.distributed add gradients in an order that depends on "
            f"the number of ranks, here {self.ranks.size}"
        )

    @property
    def exchanging(self) -> Callable[[Layout], GradientExchange] | None:
        """A function from a layout to an exchange of vectors; None before ``meet``."""
        if self.ranks is None:
            return None
        kind = NativeExchange if self._workers.exchange == NATIVE else GradientExchange
        return partial(kind, self.ranks, bucket_bytes=int(self._workers.bucket_mb * (1 << 20)))

    def _named(self, error: RankError) -> RankError | UserError:
        """Return an error with the lost rank or the reason, if known; else ``error``.

        Blocks until the monitor knows the lost rank, and the system has reported the end.
        """
        monitor = None if self.ranks is None else self.ranks.monitor
        end = None if monitor is None else monitor.explained()
        if end is not None and not end.has_ended:  # a rank hangs or is silent: no more is known
            return RankError(end.text, fix=GO_ON)
        how = None if end is None else end.text
        if (launched := self._launched) is not None:
            # A kill says most; the end of a rank says more than the output of another rank.
            how = launched.killed(EXIT_REPORT_S if end is None else BUSY_EXIT_S) or how
            how = how or launched.ended()
            if (why := launched.refused()) is not None:
                return UserError(why)
        if monitor is not None:
            how = how or monitor.farewell()
        if how is None or how in str(error):
            return error
        return RankError(how, fix=str(error) if monitor is None else GO_ON)

    def part(self, why: str) -> None:
        """Tell all ranks about the end of this process, and do not wait for any rank."""
        if self.ranks is not None:
            self.ranks.monitor.close(why)

    def leave(self, before: Callable[[], None] = lambda: None, code: int = 0) -> None:
        """End all ranks except this rank.

        Args:
            before: called on rank 0 before the ranks end.
            code: exit code of the ranks.

        Raises:
            RankError: by ``before``; the ranks have ended nevertheless.
        """
        ranks, self.ranks = self.ranks, None
        launched, self._launched = self._launched, None
        try:
            if ranks is not None and not ranks.is_broken:
                before()
                with suppress(RankError):
                    ranks.tell(END, code)
        finally:
            if ranks is not None:
                raised = sys.exception()
                over = "its loop is over"
                ranks.close(over if raised is None else f"{type(raised).__name__}: {raised}")
            if launched is not None:
                if ranks is None or ranks.is_broken:
                    launched.kill()
                launched.close()
