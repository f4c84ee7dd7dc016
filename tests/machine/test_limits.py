"""Limits of the system and of control groups, as they are read."""

from __future__ import annotations

import resource
from pathlib import Path

from quorate.commands.doctor.limits import limits
from quorate.machine import container

GIB = 1 << 30


def test_a_limit_on_files_is_one_on_shared_memory() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        found = limits()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert found.file_bytes == 1 << 20
    assert found.segment_error is not None
    assert "64 MiB cannot be had (File too large)" in found.segment_error
    assert limits().segment_error is None


def written(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def test_a_group_of_version_2_and_those_above_it(tmp_path: Path) -> None:
    membership = tmp_path / "membership"
    membership.write_text("0::/pod/container\n")
    root = tmp_path / "cgroup"
    written(
        root,
        {
            "pod/cpu.max": "250000 100000\n",
            "pod/container/cpu.max": "max 100000\n",
            "pod/memory.max": "max\n",
            "pod/container/memory.max": f"{8 * GIB}\n",
            "pod/container/memory.current": f"{5 * GIB}\n",
            "pod/container/memory.stat": f"anon 77\ninactive_file {GIB}\n",
        },
    )
    assert container.cores(root, membership) == 2.5
    assert container.memory_left(root, membership) == 4 * GIB


def test_a_group_of_version_1_in_a_container(tmp_path: Path) -> None:
    # Its name is the machine's, and what is mounted is the group itself.
    membership = tmp_path / "membership"
    membership.write_text(
        "9:name=systemd:/docker/77\n4:memory:/docker/77\n2:cpu,cpuacct:/docker/77\n0::/\n"
    )
    root = tmp_path / "cgroup"
    written(
        root,
        {
            "cpu,cpuacct/cpu.cfs_quota_us": "50000\n",
            "cpu,cpuacct/cpu.cfs_period_us": "100000\n",
            "memory/memory.limit_in_bytes": f"{2 * GIB}\n",
            "memory/memory.usage_in_bytes": f"{3 * GIB}\n",
            "memory/memory.stat": "total_inactive_file 0\n",
        },
    )
    assert container.cores(root, membership) == 0.5
    assert container.memory_left(root, membership) == 0


def test_no_limits(tmp_path: Path) -> None:
    membership = tmp_path / "membership"
    membership.write_text("4:memory:/\n2:cpu:/\n")
    root = tmp_path / "cgroup"
    written(
        root,
        {
            "cpu/cpu.cfs_quota_us": "-1\n",
            "cpu/cpu.cfs_period_us": "100000\n",
            "memory/memory.limit_in_bytes": "9223372036854771712\n",
        },
    )
    assert container.cores(root, membership) is None
    assert container.memory_left(root, membership) is None
    assert container.cores(root, tmp_path / "nothing") is None
