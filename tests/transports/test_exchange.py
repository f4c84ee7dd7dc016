"""The exchange of ranks, by real processes: its sums are those of the tree, on any hosts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed
from support.runs import SCRIPTS

pytestmark = [
    pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without distributed"),
    pytest.mark.skipif(sys.platform != "linux", reason="ranks read each other's memory by /proc"),
]


def exchanged(folder: Path, hosts: str, shards: int, shared: str, bucket_bytes: int) -> list[str]:
    words = [hosts, str(shards), shared, str(bucket_bytes), str(folder)]
    script = str(SCRIPTS / "exchange_of_ranks.py")
    processes = [
        subprocess.Popen(
            [sys.executable, script, str(rank), *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(len(hosts))
    ]
    try:
        ended = [process.communicate(timeout=100) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert [p.returncode for p in processes] == [0] * len(hosts), "".join(e for _, e in ended)
    return [out for out, _ in ended]


def test_ranks_of_a_host_read_each_others_memory(tmp_path: Path) -> None:
    said = exchanged(tmp_path, "aa", 4, "one", 1 << 19)
    assert said == ["shares True\n"] * 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("hosts", "shards", "how"),
    [
        ("aa", 4, "shared"),
        ("aabb", 8, "shared"),
        ("abba", 7, "one"),
        ("aabbc", 3, "shared"),
        ("ab", 1, "shared"),
        ("aab", 5, "sent"),
        ("aabb", 8, "sent"),
        ("abc", 8, "native"),
    ],
)
def test_whoever_adds_the_sum_is_that_of_the_tree(
    hosts: str, shards: int, how: str, tmp_path: Path
) -> None:
    said = exchanged(tmp_path, hosts, shards, how, 1 << 19)
    several = [hosts.count(host) > 1 for host in hosts]
    shares = [out == "shares True\n" for out, many in zip(said, several, strict=True) if many]
    assert set(shares) <= {how in ("shared", "one")}
