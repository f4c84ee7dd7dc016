"""What loader processes need: a refusal before the first step, not a wait without end."""

from __future__ import annotations

import multiprocessing.process
import os
import tempfile
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from quorate.coordination.plan import Plan
from quorate.data.feed import Feed
from quorate.data.loader_processes import (
    check_loader_processes,
    require_loader_memory,
)
from quorate.data.source import Source
from quorate.errors import SettingError, UserError
from quorate.machine.temporary_folder import LONGEST_TEMPORARY


def test_shared_memory_for_loader_processes(tmp_path: Path) -> None:
    file_system = os.statvfs(tmp_path)
    free = file_system.f_bavail * file_system.f_frsize
    # 2 for each of 2 x 2 processes and 2 x 4 that are ready: 16; with 4 feeds 24.
    nbytes = free // 20
    rows = torch.empty(nbytes, dtype=torch.uint8, device="meta")
    batch = {"images": [rows[: nbytes // 2], (rows[nbytes // 2 :],)], "names": ["a", "b"]}
    given: dict[str, Any] = {"shards": 4, "loader_workers": 2, "shm": tmp_path}
    require_loader_memory(batch, feeds=2, **given)
    with pytest.raises(UserError) as error:
        require_loader_memory(batch, feeds=4, **given)
    said = str(error.value)
    assert said.startswith("shared memory: loader_workers=2 hand over up to 24 shards of ")
    assert f"MiB in {tmp_path}, and " in said
    assert "docker --shm-size" in said
    require_loader_memory(batch, feeds=4, **{**given, "shm": tmp_path / "none"})


def test_a_temporary_folder_that_is_too_long_for_sockets_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plan = Plan(rows=40, batch_size=8, shards=4, seed=0)
    source, tickets = Source(range(40), plan), [(0, shard) for shard in range(4)]
    with tempfile.TemporaryDirectory(dir="/tmp") as short:  # pytest's own may be too long already
        longest = Path(short, "x" * (LONGEST_TEMPORARY - len(short) - 1))
        longest.mkdir()
        monkeypatch.setattr(tempfile, "tempdir", str(longest))
        monkeypatch.setitem(multiprocessing.process.current_process()._config, "tempdir", None)
        check_loader_processes()
        with closing(Feed(source, tickets, ahead=8, loader_workers=1)) as feed:
            for ticket in tickets:
                feed.take(ticket)
    monkeypatch.setattr(tempfile, "tempdir", str(longest) + "y")
    with pytest.raises(SettingError, match="TMPDIR"):
        check_loader_processes()
