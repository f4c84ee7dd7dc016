"""Once: what a torchrun has had done, it is not to have done again when it starts its ranks anew.

The arguments of the script are the same in each start: ``fresh`` would set aside what the ranks
before these have trained. torchrun counts its restarts, but neither those for a host that joins or
leaves, nor whether a script came so far. So it is noted in its store, which outlives the ranks.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from quorate.engines.collective.place import own_place
from quorate.errors import RankError
from quorate.machine.environment import torchrun_environment
from quorate.machine.limits import STORE_CONNECT_S


def is_done(what: str) -> bool:
    """Return whether it was done in a start of these ranks before this one. Blocks.

    Raises:
        RankError: the store is not reached.
    """
    place = own_place()
    if place is None or place.endpoint is None or place.rank > 0:  # no torchrun; or not to be done
        return False
    store = _store(place.endpoint)
    return place.attempt != "0" if store is None else bool(store.check([_key(what)]))


def note(what: str) -> None:
    """Note that it is done. Blocks.

    Raises:
        RankError: the store is not reached.
    """
    place = own_place()
    if place is not None and place.endpoint is not None:
        store = _store(place.endpoint)
        if store is not None:
            store.set(_key(what), "done")


def _store(endpoint: tuple[str, int]) -> Any | None:
    """Return torchrun's store; None if ranks have one of their own, which ends with them."""
    import torch.distributed  # not in each build of torch

    dist: Any = torch.distributed  # documented, and not declared to be exported
    if torchrun_environment().get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    try:
        return dist.TCPStore(*endpoint, is_master=False, timeout=timedelta(seconds=STORE_CONNECT_S))
    except RuntimeError as error:
        line = next(iter(str(error).splitlines()), type(error).__name__)
        raise RankError("the store of torchrun was not reached", f"{line:.300}") from error


def _key(what: str) -> str:
    return f"quorate/once/{what}"
