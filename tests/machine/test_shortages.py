"""What a machine has too little of for a run: cores, memory; what doctor and a run say of it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from quorate.machine.environment import ranks_here
from quorate.machine.host import MIB, Host, host

MACHINE = Host(
    processor="made",
    cores=8,
    cores_physical=4,
    cores_allowed=2,
    cores_limit=None,
    numa_nodes=1,
    memory_bytes=4096 * MIB,
    memory_free_bytes=1024 * MIB,
    container_free_bytes=None,
)


@pytest.mark.parametrize(
    ("workers", "threads", "what"),
    [
        (1, 1, None),
        (2, 1, None),
        (1, 2, None),
        (3, 1, "3 workers x 1 thread on 2 cores: workers wait for one another"),
        (2, 2, "2 workers x 2 threads on 2 cores: workers wait for one another"),
    ],
)
def test_cores(workers: int, threads: int, what: str | None) -> None:
    found = MACHINE.too_few_cores(workers, threads)
    assert (None if found is None else found.what) == what
    of_two = MACHINE.too_few_cores(workers, threads, devices=2)
    assert (of_two is None) == (workers * threads == 1)
    limited = replace(MACHINE, cores_limit=0.5).too_few_cores(1, 1)
    assert limited is None  # there is no fewer than one worker


def test_cores_of_workers_that_have_several_devices() -> None:
    found = MACHINE.too_few_cores(1, 1, devices=3)
    assert found is not None
    assert found.what == "1 worker of 3 devices x 1 thread on 2 cores: workers wait for one another"
    assert found.cure == "use fewer devices for each worker, or lower --workers"


def test_memory() -> None:
    assert MACHINE.too_little_memory(12) is None  # 256 + 12 x 64 MiB
    found = MACHINE.too_little_memory(13)
    assert found is not None
    assert found.what == (
        "1,024 MiB are left of the machine, and a run with 13 workers takes 1,088 MiB even "
        "with a tiny model"
    )
    inside = replace(MACHINE, container_free_bytes=300 * MIB).too_little_memory(1)
    assert inside is not None
    assert inside.what.startswith(
        "300 MiB are left to the container, and a run with 1 worker takes"
    )
    nobody_knows = replace(MACHINE, memory_free_bytes=None)
    assert nobody_knows.too_little_memory(4000) is None
    assert host().too_few_cores(1, 1) is None


def test_ranks_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert ranks_here() is None
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert ranks_here() == 8
