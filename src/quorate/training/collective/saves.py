"""Saves: a checkpoint of a state that lies on all ranks, written by all of them at once.

1. Rank 0 asks what entries there are, and makes the files in their full size, see ``draft``.
2. Each rank writes what it owns to its places, straight from where it is: nothing is copied, and no
   rank has the state of another. What shares a block of the file with others' goes to rank 0, which
   writes it, and so does everything of ranks that do not see the directory: a piece at a time.
3. Training goes on, and a thread of each rank brings the file to the disk. When all are there, rank
   0 reads the files for their checksums, and gives the checkpoint its place and its marker.
"""

from __future__ import annotations

import os
import secrets
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any

from quorate.engines.collective.rank_control import RankControl, Record
from quorate.machine import this_host
from quorate.services.checkpoints.draft import Draft, Flush
from quorate.services.checkpoints.files import TEMPORARY
from quorate.training.collective.filling import File, answer, fill, require_done, wrong_in
from quorate.training.collective.rows import BLOCK_BYTES, OPTIMIZER, Row, is_large
from quorate.training.optimizing.cut_optimizer import CutOptimizer

# Kinds of records: the others hear of them by ``Saves.hear``.
OUTLINE, FOLDER, SAVE = KINDS = ("outline", "folder", "save")


class Saves:
    """This rank's part in saves. All ranks have one.

    Args:
        say: shows a line to the user; rank 0's.
        naming: a context in which an error says which rank is gone.
    """

    def __init__(
        self,
        ranks: RankControl,
        optimizer: CutOptimizer,
        say: Callable[[str], None] = lambda _: None,
        naming: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self._ranks, self._optimizer = ranks, optimizer
        self._say, self._naming = say, naming
        self._writes: list[bool] | None = None  # whether each rank can; None: not known yet

    @property
    def are_by_all(self) -> bool:
        """Whether all ranks are to write the state."""
        return self._optimizer.is_spread and is_large(self._optimizer.flat_parameters.layout)

    # --- rank 0 -----------------------------------------------------------------------------------

    def rehearse(self, run_dir: Path) -> None:
        """Find out which ranks can write checkpoints of a run. Others ``hear`` of it. Blocks.

        If this one cannot, it is found out when there is something to save.
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
        """Have each rank write to a file what no other file has, and see whether it is there."""
        token, path = secrets.token_bytes(16), folder.resolve() / "token"
        with path.open("xb") as file:
            file.write(token)
            file.flush()
            os.fsync(file.fileno())
        self._ranks.tell({"kind": FOLDER, "path": str(path), "token": token.hex()})
        answers = self._ranks.gather("")
        writes = [True]
        with path.open("rb") as file:
            for rank in range(1, self._ranks.size):
                file.seek(rank * BLOCK_BYTES)
                why = answers[rank]
                if not why and file.read(len(token)) != token[::-1]:
                    why = f"rank 0 does not see what rank {rank} writes there"
                writes.append(not why)
                if why:
                    self._say(
                        f"{folder.parent}: {why}; rank 0 receives and writes the part of rank "
                        f"{rank} in each checkpoint"
                    )
        path.unlink()
        self._writes = writes
        return writes

    @contextmanager
    def outlined(self) -> Iterator[Callable[[Draft], Callable[[Flush], None]]]:
        """Within the block the optimizer's state is that of all ranks, what is large on "meta".

        Yields:
            What fills a draft of it; see ``Contents.fill``.
        """
        with self._naming():
            self._ranks.tell({"kind": OUTLINE})
            gathered = self._ranks.gather(self._optimizer.described())
        described = [each for own in gathered for each in own]
        with self._optimizer.outlined(described):
            yield partial(self._fill, described)

    def _fill(self, described: Sequence[Sequence[Any]], draft: Draft) -> Callable[[Flush], None]:
        held, stored = self._optimizer.held, draft.stored[OPTIMIZER]
        entries = {
            (number, entry): dtype
            for number, entry, dtype, plain, _ in described
            if plain == "piece" and dtype is not None
        }
        rows = [
            Row(number, entry, dtype, [stored[f"{entry}.{name}"].start for name in held[number]])
            for (number, entry), dtype in entries.items()
        ]
        folder = draft.folder.resolve()
        with self._naming():
            writes = self._writes or self._rehearse(folder)
            self._ranks.tell({"kind": SAVE, "folder": str(folder), "writes": writes, "rows": rows})
            try:
                file, wrong = fill(self._ranks, self._optimizer, folder, rows, writes)
            except BaseException:
                self._ranks.break_off()  # the others are in the midst of it
                raise
        file.close()  # all files of the draft are flushed later
        require_done(wrong, draft.folder)
        return partial(self._flush_all, draft.folder)

    def _flush_all(self, folder: Path, flush: Flush) -> None:
        """Return when the files are on the disk, from whichever rank."""
        error: Exception | None = None
        try:
            flush()
        except Exception as raised:  # the others wait for a word, whatever it is
            error = raised
        answers = self._ranks.gather(answer(self._ranks.rank, error), beside=True)
        require_done(wrong_in(answers), folder)

    # --- the others -------------------------------------------------------------------------------

    def hear(self, record: Record) -> None:
        """Do what a record of rank 0 asks for. Blocks."""
        ranks = self._ranks
        if record["kind"] == OUTLINE:
            ranks.gather(self._optimizer.described())
        elif record["kind"] == FOLDER:
            token = bytes.fromhex(record["token"])
            ranks.gather(_signed(Path(record["path"]), token, ranks.rank))
        elif record["kind"] == SAVE:
            rows = [Row(*row) for row in record["rows"]]
            folder, writes = Path(record["folder"]), record["writes"]
            file, wrong = fill(ranks, self._optimizer, folder, rows, writes)
            if wrong:
                file.close()
                return
            # A disk that hangs does not hold up the end of the process.
            name = "quorate-checkpoints"
            flushing = threading.Thread(target=self._flush, args=(file,), name=name, daemon=True)
            try:
                flushing.start()
            except RuntimeError:  # the system starts none at present
                self._flush(file)

    def _flush(self, file: File) -> None:
        error: Exception | None
        try:
            file.flush()
            error = file.error
        except Exception as raised:  # the edge of the thread: rank 0 waits for a word
            error = raised
        with suppress(Exception):  # a rank is gone: the main thread hears of it
            self._ranks.gather(answer(self._ranks.rank, error), beside=True)


def _signed(path: Path, token: bytes, rank: int) -> str:
    """Write to the file with a token that rank 0 has made; return why that cannot be."""
    who = f"rank {rank} on {this_host.name()}"
    try:
        with path.open("r+b", buffering=0) as file:
            if file.read(len(token)) != token:
                return f"{who} sees another file there"
            file.seek(rank * BLOCK_BYTES)
            file.write(token[::-1])
            os.fsync(file.fileno())
    except FileNotFoundError:
        return f"{who} does not see it"
    except OSError as error:
        return f"{who} cannot write there: {error.strerror}"
    return ""
