"""What is measured, the most important first, and how. Without torch: other processes compute."""

from __future__ import annotations

import time
from contextlib import ExitStack
from typing import Any, NamedTuple

from on_gpu.job import Job
from on_gpu.process import Failed, Process

NETWORKS = ("seed", "lenet5", "unet", "gpt")
KILLED = ("seed", "gpt")  # networks in whose training a worker is killed
ORDER = (
    ("speed", "eager"),
    ("digests", "eager"),
    ("two cards", "eager"),
    ("speed", "graphs"),
    ("determinism", "eager"),
    ("speed", "compiled"),
    ("kill", "eager"),
    ("two cards", "compiled"),
    ("digests", "graphs"),
)
HOWS = tuple(dict.fromkeys(how for _, how in ORDER))
NAMES = tuple(dict.fromkeys(name for name, _ in ORDER))
COMPILES = 2.0  # times as much time for what is compiled
RESERVE_S = 5.0  # at the end of a share, in which no round and no process begins
FEW = 2  # steps of a round, at least

Result = dict[str, Any] | Failed


class Effort(NamedTuple):
    """How much is measured."""

    rounds: int
    round_s: float
    updates: int  # before a digest is taken
    towers: tuple[int, ...]  # beside one


FULL = Effort(rounds=5, round_s=1.0, updates=20, towers=(2, 4))
QUICK = Effort(rounds=1, round_s=0.0, updates=8, towers=(2,))


class Measurement(NamedTuple):
    """Contenders that are compared with the first of them, each a process."""

    name: str
    network: str
    how: str
    contenders: dict[str, Job]

    def __str__(self) -> str:
        return f"{self.name} {self.network} {self.how}"

    @property
    def weight(self) -> float:
        """Its part of the time."""
        return len(self.contenders) * (1.0 if self.how == "eager" else COMPILES)


def plan(devices: list[str], precision: str, *, is_quick: bool) -> list[Measurement]:
    """Return all measurements, the most important first."""
    effort, found = QUICK if is_quick else FULL, []
    for name, how in ORDER:
        for network in KILLED if name == "kill" else NETWORKS:
            one = Job(
                "speed", devices[:1], network, how=how, precision=precision, is_quick=is_quick
            )
            groups = _contenders(name, one, devices, effort)
            found += [Measurement(name, network, how, contenders) for contenders in groups]
    return found


def _contenders(name: str, ours: Job, devices: list[str], effort: Effort) -> list[dict[str, Job]]:
    """Return the groups of contenders that a measurement compares.

    Args:
        ours: the speed of quorate on one device.
    """
    loop = ours._replace(engine="loop", deterministic=False)
    alone = ours._replace(role="digest", updates=effort.updates)
    pair = alone._replace(engine="processes", workers=2)
    if name == "speed":
        return [{"loop": loop, "quorate": ours}]
    if name == "determinism":
        return [
            {"loop": loop, "loop, deterministic": loop._replace(deterministic=True)},
            {"quorate, not deterministic": ours._replace(deterministic=False), "quorate": ours},
        ]
    if name == "digests":
        several = {f"{n} towers": alone._replace(workers=n) for n in effort.towers}
        return [{"1 tower": alone, **several, "2 processes": pair}]
    if name == "kill":
        return [{"1 tower": alone, "2 processes, one killed": pair._replace(role="kill")}]
    if len(devices) < 2:
        return []
    both = ours._replace(devices=devices, workers=2)
    return [
        {
            "DDP": both._replace(engine="ddp", deterministic=False),
            "quorate, towers": both,
            "quorate, ranks": both._replace(engine="collective"),
        }
    ]


def measure(measurement: Measurement, share_s: float, *, is_quick: bool) -> dict[str, Result]:
    """Return what each contender says, within so many seconds."""
    until = time.monotonic() + share_s
    jobs = measurement.contenders
    if any(job.role == "speed" for job in jobs.values()):
        return _by_turns(jobs, until, QUICK if is_quick else FULL)
    return {words: _to_the_end(job, until) for words, job in jobs.items()}


def _to_the_end(job: Job, until: float) -> Result:
    if time.monotonic() > until - RESERVE_S:
        return Failed("not begun, as those before it took the time of the measurement")
    with Process(job, until) as process:
        return process.answer()


def _by_turns(jobs: dict[str, Job], until: float, effort: Effort) -> dict[str, Result]:
    """Let contenders that live at once make rounds in turn, so that a drift hits all alike."""
    with ExitStack() as stack:
        started = {words: stack.enter_context(Process(job, until)) for words, job in jobs.items()}
        contenders = {words: Contender(process) for words, process in started.items()}
        for number in range(effort.rounds):
            if number and time.monotonic() > until - RESERVE_S:
                break
            for contender in contenders.values():
                contender.make_round(effort.round_s)
        return {words: contender.result() for words, contender in contenders.items()}


class Contender:
    """A process that makes a round of steps when it is its turn. Waits until it is ready."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._speeds: list[float] = []
        self._memory_mib: float | None = None
        ready = process.answer()
        self._failed = ready if isinstance(ready, Failed) else None
        begun = time.perf_counter()
        self._run(FEW)
        self._per_step_s = (time.perf_counter() - begun) / FEW
        self._speeds.clear()

    def make_round(self, seconds: float) -> None:
        """Make as many steps as take about so long."""
        self._run(max(FEW, round(seconds / self._per_step_s)))

    def result(self) -> Result:
        """Return what was measured, or why it was not."""
        if self._failed is not None:
            return self._failed
        return {"examples_per_s": self._speeds, "memory_mib": self._memory_mib}

    def _run(self, steps: int) -> None:
        if self._failed is not None:
            return
        answer = self._process.run(steps)
        if isinstance(answer, Failed):
            self._failed = answer
            return
        self._speeds.append(answer["examples_per_s"])
        self._memory_mib = answer["memory_mib"]
