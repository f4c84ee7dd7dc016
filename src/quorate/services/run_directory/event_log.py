"""The events of a run as lines of JSON: ``events.jsonl`` in the run directory.

Events are the lines shown by a run, its checkpoints, and shards taken over by another worker. A
resumed run continues the file: unlike metrics, events of recomputed steps stay.

    {"at": 1795559878.2951, "global_step": 404, "kind": "lost", "worker": 1, "text": "worker 1 ..."}

The first event of a fit has the kind "start", the script and the settings; the last one has the
kind "end" and the final state of the run. A killed fit has no "end".
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from quorate.coordination.run_event import START, WARNING, RunEvent
from quorate.services.run_directory.line_file import LineFile, RunClock

NAME = "events.jsonl"


class EventLog:
    """A log of one JSON object per event. Any thread may add events; call ``close`` at the end.

    Events wait in memory until the log is opened: before that, the run directory may turn out to
    belong to another run.
    """

    def __init__(self) -> None:
        # reentrant: a signal handler may add an event while its own thread adds one
        self._lock = threading.RLock()
        self._clock = RunClock()
        self._waiting: list[dict[str, Any]] = []
        self._global_step: Callable[[], int] = lambda: 0
        self._file: LineFile | None = None
        self._is_closed = False

    def add(self, line: str, **more: Any) -> None:
        """Add an event; a plain line is a warning.

        Args:
            line: the text of the event.
            more: further entries of the event, as JSON.
        """
        event = line if isinstance(line, RunEvent) else RunEvent(line, WARNING)
        record: dict[str, Any] = {"at": self._clock.now(), "kind": event.kind, "text": str(event)}
        record |= more
        if event.worker is not None:
            record["worker"] = event.worker
        with self._lock:
            if self._file is not None:
                self._write(record)
            elif not self._is_closed:
                self._waiting.append(record)

    def open(
        self,
        run_dir: Path,
        global_step: Callable[[], int],
        started: str,
        facts: Mapping[str, Any],
        say: Callable[[str], None],
        renew: Callable[[], None] = lambda: None,
    ) -> None:
        """Write the start of the fit, then the waiting events.

        Args:
            run_dir: the run directory, locked by this process.
            global_step: returns the updates applied so far.
            started: text of the start event; the time of the event is the creation time of this
                log.
            facts: further entries of the start event.
            say: shows a line about this file to the user, without adding the line to the log.
            renew: ``RunLock.renew``, called before the file is made again.
        """
        with self._lock:
            self._global_step = global_step
            self._file = LineFile(run_dir / NAME, say, renew)
            self._write({"at": self._clock.begun_at, "kind": START, "text": started, **facts})
            waiting, self._waiting = self._waiting, []
            for record in waiting:
                self._write(record)

    def close(self) -> None:
        """Close the file. Later events are dropped."""
        with self._lock:
            file, self._file, self._is_closed = self._file, None, True
            if file is not None:
                file.close()

    def _write(self, record: Mapping[str, Any]) -> None:
        assert self._file is not None
        step = {"at": record["at"], "global_step": self._global_step()}
        self._file.add(step | {**record})
