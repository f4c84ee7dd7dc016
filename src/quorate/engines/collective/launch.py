"""Launch: rank 0 of one machine starts the other ranks itself, where no torchrun has."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from quorate.engines.collective.board import FileBoard
from quorate.engines.collective.place import Place
from quorate.engines.processes.process_start import new_starter
from quorate.engines.processes.script import Script
from quorate.engines.processes.script_as_worker import RAISED, raised_in
from quorate.engines.processes.wire import Message
from quorate.engines.processes.worker_process import WorkerProcess
from quorate.machine.limits import BUSY_EXIT_S, FILE_POLL_S
from quorate.machine.resources import oom_kills


class Launched:
    """The ranks that this process has started. ``close`` it.

    They meet by two files. On Linux the files have no name, and are opened under /proc by number:
    nothing is left of them, whoever is killed. Elsewhere they are in a folder of this user's alone.

    Args:
        script: what they run.
        size: how many ranks there are, this one included.
        threads: intra-op threads of each.

    Raises:
        OSError: they cannot be started; nothing is left of them.
    """

    def __init__(self, script: Script, size: int, threads: int) -> None:
        self._folder: str | None = None
        if sys.platform == "linux":
            board, meet = _nameless("board"), _nameless("meet")
        else:
            self._folder = tempfile.mkdtemp(prefix="quorate-ranks-")
            board, meet = (Path(self._folder, name) for name in ("board", "meet"))
        board.write_bytes(bytes(FileBoard.nbytes(size)))
        self.place = Place(0, size, 0, f"file://{meet}", board=str(board))
        self._starter = new_starter(script, size, threads=threads)
        self._processes: list[WorkerProcess] = []
        # By rank and kind, what it told while it ran the script, before the ranks had met.
        self._messages: dict[int, dict[str, Message]] = {}
        self._oom_kills = oom_kills()  # before these
        try:
            for rank in range(1, size):
                place = replace(self.place, rank=rank, local_rank=rank)
                self._processes.append(WorkerProcess(rank, script, self._starter, place=place))
        except BaseException:
            self.close()
            raise

    def ended(self) -> str | None:
        """Return which rank has ended and how, if one has: the one whose end says most."""
        return next((text for _, text in self._endings()), None)

    def killed(self, wait_s: float) -> str | None:
        """Return the same of one that did not end by itself, as ranks do when another is lost.

        Args:
            wait_s: that the system may take to tell of it; not needed where it has told of all.
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
        """Return what a rank said that has ended for a mistake of the user's, if one has."""
        gone = [process for process in self._processes if process.has_ended()]
        told = (self._told(process).get("refuses") for process in gone)
        if (refusal := next((each for each in told if each is not None), None)) is not None:
            return str(refusal["message"])
        said = (ending.output for ending in (p.ending() for p in gone) if ending.code == 2)
        lines = (line for text in said for line in text.splitlines())
        return next((line[9:] for line in lines if line.startswith("quorate: ")), None)

    def _told(self, process: WorkerProcess) -> dict[str, Message]:
        """Return what a rank that has ended had told by its wire."""
        messages = self._messages.setdefault(process.number, {})
        messages.update((message["kind"], message) for message in process.arrived())
        return messages

    def _endings(self) -> list[tuple[bool, str]]:
        """Return whether it was its own doing, and in words: first those that were not."""
        found: list[tuple[bool, int, str]] = []
        for process in self._processes:
            if process.has_ended():
                ending = process.ending()
                if ending.is_kill and oom_kills() > self._oom_kills:
                    ending = ending._replace(is_out_of_memory=True)
                how = ending.text(had_joined=False)
                if (raised := self._told(process).get(RAISED)) is not None:
                    how = f"raised {raised_in(process.number, raised).text} while starting"
                text = f"rank {process.number} {how}"
                found.append((ending.code in (0, 1), process.number, text))
        return [(is_own, text) for is_own, _, text in sorted(found)]

    def close(self) -> None:
        """Wait for the ranks to end, or end them; nothing of them is left."""
        deadline = time.monotonic() + BUSY_EXIT_S
        for process in self._processes:
            if process.pid is not None:
                process.wait(max(0.0, deadline - time.monotonic()))
        for process in self._processes:
            process.close()
        self._starter.close()
        self.met()

    def met(self) -> None:
        """Remove the files that the ranks have met by: they know each other now."""
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def kill(self) -> None:
        """Do not wait for them."""
        for process in self._processes:
            process.kill()


def _nameless(what: str) -> Path:
    """Return the path of a new file in memory that other processes of this user can open.

    It stays open until this process ends, and a process launches ranks once: torch's ``FileStore``
    opens the path again when it is destroyed, and must not find another file under that number.
    """
    return Path(f"/proc/{os.getpid()}/fd/{os.memfd_create(f'quorate-{what}')}")
