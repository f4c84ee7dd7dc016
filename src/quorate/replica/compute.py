"""The settings of the computation of a shard: compilation, kernels, placement, pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from quorate.errors import SettingError
from quorate.replica.kernels import MEASURED, ONEDNN, TORCH
from quorate.settings import AtResume, Settings, at_least, declare, one_of, switch

DEVICE, HOST = "device", "host"  # where random numbers of accelerators are drawn
ORDERS = ("1f1b", "gpipe", "interleaved", "zero-bubble")


def _names(name: str, value: object) -> tuple[str, ...]:
    given = value.split(",") if isinstance(value, str) else value
    if not isinstance(given, Sequence) or not all(isinstance(each, str) for each in given):
        fix = "for example ['decoder']"
        raise SettingError(name, value, "names of modules, as a list or with commas", fix)
    names = tuple(each.strip() for each in given)
    if not names or "" in names or len(set(names)) != len(names):
        raise SettingError(name, value, "at least one name, each once", "name modules of the model")
    return names


@dataclass(frozen=True, kw_only=True)
class Compute(Settings):
    """Settings of the computation of a shard: compilation, kernels, determinism, pipeline.

    Args:
        compile: whether to compile the model with ``torch.compile``, once per shape of a shard. On
            an NVIDIA GPU a whole shard is then replayed as a CUDA graph, where possible. Compiled
            operations round differently, so the bits depend on ``compile``. Code that cannot be
            compiled runs uncompiled, and the run prints the reason. Default: False.
        kernels: library for the float32 matrix products of linear layers on a CPU. "torch": torch's
            own library, MKL. "onednn": oneDNN, from a certain size on. "measured": oneDNN if a
            measurement before the first update shows oneDNN to be much faster, as on some AMD
            processors. The choice is stored in the checkpoints, because the bits depend on it. Try
            "measured" if linear layers take much of the time on a CPU. Default: the choice in the
            checkpoint; "torch" in a new run.
        soft_placement: whether to run an operator on the CPU if the device has no kernel for the
            operator. The run prints the operator and its module once. Without ``soft_placement``
            such an operator is an error. Cannot be combined with ``compile``. Default: False.
        log_placement: whether to print a table with the device of each module and operator, for the
            first shard. Default: False.
        deterministic: whether to use ``torch.use_deterministic_algorithms``, which fixes the order
            of additions in operators that otherwise add in the order of thread timing. Default:
            True under "sync" on GPUs and with more than one intra-op thread; one CPU thread always
            adds in one order. Set to False if deterministic operators are too slow, or missing, and
            you do not need the same bits.
        random: where random numbers of the forward pass are drawn for an accelerator, such as
            dropout masks. "device": on the device, where they depend on the model of the GPU.
            "host": on the CPU, as a run on CPUs draws them, and copied, which takes longer. Use
            "host" if runs on different models of GPUs must draw the same numbers. A fused operator
            that draws within its kernel, as of attention with dropout, is then an error. Cannot be
            combined with ``compile``; changes nothing on CPUs. Default: "device".
        strict: whether to end the run with an error when a reason is found why the bits may differ
            on another number of workers or after a resume, or when the values are in doubt: a loss
            that is a sum over rows, a tensor that is never trained, a queue that is averaged.
            Requires ``shards`` in a new run. Default: False; the reason is reported, and recorded
            in the metrics and checkpoints.
        spot_check_every: updates between two spot checks. In a spot check all workers compute the
            same shard twice, and the results are compared. Spot checks are only made if the bits do
            not depend on timing. Default: an interval at which spot checks take about 0.5% of the
            time. 0: no spot checks.
        split: names of modules before which the model is cut into stages, in the order of the
            forward pass. The stages compute on the devices of one worker (``devices="cpu+cpu"``) at
            the same time, each on another shard. Use ``split`` for a model too large for one
            process. Default: cuts that balance the measured time of the stages, if a worker has
            several devices and the script has not placed parts of the model on devices. The bits do
            not depend on ``split``.
        pipeline: schedule of the stages. "1f1b" (the default): one forward, one backward; keeps the
            fewest activations. "gpipe": all forward passes, then all backward passes.
            "interleaved": several stages per device, to wait less; two stages per device unless
            ``split`` says otherwise. "zero-bubble": as "1f1b", but gradients of parameters are
            computed after the gradients that the previous stage waits for, to wait less.
    """

    compile: bool = declare(
        False,
        "compile the model with torch.compile, once per shape of a shard",
        kind=bool,
        check=switch,
        at_resume=AtResume.SAID,
    )
    kernels: str | None = declare(
        None,
        "library for float32 linear layers on a CPU: torch, onednn, or measured (by a test)",
        kind=str,
        metavar="WORD",
        check=lambda name, value: one_of(name, value, (TORCH, ONEDNN, MEASURED)),
    )
    soft_placement: bool = declare(
        False,
        "run operators on the CPU if the device has no kernel for them",
        kind=bool,
        check=switch,
    )
    log_placement: bool = declare(
        False,
        "show the device of each module and operator, for the first shard",
        kind=bool,
        check=switch,
    )
    deterministic: bool | None = declare(
        None,
        "use deterministic algorithms (default under sync: on GPUs, or with --threads above 1)",
        kind=bool,
        check=lambda _, value: None if value is None else bool(value),
        at_resume=AtResume.SAID,
    )
    random: str = declare(
        DEVICE,
        "where random numbers of accelerators are drawn: device, or host, alike for all models",
        kind=str,
        metavar="WORD",
        check=lambda name, value: one_of(name, value, (DEVICE, HOST)),
        at_resume=AtResume.SAID,
    )
    strict: bool = declare(
        False,
        "end the run with an error when the same bits cannot be kept",
        kind=bool,
        check=switch,
    )
    spot_check_every: int | None = declare(
        None,
        "updates between spot checks, in which all workers compute the same shard (0: none)",
        kind=int,
        metavar="N",
        check=at_least(0),
    )
    split: tuple[str, ...] | None = declare(
        None,
        "modules before which the model is cut into stages, for workers on several devices",
        kind=str,
        metavar="NAMES",
        check=_names,
    )
    pipeline: str = declare(
        "1f1b",
        f"schedule of the stages: {', '.join(ORDERS)} (default: 1f1b)",
        kind=str,
        metavar="WORD",
        check=lambda name, value: one_of(name, value, ORDERS),
    )
