"""Saves: a checkpoint of a state spread over ranks or servers, written by all of them at once.

The leader is rank 0, or the coordinator of servers. With ranks:

1. Rank 0 collects the descriptions of all entries, and creates the files at full size: see
   ``draft``.
2. Each rank writes its own part of the state to its places in the file, directly from the memory of
   the optimizer: nothing is copied, and no rank holds the state of another rank. Ranks send rank 0
   their parts of shared blocks of the file, or all of their state if they do not see the directory;
   rank 0 writes the received parts, piece by piece.
3. Training continues, and a thread of each rank flushes the file to disk. After all ranks have
   flushed, rank 0 reads the files for the checksums, writes the marker, and renames the checkpoint
   into place.

Servers write in the same way, each when the coordinator asks for its part. The coordinator flushes
the file for servers of its own host; any other server flushes the file before the answer.
"""

from __future__ import annotations

import os
import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from functools import partial
from pathlib import Path

from quorate.services.checkpoints.files import TEMPORARY
from quorate.services.checkpoints.writer import CheckpointWriter, Flush
from quorate.training.optimizing.entries import Listing, listing_of
from quorate.training.owners import slice_files
from quorate.training.owners.slice_files import StateFile
from quorate.training.owners.spread_optimizer import SliceOwners, SpreadOptimizer


class Saves:
    """The saves of a run whose state owners of slices have; used by the leader.

    Args:
        owners: the owners.
        optimizers: the optimizers with a state spread over the owners.
        say: shows a line to the user.
    """

    def __init__(
        self,
        owners: SliceOwners,
        optimizers: Sequence[SpreadOptimizer],
        say: Callable[[str], None],
    ) -> None:
        self._owners, self._optimizers, self._say = owners, optimizers, say
        self._writes: list[bool] | None = None  # whether each owner can write; None: not known yet

    @property
    def are_by_all(self) -> bool:
        """True if all owners are to write the state together."""
        return all(each.is_away and each.is_large for each in self._optimizers)

    def rehearse(self, run_dir: Path) -> None:
        """Test which owners can write checkpoints of a run. Blocks.

        An error of the leader itself is ignored: the first save raises the error.
        """
        folder = run_dir / "checkpoints"
        with suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            own = Path(tempfile.mkdtemp(prefix=TEMPORARY, dir=folder))
            try:
                self._rehearse(own)
            finally:
                shutil.rmtree(own, ignore_errors=True)

    def _rehearse(self, folder: Path) -> list[bool]:
        """Let each owner sign a new file; return by owner whether the leader sees the signature.

        An owner reads a new random token from the file, and writes the token in reverse: an owner
        that sees a different file finds no such token.
        """
        token, path = secrets.token_bytes(16), folder.resolve() / "token"
        with path.open("xb") as file:
            file.write(token)
            file.flush()
            os.fsync(file.fileno())
        writes, kind, leader = [], self._owners.kind, self._owners.leader
        answers = self._owners.ask(self._optimizers[0].prefix, "sign", path=str(path), token=token)
        with path.open("rb") as file:
            for number, why in enumerate(answer["why"] for answer in answers):
                file.seek(slice_files.place_of(number))
                if not why and file.read(len(token)) != token[::-1]:
                    why = f"{leader} does not see what {kind} {number} writes there"
                writes.append(not why)
                if why:
                    self._say(
                        f"{folder.parent}: {why}; {leader} receives and writes the part of "
                        f"{kind} {number} in each checkpoint"
                    )
        path.unlink()
        self._writes = writes
        return writes

    @contextmanager
    def meta_state(self) -> Iterator[Callable[[CheckpointWriter], Callable[[Flush], None]]]:
        """Put the state of all owners into the optimizer inside the block; values on "meta".

        Yields:
            A function to fill a draft with the state; see ``Contents.fill``.
        """
        with ExitStack() as stack:
            outlines = list[Listing]()
            for optimizer in self._optimizers:
                entries = optimizer.join_listings(self._owners.describe_slices(optimizer.prefix))
                stack.enter_context(optimizer.meta_state(entries))
                outlines.append(listing_of(entries))
            yield partial(self._fill, outlines)

    def _fill(
        self, listings: Sequence[Listing], draft: CheckpointWriter
    ) -> Callable[[Flush], None]:
        """Write the state of all owners to the file of a draft, of full size. Blocks.

        Raises:
            OSError: an owner cannot write.
        """
        owners, path = self._owners, draft.folder.resolve() / slice_files.OPTIMIZER
        writes = self._writes or self._rehearse(draft.folder)
        stored = draft.stored[slice_files.OPTIMIZER]
        for optimizer, listing in zip(self._optimizers, listings, strict=True):
            rows = slice_files.rows_of(listing, stored, optimizer.prefix)
            with closing(StateFile(path, owners.parameters.device, is_read=False)) as file:
                owners.move_rows(optimizer.prefix, rows, file, writes)
        return owners.begin_flush(draft.folder)
