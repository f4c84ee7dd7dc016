"""The role of this process: the script's own one, or a worker that runs the script once more."""

from __future__ import annotations

from quorate.machine.environment import torchrun_environment

_is_worker = False


def become_worker() -> None:
    """Note that this process was started to be a worker, before it runs the script."""
    global _is_worker
    _is_worker = True


def is_worker() -> bool:
    """Return whether this process runs the script as a worker, up to its first training loop.

    What a script does once belongs where this is False: opening a log, starting a run of Weights &
    Biases, asking at the terminal, downloading. Everything that the model, the loss and the data
    are made of belongs outside: a worker needs the same. See docs/devices.md.

    Returns:
        True in worker processes, on this machine and on a Ray cluster, and on ranks other than 0,
        whoever started them. False in the process that you started, for towers (they are threads of
        it), on rank 0, and in a notebook.
    """
    return _is_worker or torchrun_environment().get("RANK", "0") != "0"
