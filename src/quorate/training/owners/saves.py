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

import errno
import os
import secrets
import shutil
import tempfile
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, ClassVar

from quorate.engines.collective.rank_control import RankControl
from quorate.machine import this_host
from quorate.services.checkpoints.files import TEMPORARY
from quorate.services.checkpoints.writer import CheckpointWriter, Flush
from quorate.training.optimizing.entries import Listing, listed
from quorate.training.owners import slice_files
from quorate.training.owners.slice_files import Row, Rows, StateFile
from quorate.training.owners.slice_state import SliceState
from quorate.training.owners.sliced_optimizer import SlicedOptimizer
from quorate.training.owners.spread_optimizer import SpreadOptimizer

Trouble = tuple[int, str]  # of a rank: errno and text


class Saves(ABC):
    """The saves of a run whose state owners of slices have.

    Args:
        optimizers: the optimizers with a state spread over the owners.
        say: shows a line to the user; used by the leader.
    """

    owner: ClassVar[str]  # the kind of the owners, for messages
    leader: ClassVar[str]  # the process that fills the rest of the files, for messages

    def __init__(
        self,
        optimizers: Sequence[SpreadOptimizer],
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._optimizers, self._say = optimizers, say
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
        writes = []
        answers = self._sign_all(str(path), token)
        with path.open("rb") as file:
            for number, (place, why) in enumerate(answers):
                file.seek(place * slice_files.BLOCK_BYTES)
                if place and not why and file.read(len(token)) != token[::-1]:
                    why = f"{self.leader} does not see what {self.owner} {number} writes there"
                writes.append(not why)
                if why:
                    self._say(
                        f"{folder.parent}: {why}; {self.leader} receives and writes the part of "
                        f"{self.owner} {number} in each checkpoint"
                    )
        path.unlink()
        self._writes = writes
        return writes

    @contextmanager
    def outlined(self) -> Iterator[Callable[[CheckpointWriter], Callable[[Flush], None]]]:
        """Put the state of all owners into the optimizer inside the block; values on "meta".

        Yields:
            A function to fill a draft with the state; see ``Contents.fill``.
        """
        described = zip(*self._describe_all(), strict=True)  # by optimizer
        with ExitStack() as stack:
            outlines = list[Listing]()
            for optimizer, listings in zip(self._optimizers, described, strict=True):
                entries = optimizer.joined(listings)
                stack.enter_context(optimizer.outlined(entries))
                outlines.append(listed(entries))
            yield partial(self._fill, outlines)

    def _fill(
        self, listings: Sequence[Listing], draft: CheckpointWriter
    ) -> Callable[[Flush], None]:
        stored = draft.stored[slice_files.OPTIMIZER]
        rows = [
            slice_files.rows_of(listing, stored, optimizer.prefix)
            for optimizer, listing in zip(self._optimizers, listings, strict=True)
        ]
        return self._write(draft.folder, rows, self._writes or self._rehearse(draft.folder))

    def _nbytes(self, rows: Sequence[Sequence[Row]]) -> int:
        """Return the size of the rows of each optimizer, in bytes."""
        return sum(
            prod(optimizer.partition.whole.sections[row.name].shape) * row.itemsize
            for of_one, optimizer in zip(rows, self._optimizers, strict=True)
            for row in of_one
        )

    @abstractmethod
    def _describe_all(self) -> list[list[Listing]]:
        """Return the messages about the state of all owners, by owner and optimizer. Blocks."""

    @abstractmethod
    def _sign_all(self, path: str, token: bytes) -> list[tuple[int, str]]:
        """Let all owners sign a file; return the place and the failure of each. Blocks.

        The place is the number of a block. At place 0 is the leader, whose failures raise.
        """

    @abstractmethod
    def _write(
        self, folder: Path, rows: list[list[Row]], writes: list[bool]
    ) -> Callable[[Flush], None]:
        """Write the rows of each optimizer to files of full size. Blocks.

        Returns:
            A function that flushes the files of all owners; see ``Contents.fill``.

        Raises:
            OSError: an owner cannot write.
        """


class RankSaves(Saves):
    """The part of this rank in saves. Every rank has one object.

    Args:
        ranks: the connections to all ranks.
        optimizers: this rank's optimizers with a slice of their state.
        say: see ``Saves``.
    """

    owner, leader = "rank", "rank 0"

    def __init__(
        self,
        ranks: RankControl,
        optimizers: Sequence[SlicedOptimizer],
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        super().__init__(optimizers, say)
        self._ranks, self._sliced = ranks, optimizers
        ranks.methods |= {
            "describe": self._describe,
            "sign": self._sign,
            "fill": self._fill_part,
        }

    # --- rank 0 -----------------------------------------------------------------------------------

    def _describe_all(self) -> list[list[Listing]]:
        found: list[list[Listing]] = self._ranks.call("describe")
        return found

    def _sign_all(self, path: str, token: bytes) -> list[tuple[int, str]]:
        self._ranks.tell("sign", path, token)
        return [*enumerate(self._ranks.gather(""))]

    def _write(
        self, folder: Path, rows: list[list[Row]], writes: list[bool]
    ) -> Callable[[Flush], None]:
        self._ranks.tell("fill", str(folder.resolve()), rows, writes)
        with self._ranks.in_step():
            file, troubles = self._filled(folder, rows, writes)
        file.close()  # all files of the draft are flushed later
        _require_done(troubles, folder)
        return partial(self._flush_all, folder)

    def _flush_all(self, folder: Path, flush: Flush) -> None:
        """Flush the files of this process; return when all ranks have flushed. Blocks.

        Raises:
            OSError: a rank cannot flush.
        """
        _require_done(self._flushed(flush), folder)

    def _flushed(self, flush: Flush) -> list[Trouble | None]:
        """Flush the files of this rank, and return the troubles of all ranks. Blocks."""
        error: Exception | None = None
        try:
            flush()
        except Exception as raised:  # the edge of a thread: all ranks wait for an answer
            error = raised
        return self._ranks.gather(self._trouble(error), beside=True)

    def _filled(
        self, folder: Path, rows: Sequence[Sequence[Row]], writes: Sequence[bool]
    ) -> tuple[StateFile, list[Trouble | None]]:
        """Write this rank's part of the rows of each optimizer, or send the part to rank 0. Blocks.

        All ranks call.

        Args:
            folder: directory of the file; the file exists at full size.
            rows: the rows of each optimizer.
            writes: whether each rank can write to the file, by rank.

        Returns:
            The file, and the troubles of all ranks, the same on all ranks.
        """
        file, nbytes = StateFile(folder / slice_files.OPTIMIZER, is_read=False), self._nbytes(rows)
        for own, of_one, optimizer in zip(self._own, rows, self._optimizers, strict=True):
            slice_files.move(self._ranks, own, Rows(of_one, optimizer.partition), file, writes)
        found = self._ranks.gather([self._trouble(file.error), file.nbytes])
        troubles, written = [each for each, _ in found], sum(nbytes for _, nbytes in found)
        if written != nbytes and not any(troubles):
            troubles[0] = errno.EIO, f"ranks have written {written:,} bytes of {nbytes:,}"
        return file, troubles

    def _trouble(self, error: Exception | None) -> Trouble | None:
        """Return the errno and the text of an error on this rank; None without an error."""
        if error is None:
            return None
        why = getattr(error, "strerror", None) or error
        number = getattr(error, "errno", None) or errno.EIO
        return number, f"rank {self._ranks.rank} on {this_host.name()}: {why}"

    @property
    def _own(self) -> list[SliceState]:
        """This rank's slice of each optimizer's state."""
        return [each.slice for each in self._sliced if each.slice is not None]

    def _describe(self) -> list[list[Listing]]:
        """Return the messages about the state of all ranks, by rank. All ranks call. Blocks."""
        return self._ranks.gather([listed(own.state()) for own in self._own])

    # --- ranks other than 0 -----------------------------------------------------------------------

    def _sign(self, path: str, token: bytes) -> None:
        rank = self._ranks.rank
        self._ranks.gather(slice_files.sign(Path(path), token, f"rank {rank}", rank))

    def _fill_part(self, folder: str, rows: list[list[list[Any]]], writes: list[bool]) -> None:
        """Write this rank's part of a save, and flush the file in a thread. Blocks."""
        by_optimizer = [[Row(*row) for row in of_one] for of_one in rows]
        file, troubles = self._filled(Path(folder), by_optimizer, writes)
        if any(troubles):
            file.close()
            return
        # A daemon: a disk that hangs does not delay the end of the process.
        name = "quorate-checkpoints"
        flushing = threading.Thread(target=self._flush, args=(file,), name=name, daemon=True)
        try:
            flushing.start()
        except RuntimeError:  # the system starts no thread at present
            self._flush(file)

    def _flush(self, file: StateFile) -> None:
        with suppress(Exception):  # a rank is lost: the main thread raises the error
            self._flushed(file.flush)


def _require_done(troubles: Sequence[Trouble | None], path: Path) -> None:
    """Raise the trouble of the lowest rank with a trouble, if there is any.

    Raises:
        OSError: a rank has a trouble.
    """
    for number, text in filter(None, troubles):
        raise OSError(number, text, str(path))
