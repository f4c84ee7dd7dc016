"""Worker processes: shared memory for what is large, a wire each for the rest.

A site starts the script again in each of them. A worker's end is seen by its exit; what it
had computed is in shared memory and stays. A new one is started in its place.

Here are the processes, wires and the clock. What becomes of a worker is decided in
``supervisor.py``, and whether it is the same as the coordinator in ``agreement.py``.
"""

from __future__ import annotations

import itertools
import selectors
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from typing import Any

import torch

from quorate.engines.job import UNCHANGED, Job, Original, Training, place
from quorate.engines.processes.agreement import Agreement
from quorate.engines.processes.alarm import Alarm
from quorate.engines.processes.arena import Arena
from quorate.engines.processes.channel import ProcessesChannel
from quorate.engines.processes.decisions import (
    Ask,
    AwaitEnd,
    Close,
    Decision,
    Fail,
    Join,
    Kill,
    Leave,
    Release,
    Say,
    Start,
    Welcome,
)
from quorate.engines.processes.lookout import CheckSchedule
from quorate.engines.processes.member import WorkerLife
from quorate.engines.processes.pool import WorkerHandle, WorkerPool
from quorate.engines.processes.script import Script
from quorate.engines.processes.script_as_worker import RAISED, raised_in
from quorate.engines.processes.supervisor import ElasticSize, Supervisor
from quorate.engines.processes.wire import Message
from quorate.engines.worker_status import Doing, WorkerStatus
from quorate.errors import WorkerError
from quorate.machine.devices import Group
from quorate.machine.limits import FIRST_WORKERS_S, WORKER_EXIT_S
from quorate.machine.resources import oom_kills
from quorate.replica.buffers import Buffers
from quorate.replica.notes import Note, Notes
from quorate.replica.replica import Replica

# What a worker says of a shard that it was given.
ANSWERS = ("done", "left off", "failed")


class Processes:
    """A process per device entry.

    Args:
        script: what they run.
        site: where they are started; this object closes it.
        arena: what they share.
        model: the coordinator's.
        buffers: of it.
        probe: makes a replica of it, that may be it itself, to compute what workers are compared
            with.
        groups: the devices of each worker.
        datasets: what the loop was called with, by the names that workers know it by.
        threads: intra-op threads of each.
        decided: how workers compute, as far as the coordinator found it out; see ``Computing``.
        timeout_s: how long a worker may take to reach the training loop, and to answer there.
        say: shows a line to the user.
        notes: those of workers go there.
        original: the coordinator's model, whose changes by user code are followed.
        growth: of a crew that begins with some of its workers.

    Raises:
        WorkerError: a process cannot be started.
    """

    can_replace = True

    def __init__(
        self,
        script: Script,
        site: WorkerPool,
        arena: Arena,
        model: torch.nn.Module,
        buffers: Buffers,
        probe: Callable[[], Replica],
        groups: Sequence[Group],
        datasets: Mapping[str, Any],
        *,
        threads: int,
        decided: Mapping[str, Any],
        timeout_s: float,
        say: Callable[[str], None],
        notes: Notes,
        original: Original = UNCHANGED,
        growth: ElasticSize | None = None,
    ) -> None:
        self._site, self.servers = site, site.servers
        self.takes_runs = site.takes_runs and arena.takes_runs
        self.arena = arena
        self.buffers = buffers
        self.tickets: Iterator[int] = itertools.count()
        self.members = Supervisor([str(group) for group in groups], timeout_s, growth)
        self._processes: list[WorkerHandle | None] = [None] * len(groups)
        self._script = script
        self._decided = decided
        self._timeout_s = timeout_s
        self._say = say
        self._notes = notes
        self._amendments = original.amendments
        self._channels: dict[int, ProcessesChannel] = {}
        self._jobs = 0
        self._oom_kills = oom_kills()  # as far as they are explained
        told: Any = {"threads": threads, "say": say, "changes": original.changes}
        # What is open is closed in the opposite order, also when the rest cannot be opened.
        self._open = ExitStack()
        try:
            self._open.callback(site.close)
            self._agreement = Agreement(model, arena, buffers, probe, groups, datasets, **told)
            self._sources = script.sources()
            self._description, self._fds = arena.described()
            self._selector = self._open.enter_context(selectors.DefaultSelector())
            self._alarm = self._open.enter_context(closing(Alarm(self._selector)))
            self._lookout = CheckSchedule(self.members, self._channels, arena)
            for number in range(len(groups)):
                self._start(number)
        except BaseException as error:
            self.close()
            if isinstance(error, OSError):
                raise WorkerError(f"workers cannot be started: {error}") from error
            raise

    def can_compute(self, dataset: object) -> bool:
        """Return whether workers had this dataset when they came to the loop."""
        return self._agreement.name_of(dataset) is not None

    def open(self, job: Job) -> ProcessesChannel:
        """Return a job's channel. Workers are asked to join with its first ``receive``."""
        self._jobs += 1
        channel = ProcessesChannel(self, job, self._jobs)
        self._channels[channel.number] = channel
        return channel

    def begin(self, channel: ProcessesChannel) -> None:
        """Begin a channel's job. Blocks for the shard that workers are compared with."""
        job, number, gather_s = channel.job, channel.number, None
        is_first = number == 1 and isinstance(job, Training)
        # What is not repeatable in the coordinator itself, which was said, cannot be compared.
        self._agreement.expect(job, is_first=is_first and not self._notes.doubts)
        if is_first:
            # Whoever wants to know what differs wants all of them to take part.
            gather_s = FIRST_WORKERS_S if job.is_compared else self._timeout_s
        self.arena.publish(self.buffers)
        self._do(self.members.open(number, time.monotonic(), gather_s=gather_s))

    def status(self) -> list[WorkerStatus]:
        """Return what each worker is at. Any thread may."""
        rows = []
        for member in self.members:
            process = self._processes[member.number]  # read once: another thread may end it
            pid = None if process is None else process.pid
            doing = self.arena.doing(member.number)
            where = (None, False) if process is None else (process.host, process.is_elsewhere)
            rows.append(WorkerStatus(member.number, member.devices, pid, None, *doing, *where))
        return rows

    def forget(self, channel: ProcessesChannel) -> None:
        """End a job."""
        del self._channels[channel.number]
        if channel.has_begun:
            self._do(self.members.close(channel.number))

    def tell(self, worker: int, message: Message) -> None:
        """Send a message to a worker. Does not block: it may be stopped."""
        process = self._processes[worker]
        if process is not None:  # else it has ended, and the coordinator will hear of it
            process.post_with(self._amendments(), message)

    def cancel(self, worker: int, ticket: int) -> None:
        """Let a worker leave off what it was given with this ticket. Does not block."""
        self.arena.cancel(worker, ticket)
        process = self._processes[worker]
        if process is not None:
            process.cancel(ticket)

    def replace(self, worker: int, reason: str) -> None:
        """Kill a worker; its end is reported, and another started, when it is gone."""
        self._do(self.members[worker].kill(reason))

    def wake(self) -> None:
        """Have ``pump`` return. Any thread, also a signal handler, may."""
        self._alarm.ring()

    def pump(self, timeout_s: float | None) -> None:
        """Wait for news of any worker, at most so long, and pass on what there is.

        Raises:
            WorkerError: no worker is left, and no more are started.
            UserError: workers cannot be started again from this script.
        """
        for key, _ in self._selector.select(self._lookout.sleeps_s(timeout_s)):
            key.data()
        self._site.flush()
        self._do(self._lookout.decisions())

    def close(self) -> None:
        """End all workers: those that wait end at once, the others are killed."""
        processes = [process for process in self._processes if process is not None]
        for process in processes:
            process.post({"kind": "end"})
        # After a second Ctrl-C nobody waits.
        at_once = isinstance(sys.exc_info()[1], (KeyboardInterrupt, SystemExit))
        deadline = time.monotonic() + (0.0 if at_once else WORKER_EXIT_S)
        for process in processes:
            # A kill before its fork would end the others too.
            if process.pid is not None:
                process.wait(max(0.0, deadline - time.monotonic()))
        for number in range(len(self._processes)):
            self._release(number)
        self._open.close()

    # --- what was decided -------------------------------------------------------------------------

    def _do(self, decisions: Iterable[Decision]) -> None:
        """Carry out decisions, in their order."""
        for decision in decisions:
            self._lookout.stir()
            match decision:
                case Start(number):
                    self._restart(number)
                case Welcome(number):
                    fds = [self._description.fd, *self._fds]
                    answer = {"kind": "arena", "computing": self._decided, "fds": len(fds)}
                    self._process(number).post(answer, *fds)
                case Ask(number, job):
                    self._ask(self._process(number), self._channels[job])
                case Close(number, job):
                    self._close_job(self._process(number), job)
                case Join(number, job):
                    self._channels[job].joined(number, self._process(number).place)
                case Leave(number, job, reason, crashed):
                    self._channels[job].left(number, reason, crashed=crashed)
                case Kill(number):
                    self._process(number).kill()
                case AwaitEnd(number):
                    self._await_end(number)
                case Release(number):
                    self._release(number)
                case Say(line):
                    self._say(line)
                case Fail(error):
                    raise error

    def _process(self, number: int) -> WorkerHandle:
        process = self._processes[number]
        assert process is not None
        return process

    def _start(self, number: int) -> None:
        process = self._site.start(number)
        self._processes[number] = process
        hear, look = lambda: self._hear(number), lambda: self._look(number)
        process.watch(self._selector, hear, look)
        self.arena.loads_ahead(number, None)
        told = {"tells_exit": process.tells_exit, "is_placed": process.is_placed}
        self.members[number].started(time.monotonic(), **told)

    def _restart(self, number: int) -> None:
        try:
            self._start(number)
        except OSError as error:
            changed = self._script.changed(self._sources)
            now = time.monotonic()
            self._do(self.members.cannot_start(number, str(error), now, changed=changed))

    def _ask(self, process: WorkerHandle, channel: ProcessesChannel) -> None:
        """Ask a worker to join a job, and for what shows that it is the same there as here."""
        name = self._agreement.name_of(channel.job.source.dataset)
        checks, fds = self._agreement.checks(channel.job, process.agreed)
        message: Message = {**channel.invitation(), "dataset": name, "checks": checks}
        process.post_with(self._amendments(), message, *fds)

    def _close_job(self, process: WorkerHandle, job: int) -> None:
        # To a worker that is stopped, job after job may be opened and closed: of those that it was
        # not told of it need not know, so that what waits for it does not grow.
        if process.withdraw(kind="open", job=job):
            self.members[process.number].not_asked(job)
        else:
            process.post({"kind": "close", "job": job})

    def _await_end(self, number: int) -> None:
        if self._process(number).wait(WORKER_EXIT_S):
            self._ended(number)
        else:
            self._do(self.members[number].still_there(time.monotonic()))

    def _release(self, number: int) -> None:
        """Close what belonged to a process that has ended, or is to end now."""
        process, self._processes[number] = self._processes[number], None
        if process is None:
            return
        process.close()
        self.arena.tell(number, "starting")  # it writes no more, and the next one not yet

    # --- news of workers --------------------------------------------------------------------------

    def _hear(self, number: int) -> None:
        process = self._processes[number]
        if process is None or self.members[number].is_silent:
            return  # its exit was handled in the same round
        process.flush()
        for message in process.arrived():
            self._handle(number, process, message)
        if process.is_cut:
            # Its process is about to end, and its exit code says why.
            process.deaf()
            self._lookout.stir()
            self.members[number].wire_cut(time.monotonic())

    def _handle(self, number: int, process: WorkerHandle, message: Message) -> None:
        member, now = self.members[number], time.monotonic()
        member.heard(now)
        channel = self._channels.get(message.get("job", 0))
        if message["kind"] == "done":
            for worker, _ in message.get("group", [(number, message)]):
                self.members[worker].computed()
        if message["kind"] not in ANSWERS:
            self._lookout.stir()
            self._handle_rest(member, process, channel, message, now)
        elif channel is not None:  # else it is of a job that is over
            channel.answered(number, message)
        if member.is_to_go and not any(c.is_computing(number) for c in self._channels.values()):
            self._do(self.members.hand_over(number))

    def _handle_rest(
        self,
        member: WorkerLife,
        process: WorkerHandle,
        channel: ProcessesChannel | None,
        message: Message,
        now: float,
    ) -> None:
        number = member.number
        match message["kind"]:
            case "placed":
                member.placed(now)
            case "leaves":
                member.is_to_leave(message["message"])
            case "here":
                self._do(self.members.here(number, now))
            case "note":
                self._notes.put(Note(message["text"], message["is_doubt"]))
            case "refuses":
                member.refused(message["message"])
            case raised if raised == RAISED:
                member.raised(raised_in(number, message))
            case "ready":
                agreed = process.agreed
                if channel is None or self._agreement.check(channel.job, agreed, message, number):
                    self._do(self.members.ready(number, message["job"], now))
                else:
                    process.post({"kind": "close", "job": channel.number})
                    self._ask(process, channel)

    def _look(self, number: int) -> None:
        process = self._processes[number]
        if process is not None and process.has_ended():
            self._ended(number)

    def _ended(self, number: int) -> None:
        process = self._processes[number]
        if process is None:
            return
        for message in process.arrived():  # what it sent before it ended counts
            self._handle(number, process, message)
        ending, doing = process.ending(), self.arena.doing(number)
        if ending.is_kill and self.members[number].is_wanted and oom_kills() > self._oom_kills:
            self._oom_kills += 1  # another may have been killed meanwhile
            ending = ending._replace(is_out_of_memory=True)
        changed = self._script.changed(self._sources)
        told = {"where": self._place(number, doing), "changed": changed}
        self._do(self.members.exited(number, ending, doing, time.monotonic(), **told))

    def _place(self, number: int, doing: Doing) -> str:
        """Return in words which shard a worker is at: of an evaluation, or of training."""
        channels = [channel for _, channel in sorted(self._channels.items(), reverse=True)]
        own = [channel for channel in channels if number in channel.computing()]
        for channel in own or channels:
            return channel.job.place(doing.step, doing.shard)
        return place(Training.name, doing.step, doing.shard)
