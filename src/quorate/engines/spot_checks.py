"""When spot checks are made, and what follows from their answers.

A check costs the time of some shards, so the next one comes when that is a small share of the time
since. No one waits long for a worker that does not answer, and what workers compute is thrown away:
the training is what it would be without.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, closing, nullcontext

import torch

from quorate.coordination.protocol import (
    Cancel,
    Cancelled,
    Compute,
    Done,
    Failed,
    Joined,
    Keep,
    Left,
)
from quorate.data.source import Source
from quorate.engines import Channel, Transport
from quorate.engines.spot_check import Answer, SpotCheck
from quorate.machine.limits import SPOT_CHECK_ANSWER_S, SPOT_CHECK_JOIN_S
from quorate.replica.flat import Flat
from quorate.replica.loss import Loss
from quorate.replica.notes import Notes
from quorate.replica.witness.kept import changed
from quorate.replica.witness.module_trace import Event
from quorate.replica.witness.outside import Outside
from quorate.replica.witness.words import module_text

SHARE = 0.005  # of the time
MOST_FINDINGS = 3  # checks that find something; then all is said
_NOTHING = nullcontext()


# Has workers compute a job, and returns what they answer, by worker; how long the first may take.
Ask = Callable[[SpotCheck, float], Mapping[int, Answer]]


def asking(transport: Transport, workers: int) -> Ask:
    """Return what asks the workers of a transport: those that are there answer, and are in time.

    Args:
        workers: how many there are.
    """

    def ask(job: SpotCheck, patience_s: float) -> Mapping[int, Answer]:
        with closing(transport.open(job)) as channel:
            return _Asking(channel, workers, patience_s).answers()

    return ask


class SpotChecks:
    """The spot checks of one training loop.

    Args:
        ask: asks the workers of the loop.
        computed: what a check computes from: the loop's source and parameters, intra-op threads.
        every: updates between two checks; None: so many that they take 0.5% of the time. 0: none.
        notes: what is found goes there.
        model_and_loss: looked at around user code, as often as there are checks.
        alone: whether the model is used by nobody but user code.
    """

    def __init__(
        self,
        ask: Ask,
        computed: tuple[Source, Flat, int],
        every: int | None,
        notes: Notes,
        model_and_loss: tuple[torch.nn.Module, Loss],
        *,
        alone: bool,
    ) -> None:
        self._outside = Outside(*model_and_loss, notes, alone=alone)
        self._has_checked = False
        self._ask = ask
        self._computed = computed
        self._every = every
        self._notes = notes
        self._updates = 0
        self.made = 0
        self._left = MOST_FINDINGS
        self._due_at = 0.0  # of the monotonic clock

    def updated(self, step: int, patience_s: float) -> None:
        """Hear of an update; if it is time, compare what workers compute. Blocks for as long.

        Args:
            step: the next one.
            patience_s: how long the first answer may take.
        """
        self._updates += 1
        self._has_checked = False
        begun = time.monotonic()
        if self._every is None:
            is_due = begun >= self._due_at
        else:
            is_due = self._every > 0 and (self._updates - 1) % self._every == 0
        if is_due and self._left:
            self._has_checked = True
            self._left -= not self._check(step, patience_s)
            now = time.monotonic()
            self._due_at = now + (now - begun) * (1 / SHARE - 1)

    def looking(self) -> AbstractContextManager[None]:
        """Look around the block, in which user code runs, if a check was made before it."""
        return self._outside.looking() if self._has_checked else _NOTHING

    def _check(self, step: int, patience_s: float) -> bool:
        """Return whether there was nothing to note."""
        number, self.made = self.made, self.made + 1
        answers = self._ask(self._make_job(step, number, closer=False), patience_s)
        if not self._note_alone(answers):
            return False
        if not _differ(answers):
            return True
        closer = self._ask(self._make_job(step, number, closer=True), patience_s)
        if self._note_alone(closer):
            self._notes.doubt(_parting(closer))
        return False

    def _make_job(self, step: int, number: int, *, closer: bool) -> SpotCheck:
        source, parameters, threads = self._computed
        ticket = (step, number % source.plan.shards_of(step))
        return SpotCheck(
            source, parameters, range(0), ticket=ticket, closer=closer, threads=threads
        )

    def _note_alone(self, answers: Mapping[int, Answer]) -> bool:
        """Note what workers found of themselves; return whether there was nothing."""
        doubts = [doubt for _, answer in sorted(answers.items()) for doubt in answer.doubts]
        for doubt in doubts:
            self._notes.doubt(doubt)
        return not doubts


class _Asking:
    """One job, until all have answered that came, or time is up."""

    def __init__(self, channel: Channel, workers: int, patience_s: float) -> None:
        self._channel = channel
        self._workers = workers
        self._patience_s = patience_s
        self._begun = time.monotonic()
        self._first_s: float | None = None  # that the first answer took
        self._computing: set[int] = set()
        self._answers: dict[int, Answer] = {}
        self._gone = 0

    def answers(self) -> dict[int, Answer]:
        while (left_s := self._left_s()) > 0:
            event = self._channel.receive(left_s)
            match event:
                case Joined(worker):
                    self._computing.add(worker)
                    self._channel.send(Compute(worker, worker, 0, "spot check"))
                case Done(worker, step, shard):
                    self._take(worker, step, shard)
                case Failed(worker) | Cancelled(worker):  # user code: in its shard it is reported
                    self._computing.discard(worker)
                    self._gone += 1
                case Left(worker):
                    self._computing.discard(worker)
                    self._gone += 1
        for worker in self._computing:
            self._channel.send(Cancel(worker, worker, 0))
        return self._answers

    def _left_s(self) -> float:
        """Return how long to wait for the next event."""
        so_far_s = time.monotonic() - self._begun
        if len(self._answers) + self._gone >= self._workers:
            return 0.0
        if not self._computing:
            return SPOT_CHECK_JOIN_S - so_far_s
        if self._first_s is None:
            return self._patience_s - so_far_s
        return max(SPOT_CHECK_ANSWER_S, 4 * self._first_s) - so_far_s

    def _take(self, worker: int, step: int, shard: int) -> None:
        self._computing.discard(worker)
        self._channel.send(Keep(worker, step, shard))
        for _, total in self._channel.collect(step, [worker]):
            self._answers[worker] = Answer.in_sum(total)
        self._channel.publish()
        if self._first_s is None:
            self._first_s = time.monotonic() - self._begun


def _differ(answers: Mapping[int, Answer]) -> bool:
    return len({(answer.data, answer.result) for answer in answers.values()}) > 1


def _parting(answers: Mapping[int, Answer]) -> str:
    """Return where the results of two workers part, in words."""
    if not _differ(answers):
        return (
            "two workers gave different results for the same shard, and equal results the second "
            "time: the code changes an object that workers share while a shard is computed"
        )
    numbers = sorted(answers)
    first = answers[numbers[0]]
    number, other = next(
        (n, answers[n])
        for n in numbers
        if (answers[n].data, answers[n].result) != (first.data, first.result)
    )
    who = f"workers {numbers[0]} and {number}"
    if first.data != other.data:
        return f"{who} have different rows: the dataset holds different data on the two workers"
    if names := changed(first.kept, other.kept):
        text = f"{who} give different results for the same shard, and have different values of "
        return text + ", ".join(names[:4])
    for mine, theirs in zip(first.forward, other.forward, strict=False):
        if (mine.what, mine.path) != (theirs.what, theirs.path):
            return f"{who} call different modules in the same shard: {_of(theirs)}"
        if mine.hash != theirs.hash:
            did = "return different values" if mine.what == "out" else "receive different inputs"
            return f"{who} give different results for the same shard: {_of(mine)} is first to {did}"
    names = [name for name, text in first.gradient.items() if other.gradient.get(name) != text]
    of = f"the gradient of {names[0]}" if names else "the loss"
    return f"{who} give different results for the same shard: {of} differs, module outputs do not"


def _of(event: Event) -> str:
    return module_text(event.path, event.kind)
