"""A machine's resources for a run: limits of control groups, too few cores, too little memory."""

import resource
from dataclasses import replace
from pathlib import Path

import pytest

from quorate.commands.doctor.limits import limits
from quorate.machine import resources
from quorate.machine.environment import ranks_here
from quorate.machine.host import MIB, Host, host

GIB = 1 << 30


def test_a_limit_on_files_is_one_on_shared_memory() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        seen = limits()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert seen.file_bytes == 1 << 20
    assert seen.segment_error is not None
    assert "64 MiB cannot be had (File too large)" in seen.segment_error
    assert limits().segment_error is None


# --- control groups -------------------------------------------------------------------------------


def found(folder: Path, membership: str, files: dict[str, str]) -> tuple[float | None, int | None]:
    """Return the cores and memory left for a process, by the files of its control groups."""
    (folder / "membership").write_text(membership)
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    groups = folder, folder / "membership"
    return resources.container_cores(*groups), resources.memory_left(*groups)


@pytest.mark.parametrize(
    ("membership", "files", "left"),
    [
        (  # version 2, and groups above
            "0::/pod/container\n",
            {
                "pod/cpu.max": "250000 100000\n",
                "pod/container/cpu.max": "max 100000\n",
                "pod/memory.max": "max\n",
                "pod/container/memory.max": f"{8 * GIB}\n",
                "pod/container/memory.current": f"{5 * GIB}\n",
                "pod/container/memory.stat": f"anon 77\ninactive_file {GIB}\n",
            },
            (2.5, 4 * GIB),
        ),
        (  # version 1 in a container: the name is the machine's, and the group itself is mounted
            "9:name=systemd:/docker/77\n4:memory:/docker/77\n2:cpu,cpuacct:/docker/77\n0::/\n",
            {
                "cpu,cpuacct/cpu.cfs_quota_us": "50000\n",
                "cpu,cpuacct/cpu.cfs_period_us": "100000\n",
                "memory/memory.limit_in_bytes": f"{2 * GIB}\n",
                "memory/memory.usage_in_bytes": f"{3 * GIB}\n",
                "memory/memory.stat": "total_inactive_file 0\n",
            },
            (0.5, 0),
        ),
        (
            "4:memory:/\n2:cpu:/\n",
            {
                "cpu/cpu.cfs_quota_us": "-1\n",
                "cpu/cpu.cfs_period_us": "100000\n",
                "memory/memory.limit_in_bytes": "9223372036854771712\n",
            },
            (None, None),
        ),
    ],
    ids=["version 2", "version 1", "no limits"],
)
def test_what_control_groups_leave(
    tmp_path: Path, membership: str, files: dict[str, str], left: tuple[float | None, int | None]
) -> None:
    assert found(tmp_path, membership, files) == left
    assert resources.container_cores(tmp_path, tmp_path / "nothing") is None


def test_memory_that_others_on_the_machine_run_out_of_is_not_ours(tmp_path: Path) -> None:
    (tmp_path / "vmstat").write_text("oom_kill 9\n")
    groups = tmp_path, tmp_path / "membership", tmp_path / "vmstat"
    assert found(tmp_path, "0::/pod/container\n", {}) == (None, None)
    assert resources.oom_kills(*groups) == 9
    for folder, count in (("pod", 7), ("pod/container", 3)):
        found(tmp_path, "0::/pod/container\n", {f"{folder}/memory.events": f"oom_kill {count}\n"})
        assert resources.oom_kills(*groups) == count


# --- shortages ------------------------------------------------------------------------------------

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
    ("workers", "threads", "devices", "what"),
    [
        (2, 1, 1, None),
        (1, 2, 1, None),
        (3, 1, 1, "3 workers x 1 thread on 2 cores: workers wait for one another"),
        (2, 2, 1, "2 workers x 2 threads on 2 cores: workers wait for one another"),
        (1, 1, 2, None),
        (1, 1, 3, "1 worker of 3 devices x 1 thread on 2 cores: workers wait for one another"),
    ],
)
def test_too_few_cores(workers: int, threads: int, devices: int, what: str | None) -> None:
    told = MACHINE.too_few_cores(workers, threads, devices=devices)
    assert (None if told is None else told.what) == what
    if devices == 3:
        assert told is not None
        assert told.cure == "use fewer devices for each worker, or lower --workers"
    limited = replace(MACHINE, cores_limit=0.5).too_few_cores(1, 1)
    assert limited is None  # fewer than one worker is impossible


def test_too_little_memory() -> None:
    assert MACHINE.too_little_memory(12) is None  # 256 + 12 x 64 MiB
    left = "1,024 MiB are left of the machine, and a run with 13 workers takes 1,088 MiB even"
    for machine, workers, what in (
        (MACHINE, 13, left),
        (
            replace(MACHINE, container_free_bytes=300 * MIB),
            1,
            "300 MiB are left to the container, and a run with 1 worker takes",
        ),
    ):
        told = machine.too_little_memory(workers)
        assert told is not None
        assert told.what.startswith(what)
    nobody_knows = replace(MACHINE, memory_free_bytes=None)
    assert nobody_knows.too_little_memory(4000) is None
    assert host().too_few_cores(1, 1) is None


def test_ranks_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    for text, ranks in ((None, None), ("8", 8)):
        monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
        if text:
            monkeypatch.setenv("LOCAL_WORLD_SIZE", text)
        assert ranks_here() == ranks
