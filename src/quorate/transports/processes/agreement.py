"""Whether a worker is the same as the coordinator: it has run the script again, on its own.

Two things are compared by their fingerprints: the first shard of each dataset as it is loaded, and
the gradient of the first training shard from the initial parameters. A model with other parameters
has been refused before, by name, when the worker took the shared ones. What is not repeatable in
the coordinator itself is said to the user, and not compared.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from quorate.coordination.plan import abridged
from quorate.errors import UserError
from quorate.machine.devices import Group, current, kinds
from quorate.machine.memory_fraction import free_cache
from quorate.replica.model import unchanged
from quorate.replica.replica import Replica
from quorate.replica.streams import Stream
from quorate.transports.job import Job, Training, data_fingerprint, probe_fingerprint
from quorate.transports.processes.wire import Message


class Agreement:
    """The coordinator's fingerprints, which workers are compared with.

    Args:
        model: the coordinator's.
        probe: makes a replica of it, that may be it itself, to compute the gradient with.
        groups: the devices of each worker.
        datasets: by the names that workers know them by.
        threads: intra-op threads of each worker; bits depend on them.
        say: shows a line to the user.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        probe: Callable[[], Replica],
        groups: Sequence[Group],
        datasets: Mapping[str, Any],
        *,
        threads: int,
        say: Callable[[str], None],
    ) -> None:
        self._model = model
        self._probe = probe
        self._groups = groups
        self._datasets = datasets
        self._threads = threads
        self._say = say
        self._data: dict[str, str | None] = {}  # fingerprints by _key; None: not compared
        self._gradient: str | None = None  # fingerprint; None: not compared

    def name_of(self, dataset: object) -> str | None:
        """Return the name of a dataset, or None if workers do not have it."""
        return next((name for name, known in self._datasets.items() if known is dataset), None)

    def expect(self, job: Job, *, is_first: bool) -> None:
        """Take the fingerprints for a job; the gradient's only for the first. Blocks for a shard.

        Only before the first update parameters are the initial ones, for workers and coordinator.
        """
        key = self._key(job)
        if key not in self._data:
            self._data[key] = self._data_fingerprint(job) if job.is_compared else None
        if is_first and job.is_compared and isinstance(job, Training):
            self._gradient = self._gradient_fingerprint(job)

    def checks(self, job: Job, agreed: set[str], *, is_first: bool) -> list[str]:
        """Return what a worker is to be asked for: "data", "gradient", both or nothing.

        Args:
            agreed: of this worker's process, as ``check`` has left it.
            is_first: whether no update was made.
        """
        checks = []
        key = self._key(job)
        if key not in agreed and self._data[key] is not None:
            checks.append("data")
        if is_first and self._gradient is not None and isinstance(job, Training):
            checks.append("gradient")
        return checks

    def check(self, job: Job, agreed: set[str], answer: Message, *, is_first: bool) -> None:
        """Compare a worker's answer; what agrees is noted in ``agreed``.

        Raises:
            UserError: the script makes something else each time that it is run.
        """
        key = self._key(job)
        if "data" in answer:
            agreed.add(key)
            if answer["data"] != self._data[key]:
                rows = abridged(job.plan.shard(0, 0))
                raise UserError(
                    f"a worker that ran the script again has another {self._name(job)}: its first "
                    f"shard, rows {rows}, differs from the coordinator's; seed what the script "
                    "draws, sort what it takes from a set, or use engine='towers'"
                )
        # An answer that comes late may be from parameters after an update.
        if is_first and "gradient" in answer and self._gradient not in (None, answer["gradient"]):
            raise UserError(
                "a worker that ran the script again computes another gradient from the same rows "
                "and parameters: its model or loss differs in what is no parameter; seed what the "
                "script draws, or use engine='towers'"
            )

    def _name(self, job: Job) -> str:
        name = self.name_of(job.source.dataset)
        assert name is not None
        return name

    def _key(self, job: Job) -> str:
        """Of a job's kind, which may augment, its dataset, and the order of rows."""
        return f"{job.name} {self._name(job)} {job.plan.to_json()}"

    def _data_fingerprint(self, job: Job) -> str | None:
        """Of a dataset's first shard."""
        try:
            first, second = (data_fingerprint(job.source) for _ in range(2))
        except Exception:  # user code: it raises again in its shard, where it is reported
            return None
        if first != second:
            self._say(
                f"the {self._name(job)} gives other values each time it is loaded: bits are not "
                "repeatable (it draws from a generator of its own?)"
            )
            return None
        return first

    def _gradient_fingerprint(self, job: Job) -> str | None:
        """Of the gradient of the first shard, from the parameters as they are before training."""
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
                "the same shard gives another gradient each time it is computed: bits are not "
                "repeatable (the model draws from a generator of its own, or keeps state?)"
            )
            return None
        return prints[0] if prints else None
