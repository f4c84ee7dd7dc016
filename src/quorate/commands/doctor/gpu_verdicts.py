"""Verdicts on GPUs: hidden GPUs, and the GPUs of the planned run. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from quorate.commands.doctor.facts import Accelerator, Facts, Gpu
from quorate.commands.doctor.verdict import BEWARE, FAILS, Verdict
from quorate.machine.visible_devices import VARIABLE

MIB = 1 << 20
CONTEXT_BYTES = 512 * MIB  # taken by CUDA on a GPU before any tensor


def on_hidden_gpus(facts: Facts) -> Iterator[Verdict]:
    """Judge existing but invisible GPUs, and the value of the variable."""
    value, selection = facts.environment.get(VARIABLE), facts.selection
    seen = {visible.index for visible in selection.visible}
    hidden = [gpu.index for gpu in facts.gpus if gpu.index not in seen]
    cure = f"unset {VARIABLE}, or name those that are wanted: {VARIABLE}=0,1"
    if value is None:
        if selection.remark is not None:
            yield Verdict(BEWARE, "GPUs", selection.remark, "see NVIDIA's MIG user guide")
    elif not selection.visible:
        if selection.remark is None:
            return
        what = f"{VARIABLE}={value!r}: {selection.remark}"
        if facts.gpus:
            what += f": {len(facts.gpus)} are hidden, and a run uses the CPU"
        yield Verdict(BEWARE, "GPUs", what, cure)
    elif selection.remark is not None:
        yield Verdict(BEWARE, "GPUs", f"{VARIABLE}={value!r}: {selection.remark}", cure)
    elif hidden:
        listed = ", ".join(map(str, hidden))
        what = f"{VARIABLE}={value!r} hides {len(hidden)} of {len(facts.gpus)}: physical {listed}"
        yield Verdict(BEWARE, "GPUs", what, cure)
    names = {gpu.name for gpu in facts.gpus}
    if (
        value is not None
        and value[:1].isdigit()
        and len(names) > 1
        and facts.environment.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID"
    ):
        yield Verdict(
            BEWARE,
            "GPUs",
            "they are of several kinds, and without CUDA_DEVICE_ORDER=PCI_BUS_ID an index in "
            f"{VARIABLE} is CUDA's, the fastest first, and not nvidia-smi's",
            "set CUDA_DEVICE_ORDER=PCI_BUS_ID, or use UUIDs",
        )


def on_devices(facts: Facts, chosen: Sequence[Accelerator]) -> Iterator[Verdict]:
    """Judge the accelerators of the planned run, and the links between them."""
    gpus = {gpu.index: gpu for gpu in facts.gpus}
    used: list[Gpu] = []
    for accelerator in chosen:
        if accelerator.error is not None:
            yield Verdict(
                FAILS,
                accelerator.device,
                f"torch cannot compute on it: {accelerator.error}",
                f"install a build of torch for it, free it, or leave it out with {VARIABLE}",
            )
        if accelerator.visible is not None and accelerator.visible.index in gpus:
            gpu = gpus[accelerator.visible.index]
            used.append(gpu)
            yield from _on_gpu(accelerator.device, gpu)
    indices = {gpu.index for gpu in used}
    for link in facts.links:
        if link.is_direct is False and {link.one, link.other} <= indices:
            yield Verdict(
                BEWARE,
                f"GPUs {link.one}, {link.other}",
                f"neither reads the other's memory ({link.kind}): gradients go through the host's",
                "nothing needs to be done; GPUs with a direct link exchange faster",
            )


def _on_gpu(device: str, gpu: Gpu) -> Iterator[Verdict]:
    if gpu.compute_mode == "prohibited":
        yield Verdict(
            FAILS,
            device,
            "its compute mode is prohibited",
            f"nvidia-smi -i {gpu.index} -c DEFAULT",
        )
    if gpu.compute_mode == "exclusive":
        yield Verdict(
            FAILS if gpu.holders else BEWARE,
            device,
            f"its compute mode lets one process use it, and {len(gpu.holders)} do",
            f"one worker on it, nobody else; or nvidia-smi -i {gpu.index} -c DEFAULT",
        )
    if gpu.memory_bytes is None or not gpu.memory_total_bytes:
        return
    free = gpu.memory_total_bytes - gpu.memory_bytes
    if gpu.memory_bytes > gpu.memory_total_bytes / 2 or free < CONTEXT_BYTES:
        held = ", ".join(
            f"process {h.pid}"
            + (f" ({h.name})" if h.name else "")
            + ("" if h.memory_bytes is None else f" {h.memory_bytes / MIB:,.0f} MiB")
            for h in gpu.holders
        )
        yield Verdict(
            FAILS if free < CONTEXT_BYTES else BEWARE,
            device,
            f"{free / MIB:,.0f} of {gpu.memory_total_bytes / MIB:,.0f} MiB are free; held by "
            + (held or "processes that cannot be seen from here"),
            f"end those, wait for them, or leave it out with {VARIABLE}; "
            "--memory-fraction bounds what our own workers take",
        )
