"""The state of servers, moved between their slices and a file: the coordinator's side.

The side of a server is in ``server_slice.py``: "move" and the requests for the rest.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from quorate.engines.servers import Servers, as_image, read_image
from quorate.machine import this_host
from quorate.training.owners.slice_files import Part, Rows, StateFile, move_rest


def move(
    servers: Servers,
    rows: Rows,
    file: StateFile,
    sees: Sequence[bool] | None = None,
    first_mark: str = "",
) -> int:
    """Move all servers' parts of some rows between slices and a file, and return the bytes. Blocks.

    Args:
        file: the file as the coordinator sees the file.
        sees: whether each server moves blocks itself. None: each server looks at the ``mark``.
        first_mark: the coordinator's ``mark`` of the file.

    Raises:
        CheckpointError: the file cannot be read.
        OSError: a server cannot write to the file.
        ServerError: a server is gone.
    """
    # 1. On each server that sees the file: whole blocks.
    same = {"path": str(file.path), "is_read": file.is_read, "rows": [[*row] for row in rows.rows]}
    told = {"kind": "move", **same, "host": this_host.mark(), "mark": first_mark}
    count = servers.count
    each_sees = [None] * count if sees is None else sees
    answers = [answer for answer, _ in servers.ask([{**told, "sees": own} for own in each_sees])]
    for error in (answer["error"] for answer in answers):
        if error is not None:
            raise error

    def exchange(_each: Sequence[Sequence[Part]], values: Sequence[Sequence[torch.Tensor]]) -> None:
        if file.is_read:
            servers.ask([{"kind": "put rest"}] * count, [*map(as_image, values)])
        else:
            found = servers.ask([{"kind": "get rest"}] * count)
            for (_, image), own in zip(found, values, strict=True):
                read_image(image, own)

    # 2. By the coordinator: the rest.
    rest = (rows.rest(number, sees=answer["sees"]) for number, answer in enumerate(answers))
    move_rest(rows, file, rest, exchange, torch.device("cpu"))
    return file.nbytes + sum(int(answer["nbytes"]) for answer in answers)
