"""Launch: without torchrun, rank 0 of one machine starts all higher ranks."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from quorate.engines.collective.heartbeat_store import FileHeartbeats
from quorate.engines.collective.rank_place import RankPlace
from quorate.engines.processes.pool import WorkerHandle
from quorate.engines.processes.process_start import new_starter
from quorate.engines.processes.script import Script
from quorate.engines.processes.script_as_worker import raised_in
from quorate.engines.processes.worker_messages import ScriptRaised, ScriptRefused
from quorate.machine.limits import BUSY_EXIT_S, FILE_POLL_S
from quorate.machine.resources import oom_kills


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
        self._starter = new_starter(script, size, threads=threads)
        self._processes: list[WorkerHandle] = []
        # By rank: why its script ended before the ranks had met.
        self._reasons: dict[int, ScriptRaised | ScriptRefused] = {}
        self._oom_kills = oom_kills()  # before these
        try:
            for rank in range(1, size):
                place = replace(self.place, rank=rank, local_rank=rank)
                process = WorkerHandle(rank)
                process.begin(script, self._starter, place=place)
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
                how = ending.text(had_joined=False)
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
        """Remove the files by which the ranks have met."""
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
