"""CUDA_VISIBLE_DEVICES: the GPUs that a process sees, their order, and why others are hidden.

The rules are CUDA's (programming guide, "CUDA environment variables"; for slices the MIG user
guide, "CUDA device enumeration"), and otherwise the rules by which torch counts devices:

* Not set: all GPUs. Empty: none.
* A list with commas. An index is nvidia-smi's (with CUDA_DEVICE_ORDER=PCI_BUS_ID, or GPUs of a
  single kind); blanks around the index and text after its digits are ignored.
* A UUID as shown by nvidia-smi -L, or an unambiguous prefix. The first entry decides whether all
  entries are indices, ``GPU-`` names or ``MIG-`` names.
* The first invalid entry ends the list: -1, an index or a UUID without a GPU or with several, a
  name among indices, a blank before a name.
* An entry twice: no GPU is visible.
* A process sees at most one slice of a GPU (MIG), and with a slice no whole GPU.

The visible GPUs have the order of the list: the first is ``cuda:0``.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

VARIABLE = "CUDA_VISIBLE_DEVICES"


class Slice(NamedTuple):
    """A slice of a partitioned GPU (MIG)."""

    uuid: str  # "MIG-..."
    gpu_instance: int
    compute_instance: int


@dataclass(frozen=True)
class Gpu:
    """A GPU known to the driver."""

    index: int  # nvidia-smi's
    uuid: str  # "GPU-..."
    is_cut: bool = False  # MIG is on
    slices: tuple[Slice, ...] = ()


@dataclass(frozen=True)
class VisibleGpu:
    """The GPU, or slice, behind a name ``cuda:N``."""

    index: int  # nvidia-smi's
    uuid: str  # of the GPU, or of its slice

    def __str__(self) -> str:
        return f"physical {self.index} = {self.uuid}"


class Selection(NamedTuple):
    """The GPUs selected by the variable."""

    visible: tuple[VisibleGpu, ...]  # cuda:0, cuda:1, ...
    remark: str | None  # why fewer GPUs are visible than the variable seems to say


class _ValidEntries(NamedTuple):
    """The entries before the first entry that is invalid on any machine."""

    valid: tuple[int | str, ...]
    remark: str | None


def select(value: str | None, gpus: Sequence[Gpu]) -> Selection:
    """Return the GPUs visible to a process.

    Args:
        value: the value of the variable; None if not set.
        gpus: all GPUs known to the driver, by index.
    """
    if value is None:
        return _sliced(gpus, None)
    entries = _entries(value)
    if entries.valid and str(entries.valid[0]).startswith("MIG-"):
        return _slices(entries, gpus)
    found: list[Gpu] = []
    for number, entry in enumerate(entries.valid, start=1):
        fits = [gpu for gpu in gpus if _fits(entry, gpu)]
        if len(fits) != 1:
            why = f"fits {len(fits)} GPUs" if fits else f"is none of the {len(gpus)} GPUs here"
            return _sliced(found, _ends(number, entry, why))
        if fits[0] in found:
            return Selection((), _twice(entry))
        found += fits
    return _sliced(found, entries.remark)


def why_none(value: str | None) -> str | None:
    """Return why the variable hides every GPU on any machine; None if it need not."""
    if value is None:
        return None
    entries = _entries(value)
    return None if entries.valid else entries.remark


def _entries(value: str) -> _ValidEntries:
    if not value.strip():
        return _ValidEntries((), "it is empty, which hides every GPU")
    kind = next((prefix for prefix in ("GPU-", "MIG-") if value.startswith(prefix)), None)
    valid: list[int | str] = []
    for number, text in enumerate(value.split(","), start=1):
        entry: int | str
        if kind is None:
            digits = re.match(r"\+?[0-9]+", text.strip())
            if digits is None:
                return _ValidEntries(tuple(valid), _ends(number, text, _no_index(text.strip())))
            entry = int(digits[0])
        elif text.startswith(kind):
            entry = text
        else:
            why = f"does not begin with {kind}, as the first entry does"
            if text.strip().startswith(kind):
                why = "has a blank before it"
            return _ValidEntries(tuple(valid), _ends(number, text, why))
        if entry in valid:
            return _ValidEntries((), _twice(entry))
        valid.append(entry)
    return _ValidEntries(tuple(valid), None)


def _no_index(text: str) -> str:
    return "is negative" if re.match(r"-[0-9]", text) else "is no index"


def _ends(number: int, entry: int | str, why: str) -> str:
    if number == 1:
        return f"{str(entry)!r} {why}, which hides every GPU"
    return f"entry {number}, {str(entry)!r}, {why}, which hides it and whatever follows"


def _twice(entry: int | str) -> str:
    return f"{str(entry)!r} is there twice, which hides every GPU"


def _fits(entry: int | str, gpu: Gpu) -> bool:
    return gpu.index == entry if isinstance(entry, int) else gpu.uuid.startswith(entry)


def _sliced(gpus: Sequence[Gpu], remark: str | None) -> Selection:
    """Return the whole GPUs, or the single slice visible instead."""
    for gpu in gpus:
        if gpu.slices:
            if len(gpus) > 1 or len(gpu.slices) > 1:
                remark = f"GPU {gpu.index} is cut into slices: a process sees one, and nothing else"
            return Selection((VisibleGpu(gpu.index, gpu.slices[0].uuid),), remark)
    if cut := [gpu.index for gpu in gpus if gpu.is_cut]:
        remark = f"GPU {cut[0]} is to be cut into slices (MIG), and has none"
    return Selection(tuple(VisibleGpu(g.index, g.uuid) for g in gpus if not g.is_cut), remark)


def _slices(entries: _ValidEntries, gpus: Sequence[Gpu]) -> Selection:
    first = entries.valid[0]
    for gpu in gpus:
        for part in gpu.slices:
            # The second form is used by drivers before R470.
            place = f"MIG-{gpu.uuid}/{part.gpu_instance}/{part.compute_instance}"
            if first in (part.uuid, place):
                remark = entries.remark
                if len(entries.valid) > 1:
                    remark = "a process sees one slice: those after the first are hidden"
                return Selection((VisibleGpu(gpu.index, part.uuid),), remark)
    return Selection((), _ends(1, first, "is none of the slices here"))
