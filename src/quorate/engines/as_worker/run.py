"""Running a script as a worker: up to its first training loop, from which it does not come back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from quorate.engines.as_worker import written_files
from quorate.engines.as_worker.no_input import take_away_input
from quorate.engines.as_worker.raised import message_of
from quorate.engines.as_worker.role import become_worker
from quorate.engines.processes.script import Script
from quorate.errors import UserError


def run_script(
    script: Script, own: Mapping[str, Any], send: Callable[[dict[str, Any]], None]
) -> None:
    """Run a script as a worker. Raises whatever it raises, which the coordinator is told of.

    Args:
        script: what to run.
        own: what the script's own process has: ``own_process.facts``.
        send: sends a message to the coordinator.
    """
    become_worker()
    if own["has_input"]:
        take_away_input()
    written_files.look_out({(device, inode) for device, inode in own["writes"]})
    try:
        script.run()
    except UserError as error:
        send({"kind": "refuses", "message": str(error)})
        raise
    except Exception as error:  # user code: it is told once for all workers
        send(message_of(error))
        raise
