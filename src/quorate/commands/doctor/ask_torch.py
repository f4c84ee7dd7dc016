"""torch's build, and a test of each visible accelerator. Runs in a separate process.

Imports nothing of quorate. See ``ask``.
"""

from __future__ import annotations

import json
import warnings
from typing import Any


def run() -> None:
    """Print a line of JSON before each question, one for each answer, and one at the end."""
    _ask()
    _say(end=True)


def _ask() -> None:
    warnings.simplefilter("ignore")  # an old driver, say: the error contains the same text
    try:
        import torch
    except Exception as error:  # the edge of a process
        _say(error=f"{type(error).__name__}: {error}")
        return
    _say(asking="torch for its devices")
    backends: Any = torch.backends
    accelerator = torch.accelerator.current_accelerator()
    _say(
        build={
            "version": torch.__version__,
            "cuda": torch.version.cuda,
            "hip": torch.version.hip,
            "accelerator": None if accelerator is None else accelerator.type,
            "threads": torch.get_num_threads(),
            "mkldnn": backends.mkldnn.is_available(),
            "cudnn": _version(backends.cudnn.version()),
            "nccl": torch.distributed.is_available() and torch.distributed.is_nccl_available(),
            "gloo": torch.distributed.is_available() and torch.distributed.is_gloo_available(),
        }
    )
    if accelerator is None:
        return
    kind = accelerator.type
    module: Any = torch.get_device_module(accelerator)
    count = module.device_count()
    _say(count=count)
    if count == 0 and kind == "cuda":
        _say(asking="torch why it sees no GPU")
        try:
            module.init()
        except Exception as error:  # torch reports the reason only in this exception
            _say(why_none=_first_line(error))
        return
    for index in range(count):
        name = f"{kind}:{index}"
        _say(asking=f"{name} for a little memory")
        answer: dict[str, Any] = {"device": name, "uuid": None, "error": None}
        try:
            if kind == "cuda":
                answer["uuid"] = str(module.get_device_properties(index).uuid)
            ones = torch.ones(8, device=name)
            _say(asking=f"{name} to compute")
            with torch.accelerator.device_index(index):
                if (ones * 2).sum().item() != 16:
                    answer["error"] = "8 times 2 is not 16 on it"
        except Exception as error:  # no kernel, no memory left, held by another process
            answer["error"] = _first_line(error)
        _say(device=answer)


def _version(number: int | None) -> str | None:
    return None if number is None else str(number)


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _say(**line: Any) -> None:
    print(json.dumps(line), flush=True)
