"""Worker processes of one machine: shared memory for what is large, a wire each for the rest.

The coordinator starts the script again in each of them. A worker's end is seen by its exit; what it
had computed is in shared memory and stays. A new one is started in its place.

Legend: N workers, V shards, t step, s shard.
"""

from __future__ import annotations

import heapq
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import IO, Any, NamedTuple

import torch

from quorate import lifeline, raised
from quorate.coordinator import (
    Compute,
    Discard,
    Done,
    Event,
    Failed,
    Joined,
    Keep,
    Left,
    Replace,
)
from quorate.devices import usable_cores
from quorate.errors import UserError, WorkerError
from quorate.fingerprint import fingerprint
from quorate.job import Evaluation, Job
from quorate.plan import abridged
from quorate.replica import Buffers
from quorate.restarts import Restarts
from quorate.script import Script
from quorate.settings import child_environment
from quorate.shard_sum import ShardSum
from quorate.shared_memory import Segment
from quorate.transports import Part, worker
from quorate.transports.arena import Arena, Slot
from quorate.tree import Node, TreeSum
from quorate.wire import Message, Wire

# How long workers may take to end when they are told to; then they are killed.
GRACE_S = 0.5


class Processes:
    """A process per device entry.

    Args:
        script: what they run.
        arena: what they share.
        buffers: of the coordinator's model.
        devices: one per worker.
        datasets: what the loop was called with, by the names that workers know it by.
        threads: intra-op threads of each.
        timeout_s: how long a worker may take to reach the training loop.
        say: shows a line to the user.
    """

    def __init__(
        self,
        script: Script,
        arena: Arena,
        buffers: Buffers,
        devices: Sequence[torch.device],
        datasets: Mapping[str, Any],
        *,
        threads: int,
        timeout_s: float,
        say: Callable[[str], None],
    ) -> None:
        self.arena = arena
        self.buffers = buffers
        self._script = script
        self._sources = script.sources()
        self._devices = devices
        self._datasets = datasets
        self._fingerprints: dict[str, str] = {}  # of each dataset's first shard
        self._threads = threads
        self._timeout_s = timeout_s
        self._say = say
        self._channels: dict[int, ProcessesChannel] = {}
        self._jobs = 0
        text, self._fds = arena.handed_over()
        payload = json.dumps(text).encode()
        self._description = Segment(len(payload))
        self._description.map[:] = payload
        self._selector = selectors.DefaultSelector()
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)
        self._selector.register(self._wake_read, selectors.EVENT_READ, self._woken)
        self._members = [_Member(number) for number in range(len(devices))]
        try:
            for member in self._members:
                self._start(member)
        except BaseException:
            self.close()
            raise

    def can_compute(self, dataset: object) -> bool:
        return any(known is dataset for known in self._datasets.values())

    def open(self, job: Job) -> ProcessesChannel:
        self._jobs += 1
        channel = ProcessesChannel(self, job, self._jobs)
        self._channels[self._jobs] = channel
        self.arena.publish(self.buffers)
        for member in self._members:
            if member.process is not None and member.process.is_here:
                self._offer(member.process, channel)
        return channel

    def forget(self, channel: ProcessesChannel) -> None:
        """End a job."""
        del self._channels[channel.number]
        for member in self._members:
            if member.process is not None and channel.number in member.process.offered:
                member.process.wire.send({"kind": "close", "job": channel.number})

    def tell(self, worker: int, message: Message) -> None:
        process = self._members[worker].process
        if process is not None:  # else it has ended, and the coordinator will hear of it
            process.wire.send(message)

    def replace(self, worker: int, reason: str) -> None:
        """Kill a worker; its end is reported, and another started, when it is gone."""
        process = self._members[worker].process
        if process is not None:
            process.silent = reason
            process.popen.kill()

    def wake(self) -> None:
        """Have ``pump`` return. Any thread, also a signal handler, may."""
        with suppress(OSError):  # it is awake already, or gone
            os.write(self._wake_write, b"!")

    def pump(self, timeout_s: float | None) -> None:
        """Wait for news of any worker, at most so long, and pass on what there is.

        Raises:
            WorkerError: no worker is left, and no more are started.
            UserError: workers cannot be started again from this script.
        """
        now = time.monotonic()
        due_s = [max(0.0, at - now) for at in self._due()]
        limits = due_s if timeout_s is None else [*due_s, timeout_s]
        for key, _ in self._selector.select(min(limits, default=None)):
            key.data()
        self._do_what_is_due()

    def close(self) -> None:
        """End all workers: those that wait end at once, the others are killed."""
        for member in self._members:
            member.retry_at = None
            if member.process is not None:
                member.process.wire.send({"kind": "end"})
        # After a second Ctrl-C nobody waits.
        at_once = isinstance(sys.exc_info()[1], (KeyboardInterrupt, SystemExit))
        deadline = time.monotonic() + (0.0 if at_once else GRACE_S)
        for member in self._members:
            if (process := member.process) is None:
                continue
            try:
                process.popen.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.popen.kill()
            process.popen.wait()
            self._release(member)
        self._selector.close()
        os.close(self._wake_read)
        os.close(self._wake_write)
        self._wake_write = -1

    # --- starting ---------------------------------------------------------------------------------

    def _start(self, member: _Member) -> None:
        member.retry_at = None
        output = tempfile.TemporaryFile()  # noqa: SIM115  closed with the process
        ours, theirs = Wire.pair()
        # Whoever has more threads than cores must not spin while it waits for work.
        crowded = self._threads * len(self._devices) > usable_cores()
        defaults = {"OMP_WAIT_POLICY": "passive"} if crowded else {}
        start = {
            "number": member.number,
            "wire": theirs.socket.fileno(),
            "output": output.fileno(),
            "script": asdict(self._script),
        }
        try:
            popen = subprocess.Popen(
                [
                    sys.executable,
                    *subprocess._args_from_interpreter_flags(),  # type: ignore[attr-defined]
                    lifeline.__file__,
                    str(os.getpid()),
                    worker.__name__,
                    json.dumps(sys.path),
                    json.dumps(start),
                ],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.socket.fileno(), output.fileno()],
                cwd=self._script.folder,
                env=child_environment(defaults),
                process_group=0,  # a terminal's Ctrl-C is the coordinator's
            )
        except OSError as error:
            ours.close()
            output.close()
            raise WorkerError(f"worker {member.number} cannot be started: {error}") from error
        finally:
            theirs.close()
        process = _Process(popen, ours, output)
        member.process = process
        self._selector.register(ours.socket, selectors.EVENT_READ, lambda: self._hear(member))
        if hasattr(os, "pidfd_open"):
            # Its children may have inherited the wire and keep it open, but not its exit.
            process.exit = os.pidfd_open(popen.pid)
            self._selector.register(process.exit, selectors.EVENT_READ, lambda: self._ended(member))

    def _offer(self, process: _Process, channel: ProcessesChannel) -> None:
        job = channel.job
        name = next(n for n, d in self._datasets.items() if d is job.source.dataset)
        process.offered.add(channel.number)
        process.wire.send(
            {
                "kind": "open",
                "job": channel.number,
                "work": "evaluation" if isinstance(job, Evaluation) else "training",
                "dataset": name,
                "check": name not in process.checked,
                "averaged": job.parameters is self.arena.average,
                "plan": job.plan.to_json(),
                "steps": [job.steps.start, job.steps.stop],
                "loading": job.loading,
            }
        )

    def _check(self, member: _Member, channel: ProcessesChannel, answer: str | None) -> None:
        """Refuse a worker that loaded other rows than the coordinator does."""
        assert member.process is not None
        source = channel.job.source
        name = next(n for n, d in self._datasets.items() if d is source.dataset)
        if answer is None or name in member.process.checked:
            return
        member.process.checked.add(name)
        if name not in self._fingerprints:
            self._fingerprints[name] = fingerprint(source.load((0, 0)).data)
        if answer == self._fingerprints[name]:
            return
        if fingerprint(source.load((0, 0)).data) != self._fingerprints[name]:
            self._fingerprints[name] = answer
            self._say(
                f"the {name} gives other values each time it is loaded: bits are not repeatable "
                "(it draws from a generator of its own?)"
            )
            return
        raise UserError(
            f"a worker that ran the script again has another {name}: its first shard, rows "
            f"{abridged(source.plan.shard(0, 0))}, differs from the coordinator's; seed what the "
            "script draws, sort what it takes from a set, or use engine='towers'"
        )

    # --- news of workers --------------------------------------------------------------------------

    def _woken(self) -> None:
        with suppress(BlockingIOError):
            os.read(self._wake_read, 4096)

    def _hear(self, member: _Member) -> None:
        process = member.process
        if process is None:
            return  # its exit was handled in the same round
        for message in process.wire.arrived():
            self._handle(member, process, message)
        if process.wire.is_cut:
            self._selector.unregister(process.wire.socket)
            process.is_deaf = True
            process.popen.kill()  # if it has not ended by itself
            if process.exit is None:
                self._ended(member)

    def _handle(self, member: _Member, process: _Process, message: Message) -> None:
        channel = self._channels.get(message.get("job", 0))
        match message["kind"]:
            case "here":
                process.is_here = True
                process.wire.send({"kind": "arena"}, [self._description.fd, *self._fds])
                for each in self._channels.values():
                    self._offer(process, each)
            case "unfit":
                process.unfit = message["message"]
            case "ready" if channel is not None:
                self._check(member, channel, message["fingerprint"])
                process.joined.add(channel.number)
                channel.joined(member.number)
                if member.lost_at is not None:
                    away_s = time.monotonic() - member.lost_at
                    member.lost_at = None
                    self._say(f"worker {member.number} is back after {away_s:.1f} s")
            case "done":
                member.restarts.computed()
                if channel is not None:
                    channel.done(member.number, message)
            case "failed" if channel is not None:
                channel.failed(member.number, message)

    def _ended(self, member: _Member) -> None:
        process = member.process
        if process is None:
            return
        for message in process.wire.arrived():  # what it sent before it ended counts
            self._handle(member, process, message)
        code = process.popen.wait()
        doing = self.arena.doing(member.number)
        reason = process.silent or _how(code)
        if process.unfit is not None:
            if all(other.restarts.computed_in_all == 0 for other in self._members):
                raise UserError(process.unfit)
            reason = process.unfit
        where = ""
        if not process.is_here:
            where = " while starting"
        elif doing.phase != "waiting":
            where = f" in step {doing.step}, shard {doing.shard}, {doing.phase}"
        # A kill comes from outside: an operator, or the kernel when memory runs out.
        killed = code == -signal.SIGKILL and process.silent is None
        said = f"worker {member.number} ({self._devices[member.number]}) {reason}{where}"
        if not process.is_here and code > 0:
            said += f": {_tail(process.output)}"
        self._release(member)
        for number in process.joined & self._channels.keys():
            self._channels[number].left(member.number, said, crashed=not killed)
        self._again(member, said, killed=killed, unfit=process.unfit is not None)

    def _again(self, member: _Member, said: str, *, killed: bool, unfit: bool) -> None:
        """Start another in its place, now or later, or give it up."""
        now = time.monotonic()
        member.lost_at = member.lost_at or now
        delay_s = None if unfit else member.restarts.ended(killed=killed)
        if changed := self._script.changed(self._sources):
            delay_s = None
            said += f"; {changed} has changed since, so that no other can take its place"
        if delay_s is not None:
            member.retry_at = now + delay_s
            self._say(f"{said}; another is starting")
            return
        member.given_up = said
        if all(other.given_up is not None for other in self._members):
            reasons = "\n".join(f"  {m.given_up}" for m in self._members)
            raise WorkerError(f"no worker is left, and no other is started:\n{reasons}")
        self._say(f"{said}; the run goes on without it")

    def _release(self, member: _Member) -> None:
        """Close what belonged to a process that has ended."""
        process, member.process = member.process, None
        assert process is not None
        if not process.is_deaf:
            self._selector.unregister(process.wire.socket)
        if process.exit is not None:
            self._selector.unregister(process.exit)
            os.close(process.exit)
        process.wire.close()
        process.output.close()

    def _due(self) -> Iterator[float]:
        for member in self._members:
            if member.retry_at is not None:
                yield member.retry_at
            if member.process is not None and not member.process.is_here:
                yield member.process.started_at + self._timeout_s

    def _do_what_is_due(self) -> None:
        now = time.monotonic()
        for member in self._members:
            process = member.process
            if member.retry_at is not None and member.retry_at <= now:
                self._start(member)
            elif process is None or process.is_here or process.silent is not None:
                continue
            elif process.started_at + self._timeout_s <= now:
                reason = f"took more than worker_timeout_s={self._timeout_s:g} s"
                self.replace(member.number, reason)


class ProcessesChannel:
    """One job's conversation with all workers."""

    def __init__(self, transport: Processes, job: Job, number: int) -> None:
        self.job = job
        self.number = number
        self._transport = transport
        self._events: deque[Event] = deque()
        self._errors: dict[tuple[int, int, int], BaseException] = {}
        self._running: dict[int, _Running] = {}  # worker -> what it computes
        self._pending: dict[tuple[int, int, int], _Result] = {}  # neither kept nor discarded
        # Of the newest step: what is kept and not yet added, and the sums of the rest.
        self._step = -1
        self._kept: deque[tuple[Node, _Result]] = deque()
        self._sum: TreeSum[_Result] = TreeSum(0, self._add)
        self._free = list(range(transport.arena.slots))  # a heap: low ones first, so few are used
        self._slots: dict[int, Slot] = {}

    def send(self, effect: Compute | Keep | Discard | Replace) -> None:
        match effect:
            case Compute():
                self._compute(effect)
            case Keep(worker, step, shard):
                self._kept.append(((0, shard), self._pending.pop((worker, step, shard))))
            case Discard(worker, step, shard):
                self._give_back(self._pending.pop((worker, step, shard)))
            case Replace(worker, reason):
                self._transport.replace(worker, reason)

    def receive(self, timeout_s: float | None) -> Event | None:
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while not self._events:
            if self._kept:  # adding can wait, a worker without work cannot
                self._transport.pump(0.0)
                if not self._events:
                    self._sum.put(*self._kept.popleft())
                continue
            left_s = None if deadline is None else max(0.0, deadline - time.monotonic())
            self._transport.pump(left_s)
            if not self._events and left_s == 0.0:
                return None
        return self._events.popleft()

    def post(self, event: Event) -> None:
        self._events.append(event)
        self._transport.wake()

    def collect(self, step: int, holders: Sequence[int]) -> list[Part]:  # noqa: ARG002
        assert step == self._step
        parts = [*self._sum.parts.items(), *self._kept]
        return [(node, result.sum) for node, result in parts]

    def error(self, worker: int, step: int, shard: int) -> BaseException:
        return self._errors[worker, step, shard]

    def close(self) -> None:
        self._transport.forget(self)

    # --- what the transport reports ---------------------------------------------------------------

    def joined(self, worker: int) -> None:
        self._events.append(Joined(worker))

    def left(self, worker: int, reason: str, *, crashed: bool) -> None:
        running = self._running.pop(worker, None)
        if running is not None:
            step, shard, slot = running
            self._free_slot(slot)  # it is gone, and writes no more
            rows = abridged(self.job.plan.shard(step, shard))
            self._errors[worker, step, shard] = WorkerError(
                f"{reason}; it computed step {step}, shard {shard}, rows {rows}"
            )
        self._events.append(Left(worker, reason, crashed=crashed, results_stay=True))

    def done(self, worker: int, message: Message) -> None:
        step, shard, number = self._running.pop(worker)
        slot = None if number is None else self._slot(number)
        missing = message["missing"]
        self._pending[worker, step, shard] = _Result(
            ShardSum(
                weight=message["weight"],
                metrics=message["metrics"],
                gradient=None if slot is None else slot.gradient,
                buffers=slot.buffers if slot is not None and slot.buffers.numel() else None,
                counts=slot.counts if slot is not None and slot.counts.numel() else None,
                missing=None if missing is None else frozenset(missing),
            ),
            number,
        )
        self._events.append(Done(worker, step, shard))

    def failed(self, worker: int, message: Message) -> None:
        step, shard, slot = self._running.pop(worker)
        self._free_slot(slot)
        self._errors[worker, step, shard] = raised.from_json(message["error"])
        self._events.append(Failed(worker, step, shard))

    # --- slots ------------------------------------------------------------------------------------

    def _compute(self, effect: Compute) -> None:
        if effect.step != self._step:
            self._begin(effect.step)
        slot = None if isinstance(self.job, Evaluation) else heapq.heappop(self._free)
        self._running[effect.worker] = _Running(effect.step, effect.shard, slot)
        self._transport.tell(
            effect.worker,
            {
                "kind": "compute",
                "job": self.number,
                "step": effect.step,
                "shard": effect.shard,
                "slot": slot,
                "place": effect.place,
            },
        )

    def _begin(self, step: int) -> None:
        """Forget the sums of the step before, and show workers what the update made of buffers."""
        for _, result in (*self._sum.parts.items(), *self._kept):
            self._give_back(result)
        self._kept.clear()
        self._step = step
        self._sum = TreeSum(self.job.plan.shards_of(step), self._add)
        if not isinstance(self.job, Evaluation):
            self._transport.arena.publish(self._transport.buffers)

    def _add(self, left: _Result, right: _Result) -> _Result:
        left.sum.add(right.sum)
        self._give_back(right)
        return left

    def _give_back(self, result: _Result) -> None:
        self._free_slot(result.slot)

    def _free_slot(self, number: int | None) -> None:
        if number is not None:
            heapq.heappush(self._free, number)

    def _slot(self, number: int) -> Slot:
        if number not in self._slots:
            self._slots[number] = self._transport.arena.slot(number)
        return self._slots[number]


class _Running(NamedTuple):
    step: int
    shard: int
    slot: int | None


class _Result(NamedTuple):
    """One or more shards' sums, and the slot that they lie in."""

    sum: ShardSum
    slot: int | None


@dataclass
class _Process:
    """One life of a worker."""

    popen: subprocess.Popen[bytes]
    wire: Wire
    output: IO[bytes]  # of the script before the training loop
    started_at: float = field(default_factory=time.monotonic)
    exit: int | None = None  # becomes readable when it ends
    is_here: bool = False  # it has reached the training loop
    is_deaf: bool = False  # its wire is cut
    offered: set[int] = field(default_factory=set)  # jobs
    joined: set[int] = field(default_factory=set)  # jobs
    checked: set[str] = field(default_factory=set)  # datasets
    silent: str | None = None  # why it is being killed
    unfit: str | None = None  # why it cannot take part


@dataclass
class _Member:
    """A worker's number, through all its lives."""

    number: int
    process: _Process | None = None
    restarts: Restarts = field(default_factory=Restarts)
    retry_at: float | None = None
    lost_at: float | None = None  # since when there is none
    given_up: str | None = None


def _how(code: int) -> str:
    """How a process ended."""
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        name = f" ({signal.Signals(-code).name})"
    except ValueError:
        name = ""
    return f"was killed by signal {-code}{name}"


def _tail(output: IO[bytes], most: int = 600) -> str:
    """The end of what a script printed, for a message."""
    output.seek(0)
    text = output.read().decode(errors="replace").strip()
    return text[-most:] or "it printed nothing"
