"""Whether a worker is the same as the coordinator: it has run the script again, on its own.

Two things are compared by their fingerprints: the first shard of each dataset as it is loaded, and
the gradient of the first training shard. A model with other parameters has been refused before, by
name, when the worker took the shared ones. What is not repeatable in the coordinator itself is said
to the user, and not compared.

Every process is compared before it takes part, however late it comes: parameters have changed then,
so those that the coordinator had at the start are kept, and the worker computes from them too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from quorate.coordination.epochs import Course
from quorate.coordination.plan import abridged
from quorate.engines.fingerprints import data_fingerprint, probe_fingerprint
from quorate.engines.job import Job, Training
from quorate.engines.messages import Message
from quorate.engines.processes.arena import Arena
from quorate.errors import UserError
from quorate.machine.devices import Group, current, kinds
from quorate.machine.memory_fraction import free_cache
from quorate.machine.shared_memory import Segment
from quorate.replica.buffers import Buffers
from quorate.replica.model import unchanged
from quorate.replica.replica import Replica
from quorate.replica.streams import Stream

GRADIENT = "gradient"
EXPECTED = "expects "  # before the fingerprint that a worker was asked with
# How often a worker is asked again whose model was changed by user code while it computed.
MOST_ASKED = 3


class Agreement:
    """The coordinator's fingerprints, which workers are compared with.

    Args:
        model: the coordinator's.
        arena: whose parameters, with the buffers, gradients are computed from.
        buffers: of the model.
        probe: makes a replica of it, that may be it itself, to compute the gradient with.
        groups: the devices of each worker.
        datasets: by the names that workers know them by.
        threads: intra-op threads of each worker; bits depend on them.
        say: shows a line to the user.
        changes: counts what user code changed in the model that is no parameter and no buffer.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        arena: Arena,
        buffers: Buffers,
        probe: Callable[[], Replica],
        groups: Sequence[Group],
        datasets: Mapping[str, Any],
        *,
        threads: int,
        say: Callable[[str], None],
        changes: Callable[[], int] = lambda: 0,
    ) -> None:
        self._model = model
        self._arena = arena
        self._buffers = buffers
        self._probe = probe
        self._groups = groups
        self._datasets = datasets
        self._threads = threads
        self._say = say
        self._data: dict[str, str | None] = {}  # fingerprints by _key; None: not compared
        self._courses: dict[str, Course] = {}  # where in their runs those are
        self._changes = changes
        self._gradient: str | None = None  # fingerprint; None: not compared
        self._known_at = 0  # the number of changes when it was computed
        self._start: Segment | None = None  # parameters and buffers that it was computed from

    def name_of(self, dataset: object) -> str | None:
        """Return the name of a dataset, or None if workers do not have it."""
        return next((name for name, known in self._datasets.items() if known is dataset), None)

    def expect(self, job: Job, *, is_first: bool) -> None:
        """Take the fingerprints for a job; the gradient's for the first. Blocks for a shard."""
        key = self._key(job)
        if key not in self._data:
            self._take_data(job)
        if is_first and job.is_compared and isinstance(job, Training):
            self._take_gradient(job)

    def checks(self, job: Job, agreed: set[str]) -> tuple[list[str], list[int]]:
        """Return what a worker is to be asked for, "data", "gradient", both or nothing.

        And the descriptor of what the gradient is to be computed from.

        Args:
            agreed: of this worker's process, as ``check`` has left it.
        """
        checks, fds = [], []
        key = self._key(job)
        if key not in agreed and self._data[key] is not None:
            if self._courses[key] != job.plan.course:  # rows may depend on where in the run it is
                self._take_data(job)
            checks.append("data")
        if GRADIENT not in agreed and self._gradient is not None and isinstance(job, Training):
            if self._changes() != self._known_at:
                self._take_gradient(job)
            if self._start is not None:
                checks.append(GRADIENT)
                agreed -= {word for word in agreed if word.startswith(EXPECTED)}
                agreed.add(f"{EXPECTED}{self._gradient}")
                fds.append(self._start.fd)
        return checks, fds

    def check(self, job: Job, agreed: set[str], answer: Message, worker: int) -> bool:
        """Compare a worker's answer, and return whether it may take part; else ask it again.

        Args:
            agreed: gets what is known now, and need not be asked for again.

        Raises:
            UserError: the script makes something else each time that it is run.
            Whatever the user's code raised in the worker, and not in the coordinator.
        """
        key = self._key(job)
        if "data" in answer:
            agreed.add(key)
            if answer["data"] != self._data[key]:
                rows = abridged(job.plan.shard(0, 0))
                raise UserError(
                    f"a worker that ran the script again has another {self._name(job)}",
                    f"its first shard, rows {rows}, differs from the coordinator's",
                    fix="seed what the script draws, sort what it takes from a set, or use "
                    "engine='towers'",
                )
        if "error" in answer:
            error = answer["error"]
            error.add_note(
                f"quorate: worker {worker}, in the shard that it is compared by: step 0, shard 0, "
                f"rows {abridged(job.plan.shard(0, 0))}; the coordinator has computed it"
            )
            raise error
        # It was asked with what user code had set by then, and others may have been asked since.
        got = answer.get(GRADIENT)
        if got is None or self._gradient in (None, got) or f"{EXPECTED}{got}" in agreed:
            agreed.add(GRADIENT)
            return True
        if self._changes() == self._known_at:
            raise UserError(
                "a worker that ran the script again computes another gradient from the same rows "
                "and parameters",
                "its model or loss differs in something that is not a parameter",
                fix="seed what the script draws, or use engine='towers'",
            )
        # User code changed the model meanwhile: it may have computed with the one or the other.
        asked = sum(word.startswith("asked") for word in agreed) + 1
        agreed.add(f"asked {asked}")
        if asked < MOST_ASKED:
            return False
        agreed.add(GRADIENT)
        self._say(
            f"worker {worker} was not compared with the coordinator: the script changed the model "
            "during every comparison"
        )
        return True

    def _name(self, job: Job) -> str:
        name = self.name_of(job.source.dataset)
        assert name is not None
        return name

    def _key(self, job: Job) -> str:
        """Of a job's kind, which may augment, its dataset, and the order of rows."""
        plan = {name: value for name, value in job.plan.to_json().items() if name != "course"}
        return f"{job.name} {self._name(job)} {plan}"

    def _take_data(self, job: Job) -> None:
        key = self._key(job)
        self._data[key] = self._data_fingerprint(job) if job.is_compared else None
        self._courses[key] = job.plan.course

    def _data_fingerprint(self, job: Job) -> str | None:
        """Of a dataset's first shard."""
        try:
            first, second = (data_fingerprint(job.source) for _ in range(2))
        except Exception:  # user code: it raises again in its shard, where it is reported
            return None
        if first != second:
            self._say(
                f"the {self._name(job)} gives different values each time it is loaded, so the bits "
                "are not repeatable; look for a generator of your own in the dataset"
            )
            return None
        return first

    def _take_gradient(self, job: Job) -> None:
        """Compute the gradient that workers are compared by, and keep what it is computed from."""
        self._known_at = self._changes()
        self._gradient = self._gradient_fingerprint(job)
        self._start = None if self._gradient is None else self._arena.kept(self._buffers)

    def _gradient_fingerprint(self, job: Job) -> str | None:
        """Of the gradient of the first shard, from the parameters as they are."""
        if len(kinds(self._groups)) > 1:
            return None  # workers have different bits

        def twice() -> list[str]:
            prints = []
            for _ in range(2):
                with unchanged(self._model), Stream() as stream:
                    replica = self._probe()
                    if kinds([replica.group]) == kinds(self._groups):
                        with current(replica.device):
                            prints.append(probe_fingerprint(replica, job.source, stream))
            return prints

        # In a thread, as workers compute: this one may be inside of an autocast of the script's.
        with ThreadPoolExecutor(
            1, initializer=torch.set_num_threads, initargs=(self._threads,)
        ) as thread:
            prints = thread.submit(twice).result()
        free_cache([device for group in self._groups for device in group])
        if len(set(prints)) > 1:
            self._say(
                "the same shard gives a different gradient each time, so the bits are not "
                "repeatable; look for a generator of your own or kept state in the model"
            )
            return None
        return prints[0] if prints else None
