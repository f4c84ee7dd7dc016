"""Out of memory: the users of a device's memory, and the remedies."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import psutil
import torch

from quorate.machine.devices import has_streams
from quorate.machine.gpu_identity import processes
from quorate.machine.shared_memory import free_bytes

MIB = 1 << 20
MOST_NAMED = 5  # processes with most memory


def note(
    error: BaseException,
    device: torch.device,
    *,
    shards: int | None = None,
    parameter_bytes: int | None = None,
) -> str | None:
    """Return a note for an exception of a worker; None if memory was not the cause.

    Args:
        device: the device of the computation.
        shards: number of shards per batch.
        parameter_bytes: bytes of the model's trainable parameters; gradients take as many.
    """
    if not _is_out_of_memory(error):
        return None
    more = "more shards" if shards is None else f"more shards than {shards}"
    helps = [f"{more} (each is smaller)", "precision='bf16'"]
    if _fraction(device) < 1:
        helps.insert(0, "a larger memory_fraction")
    if device.type == "cpu":
        helps.append("fewer workers")
    else:
        helps.append("fewer workers on this device, or none of other programs")
    try:
        held = _held(device, parameter_bytes)
    except Exception as failed:  # a failure of this note must not replace the user's exception
        held = f"who holds what is not known ({type(failed).__name__}: {failed})"
    return f"quorate: out of memory on {device}: {held}. What helps: {'; '.join(helps)}"


def _held(device: torch.device, parameter_bytes: int | None) -> str:
    parts = []
    if has_streams(device):  # and torch's allocator reports figures
        left, total = torch.accelerator.get_memory_info(device)
        tensors = torch.accelerator.memory_allocated(device)
        kept = torch.accelerator.memory_reserved(device) - tensors
        fraction = _fraction(device)
        parts.append(f"{_mib(left)} free of {_mib(total)}")
        parts.append(f"this process has {_mib(tensors)} in tensors")
        parts.append(f"{_mib(kept)} kept by torch for later ones")
        if fraction < 1:
            parts.append(f"and may have {_mib(fraction * total)} (memory_fraction)")
        others = processes(device)
    else:
        free = free_bytes()
        parts.append("how much is free is not known" if free is None else f"{_mib(free)} free")
        parts.append(f"this process has {_mib(psutil.Process().memory_info().rss)}")
        others = _resident() if device.type == "cpu" else []
    if parameter_bytes is not None:
        parts.append(
            f"parameters and gradients are {_mib(2 * parameter_bytes)}, the rest is the shard's "
            "rows and activations and, where updates are made, the optimizer's state"
        )
    parts += _named(others)
    return ", ".join(parts)


def _fraction(device: torch.device) -> float:
    if device.type == "cpu":
        return 1.0
    try:  # torch.accelerator lacks this function
        module = torch.get_device_module(device)
        return float(module.get_per_process_memory_fraction(device))
    except (AssertionError, AttributeError, RuntimeError):  # the device itself has failed
        return 1.0


def _resident() -> list[tuple[int, int | None]]:
    """Return the processes of this machine and their resident bytes."""
    found: list[tuple[int, int | None]] = []
    for process in psutil.process_iter(["memory_info"]):
        memory = process.info["memory_info"]
        if memory is not None:
            found.append((process.pid, memory.rss))
    return found


def _named(others: Sequence[tuple[int, int | None]]) -> list[str]:
    """Return ``process 4242 (python) has 20,000 MiB`` for the processes with most memory first."""
    ordered = sorted(others, key=lambda other: -(other[1] or 0))
    own = psutil.Process().pid
    named = []
    for pid, nbytes in [other for other in ordered if other[0] != own][:MOST_NAMED]:
        try:
            name = f" ({psutil.Process(pid).name()})"
        except psutil.Error:  # the process has ended, or runs outside of this container
            name = ""
        has = "an unknown amount" if nbytes is None else _mib(nbytes)
        named.append(f"process {pid}{name} has {has}")
    return named


def _mib(nbytes: float) -> str:
    return f"{nbytes / MIB:,.0f} MiB"


def _is_out_of_memory(error: BaseException) -> bool:
    # torch raises a plain RuntimeError for the CPU.
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or (
        isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)
    )


def be_killed_first() -> None:
    """Make the kernel kill this process before others when memory runs out.

    A worker can be restarted without any loss; the coordinator cannot.
    """
    with suppress(OSError, ValueError):  # not Linux, or no /proc
        score = Path("/proc/self/oom_score_adj")
        score.write_text(str(min(1000, int(score.read_text()) + 500)))
