"""Compute: how a replica runs the operators of a shard."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from quorate.errors import SettingError
from quorate.replica.kernels import MEASURED, ONEDNN, TORCH
from quorate.settings import AtResume, Settings, about, at_least, one_of, switch

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
    """How replicas compute.

    Args:
        compile: whether the model is compiled by torch.compile, once per shape of a shard; on an
            NVIDIA GPU a whole shard is then replayed as a CUDA graph where that works. Compiled
            operations round in another way, so the bits depend on it. What cannot be compiled runs
            as it is, and the reason is said.
        kernels: by which library a CPU makes the products of float32 linear layers. ``"torch"``: by
            torch's, MKL. ``"onednn"``: by oneDNN from a size on. ``"measured"``: by oneDNN if that
            is much faster on this processor, as on some of AMD's; it is measured once, before the
            first update. What was chosen is kept by the run's checkpoints, as the bits depend on
            it. Try it where linear layers take much of a CPU's time. Default: as the checkpoint
            says, and torch's in a new run.
        soft_placement: whether an operator that a device has no kernel for runs on the CPU. It is
            named once, with the module that called it. Without it that is an error. Not together
            with ``compile``.
        log_placement: show which module and operator ran where, as a table, for the first shard.
        deterministic: whether operators that add in whatever order threads come are held to one
            order, by ``torch.use_deterministic_algorithms``. Default: under ``sync``, on GPUs and
            with more than one intra-op thread; one CPU thread has one order anyway. Turn it off
            where it is too slow, or an operator has no such version, and other bits will do.
        strict: whether the run ends with an error where something is found by which its bits would
            be others on another number of workers, or after a resume. Otherwise that is said, and
            stands in the metrics and the checkpoints. Likewise where the values are in doubt: a
            loss that is a sum over rows, a tensor that is never trained, a queue that is averaged.
        spot_check_every: updates between two spot checks, in which all workers compute one and the
            same shard, twice, and the results are compared. Default: so many that they take about
            0.5% of the time. 0: no spot checks. Only where the bits do not depend on timing.
        split: names of modules, in the order in which the forward pass calls them, before each of
            which the model is cut. The stages between them compute on the devices of a replica
            (``devices="cpu+cpu"``), all at the same time: while one has a shard, another has the
            next one. For a model that one process has no room for. Default: where stages take the
            same time, by what the parts of the model take of one shard, if replicas are on several
            devices and the script has placed no part on one. The bits do not depend on it.
        pipeline: in which order stages compute shards. ``"1f1b"``: one forward, one backward, which
            holds the fewest activations. ``"gpipe"``: all forward, then all backward.
            ``"interleaved"``: several stages on each device, for less waiting; two of them, where
            ``split`` does not say. ``"zero-bubble"``: one forward, one backward, but gradients of
            parameters come later than those that the stage before waits for, for less waiting too.
    """

    compile: bool = field(
        default=False,
        metadata=about(
            "compile the model with torch.compile, once per shape of a shard",
            kind=bool,
            check=switch,
            at_resume=AtResume.SAID,
        ),
    )
    kernels: str | None = field(
        default=None,
        metadata=about(
            "library for float32 linear layers on a CPU: torch, onednn, or measured (by a test)",
            kind=str,
            metavar="WORD",
            check=lambda name, value: one_of(name, value, (TORCH, ONEDNN, MEASURED)),
        ),
    )
    soft_placement: bool = field(
        default=False,
        metadata=about(
            "run operators on the CPU if the device has no kernel for them", kind=bool, check=switch
        ),
    )
    log_placement: bool = field(
        default=False,
        metadata=about(
            "show the device of each module and operator, for the first shard",
            kind=bool,
            check=switch,
        ),
    )
    deterministic: bool | None = field(
        default=None,
        metadata=about(
            "use deterministic algorithms (default under sync: on GPUs, or with --threads above 1)",
            kind=bool,
            check=lambda _, value: None if value is None else bool(value),
            at_resume=AtResume.SAID,
        ),
    )
    strict: bool = field(
        default=False,
        metadata=about(
            "end the run with an error when the same bits cannot be kept", kind=bool, check=switch
        ),
    )
    spot_check_every: int | None = field(
        default=None,
        metadata=about(
            "updates between spot checks, in which all workers compute the same shard (0: none)",
            kind=int,
            metavar="N",
            check=at_least(0),
        ),
    )
    split: tuple[str, ...] | None = field(
        default=None,
        metadata=about(
            "modules before which the model is cut into stages, for workers on several devices",
            kind=str,
            metavar="NAMES",
            check=_names,
        ),
    )
    pipeline: str = field(
        default="1f1b",
        metadata=about(
            f"schedule of the stages: {', '.join(ORDERS)} (default: 1f1b)",
            kind=str,
            metavar="WORD",
            check=lambda name, value: one_of(name, value, ORDERS),
        ),
    )
