"""The role of this process: the script's own process, or a worker that runs the script again."""

from __future__ import annotations

from quorate.machine.environment import torchrun_environment

_is_worker = False


def become_worker() -> None:
    """Note that this process is a worker, before the script runs."""
    global _is_worker
    _is_worker = True


def is_worker() -> bool:
    """Return whether this process is a worker, which runs the script up to the first training loop.

    Guard code that must run only once with ``if not quorate.is_worker():``, such as opening a log,
    starting a Weights & Biases run, asking a question at the terminal or downloading files. Do not
    guard the code that creates the model, the loss or the data: a worker needs the same objects.
    See docs/devices.md.

    Returns:
        True in worker processes on this machine or on a Ray cluster, and on all ranks except rank
        0. False in the process that you started, in towers (threads of that process), on rank 0 and
        in a notebook.
    """
    return _is_worker or torchrun_environment().get("RANK", "0") != "0"
