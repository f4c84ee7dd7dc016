"""Worker processes of one machine: shared memory for what is large, a wire each for the rest.

The coordinator starts the script again in each of them. A worker's end is seen by its exit; what it
had computed is in shared memory and stays. A new one is started in its place.

Legend: N workers, V shards, t step, s shard.
"""

from __future__ import annotations

import itertools
import json
import os
import selectors
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch

from quorate.coordination.plan import abridged
from quorate.errors import UserError, WorkerError
from quorate.machine.cores import usable_cores
from quorate.machine.descriptors import require_descriptors
from quorate.machine.devices import Group, current, kinds
from quorate.machine.memory_fraction import free_cache
from quorate.machine.shared_memory import Segment
from quorate.replica.buffers import Buffers
from quorate.replica.fingerprint import fingerprint
from quorate.replica.model import unchanged
from quorate.replica.notes import Notes
from quorate.replica.replica import Replica
from quorate.replica.streams import Stream
from quorate.transports.job import Job, Training, class_name, probe_fingerprint
from quorate.transports.processes.arena import Arena
from quorate.transports.processes.channel import ProcessesChannel
from quorate.transports.processes.restarts import Restarts
from quorate.transports.processes.script import Script
from quorate.transports.processes.starter import new_starter
from quorate.transports.processes.wire import Message
from quorate.transports.processes.worker_process import WorkerProcess
from quorate.transports.worker_status import WorkerStatus

# How long workers may take to end when they are told to; then they are killed.
GRACE_S = 0.5

# How long one may take that has closed its wire: it is ending, with torch to tear down.
DEAF_S = 5.0

# How long the first workers that are ready wait for the others: as long as no update is made, a
# worker can be asked for the gradient that the coordinator computes too.
TOGETHER_S = 10.0


class Processes:
    """A process per device entry.

    Args:
        script: what they run.
        arena: what they share.
        model: the coordinator's.
        buffers: of it.
        probe: makes a replica of it, that may be it itself, to compute what workers are compared
            with.
        groups: the devices of each worker.
        datasets: what the loop was called with, by the names that workers know it by.
        threads: intra-op threads of each.
        compiles: whether workers compile, as the coordinator found it could.
        timeout_s: how long a worker may take to reach the training loop, and to answer there.
        say: shows a line to the user.
        notes: those of workers go there.

    Raises:
        UserError: there are too few descriptors.
        WorkerError: a process cannot be started.
    """

    can_replace = True

    def __init__(
        self,
        script: Script,
        arena: Arena,
        model: torch.nn.Module,
        buffers: Buffers,
        probe: Callable[[], Replica],
        groups: Sequence[Group],
        datasets: Mapping[str, Any],
        *,
        threads: int,
        compiles: bool,
        timeout_s: float,
        say: Callable[[str], None],
        notes: Notes,
    ) -> None:
        require_descriptors(len(groups))
        self.arena = arena
        self.buffers = buffers
        self._script = script
        self._sources = script.sources()
        self._model = model
        self._probe = probe
        self._groups = groups
        self._devices = [device for group in groups for device in group]
        self._datasets = datasets
        self._threads = threads
        self._compiles = compiles
        self._timeout_s = timeout_s
        self._say = say
        self._notes = notes
        self._channels: dict[int, ProcessesChannel] = {}
        self._jobs = 0
        self.tickets: Iterator[int] = itertools.count()
        self._data: dict[str, str | None] = {}  # fingerprints by _key; None: not repeatable
        self._gradient: str | None = None  # fingerprint; None: not repeatable, or training goes on
        self._together_until: float | None = None
        text, self._fds = arena.handed_over()
        payload = json.dumps(text).encode()
        self._description = Segment(len(payload))
        self._description.map[:] = payload
        self._selector = selectors.DefaultSelector()
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)
        self._selector.register(self._wake_read, selectors.EVENT_READ, self._woken)
        self._members = [_Member(number) for number in range(len(groups))]
        self._starter = new_starter(script, spins=threads * len(groups) <= usable_cores())
        try:
            for member in self._members:
                self._start(member)
        except BaseException as error:
            self.close()
            if isinstance(error, OSError):
                raise WorkerError(f"workers cannot be started: {error}") from error
            raise

    def can_compute(self, dataset: object) -> bool:
        return any(known is dataset for known in self._datasets.values())

    def open(self, job: Job) -> ProcessesChannel:
        self._jobs += 1
        if (key := self._key(job)) not in self._data:
            self._data[key] = self._fingerprint(job) if job.is_compared else None
        if self._jobs == 1 and isinstance(job, Training):
            self._gradient = self._probed(job) if job.is_compared else None
            # Whoever wants to know what differs wants all of them to take part.
            self._together_until = time.monotonic() + (
                TOGETHER_S if job.is_compared else self._timeout_s
            )
        channel = ProcessesChannel(self, job, self._jobs)
        self._channels[self._jobs] = channel
        self.arena.publish(self.buffers)
        for member in self._members:
            if member.life is not None and member.life.is_here:
                self._ask(member.life, channel)
        return channel

    def status(self) -> list[WorkerStatus]:
        found = []
        for member, group in zip(self._members, self._groups, strict=True):
            life = member.life  # read once: another thread may end it
            pid = None if life is None else life.pid
            doing = self.arena.doing(member.number)
            found.append(WorkerStatus(member.number, str(group), pid, None, *doing))
        return found

    def forget(self, channel: ProcessesChannel) -> None:
        """End a job."""
        del self._channels[channel.number]
        for member in self._members:
            life, number = member.life, channel.number
            if life is None:
                continue
            # It may be computing for another job still, and join this one only later.
            if number in life.joined or number in member.ready or number in life.asked:
                life.wire.send({"kind": "close", "job": number})
            life.asked.pop(number, None)
            life.joined.discard(number)
            member.ready.discard(number)

    def tell(self, worker: int, message: Message) -> None:
        life = self._members[worker].life
        if life is not None:  # else it has ended, and the coordinator will hear of it
            life.wire.send(message)

    def replace(self, worker: int, reason: str) -> None:
        """Kill a worker; its end is reported, and another started, when it is gone."""
        life = self._members[worker].life
        if life is not None:
            life.kill(reason)

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
            if member.life is not None:
                member.life.wire.send({"kind": "end"})
        # After a second Ctrl-C nobody waits.
        at_once = isinstance(sys.exc_info()[1], (KeyboardInterrupt, SystemExit))
        deadline = time.monotonic() + (0.0 if at_once else GRACE_S)
        for member in self._members:
            # A kill before its fork would end the others too.
            if member.life is not None and member.life.pid is not None:
                member.life.wait(max(0.0, deadline - time.monotonic()))
        for member in self._members:
            if member.life is not None:
                self._release(member)
        self._starter.close()
        if self._wake_write >= 0:
            self._selector.close()
            write, self._wake_write = self._wake_write, -1
            os.close(self._wake_read)
            os.close(write)

    # --- starting ---------------------------------------------------------------------------------

    def _start(self, member: _Member) -> None:
        member.retry_at = None
        life = WorkerProcess(member.number, self._script, self._starter)
        member.life = life
        self._selector.register(life.wire.socket, selectors.EVENT_READ, lambda: self._hear(member))
        if life.exit is not None:
            self._selector.register(life.exit, selectors.EVENT_READ, lambda: self._look(member))

    def _ask(self, life: WorkerProcess, channel: ProcessesChannel) -> None:
        """Ask a worker to join a job, and for what shows that it is the same there as here."""
        job = channel.job
        key = self._key(job)
        checks = []
        if key not in life.checked and self._data[key] is not None:
            checks.append("data")
        if self._gradient is not None and isinstance(job, Training):
            checks.append("gradient")
        life.asked[channel.number] = time.monotonic()
        life.wire.send(
            {
                "kind": "open",
                "job": channel.number,
                "work": class_name(job),
                "dataset": self._name_of(job),
                "checks": checks,
                "averaged": job.parameters is self.arena.average,
                "plan": job.plan.to_json(),
                "steps": [job.steps.start, job.steps.stop],
                "options": job.options(),
            }
        )

    def _name_of(self, job: Job) -> str:
        dataset = job.source.dataset
        return next(name for name, known in self._datasets.items() if known is dataset)

    def _key(self, job: Job) -> str:
        """Of a job's kind, which may augment, its dataset, and the order of rows."""
        return f"{job.name} {self._name_of(job)} {job.plan.to_json()}"

    # --- whether a worker is the same as the coordinator ------------------------------------------

    def _fingerprint(self, job: Job) -> str | None:
        """Of a dataset's first shard."""
        try:
            first, second = (fingerprint(job.source.load((0, 0)).data) for _ in range(2))
        except Exception:  # user code: it raises again in its shard, where it is told
            return None
        if first != second:
            self._say(
                f"the {self._name_of(job)} gives other values each time it is loaded: bits are not "
                "repeatable (it draws from a generator of its own?)"
            )
            return None
        return first

    def _probed(self, job: Job) -> str | None:
        """Of the gradient of the first shard, from the parameters as they are before training."""
        if len(kinds(self._groups)) > 1:
            return None  # workers have different bits

        def twice() -> list[str]:
            found = []
            for _ in range(2):
                with unchanged(self._model), Stream() as stream:
                    replica = self._probe()
                    if kinds([replica.group]) == kinds(self._groups):
                        with current(replica.device):
                            found.append(probe_fingerprint(replica, job.source, stream))
            return found

        # In a thread, as workers compute: this one may be inside of an autocast of the script's.
        with ThreadPoolExecutor(
            1, initializer=torch.set_num_threads, initargs=(self._threads,)
        ) as one:
            found = one.submit(twice).result()
        free_cache(self._devices)
        if len(set(found)) > 1:
            self._say(
                "the same shard gives another gradient each time it is computed: bits are not "
                "repeatable (the model draws from a generator of its own, or keeps state?)"
            )
            return None
        return found[0] if found else None

    def _check(self, life: WorkerProcess, channel: ProcessesChannel, answer: Message) -> None:
        key, name = self._key(channel.job), self._name_of(channel.job)
        if "data" in answer:
            life.checked.add(key)
            if answer["data"] != self._data[key]:
                rows = abridged(channel.job.plan.shard(0, 0))
                raise UserError(
                    f"a worker that ran the script again has another {name}: its first shard, rows "
                    f"{rows}, differs from the coordinator's; seed what the script draws, sort "
                    "what it takes from a set, or use engine='towers'"
                )
        if "gradient" in answer and self._gradient not in (None, answer["gradient"]):
            raise UserError(
                "a worker that ran the script again computes another gradient from the same rows "
                "and parameters: its model or loss differs in what is no parameter; seed what the "
                "script draws, or use engine='towers'"
            )

    def _let_join(self) -> None:
        """Let workers that are ready begin; at first, when all are."""
        if self._together_until is not None:
            waited_for = [m.life for m in self._members if m.life is not None and not m.ready]
            if waited_for and time.monotonic() < self._together_until:
                return
            self._together_until = self._gradient = None
        for member in self._members:
            for channel in [c for n, c in self._channels.items() if n in member.ready]:
                channel.joined(member.number)
                assert member.life is not None
                member.life.joined.add(channel.number)
            member.ready.clear()

    # --- news of workers --------------------------------------------------------------------------

    def _woken(self) -> None:
        with suppress(BlockingIOError):
            os.read(self._wake_read, 4096)

    def _hear(self, member: _Member) -> None:
        life = member.life
        if life is None or life.is_deaf_since is not None:
            return  # its exit was handled in the same round
        for message in life.wire.arrived():
            self._handle(member, life, message)
        if life.wire.is_cut:
            # Its process is about to end, and its exit code says why.
            self._selector.unregister(life.wire.socket)
            life.is_deaf_since = time.monotonic()

    def _handle(self, member: _Member, life: WorkerProcess, message: Message) -> None:
        channel = self._channels.get(message.get("job", 0))
        life.asked = dict.fromkeys(life.asked, time.monotonic())  # it is alive
        match message["kind"]:
            case "here":
                life.is_here = True
                answer: Message = {"kind": "arena", "compile": self._compiles}
                life.wire.send(answer, [self._description.fd, *self._fds])
                for each in self._channels.values():
                    self._ask(life, each)
            case "note":
                self._notes.add(message["line"])
            case "unfit":
                life.unfit = message["message"]
            case "ready" if channel is not None:
                self._check(life, channel, message)
                del life.asked[channel.number]
                member.ready.add(channel.number)
                self._let_join()
                if member.lost_at is not None:
                    away_s = time.monotonic() - member.lost_at
                    member.lost_at = None
                    self._say(f"worker {member.number} is back after {away_s:.1f} s")
            case "done":
                member.restarts.computed()
                if channel is not None:
                    channel.done(member.number, message)
            case "left off" if channel is not None:
                channel.left_off(member.number, message)
            case "failed" if channel is not None:
                channel.failed(member.number, message)

    def _look(self, member: _Member) -> None:
        if member.life is not None and member.life.has_ended():
            self._ended(member)

    def _ended(self, member: _Member) -> None:
        life = member.life
        if life is None:
            return
        for message in life.wire.arrived():  # what it sent before it ended counts
            self._handle(member, life, message)
        reason, killed = life.how_it_ended()
        if life.unfit is not None and not any(m.restarts.computed_in_all for m in self._members):
            raise UserError(life.unfit)
        doing = self.arena.doing(member.number)
        where = ""
        if life.joined and doing.phase not in ("starting", "waiting"):
            where = f" in step {doing.step}, shard {doing.shard}, {doing.phase}"
            if life.kill_reason is not None:
                where += f" for {time.monotonic() - doing.since:.0f} s"
        elif not life.joined and killed:
            where = " while starting"
        said = f"worker {member.number} ({self._groups[member.number]}) {reason}{where}"
        self._release(member)
        for number in life.joined & self._channels.keys():
            self._channels[number].left(member.number, said, crashed=not killed)
        self._again(member, said, killed=killed, unfit=life.unfit is not None)
        self._let_join()

    def _again(self, member: _Member, said: str, *, killed: bool, unfit: bool = False) -> None:
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
        """Close what belonged to a process that has ended, or is to end now."""
        life, member.life = member.life, None
        member.ready.clear()
        assert life is not None
        if life.is_deaf_since is None:
            self._selector.unregister(life.wire.socket)
        if life.exit is not None:
            self._selector.unregister(life.exit)
        life.close()
        self.arena.tell(member.number, "starting")  # it writes no more, and the next one not yet

    # --- what is due at a time --------------------------------------------------------------------

    def _due(self) -> Iterator[float]:
        if self._together_until is not None:
            yield self._together_until
        for member in self._members:
            if member.retry_at is not None:
                yield member.retry_at
            if member.life is not None and member.life.is_deaf_since is not None:
                yield member.life.is_deaf_since + (0.0 if member.life.exit is None else DEAF_S)
            elif member.life is not None and member.life.kill_reason is None:
                yield from self._answers_due(member.life)

    def _answers_due(self, life: WorkerProcess) -> list[float]:
        """When it has to have reached the loop, or joined what it was asked to."""
        if any(channel.is_computing(life.number) for channel in self._channels.values()):
            return []  # it comes to that when it is done, and the coordinator looks after it
        waits = list(life.asked.values()) if life.is_here else [life.started_at]
        return [since + self._timeout_s for since in waits]

    def _do_what_is_due(self) -> None:
        now = time.monotonic()
        if self._together_until is not None and self._together_until <= now:
            self._let_join()
        for member in self._members:
            if member.retry_at is not None and member.retry_at <= now:
                self._retry(member)
                continue
            life = member.life
            if life is None:
                continue
            if life.is_deaf_since is not None:
                self._see_whether_it_ends(member, life, now)
            elif life.kill_reason is None and any(at <= now for at in self._answers_due(life)):
                life.kill(f"took more than worker_timeout_s={self._timeout_s:g} s to start")

    def _see_whether_it_ends(self, member: _Member, life: WorkerProcess, now: float) -> None:
        assert life.is_deaf_since is not None
        if life.exit is None and life.wait(GRACE_S):
            self._ended(member)
        elif now >= life.is_deaf_since + DEAF_S:
            if life.kill_reason is None:
                life.kill("closed its wire")
            life.is_deaf_since = now
            # Perhaps nobody tells of its end: its nursery hangs, or there is no ``exit``.
            if life.wait(GRACE_S):
                self._ended(member)

    def _retry(self, member: _Member) -> None:
        try:
            self._start(member)
        except OSError as error:
            said = f"worker {member.number} cannot be started: {error}"
            self._again(member, said, killed=False)


@dataclass
class _Member:
    """A worker's number, through all its lives."""

    number: int
    life: WorkerProcess | None = None
    ready: set[int] = field(default_factory=set)  # jobs that this life may join
    restarts: Restarts = field(default_factory=Restarts)
    retry_at: float | None = None
    lost_at: float | None = None  # since when there is none
    given_up: str | None = None
