"""A training of two scalars whose shards arrive in the order that a scenario dictates.

    quorate run --devices cpu --workers 3 --shards 3 --update async \
        tests/scripts/dictated.py race sgd 9 3 FOLDER

Arguments: scenario, optimizer, updates, rows of a batch, folder. Prints a line of JSON: what the
coordinator was told and asked for, in order; what each shard was and read; the parameters after
each update; the reports.

Each shard is one row. In the loss it writes down what it reads, and waits for its gate, a file. The
scenario, a thread of the coordinator's process, opens one gate after the other, and goes on when
the coordinator has dealt with what came of it. The coordinator's clock counts entries of the log,
and it has no shard computed twice, so that its decisions follow from the order alone.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

import quorate
import quorate.training.loop
from quorate.coordination.coordinator import Coordinator
from quorate.coordination.protocol import Applied, Cancel, Compute, Event, Stop, Tick
from quorate.training.drive import drive
from quorate.transports import Channel
from quorate.transports.processes.transport import Processes
from quorate.transports.processes.worker import here

LIMIT_S = 60.0
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    # Powers of two: their products are exact, so that it does not matter where kernels round.
    "sgd": lambda params: torch.optim.SGD(params, lr=0.125),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.125, momentum=0.5),
    "adam": lambda params: torch.optim.Adam(params, lr=0.05),
}

# --- a worker's side ------------------------------------------------------------------------------


def wait_for(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(what)
        time.sleep(0.002)


def write(path: Path, content: Any) -> None:
    """Whole or not at all."""
    new = path.with_suffix(".new")
    new.write_text(json.dumps(content))
    os.replace(new, path)


def token() -> int | None:
    """Which call to compute this thread carries out; None: a probe."""
    name, worker = threading.current_thread().name, here()
    if worker is None and not name.startswith("quorate-tower-"):
        return None
    number = name.rpartition("-")[2] if worker is None else worker.number
    given = folder / f"given-{number}"
    return int(given.read_text()) if given.exists() else None


class Marked(torch.autograd.Function):
    """The same value; leaves a file when its gradient is computed."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, number: int | None) -> torch.Tensor:
        ctx.number = number
        return value.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        if ctx.number is not None:
            (folder / f"backward-{ctx.number}").touch()
        return grad, None


class Product(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.tensor(1.5, dtype=torch.float64))
        self.b = nn.Parameter(torch.tensor(-0.7, dtype=torch.float64))

    def values(self) -> list[float]:
        return [self.a.item(), self.b.item()]


def loss(model: Any, batch: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    x, n = batch
    if (number := token()) is not None:
        write(folder / f"begun-{number}", [x.item(), n.item(), *model.values()])
        gates = folder / f"gate-{number}", folder / "gate-all"
        wait_for(lambda: any(gate.exists() for gate in gates), f"no gate for {number}")
        write(folder / f"ended-{number}", model.values())
    return {"loss": (x * model.a * Marked.apply(model.b, number)).mean(), "weight": n.sum()}


# --- the coordinator's side -----------------------------------------------------------------------


class Director:
    """Knows what the coordinator was told and asked for, and opens gates."""

    def __init__(self) -> None:
        self.log: list[tuple[Any, ...]] = []
        self.states = [trainer.model.values()]
        self.reports: list[dict[str, Any]] = []
        self.error: BaseException | None = None
        self._changed = threading.Condition()
        self._at: dict[int, int] = {}  # worker -> its token
        self._cancelled: set[int] = set()
        self._tokens = 0
        self._applied = 0
        self._is_listening = self._is_held = self._is_over = False
        self._holds = 0
        self._skipped_s = 0.0

    # --- called by the coordinator's thread ---

    def drive(
        self, coordinator: Coordinator, channel: Channel, apply: Any, say: Any, **how: Any
    ) -> Iterator[Any]:
        coordinator._dealing._next_copy = lambda *_: None  # type: ignore[method-assign]
        seen: Any = _Seen(channel, self)
        self._channel = channel
        clock = lambda: len(self.log) + self._skipped_s  # noqa: E731
        yield from drive(coordinator, seen, apply, clock, say, **how)

    def give(self, effect: Compute) -> None:
        number, self._tokens = self._tokens, self._tokens + 1
        write(folder / f"given-{effect.worker}", number)
        with self._changed:
            self._at[effect.worker] = number
            self._note("Compute", effect.worker, number, effect.step, effect.shard, self._applied)

    def asked(self, effect: Any) -> None:
        with self._changed:
            number = self._at.get(effect.worker)
            self._note(type(effect).__name__, effect.worker, number, effect.step, effect.shard)
            if isinstance(effect, Cancel):
                assert number is not None
                self._cancelled.add(number)
                (folder / f"gate-{number}").touch()

    def listens(self) -> None:
        with self._changed:
            self._is_listening = True
            self._changed.notify_all()

    def hears(self, event: Event | None) -> None:
        with self._changed:
            self._is_listening = False
            if event is not None and not isinstance(event, Tick | Stop):
                worker = getattr(event, "worker", -1)
                number = None if type(event).__name__ == "Joined" else self._at.pop(worker, None)
                self._note(type(event).__name__, worker, number)

    def applied(self, step: int) -> None:
        with self._changed:
            self._applied += 1
            self._note(Applied.__name__, step)

    def reported(self, report: quorate.Report) -> None:
        with self._changed:
            self.states.append(trainer.model.values())
            self.reports.append(asdict(report))
            self._is_held = self._holds > 0
            self._changed.notify_all()
            assert self._changed.wait_for(lambda: self._holds == 0, LIMIT_S)
            self._is_held = False

    def over(self) -> None:
        with self._changed:
            self._is_over = True
            self._changed.notify_all()

    def _note(self, *entry: Any) -> None:
        self.log.append(entry)
        self._changed.notify_all()

    # --- called by the scenario ---

    def wait(self, condition: Callable[[], bool], what: str) -> None:
        """Until it is so, and the coordinator has dealt with all that it was told."""

        def is_so() -> bool:
            return self._is_over or ((self._is_listening or self._is_held) and condition())

        with self._changed:
            if not self._changed.wait_for(is_so, LIMIT_S):
                raise TimeoutError(f"{what}: {self.log}")

    def has(self, *entry: Any) -> bool:
        return any(each[: len(entry)] == entry for each in self.log)

    def is_idle(self, worker: int) -> bool:
        return worker not in self._at

    def wanted(self) -> dict[int, int]:
        """The tokens of workers that compute, and were not told to leave off."""
        return {w: number for w, number in self._at.items() if number not in self._cancelled}

    def begun(self, *workers: int) -> None:
        for worker in workers:
            self.wait(lambda w=worker: w in self.wanted(), f"worker {worker} has no shard")
            number = self.wanted().get(worker)
            if number is not None:  # else the run is over
                begun = folder / f"begun-{number}"
                wait_for(lambda b=begun: b.exists() or self._is_over, f"worker {worker} is away")

    def finish(self, *workers: int) -> None:
        """Let each finish what it computes, in this order."""
        for worker in workers:
            self.begun(worker)
            number = self.wanted().get(worker)
            (folder / f"gate-{number}").touch()
            self.wait(lambda w=worker, n=number: self._at.get(w) != n, f"worker {worker} is late")

    def finish_too_late(self, worker: int) -> None:
        """Let it finish, while a report is held, so that it can be told nothing any more."""
        self.begun(worker)
        (folder / f"gate-{self._at[worker]}").touch()
        wait_for(lambda: trainer.workers[worker].phase == "waiting", "it does not push")

    def has_left_off(self, worker: int) -> None:
        self.wait(lambda: self.has("Cancelled", worker), f"worker {worker} does not leave off")

    @contextmanager
    def holding(self) -> Iterator[None]:
        """The next report is held until the end of the block."""
        with self._changed:
            self._holds += 1
        yield
        self.wait(lambda: self._is_held, "no report")
        with self._changed:
            self._holds -= 1
            self._changed.notify_all()

    def kill(self, worker: int) -> bool:
        """As kill -9 would; a tower cannot be killed."""
        transport = trainer._loop.transport
        if not isinstance(transport, Processes):
            return False
        os.kill(transport.status()[worker].pid, signal.SIGKILL)
        self.wait(lambda: self.has("Left", worker), f"worker {worker} does not leave")
        return True

    def let_pass(self, seconds: float) -> None:
        """Let the coordinator's clock go forward."""
        with self._changed:
            self._skipped_s += seconds
            self._is_listening = False
        self._channel.post(Tick())
        self.wait(lambda: True, "it does not listen")

    def finish_all(self) -> None:
        """Whoever has a shard, until the run is over; the lowest first."""
        while not self._is_over:
            self.wait(lambda: bool(self.wanted()), "nobody computes")
            if wanted := self.wanted():
                self.finish(min(wanted))

    def run(self, scenario: Callable[[Director], None]) -> None:
        try:
            scenario(self)
            self.finish_all()
        except BaseException as error:  # the edge of the thread
            self.error = error
            (folder / "gate-all").touch()
            trainer.stop("the scenario failed")
            with self._changed:
                self._holds = 0
                self._changed.notify_all()


class _Seen:
    """A channel that tells the director what passes through it."""

    def __init__(self, channel: Channel, director: Director) -> None:
        self._channel = channel
        self._director = director

    def send(self, effect: Any) -> None:
        if isinstance(effect, Compute):
            self._director.give(effect)
        self._channel.send(effect)
        if not isinstance(effect, Compute):
            self._director.asked(effect)

    def receive(self, timeout_s: float | None) -> Event | None:
        self._director.listens()
        event = self._channel.receive(timeout_s)
        self._director.hears(event)
        return event

    def collect(self, step: int, holders: Any) -> Any:
        self._step = step
        return self._channel.collect(step, holders)

    def publish(self) -> None:
        self._channel.publish()
        self._director.applied(self._step)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._channel, name)


# --- scenarios ------------------------------------------------------------------------------------


def quorum(d: Director) -> None:
    """quorum:2, 3 shards, 3 workers."""
    # 1. The first two; worker 2 is told, and leaves off.
    d.begun(0, 1, 2)
    d.finish(1, 0)
    d.has_left_off(2)
    # 2. Three arrive where two were needed.
    d.begun(0, 1, 2)
    with d.holding():
        d.finish(2, 0)
        d.finish_too_late(1)
    d.wait(lambda: d.has("Discard", 1), "what came too late is not discarded")
    # 3. One is killed.
    d.begun(0, 2)
    d.kill(2)
    d.finish(0)


def over_commit(d: Director) -> None:
    """4 shards, 2 workers: the fast one does three of them; then the other is the fast one."""
    d.begun(0, 1)
    d.finish(0, 0, 0, 1)
    d.begun(0, 1)
    d.finish(1, 1, 1, 0)
    # What a killed worker has computed stays, what it computes is dealt again.
    d.begun(0, 1)
    d.finish(1)
    d.begun(1)
    d.kill(1)


def over_quorum(d: Director) -> None:
    """quorum:3, 5 shards, 2 workers: the fast one does as many as it is given."""
    d.begun(0, 1)
    d.finish(0, 0, 1)
    # Worker 1 is far behind: three are done before it.
    d.begun(0, 1)
    d.finish(0, 0)
    d.let_pass(100.0)
    d.finish(0)
    d.has_left_off(1)


def race(d: Director) -> None:
    """async, 3 workers: worker 2 is late, by 3 updates."""
    d.begun(0, 1, 2)
    d.finish(0, 1, 0, 2)
    d.finish(2, 2, 1, 0)


def bound(d: Director) -> None:
    """bounded:2, 3 workers: in the same order; the others wait, as otherwise it would be 3."""
    d.begun(0, 1, 2)
    d.finish(0, 1, 0)
    assert d.is_idle(0)
    d.finish(1)
    assert d.is_idle(1)
    time.sleep(0.2)  # nothing happens by itself
    assert len(d.reports) == 2
    d.finish(2)
    d.begun(0, 1, 2)
    d.finish(2, 1, 0)


SCENARIOS = {each.__name__: each for each in (quorum, over_commit, over_quorum, race, bound)}

scenario, optimizer, steps, batch, folder = (*sys.argv[1:5], Path(sys.argv[5]))
folder.mkdir(exist_ok=True)
ROWS = 40
trainer: Any = quorate.Trainer(
    Product(), loss, optimizer=OPTIMIZERS[optimizer], batch_size=int(batch)
)
row = torch.arange(ROWS, dtype=torch.float64)
data = TensorDataset(0.3 + 0.1 * row, 2.0 ** (row % 3))
if here() is None:
    director = Director()
    quorate.training.loop.drive = director.drive  # type: ignore[assignment]
    thread = threading.Thread(target=director.run, args=(SCENARIOS[scenario],), name="scenario")
    thread.start()
else:
    director = thread = None  # type: ignore[assignment]
try:
    for update in trainer.updates(data, steps=int(steps), shuffle=False):
        director.reported(update)
finally:
    quorate.training.loop.drive = drive
    director.over()
    thread.join()
if director.error is not None:
    raise director.error
shards = {}
for path in folder.glob("begun-*"):
    number = path.name.partition("-")[2]
    shards[number] = {"begun": json.loads(path.read_text())}
    ended = folder / f"ended-{number}"
    shards[number]["ended"] = json.loads(ended.read_text()) if ended.exists() else None
    shards[number]["backward"] = (folder / f"backward-{number}").exists()
print(
    json.dumps(
        {
            "log": director.log,
            "shards": shards,
            "states": director.states,
            "reports": director.reports,
        }
    )
)
