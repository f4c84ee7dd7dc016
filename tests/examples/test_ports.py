"""The ports: what is counted, what is a fault, two of them trained, and the table of the page."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PORTS = sorted((ROOT / "ports").glob("*/*.py"))

SCRIPT = '''"""A title.

Not compared: it draws.
"""

import torch

import quorate


def rows():  # shared
    """Say."""
    return 3


def plain() -> nn.Module:
    model = rows()
    # a comment
    for _ in model:
        step()

    return model


def ported() -> nn.Module:
    model = rows()
    with model:
        step()
    fit()
    return model


if __name__ == "__main__":
    ported()
'''


def command() -> ModuleType:
    name = "ports_run"
    spec = importlib.util.spec_from_file_location(name, ROOT / "ports" / "run.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def test_a_port_is_read_and_its_changed_lines_are_counted(tmp_path: Path) -> None:
    run = command()
    path = tmp_path / "kind" / "small.py"
    path.parent.mkdir()
    path.write_text(SCRIPT)
    port = run.port(path)
    assert (port.name, port.title, port.is_compared) == ("kind/small", "A title", False)
    shared = ["import torch", "def rows():", "return 3"]
    assert port.plain == [*shared, "model = rows()", "for _ in model:", "step()", "return model"]
    ours = ["import torch", "import quorate", *shared[1:], "model = rows()", "with model:"]
    assert port.ported == [*ours, "step()", "fit()", "return model"]
    assert port.accelerated is None
    assert run.changed(port.plain, port.ported) == (3, 1)


GOOD = {"digests": {"1 tower": "a", "2 towers": "a"}, "distance": 1e-7, "moved": 0.1}


@pytest.mark.parametrize(
    ("remark", "changes", "fault"),
    [
        ("", {}, None),
        ("", {"digests": {"1 tower": "a", "2 towers": "b"}}, "digests differ"),
        ("", {"digests": {"1 tower": "a"}}, "on one number of workers alone"),
        ("", {"distance": 2e-5}, "2.0e-05 from the plain loop"),
        ("", {"distance": float("nan")}, "nan from the plain loop"),
        ("", {"moved": 1e-4}, "moves its parameters by 1.0e-04"),
        ("", {"accelerate": 1e-3}, "Accelerate's is 1.0e-03"),
        ("", {"refused": "no"}, "is refused: no"),
        ("", {"error": "it fell"}, "fails: it fell"),
        ("Not compared: it draws.", {"distance": 0.1}, None),
        ("Refused: another way.", {"refused": "no"}, None),
        ("Refused: another way.", {}, "is not refused any more"),
        ("Processes alone: copies.", {"refused": "no"}, None),
    ],
)
def test_faults(remark: str, changes: dict[str, Any], fault: str | None, tmp_path: Path) -> None:
    run = command()
    path = tmp_path / "small.py"
    path.write_text(SCRIPT.replace("Not compared: it draws.", remark))
    found = run.fault(run.port(path), {**GOOD, **changes})
    assert found is None if fault is None else fault in found


def test_the_page_has_a_row_for_each_port_and_no_fault() -> None:
    run = command()
    page = (ROOT / "docs" / "ports.md").read_text()
    rows = re.findall(r"^\| `(\S+)`: (.*?) \|", page, re.MULTILINE)
    assert rows == [(port.name, port.title) for port in map(run.port, PORTS)]
    assert len(rows) >= 40
    assert ", 0 with a fault." in page


@pytest.mark.slow
def test_ports_are_trained_and_compared(tmp_path: Path) -> None:
    words = [sys.executable, str(ROOT / "ports" / "run.py"), "--python", sys.executable]
    words += ["--log", str(tmp_path / "log"), "--markdown", str(tmp_path / "table.md")]
    words += ["--only", "one_cycle", "offline_q_learning"]
    ended = subprocess.run(words, capture_output=True, text=True, check=False)
    said = ended.stdout + ended.stderr + (tmp_path / "log").read_text()
    assert ended.returncode == 0, said
    table = (tmp_path / "table.md").read_text()
    assert table.count("equal: 1 tower, 2 towers, 2 processes") == 2, said
    assert "2 ports: 2 with one digest on one worker and on two, 2 of them within 1e-05" in table
