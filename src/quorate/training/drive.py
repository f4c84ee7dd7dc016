"""The drive: carries out the coordinator's effects over a transport, and reports events to it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from typing import Any, NamedTuple, TypeVar

from quorate.coordination.coordinator import Coordinator
from quorate.coordination.protocol import (
    Abort,
    Applied,
    Apply,
    Cancel,
    Compute,
    Discard,
    Effect,
    Failed,
    Finish,
    Keep,
    Replace,
    Stop,
    Tick,
    Wake,
)
from quorate.coordination.rules import Rule
from quorate.coordination.run_event import TAKEOVER, RunEvent
from quorate.engines import Channel, Transport
from quorate.engines.job import Job, Training, place
from quorate.engines.tracing import current
from quorate.replica.shard_sum import Part
from quorate.services.display.raised_shards import RaisedShards
from quorate.services.display.straggler import CopiedShards
from quorate.training.stop import Stops

T = TypeVar("T")


class ReadyStep(NamedTuple):
    """A step with enough shards for its update."""

    step: int
    parts: list[Part]
    shards: tuple[int, ...]  # the shards in the step
    staleness: int  # updates since the oldest parameters used for a shard


def drive(
    coordinator: Coordinator,
    channel: Channel,
    apply: Callable[[ReadyStep], T],
    say: Callable[[str], None] = lambda _: None,
    raised_shards: RaisedShards | None = None,
    copied_shards: CopiedShards | None = None,
    stopping: Callable[[], str | None] = lambda: None,
    job_name: str = Training.name,
    before_shard: Callable[[], None] = lambda: None,
) -> Iterator[T]:
    """Run the coordinator to its end, and yield the result of each update.

    No message is sent to workers while the caller processes a result.

    Args:
        apply: makes the update of a step.
        say: shows a line to the user, such as the name of a worker that raised.
        raised_shards: shards that raised, of earlier drives too; not summed up at the end of this
            drive.
        copied_shards: counts the shards of slow workers computed a second time. Default: not shown.
        stopping: returns the reason for a stop, or None; job_name at the beginning and after each
            update.
        job_name: name of the job in messages: "training", "validation".
        before_shard: job_name before a shard is given to a worker.

    Raises:
        Exception: the error of user code in a shard that failed on all attempts.
    """
    collect, publish = channel.collect, channel.publish
    if (trace := current()) is not None:
        collect = trace.span("collecting")(collect)
        publish = trace.span("publishing")(publish)
    callers_s = 0.0  # time spent by the caller on results, which makes no worker slow

    def now() -> float:
        return channel.now() - callers_s

    wake_at: float | None = None
    copied_shards = copied_shards or CopiedShards()
    is_summed_up = raised_shards is None
    last_takeover: tuple[int, int | None, int] | None = None  # worker, former worker, step
    raised_shards = raised_shards or RaisedShards()
    if (reason := stopping()) is not None:  # before a worker has joined
        coordinator.handle(Stop(reason), now())
        return
    while True:
        waits_from = time.monotonic()
        event = channel.receive(None if wake_at is None else max(0.0, wake_at - now()))
        if trace is not None:
            trace.note_wait(waits_from)
        effects: deque[Effect] = deque(coordinator.handle(event or Tick(), now()))
        if isinstance(event, Failed) and not any(isinstance(e, Abort) for e in effects):
            error = channel.error(event.worker, event.step, event.shard)
            where = place(job_name, event.step, event.shard)
            if line := raised_shards.named(event.worker, where, error):
                say(line)
        wake_at = None
        while effects:
            match effects.popleft():
                case Compute() as effect:
                    if effect.lost_with not in (None, effect.worker):
                        takeover = (effect.worker, effect.lost_with, effect.step)
                        if takeover != last_takeover:
                            say(_taken_over(effect, job_name))
                        last_takeover = takeover
                    late = effect.instead_of
                    usual_shard_s = None if late is None else coordinator.usual_shard_s(late)
                    copied_shards.count(effect, usual_shard_s, job_name)
                    before_shard()
                    channel.send(effect)
                case Keep() | Discard() | Cancel() | Replace() as effect:
                    channel.send(effect)
                case Apply(step, holders, shards, staleness):
                    parts = collect(step, holders)
                    applied = apply(ReadyStep(step, parts, shards, staleness))
                    publish()
                    effects.extend(coordinator.handle(Applied(step), now(), only_record=True))
                    began = channel.now()
                    yield applied
                    callers_s += channel.now() - began
                    # The next shards are dealt only now: after a stop, no further update is made.
                    if (reason := stopping()) is not None:
                        coordinator.handle(Stop(reason), now(), only_record=True)
                    effects.extend(coordinator.decide(now()))
                case Wake(at):
                    wake_at = at
                case Abort(worker, step, shard):
                    raise channel.error(worker, step, shard)
                case Finish():
                    for line in raised_shards.summary(job_name) if is_summed_up else ():
                        say(line)
                    return


def run_job(
    transport: Transport,
    job: Job,
    apply: Callable[[ReadyStep], object],
    rule: Rule,
    timeout_s: float | None,
    stops: Stops | None = None,
    **options: Any,
) -> int:
    """Let workers compute a job to its end, and return the number of the step after the last.

    The number is lower than the end of the job if the job was stopped. Blocks.

    Args:
        apply: receives each step.
        timeout_s: how long a worker may be silent, in seconds, where a worker can be replaced.
        stops: requests to stop, from any thread.
        options: keyword arguments of ``drive``.

    Raises:
        Exception: the error of user code in a shard that failed on all attempts.
    """
    with ExitStack() as stack:
        channel = stack.enter_context(closing(transport.open(job)))
        if stops is not None:
            stack.enter_context(stops.calling(lambda reason: channel.post(Stop(reason))))
        coordinator = Coordinator(
            shards_of=job.plan.shards_of,
            home_shards=job.home_shards,
            lookahead=job.plan.lookahead,
            first_step=job.steps.start,
            last_step=job.steps.stop,
            rule=rule,
            timeout_s=timeout_s if transport.can_replace else None,
        )
        for _ in drive(coordinator, channel, apply, **options):
            pass
    return coordinator.applied


def _taken_over(effect: Compute, job_name: str) -> RunEvent:
    """Return the event of a shard taken over from a worker that left."""
    of_job = f" of {job_name}" if job_name else ""
    return RunEvent(
        f"worker {effect.worker} takes over shard {effect.shard} of step {effect.step}{of_job} "
        f"from worker {effect.lost_with}",
        TAKEOVER,
        effect.worker,
        is_shown=False,
    )
