"""The agreement of workers with the coordinator: both run the script, and must compute the same.

Two fingerprints of each worker are compared with the coordinator's: of the first shard of each
dataset as loaded, and of the gradient of the first training shard. (A model with different
parameters is refused earlier, with the names of the parameters, when the worker maps the shared
parameters.) If the coordinator's own fingerprint changes when computed twice, the user is warned,
and workers are not compared.

Every process is compared before its first shard, also late in a run. Because parameters have
changed by then, the coordinator keeps the parameters of its own computation for the workers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch

from quorate.coordination.epochs import Course
from quorate.coordination.plan import abridged
from quorate.engines.job import Job, Training, data_fingerprint, probe_fingerprint
from quorate.engines.processes.arena import Arena
from quorate.engines.processes.worker_messages import JobReady
from quorate.errors import UserError
from quorate.machine.devices import Group, current, kinds
from quorate.machine.memory_fraction import free_cache
from quorate.machine.shared_memory import Segment
from quorate.replica.buffers import Buffers
from quorate.replica.model import unchanged
from quorate.replica.replica import Replica
from quorate.replica.streams import Stream

MOST_ATTEMPTS = 3  # to compare a worker's gradient while user code changes the model


@dataclass
class Comparison:
    """The progress of the comparison of one worker process."""

    data: set[str] = field(default_factory=set)  # keys of compared datasets
    gradient_is_done: bool = False
    expected: str | None = None  # the coordinator's gradient fingerprint at the last request
    attempts: int = 0  # answers with an unexpected gradient


@dataclass(kw_only=True)
class Agreement:
    """The coordinator's fingerprints, and the comparison of workers with the fingerprints.

    Attributes:
        model: the coordinator's model.
        arena: the parameters and buffers for the gradient.
        buffers: of the model.
        probe: returns a replica of the model (perhaps with the model itself) for the gradient.
        groups: the devices of each worker.
        datasets: the datasets by the workers' names.
        threads: intra-op threads of each worker; bits depend on ``threads``.
        say: shows a line to the user.
        changes: counts changes of the model by user code, except in parameters and buffers.
    """

    model: torch.nn.Module
    arena: Arena
    buffers: Buffers
    probe: Callable[[], Replica]
    groups: Sequence[Group]
    datasets: Mapping[str, Any]
    threads: int
    say: Callable[[str], None]
    changes: Callable[[], int]
    # By _key: the position in the run, and the fingerprint; None: data is not compared.
    _data: dict[str, tuple[Course, str | None]] = field(default_factory=dict)
    _gradient: str | None = None  # fingerprint; None: gradients are not compared
    _known_at: int = 0  # the number of changes at the computation of the gradient
    _start: Segment | None = None  # parameters and buffers of that computation

    def name_of(self, dataset: object) -> str | None:
        """Return the name of a dataset; None if workers do not have the dataset."""
        return next((name for name, known in self.datasets.items() if known is dataset), None)

    def expect(self, job: Job, *, is_first: bool) -> None:
        """Compute the fingerprints for a new job. Blocks for a shard.

        Args:
            is_first: whether to compute the gradient's fingerprint, too.
        """
        if self._key(job) not in self._data:
            self._take_data(job)
        if is_first and job.is_compared and isinstance(job, Training):
            self._take_gradient(job)

    def checks(self, job: Job, comparison: Comparison) -> tuple[bool, Segment | None]:
        """Return the fingerprints to request from a worker.

        Returns:
            Whether to request the data's fingerprint; and for the gradient's fingerprint the
            parameters to compute from, or None.
        """
        key = self._key(job)
        course, data = self._data[key]
        compares_data = key not in comparison.data and data is not None
        if compares_data and course != job.plan.course:  # rows may depend on the position
            self._take_data(job)
        if comparison.gradient_is_done or self._gradient is None or not isinstance(job, Training):
            return compares_data, None
        if self.changes() != self._known_at:
            self._take_gradient(job)
        if self._start is not None:
            comparison.expected = self._gradient
        return compares_data, self._start

    def check(self, job: Job, comparison: Comparison, answer: JobReady, worker: int) -> bool:
        """Compare a worker's answer. Return whether the worker may join; else request once more.

        Raises:
            UserError: the script has a different result each time.
            Any exception of user code in the worker, but not in the coordinator.
        """
        key = self._key(job)
        if answer.data is not None:
            comparison.data.add(key)
            if answer.data != self._data[key][1]:
                rows = abridged(job.plan.shard(0, 0))
                raise UserError(
                    f"a worker that ran the script again has another {self._name(job)}",
                    f"its first shard, rows {rows}, differs from the coordinator's",
                    fix="seed what the script draws, sort what it takes from a set, or use "
                    "engine='towers'",
                )
        if (error := answer.error) is not None:
            error.add_note(
                f"quorate: worker {worker}, in the shard that it is compared by: step 0, shard 0, "
                f"rows {abridged(job.plan.shard(0, 0))}; the coordinator has computed it"
            )
            raise error
        got = answer.gradient
        # ``expected``, because the coordinator's fingerprint may have changed since the request.
        if got is None or self._gradient in (None, got) or got == comparison.expected:
            comparison.gradient_is_done = True
            return True
        if self.changes() == self._known_at:
            raise UserError(
                "a worker that ran the script again computes another gradient from the same rows "
                "and parameters",
                "its model or loss differs in something that is not a parameter",
                fix="seed what the script draws, or use engine='towers'",
            )
        # User code changed the model after the request, perhaps before the worker's computation.
        comparison.attempts += 1
        comparison.gradient_is_done = comparison.attempts == MOST_ATTEMPTS
        if comparison.gradient_is_done:
            self.say(
                f"worker {worker} was not compared with the coordinator: the script changed the "
                "model during every comparison"
            )
        return comparison.gradient_is_done

    def _name(self, job: Job) -> str:
        name = self.name_of(job.source.dataset)
        assert name is not None
        return name

    def _key(self, job: Job) -> str:
        """Return a key for the kind of a job (with augmentation or not), dataset and order."""
        plan = {name: value for name, value in job.plan.to_json().items() if name != "course"}
        return f"{job.name} {self._name(job)} {plan}"

    def _take_data(self, job: Job) -> None:
        data = self._data_fingerprint(job) if job.is_compared else None
        self._data[self._key(job)] = (job.plan.course, data)

    def _data_fingerprint(self, job: Job) -> str | None:
        """Return the fingerprint of a dataset's first shard; None if not repeatable."""
        try:
            first, second = (data_fingerprint(job.source) for _ in range(2))
        except Exception:  # of user code; raised again and reported when a worker loads the shard
            return None
        if first != second:
            self.say(
                f"the {self._name(job)} gives different values each time it is loaded, so the bits "
                "are not repeatable; look for a generator of your own in the dataset"
            )
            return None
        return first

    def _take_gradient(self, job: Job) -> None:
        """Compute the gradient for comparisons, and keep the parameters of the computation."""
        self._known_at = self.changes()
        self._gradient = self._gradient_fingerprint(job)
        self._start = None if self._gradient is None else self.arena.kept(self.buffers)

    def _gradient_fingerprint(self, job: Job) -> str | None:
        """Return the fingerprint of the first shard's gradient; None if not repeatable."""
        if len(kinds(self.groups)) > 1:
            return None  # workers have different bits

        def twice() -> list[str]:
            prints = []
            for _ in range(2):
                with unchanged(self.model), Stream() as stream:
                    replica = self.probe()
                    if kinds([replica.group]) == kinds(self.groups):
                        with current(replica.device):
                            prints.append(probe_fingerprint(replica, job.source, stream))
            return prints

        # In a new thread, as in workers: an autocast of the script has no effect there.
        with ThreadPoolExecutor(
            1, initializer=torch.set_num_threads, initargs=(self.threads,)
        ) as thread:
            prints = thread.submit(twice).result()
        free_cache([device for group in self.groups for device in group])
        if len(set(prints)) > 1:
            self.say(
                "the same shard gives a different gradient each time, so the bits are not "
                "repeatable; look for a generator of your own or kept state in the model"
            )
            return None
        return prints[0] if prints else None
