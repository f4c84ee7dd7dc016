"""The default process group of torch.distributed: needed by scripts for DDP, absent in quorate.

Quorate adds gradients over all workers itself, with the same loss on any number of workers. A
script that creates a process group is refused, and a call that needs the group ends in a line with
the name of the call.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterable
from pathlib import Path
from types import FrameType
from typing import Any

import torch.distributed

from quorate.engines.users_line import line_of_error
from quorate.errors import UserError

_DISTRIBUTED = str(Path(torch.distributed.__file__ or "").parent)
_TORCH = str(Path(_DISTRIBUTED).parent)
# Modules of torch that raise if the group is missing or cannot be created.
_RAISES = tuple(
    str(Path(_DISTRIBUTED, f"{name}.py")) for name in ("distributed_c10d", "rendezvous")
)
_DECORATOR = str(Path(_DISTRIBUTED, "c10d_logger.py"))

_OTHERWISE = (
    "leave it out: quorate adds gradients over all workers itself, and whatever the loss returns "
    "is averaged over all rows; or guard it by torch.distributed.is_initialized(), which is False"
)
_INIT = "leave it out: quorate connects its workers itself, also the ranks of torchrun"
_NUMBER = (
    "leave it out: the loss and the learning rate are those of the whole batch on any number of "
    "workers, and callbacks run in one process"
)
MAKERS = ("init_process_group", "init_device_mesh")
_CURES = {
    **dict.fromkeys(MAKERS, _INIT),
    "destroy_process_group": "leave it out: there is nothing to destroy",
    "get_rank": _NUMBER,
    "get_world_size": _NUMBER,
    "DistributedSampler": "leave it out: quorate deals the rows to the workers itself",
    "DistributedDataParallel": (
        "give Trainer the model itself: quorate adds gradients over all workers"
    ),
}
# An exception of a worker process has no class names.
_CLASSES = {
    str(Path(_TORCH, "nn", "parallel", "distributed.py")): "DistributedDataParallel",
    str(Path(_TORCH, "utils", "data", "distributed.py")): "DistributedSampler",
}


def require_none() -> None:
    """Refuse a script with a default process group of several ranks.

    A loss function would use the group: a sum over ranks would wait for a rank without a shard at
    the moment, and a loss divided by the number of ranks would depend on the number of ranks.

    Raises:
        UserError: the script has created a group.
    """
    if _is_there() and (size := torch.distributed.get_world_size()) > 1:
        raise UserError(
            "torch.distributed.init_process_group() was called",
            got=f"a process group of {size} ranks",
            expected="none",
            fix=_INIT,
        )


def require_none_made(reads: Iterable[tuple[str, str]]) -> None:
    """Refuse code of shards that creates a process group: a rank of torchrun would wait for all.

    Args:
        reads: names used by the code, each with its line: "train.py:12".

    Raises:
        UserError: the code creates a group.
    """
    for name, where in reads:
        if name in MAKERS:
            raise UserError(_line(name, where))


def refused_call(error: BaseException) -> UserError | None:
    """Return the error for a call that needs a default process group; None for further errors.

    Args:
        error: raised in this process or in a worker.
    """
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    is_theirs = bool(frames) and frames[-1].f_code.co_filename in _RAISES
    if not is_theirs or isinstance(error, UserError) or _is_there():
        return None
    call = _called(frames)
    return UserError(_line(call, line_of_error(error)))


def _line(call: str, where: str) -> str:
    return (
        f"{call}() ({where}): got a call that needs a process group of torch.distributed, expected "
        f"none, as quorate makes no such group; {_CURES.get(call, _OTHERWISE)}"
    )


def _is_there() -> bool:
    dist: Any = torch.distributed  # most names are missing in some builds of torch
    return bool(dist.is_available() and dist.is_initialized())


def _called(frames: list[FrameType]) -> str:
    """Return the name of the torch function or class called by code outside torch."""
    inner: list[FrameType] = []
    for frame in reversed(frames):
        file = frame.f_code.co_filename
        if not file.startswith(_TORCH):
            break
        if file != _DECORATOR:
            inner.append(frame)
    first = inner[-1].f_code
    if first.co_name == "__init__":
        return _CLASSES.get(first.co_filename) or first.co_qualname.partition(".")[0]
    return first.co_name
