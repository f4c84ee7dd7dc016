"""Faults of the configurations: the events for the processes of a run, and their times.

    kill@forward            a worker is killed while it computes ``forward``
    int@run:3               the run itself gets SIGINT after update 3
    term@all:2              ... every process of the run gets SIGTERM
    segv@loader:4           ... a process that loads rows for a worker
    kill@save:4             the run is killed in the middle of its first save from update 4 on
    raise@shard:2           the first worker at a shard of step 2 raises, once
    raise!@shard:2          every worker at a shard of step 2 raises, each time
    slow@one:3              the first worker at a shard of step 3 is slow from then on
    model@script            the script makes another model in workers

``+`` joins faults of a part of a run, ``/`` is between parts: after each part but the last the
run is over, and is resumed. Every fault leaves a file ``done-PART-NUMBER`` in the folder.
"""

import ctypes
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from support.trainings.models import Batch
from torch import nn
from torch.utils.data import Dataset

import quorate

SIGNALS = {number.name[3:].lower(): number for number in signal.Signals}
ENDS = ("kill", "segv", "abrt", "quit", "stop")  # final for a worker
PROCESSES = ("run", "server", "worker", "loader", "all")
PHASES = ("starting", "waiting", "fetching", "forward", "backward", "pushing")
IN_SCRIPTS = ("data", "model")
SLOW_S = 3.0
PAUSE_S = 0.3  # pause of a worker stopped by "pause" and then continued


class MineError(Exception):
    """An exception of a type that the run's process does not take from the worker's."""

    def __init__(self, first: int, second: int) -> None:
        super().__init__(f"{first} and {second}")


def fail() -> None:
    """Raise, with a separate frame in the traceback."""
    print("a worker's own words")
    raise MineError(3, 4)


def hang() -> None:
    """Never return."""
    while True:
        time.sleep(0.01)


MISDEEDS: dict[str, Callable[[], Any]] = {
    "raise": fail,
    "exit": lambda: os._exit(3),
    "segfault": lambda: ctypes.string_at(0),
    "memory": lambda: torch.empty(1 << 50),
    "hang": hang,
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "slow": lambda: time.sleep(SLOW_S),
    "vector": lambda: None,  # the loss is no scalar
    "nan": lambda: None,
}


@dataclass(frozen=True)
class Fault:
    """A fault: see above."""

    part: int
    number: int  # in the part
    action: str  # a name of ``SIGNALS`` or of ``MISDEEDS``, or pause
    place: str  # a name in ``PROCESSES`` or ``PHASES``; save, shard, one, script
    step: int = 0
    is_always: bool = False

    def claims(self, folder: Path) -> bool:
        """Return whether this is the first time in any process, and note the fault."""
        try:
            self.mark(folder).touch(exist_ok=False)
        except FileExistsError:
            return False
        return True

    def mark(self, folder: Path) -> Path:
        """Return the file that marks the fault as done."""
        return folder / f"done-{self.part}-{self.number}"


def faults_of(text: str) -> list[list[Fault]]:
    """Return the faults of each part of a run.

    Raises:
        ValueError: a word is no fault.
    """
    return [
        [_fault(part, number, word) for number, word in enumerate(words.split("+")) if word]
        for part, words in enumerate(text.split("/"))
    ]


def _fault(part: int, number: int, word: str) -> Fault:
    action, _, where = word.partition("@")
    place, _, step = where.partition(":")
    known: Mapping[str, Collection[str]] = {
        **dict.fromkeys((*PROCESSES, *PHASES, "save"), (*SIGNALS, "pause")),
        **dict.fromkeys(("shard", "one"), tuple(MISDEEDS)),
        "script": IN_SCRIPTS,
    }
    if action.rstrip("!") not in known.get(place, ()):
        raise ValueError(f"fault: got {word!r}, expected ACTION@PLACE[:STEP], see faults.py")
    return Fault(part, number, action.rstrip("!"), place, int(step or 0), action.endswith("!"))


# --- in the process of the run --------------------------------------------------------------------


class Strikes(quorate.Callback):
    """Carries out the faults of a part, except for misdeeds of a worker."""

    def __init__(self, trainer: quorate.Trainer, faults: Sequence[Fault], folder: Path) -> None:
        self._trainer, self._folder = trainer, folder
        self._after = [fault for fault in faults if fault.place in PROCESSES]
        self._in_saves = [fault for fault in faults if fault.place == "save"]
        self._in_phases = [fault for fault in faults if fault.place in PHASES]
        self._hit: set[int] = set()
        self._is_gathered = False

    def updated(self, report: quorate.Report) -> None:
        if not self._is_gathered:  # so faults meet all workers
            self._is_gathered = True
            until = time.monotonic() + 60
            while any(w.phase == "starting" for w in self._trainer.workers):
                assert time.monotonic() < until
                time.sleep(0.005)
            threading.Thread(target=self._strike_in_phases, daemon=True).start()
        for fault in self._in_saves:
            if fault.step <= report.global_step and fault.claims(self._folder):
                threading.Thread(target=self._strike_in_save, args=(fault,), daemon=True).start()
        for fault in self._after:
            if fault.step <= report.global_step and not fault.mark(self._folder).exists():
                pids = self._processes(fault)
                if not pids:
                    continue  # the process is being replaced
                fault.claims(self._folder)
                for pid in pids:
                    self._send(fault, pid)

    def _processes(self, fault: Fault) -> list[int]:
        run, place = psutil.Process(), fault.place
        if place == "run":
            return [run.pid]
        if place == "all":
            return [*(child.pid for child in run.children(recursive=True)), run.pid]
        workers = [w for w in self._trainer.workers if w.pid not in {None, run.pid, *self._hit}]
        if place == "server":
            parents = {psutil.Process(worker.pid).ppid() for worker in workers} - {run.pid}
            return [*parents][:1]
        able = [worker.pid for worker in workers if worker.phase != "starting"]
        if place == "worker":
            if fault.action in ENDS:  # noticed later
                self._hit.update(able[:1])
            return able[:1]
        return [child.pid for pid in able[:1] for child in psutil.Process(pid).children()][:1]

    def _strike_in_phases(self) -> None:
        for fault in self._in_phases:
            while not (pid := self._met(fault.place)):
                time.sleep(0.0002)
            fault.claims(self._folder)
            self._send(fault, pid)

    def _met(self, phase: str) -> int | None:
        """Return a worker in a phase while another worker lives."""
        living = [w for w in self._trainer.workers if w.pid not in {None, *self._hit}]
        able = [worker for worker in living if worker.phase != "starting"]
        for worker in living:
            if worker.phase == phase and (phase == "starting" or len(able) > 1):
                assert worker.pid is not None
                self._hit.add(worker.pid)
                return worker.pid
        return None

    def _strike_in_save(self, fault: Fault) -> None:
        assert self._trainer.run_dir is not None
        folder = self._trainer.run_dir / "checkpoints"
        while not [path for path in folder.glob(".*") if path.is_dir()]:
            time.sleep(0.0001)
        self._send(fault, os.getpid())

    def _send(self, fault: Fault, pid: int) -> None:
        number = signal.SIGSTOP if fault.action == "pause" else SIGNALS[fault.action]
        os.kill(pid, number)
        if fault.action == "pause":
            threading.Timer(PAUSE_S, self._resume, (psutil.Process(pid),)).start()

    def _resume(self, process: psutil.Process) -> None:
        with suppress(psutil.NoSuchProcess):
            process.resume()


# --- in workers -----------------------------------------------------------------------------------


def in_script(faults: Sequence[Fault], folder: Path) -> set[str]:
    """Return the differences for this run of the script."""
    found = [fault for fault in faults if fault.place == "script" and quorate.is_worker()]
    for fault in found:
        fault.claims(folder)
    return {fault.action for fault in found}


class Slow(torch.autograd.Function):
    """Return a scalar unchanged; forward and backward take time, for faults to meet them."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, pause_s: float) -> torch.Tensor:
        ctx.pause_s = pause_s
        time.sleep(pause_s)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        time.sleep(ctx.pause_s)
        return grad, None


class SlowRows(Dataset[Any]):
    """Rows of a dataset; four rows take as long as a phase."""

    def __init__(self, rows: Any, pause_s: float) -> None:
        self.rows, self.pause_s = rows, pause_s

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, row: int) -> Any:
        time.sleep(self.pause_s / 4)
        return self.rows[row]


def counts(rows: Any, total: int) -> dict[str, torch.Tensor]:
    """Return metrics whose sums have a digit to the base of 16 for each row, see ``books``."""
    row = torch.as_tensor(rows.copy())
    digit = 16.0 ** (row % 11).double()
    return {f"sum{n}": (digit * (row // 11 == n)).mean() for n in range(-(-total // 11))}


def disturbed(
    loss: Callable[[nn.Module, Batch], dict[str, Any]] | quorate.Gather,
    faults: Sequence[Fault],
    folder: Path,
    *,
    pause_s: float = 0.0,
    counted_rows: int = 0,
) -> Callable[..., dict[str, Any]] | quorate.Gather:
    """Return a loss of the same value with misdeeds in worker processes, and with pauses.

    Args:
        loss: as for ``Trainer``; a ``Gather`` does no misdeeds.
        faults: of this part of the run.
        folder: where faults are noted.
        pause_s: time of ``forward`` and ``backward``.
        counted_rows: rows of a dataset with counted rows; 0: rows are not counted.
    """
    if isinstance(loss, quorate.Gather):
        return _slowed(loss, pause_s)
    misdeeds = [fault for fault in faults if fault.place in ("shard", "one")]

    def due(at: Any) -> Iterator[Fault]:
        if not (at.training and quorate.is_worker()):
            return
        for fault in misdeeds:
            own = fault.mark(folder).with_suffix(f".{os.getpid()}")
            if fault.place == "one":
                if at.step >= fault.step and (fault.claims(folder) or own.exists()):
                    own.touch()
                    yield fault
            elif at.step == fault.step and (fault.claims(folder) or fault.is_always):
                yield fault

    def value_of(model: nn.Module, batch: Batch, at: Any) -> dict[str, Any]:
        actions = []
        for fault in due(at):  # in turn: a hanging worker leaves the next misdeed to another worker
            actions.append(fault.action)
            MISDEEDS[fault.action]()
        found = loss(model, batch)
        value = found["loss"]
        terms = {"loss": value} if isinstance(value, torch.Tensor) else value
        name, value = next((n, t) for n, t in terms.items() if isinstance(t, torch.Tensor))
        if "vector" in actions:
            value = value + torch.zeros(2)
        if "nan" in actions:
            value = value * math.nan
        if pause_s:
            value = Slow.apply(value, pause_s)
        made = value if name == "loss" else {**terms, name: value}
        return {**found, "loss": made, **counts(at.rows, counted_rows)}

    return value_of


def _slowed(gather: quorate.Gather, pause_s: float) -> quorate.Gather:
    """Return a loss over the whole batch of the same value, whose two passes take their time."""

    def represent(model: nn.Module, batch: Batch) -> tuple[torch.Tensor, ...]:
        return tuple(Slow.apply(rows, pause_s) for rows in gather.represent(model, batch))

    return quorate.Gather(represent, gather.contrast)
