"""An examination: collects all facts, with a limit of five seconds per question to a driver."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import psutil

from quorate.commands.doctor.ask import ANSWER_S, Asked, ask
from quorate.commands.doctor.facts import Accelerator, Driver, Facts, Gpu, Holder, Link, Torch
from quorate.commands.doctor.limits import limits
from quorate.commands.doctor.network import interfaces
from quorate.machine.environment import device_environment
from quorate.machine.host import host
from quorate.machine.visible_devices import VARIABLE, Selection, Slice, VisibleGpu, select, why_none
from quorate.machine.visible_devices import Gpu as Listed


def examine(answer_s: float = ANSWER_S) -> Facts:
    """Collect the facts. Takes as long as an import of torch; 5 s more per hanging driver.

    Args:
        answer_s: limit of an answer of a driver, in seconds.
    """
    with ThreadPoolExecutor(2) as both:
        driver, torch = both.map(partial(ask, answer_s=answer_s), ("ask_nvml", "ask_torch"))
    environment = device_environment()
    gpus = tuple(_gpu(answer) for answer in driver.all("gpu"))
    value = environment.get(VARIABLE)
    selection = Selection((), why_none(value))  # the only knowledge if some GPU did not answer
    if driver.failure is None:
        selection = select(value, [Listed(g.index, g.uuid, g.is_cut, g.slices) for g in gpus])
    return Facts(
        environment=environment,
        driver=_driver(driver),
        gpus=gpus,
        lost={gpu["index"]: gpu["error"] for gpu in driver.all("lost")},
        links=tuple(Link(**link) for link in driver.all("link")),
        selection=selection,
        torch=_torch(torch),
        accelerators=_accelerators(torch, gpus, selection),
        host=host(),
        limits=limits(),
        interfaces=interfaces(),
    )


def _driver(asked: Asked) -> Driver:
    answer = asked.first("driver") or {"version": None, "cuda": None}
    return Driver(**answer, failure=asked.failure)


def _gpu(answer: dict[str, Any]) -> Gpu:
    slices = tuple(Slice(**part) for part in answer.pop("slices"))
    holders = tuple(
        Holder(process["pid"], _name(process["pid"]), process["memory_bytes"])
        for process in answer.pop("holders")
    )
    return Gpu(**answer, slices=slices, holders=holders)


def _name(pid: int) -> str | None:
    try:
        return psutil.Process(pid).name()
    except psutil.Error:  # the process has ended, or runs outside of this container
        return None


def _torch(asked: Asked) -> Torch:
    nothing = dict.fromkeys(("version", "cuda", "hip", "accelerator", "threads", "cudnn"))
    answer = asked.first("build") or {**nothing, "mkldnn": False, "nccl": False, "gloo": False}
    return Torch(**answer, why_none=asked.first("why_none"), failure=asked.failure)


def _accelerators(
    asked: Asked, gpus: Sequence[Gpu], selection: Selection
) -> tuple[Accelerator, ...]:
    """Return torch's accelerators with their GPUs: by UUID, else by the variable's rules."""
    indices = {gpu.uuid: gpu.index for gpu in gpus}
    indices |= {part.uuid: gpu.index for gpu in gpus for part in gpu.slices}
    accelerators = []
    for number, answer in enumerate(asked.all("device")):
        uuids = [f"{kind}-{answer['uuid']}" for kind in ("GPU", "MIG")]
        visible = next((VisibleGpu(indices[u], u) for u in uuids if u in indices), None)
        is_listed = answer["device"].startswith("cuda") and number < len(selection.visible)
        if visible is None and answer["uuid"] is None and is_listed:
            visible = selection.visible[number]
        accelerators.append(Accelerator(answer["device"], visible, answer["error"]))
    return tuple(accelerators)
