"""CUDA_VISIBLE_DEVICES: CUDA's rules, case by case; torch's own count as a second opinion."""

from __future__ import annotations

import pytest
import torch

from quorate.machine.visible_devices import Gpu, Selection, Slice, Visible, select, why_none

A, B, C, D = (
    "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6",
    "GPU-8932a0ff-0000-4106-c12f-20bd9faed9f6",
    "GPU-11111111-2222-3333-4444-555555555555",
    "GPU-22222222-2222-3333-4444-555555555555",
)
FOUR = [Gpu(index, uuid) for index, uuid in enumerate([A, B, C, D])]

# The variable -> which GPUs are cuda:0, cuda:1, ..., and a part of what is said of the rest.
CASES: list[tuple[str | None, list[int], str | None]] = [
    (None, [0, 1, 2, 3], None),
    ("", [], "it is empty, which hides every GPU"),
    ("   ", [], "it is empty"),
    ("0", [0], None),
    ("2,1", [2, 1], None),  # the programming guide's example: 2 comes before 1, 0 is hidden
    ("0,2,-1,1", [0, 2], "entry 3, '-1', is negative"),  # likewise: 1 comes after an invalid one
    ("0, 1, 2, 3", [0, 1, 2, 3], None),  # as TF1 scripts have it
    (" 3 ,\t1 ", [3, 1], None),
    ("-1", [], "'-1' is negative, which hides every GPU"),
    ("-1,0,1", [], "'-1' is negative"),
    ("7", [], "'7' is none of the 4 GPUs here"),
    ("1,7,2", [1], "entry 2, '7', is none of the 4 GPUs here"),
    ("0,0", [], "'0' is there twice"),
    ("0,1,0", [], "'0' is there twice"),
    ("0,,1", [0], "entry 2, '', is no index"),
    ("0,1,", [0, 1], "entry 3, '', is no index"),
    ("none", [], "'none' is no index"),
    ("NoDevFiles", [], "is no index"),  # what old SLURMs write
    ("1gpu,2ampere", [1, 2], None),  # as C reads numbers
    ("+1", [1], None),
    ("-", [], "'-' is no index"),
    ("0-2", [0], None),  # no range
    (A, [0], None),
    (f"{D},{A}", [3, 0], None),
    ("GPU-8932f937", [0], None),  # the programming guide's example of an abbreviation
    ("GPU-1", [2], None),
    ("GPU-8932", [], "'GPU-8932' fits 2 GPUs"),
    ("GPU-1,GPU-8932,GPU-2", [2], "entry 2, 'GPU-8932', fits 2 GPUs"),
    ("GPU-", [], "fits 4 GPUs"),
    ("GPU-77", [], "is none of the 4 GPUs here"),
    (f"GPU-1,{C}", [], "is there twice"),  # two names of one GPU
    ("GPU-1, GPU-2", [2], "entry 2, ' GPU-2', has a blank before it"),
    ("GPU-1,0", [2], "entry 2, '0', does not begin with GPU-"),
    ("0,GPU-1", [0], "entry 2, 'GPU-1', is no index"),
    (" GPU-1", [], "' GPU-1' is no index"),
    ("gpu-1", [], "'gpu-1' is no index"),
    ("MIG-11111111", [], "is none of the slices here"),
]


@pytest.mark.parametrize(("value", "indices", "remark"), CASES, ids=[repr(c[0]) for c in CASES])
def test_what_is_visible(value: str | None, indices: list[int], remark: str | None) -> None:
    found = select(value, FOUR)
    assert [visible.index for visible in found.visible] == indices
    assert [visible.uuid for visible in found.visible] == [FOUR[i].uuid for i in indices]
    if remark is None:
        assert found.remark is None
    else:
        assert found.remark is not None
        assert remark in found.remark


# torch fails on a "-" alone, and leaves slices to CUDA.
COUNTED = [case[:2] for case in CASES if case[0] not in (None, "-", "MIG-11111111")]


@pytest.mark.parametrize(("value", "indices"), COUNTED, ids=[repr(c[0]) for c in COUNTED])
def test_torch_counts_the_same(
    value: str, indices: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Its count over NVML, on a machine with these four GPUs.
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    monkeypatch.setattr(torch.cuda, "_raw_device_count_nvml", lambda: 4)
    monkeypatch.setattr(torch.cuda, "_raw_device_uuid_nvml", lambda: [A, B, C, D])
    assert torch.cuda._device_count_nvml() == len(indices)


def test_why_every_gpu_is_hidden_whatever_there_is() -> None:
    assert why_none(None) is None
    assert why_none("0") is None
    assert why_none("GPU-1") is None
    assert why_none("") == "it is empty, which hides every GPU"
    assert why_none("-1") == "'-1' is negative, which hides every GPU"
    assert why_none("0,0") == "'0' is there twice, which hides every GPU"


def test_how_it_is_printed() -> None:
    assert str(Visible(4, A)) == f"physical 4 = {A}"


FIRST, SECOND = Slice("MIG-aaaa", 1, 0), Slice("MIG-bbbb", 2, 0)
CUT = [Gpu(0, A), Gpu(1, C, is_cut=True, slices=(FIRST, SECOND)), Gpu(2, D, is_cut=True)]


@pytest.mark.parametrize(
    ("value", "visible", "remark"),
    [
        ("MIG-bbbb", [Visible(1, "MIG-bbbb")], None),
        (f"MIG-{C}/1/0", [Visible(1, "MIG-aaaa")], None),  # the form before driver R470
        ("MIG-bbbb,MIG-aaaa", [Visible(1, "MIG-bbbb")], "a process sees one slice"),
        ("MIG-cccc", [], "is none of the slices here"),
        ("MIG-bbbb,0", [Visible(1, "MIG-bbbb")], "does not begin with MIG-"),
        # A GPU that is cut stands for its first slice, and beside a slice no GPU is seen.
        ("1", [Visible(1, "MIG-aaaa")], "GPU 1 is cut into slices"),
        (None, [Visible(1, "MIG-aaaa")], "GPU 1 is cut into slices"),
        ("0", [Visible(0, A)], None),
        ("0,2", [Visible(0, A)], "GPU 2 is to be cut into slices (MIG), and has none"),
    ],
)
def test_slices(value: str | None, visible: list[Visible], remark: str | None) -> None:
    found = select(value, CUT)
    assert list(found.visible) == visible
    assert (found.remark is None) == (remark is None)
    assert (remark or "") in (found.remark or "")


def test_no_gpu() -> None:
    assert select(None, []) == Selection((), None)
    assert select("0", []).remark == "'0' is none of the 0 GPUs here, which hides every GPU"
