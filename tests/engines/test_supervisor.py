"""The fates of workers: every short order of events, drawn long orders; the frequency of starts.

No run reaches most of these orders: workers end, are silent, late and killed at the same time.
"""

import math
from collections import Counter
from collections.abc import Iterator
from selectors import SelectSelector
from typing import Any, NamedTuple, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quorate.engines.processes import worker_messages as messages
from quorate.engines.processes.endings import Ending
from quorate.engines.processes.pool import Callback, ElasticSize, WorkerHandle
from quorate.engines.processes.supervisor import RestartBudget, Supervisor
from quorate.engines.worker_status import PHASES, Doing
from quorate.errors import UserError, WorkerError
from quorate.machine.limits import FIRST_WORKERS_S, WORKER_SILENCE_S

Event = tuple[object, ...]
CODES = (0, 3, -9, -11)
FIRST, SECOND = 1, 2  # jobs
TIMEOUT_S = 60.0


class Process(WorkerHandle):
    """A made-up process."""

    pid = None

    def __init__(self, number: int, group: "Group") -> None:
        super().__init__(number)
        self.group = group
        self.is_placed = group.elastic is None
        self.messages: list[messages.WorkerMessage] = []
        self.is_at_loop = self.is_killed = False
        self.code: int | None = None
        self.invited: set[int] = set()  # jobs without an answer from the process
        self.joined: set[int] = set()

    def watch(self, selector: SelectSelector, hear: Callback, look: Callback) -> None:  # type: ignore[override]
        self.hear, self.look = hear, look

    def arrived(self) -> list[messages.WorkerMessage]:
        arrived, self.messages = self.messages, []
        return arrived

    def cut(self) -> None:
        self._is_cut = True
        self.hear()

    def cancel(self, ticket: int) -> None:
        raise AssertionError

    def post(self, message: messages.WorkerMessage, *fds: int) -> None:
        assert isinstance(message, messages.CloseJob)
        self.joined.discard(message.job)

    def kill(self) -> None:
        self.is_killed = True

    def has_ended(self) -> bool:
        return self.code is not None

    def wait(self, timeout_s: float) -> bool:
        if self.is_killed and not self.group.stubborn:
            self.code = -9
        return self.has_ended()

    def ending(self) -> Ending:
        assert self.code is not None
        return Ending(self.code, None, "nothing")

    def close(self) -> None:
        self.group.untold[self.number] = self.group.processes.pop(self.number).joined
        self.group.releases[self.number] += 1


class Channel(NamedTuple):
    """The channel of an open job."""

    job: int
    group: "Group"

    def joined(self, worker: int, place: str) -> None:
        assert self.job not in self.group.processes[worker].joined, "joined twice"
        self.group.processes[worker].joined.add(self.job)

    def left(self, worker: int, reason: str, *, crashed: bool) -> None:
        assert not (crashed and worker), "a shard is blamed that nobody has begun"
        process = self.group.processes.get(worker)
        (self.group.untold[worker] if process is None else process.joined).remove(self.job)


class Group:
    """A pool of made-up processes, the jobs, and the supervisor between them.

    Args:
        workers: the number of workers.
        stubborn: whether a process lives on for a while after a kill.
        gather_s: the time that the first processes wait for each other, in the first job.
        least: the number to begin with, if the pool grows: processes wait for room then.
    """

    servers = None
    takes_runs = False

    def __init__(
        self,
        workers: int = 1,
        *,
        stubborn: bool = False,
        gather_s: float | None = None,
        least: int | None = None,
    ) -> None:
        self.now = 100.0
        self.elastic = None if least is None else ElasticSize(least, "there is room")
        self.stubborn, self.gather_s = stubborn, gather_s
        self.processes: dict[int, Process] = {}
        self.untold: dict[int, set[int]] = {}  # jobs still to hear of a gone worker
        self.cannot_start = False
        self.open_jobs: set[int] = set()
        self.starts, self.releases = Counter[int](), Counter[int]()
        self.error: UserError | WorkerError | None = None
        self.supervisor = Supervisor(
            *(self, cast("Any", self), SelectSelector()),
            *([f"cpu:{n}" for n in range(workers)], TIMEOUT_S),
            *(lambda _: None, lambda: None, lambda: self.now),
        )
        self.supervisor.start()

    # --- a pool -----------------------------------------------------------------------------------

    def start(self, number: int) -> Process:
        assert number not in self.processes, "two processes of a worker"
        assert self.error is None
        assert self.supervisor.workers[number].given_up is None, "given up, and started again"
        if self.cannot_start:
            raise OSError("no memory")
        self.processes[number] = Process(number, self)
        self.starts[number] += 1
        return self.processes[number]

    def flush(self) -> None: ...

    # --- the jobs ---------------------------------------------------------------------------------

    def welcome(self, worker: WorkerHandle) -> None:
        assert self.processes[worker.number].is_at_loop

    def invite(self, worker: WorkerHandle, job: int) -> None:
        assert job in self.open_jobs
        assert self.processes[worker.number].is_at_loop
        self.processes[worker.number].invited.add(job)

    def accepts(self, worker: WorkerHandle, answer: messages.JobReady) -> bool:
        return True

    @property
    def channels(self) -> dict[int, "Channel"]:
        return {job: Channel(job, self) for job in self.open_jobs}

    def receive(self, worker: int, message: object) -> None: ...

    def is_computing(self, worker: int) -> bool:
        return False

    def computing(self) -> frozenset[int]:
        return frozenset()

    def last_shard(self, worker: int) -> tuple[Doing, str]:
        phase = "waiting" if worker else "forward"  # workers besides the first begin no shard
        at = Doing(phase, 7, 3, self.now - 8.0, dict.fromkeys(PHASES, 0.0), 1)
        return at, "step 7, shard 3"

    def released(self, worker: int) -> None:
        assert worker not in self.processes

    # --- events -----------------------------------------------------------------------------------

    def hear(self, n: int, kind: str, job: int | None = None) -> None:
        process = self.processes[n]
        process.is_at_loop |= kind == "here"
        if job is not None:
            process.invited.remove(job)
        match kind:
            case "ready":
                message: messages.WorkerMessage = messages.JobReady(job or 0)
            case "done":
                message = messages.ShardsDone([], job=0, ticket=0)
            case "leaves" | "refuses":
                of_kind = messages.WorkerLeaves if kind == "leaves" else messages.ScriptRefused
                message = of_kind("a reason")
            case _:
                message = messages.ReachedLoop() if kind == "here" else messages.WorkerPlaced()
        process.messages.append(message)
        process.hear()
        if kind == "leaves":
            assert not process.joined, "a job was not told"
            process.invited.clear()

    def cut(self, n: int) -> None:
        self.processes[n].cut()

    def exit(self, n: int, code: int) -> None:
        self.processes[n].code = code
        self.processes[n].look()

    def replace(self, n: int) -> None:
        self.supervisor.kill(n, "no answer for 8 s")

    def open(self, job: int) -> None:
        self.open_jobs.add(job)
        self.supervisor.open(job, gather_s=self.gather_s if job == FIRST else None)

    def close(self, job: int | None = None) -> None:
        assert job is not None
        self.open_jobs.remove(job)
        self.supervisor.end(job)

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.supervisor.tick()

    # --- invariants -------------------------------------------------------------------------------

    def check(self) -> None:
        for life in self.supervisor.workers:
            n = life.number
            process = self.processes.get(n)
            assert (life.process is not None) == (process is not None)
            assert self.starts[n] - self.releases[n] == (n in self.processes)  # all wires closed
            if self.error is not None:
                continue  # the run has failed, with all jobs
            assert not self.untold.get(n), "gone, and a job was not told"
            due = self.supervisor._due(life, frozenset())
            if process is None or life.process is None:
                assert (life.given_up is None) == (life.restart_at is not None) == (due < math.inf)
                continue
            assert life.process.joined == process.joined
            assert life.process.has_handed_over or life.process.is_at_loop == process.is_at_loop
            assert (life.process.silent_since is not None) == process.is_cut
            # Nobody is forgotten: the wait for a worker has a time limit.
            is_awaited = not process.is_at_loop or bool(process.invited)
            if not (process.is_cut or process.is_placed):  # there may never be room
                assert due == math.inf
            if process.is_cut or (is_awaited and not process.is_killed and process.is_placed):
                assert due < math.inf
        given_up = [life.given_up is not None for life in self.supervisor.workers]
        if isinstance(self.error, WorkerError):
            assert all(given_up)
        elif self.error is None:
            assert not all(given_up)

    def check_that_time_goes_on(self) -> None:
        """Check that due work is done: nothing is due at the same time again."""
        if self.error is None:
            happen(self, ("pass_time", 0.0))
            due = [self.supervisor._due(each, frozenset()) for each in self.supervisor.workers]
            assert self.error is not None or min(due) > self.now


def possible(group: Group, *, times: tuple[float, ...]) -> Iterator[Event]:
    """Yield all possible next events."""
    if group.error is not None:
        return
    for n, process in group.processes.items():
        if not process.is_placed:
            yield "hear", n, "placed"
        elif not process.is_cut:
            if not process.is_at_loop:
                yield "hear", n, "here"
            yield "hear", n, "leaves"
            for job in sorted(process.invited):
                yield "hear", n, "ready", job
            yield "cut", n
            yield "hear", n, "refuses"
            if process.joined:
                yield "hear", n, "done"
        yield "replace", n
        for code in CODES:
            yield "exit", n, code
    for job in (FIRST, SECOND):
        yield ("close" if job in group.open_jobs else "open"), job
    for seconds in times:
        yield "pass_time", seconds


def happen(group: Group, event: Event) -> None:
    name, *arguments = event
    try:
        getattr(group, str(name))(*arguments)
    except (UserError, WorkerError) as error:
        group.error = error
    group.check()


def sequences(first: list[Event], depth: int) -> Iterator[list[Event]]:
    """Yield all orders of events of a length, after some given first events."""
    group = Group(1)
    for event in first:
        happen(group, event)
    events = list(possible(group, times=(TIMEOUT_S,)))
    group.check_that_time_goes_on()
    if depth == 0:
        yield first
        return
    for event in events:
        if event in (("open", SECOND), ("close", SECOND)):
            continue
        yield from sequences([*first, event], depth - 1)


@pytest.mark.parametrize(
    ("first", "depth"),
    [
        ([], 4),
        ([("open", FIRST), ("hear", 0, "here")], 3),
        ([("open", FIRST), ("hear", 0, "here"), ("hear", 0, "ready", FIRST)], 3),
        ([("open", FIRST), ("hear", 0, "here"), ("hear", 0, "ready", FIRST), ("cut", 0)], 4),
        ([("exit", 0, -9), ("pass_time", 0.0)], 4),
    ],
    ids=["start", "here", "joined", "silent", "lost"],
)
def test_every_short_order_of_events(first: list[Event], depth: int) -> None:
    count = sum(1 for _ in sequences(first, depth))
    assert count > 50


@given(
    st.data(),
    st.integers(1, 3),
    st.booleans(),
    st.sampled_from([None, FIRST_WORKERS_S]),
    st.sampled_from([None, 1, 2]),
)
@settings(max_examples=100, deadline=None, derandomize=True, database=None)
def test_long_histories_of_several_workers(
    data: st.DataObject,
    workers: int,
    stubborn: bool,
    gather_s: float | None,
    least: int | None,
) -> None:
    least = least and min(least, workers)
    group = Group(workers, gather_s=gather_s, least=least, stubborn=stubborn)
    for _ in range(60):
        events = list(possible(group, times=(0.0, 0.3, WORKER_SILENCE_S, TIMEOUT_S)))
        if not events:
            break
        group.cannot_start = data.draw(st.integers(0, 9)) == 0
        happen(group, data.draw(st.sampled_from(events)))
        group.cannot_start = False
    group.check_that_time_goes_on()


# --- the frequency of restarts --------------------------------------------------------------------


@given(
    # None: a shard is computed; True: the worker is killed; False: the worker ends by itself.
    st.lists(st.sampled_from([None, True, False]), max_size=60),
    st.integers(1, 8),
    st.integers(1, 4),
)
def test_the_budget_is_of_starts_in_vain(
    events: list[bool | None], killed: int, failed: int
) -> None:
    budget = RestartBudget(killed=killed, failed=failed)
    in_vain: list[bool] = []  # since the last computed shard
    for killed_now in events:
        if killed_now is None:
            budget.note_shard()
            in_vain = []
            continue
        delay_s = budget.delay_s(killed=killed_now)
        given_up = len(in_vain) + 1 > killed or [*in_vain, killed_now].count(False) >= failed
        assert (delay_s is None) == given_up
        if given_up:
            return
        assert (delay_s == 0) == (not in_vain)  # after work, a worker is missed at once
        in_vain.append(killed_now)
