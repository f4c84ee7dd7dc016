"""Saves by servers: each server writes its own part of a checkpoint."""

from __future__ import annotations

import errno
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

from quorate.engines.servers import Servers
from quorate.services.checkpoints.writer import Flush
from quorate.training.optimizing.entries import Listing
from quorate.training.owners import server_files, slice_files
from quorate.training.owners.saves import Saves
from quorate.training.owners.slice_files import Row, Rows, StateFile
from quorate.training.owners.spread_optimizer import SpreadOptimizer


class ServerSaves(Saves):
    """The saves of a run whose state servers have.

    Args:
        optimizer: the optimizer of the servers.
        servers: the servers.
        say: see ``Saves``.
    """

    owner, leader = "server", "the coordinator"

    def __init__(
        self, optimizer: SpreadOptimizer, servers: Servers, say: Callable[[str], None]
    ) -> None:
        super().__init__([optimizer], say)
        self._servers = servers

    def _ask(self, kind: str, **named: Any) -> list[dict[str, Any]]:
        told = [{"kind": kind, **named}] * self._servers.count
        return [answer for answer, _ in self._servers.ask(told)]

    def _describe_all(self) -> list[list[Listing]]:
        return [[answer["state"]] for answer in self._ask("describe")]

    def _sign_all(self, path: str, token: bytes) -> list[tuple[int, str]]:
        answers = self._ask("sign", path=path, token=token)
        return [(1 + number, answer["why"]) for number, answer in enumerate(answers)]

    def _write(
        self, folder: Path, rows: list[list[Row]], writes: list[bool]
    ) -> Callable[[Flush], None]:
        ((of_one,), (optimizer,)) = rows, self._optimizers
        with closing(StateFile(folder.resolve() / slice_files.OPTIMIZER, is_read=False)) as file:
            own = Rows(of_one, optimizer.partition)
            written = server_files.move(self._servers, own, file, writes)
        if file.error is not None:
            raise file.error
        if written != (nbytes := self._nbytes(rows)):
            why = f"servers have written {written:,} bytes of {nbytes:,}"
            raise OSError(errno.EIO, why, str(folder))
        return lambda flush: flush()
