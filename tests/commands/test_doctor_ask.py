"""Questions to drivers: they are cut off, and what was answered counts."""

from __future__ import annotations

import os
import resource
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from quorate.commands.doctor.ask import ask


def asked(folder: Path, text: str, **options: float) -> Any:
    (folder / "ask_this.py").write_text(f"import json, os, time\n\n\ndef run():\n{text}")
    return ask("ask_this", [str(folder)], **options)


def test_a_question_that_blocks_is_cut_off_and_what_was_answered_counts(tmp_path: Path) -> None:
    text = """
    print(json.dumps({"asking": "GPU 0"}), flush=True)
    print(json.dumps({"gpu": os.getpid()}), flush=True)
    print(json.dumps({"asking": "GPU 1"}), flush=True)
    time.sleep(1000)
"""
    began = time.monotonic()
    found = asked(tmp_path, text, answer_s=0.3)
    assert time.monotonic() - began < 60  # of 1000
    assert found.failure == "no answer within 0.3 s from GPU 1"
    assert not psutil.pid_exists(found.first("gpu"))


def test_every_question_has_its_own_time(tmp_path: Path) -> None:
    text = """
    for number in range(4):
        print("a library's own words\\n7", flush=True)
        print(json.dumps({"asking": f"GPU {number}"}), flush=True)
        time.sleep(0.2)
        print(json.dumps({"gpu": number}), flush=True)
    print(json.dumps({"end": True}), flush=True)
    time.sleep(1000)
"""
    found = asked(tmp_path, text, answer_s=0.6)
    assert found == ([{"gpu": number} for number in range(4)], None)


def test_a_process_that_never_begins_or_dies(tmp_path: Path) -> None:
    slow = asked(tmp_path, "    time.sleep(1000)\n", begin_s=0.3)
    assert slow.failure == "no answer within 0.3 s from the start"
    dies = asked(
        tmp_path, '    print(\'{"asking": "GPU 0"}\', flush=True)\n    raise OSError("x")\n'
    )
    assert dies.failure == "asking GPU 0 ended its process: OSError: x"
    told_why = asked(tmp_path, '    print(\'{"error": "no driver"}\', flush=True)\n')
    assert told_why == ([], "no driver")


def test_no_descriptors_to_ask_with(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = max(int(name) for name in os.listdir("/dev/fd")) + 1  # noqa: PTH208
    resource.setrlimit(resource.RLIMIT_NOFILE, (used, hard))
    try:
        holes = []
        while True:
            try:
                holes.append(os.dup(0))
            except OSError:
                break
        found = asked_without_files(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for hole in holes:
            os.close(hole)
    assert found.failure is not None
    assert found.failure.startswith("no process can be started to ask: Too many open files")


def asked_without_files(folder: Path) -> Any:
    return ask("ask_this", [str(folder)])


TORCH_STAND_IN = """
import contextlib
from types import SimpleNamespace as Values

__version__ = "2.13.0+cu130"
version = Values(cuda="13.0", hip=None)
backends = Values(
    mkldnn=Values(is_available=lambda: True), cudnn=Values(version=lambda: 91002)
)
distributed = Values(
    is_available=lambda: True, is_nccl_available=lambda: True, is_gloo_available=lambda: True
)
accelerator = Values(
    current_accelerator=lambda: Values(type="cuda"),
    device_index=lambda index: contextlib.nullcontext(),
)

def init():
    raise RuntimeError("The NVIDIA driver on your system is too old\\nPlease update")

cuda = Values(
    device_count=lambda: COUNT,
    init=init,
    get_device_properties=lambda index: Values(uuid="aaaa"),
)

class Ones:
    def __mul__(self, factor): return self
    def sum(self): return Values(item=lambda: 16.0)

def get_num_threads(): return 32
def get_device_module(accelerator): return cuda
def ones(size, device):
    if device == "cuda:1":
        raise RuntimeError("no kernel image is available\\nCompile with ...")
    return Ones()
"""


@pytest.mark.parametrize("count", [0, 2])
def test_what_torch_is_asked_where_it_has_gpus(count: int, tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text(f"COUNT = {count}\n{TORCH_STAND_IN}")
    found = ask("ask_torch", [str(tmp_path)])
    assert found.failure is None
    assert found.first("build")["nccl"]
    assert found.first("build")["cudnn"] == "91002"
    if count == 0:
        assert found.first("why_none") == "The NVIDIA driver on your system is too old"
        return
    assert found.all("device") == [
        {"device": "cuda:0", "uuid": "aaaa", "error": None},
        {"device": "cuda:1", "uuid": "aaaa", "error": "no kernel image is available"},
    ]
