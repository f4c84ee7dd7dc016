"""The ports: counts, faults, two trained ports, and the table of the page."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.example_modules import example_modules

ROOT = Path(__file__).parents[2]
PORTS = sorted((ROOT / "ports").glob("*/*.py"))


def test_the_page_has_a_row_for_each_port_and_no_fault() -> None:
    page = (ROOT / "docs" / "ports.md").read_text()
    rows = re.findall(r"^\| `(\S+)`: (.*?) \|", page, re.MULTILINE)
    with example_modules(ROOT / "ports") as ports:
        assert rows == [(port.name, port.title) for port in map(ports.run.port, PORTS)]
    assert len(rows) >= 40
    assert ", 0 with a fault." in page


@pytest.mark.slow
def test_ports_are_trained_and_compared(tmp_path: Path) -> None:
    words = [sys.executable, str(ROOT / "ports" / "run.py"), "--python", sys.executable]
    words += ["--log", str(tmp_path / "log"), "--markdown", str(tmp_path / "table.md")]
    words += ["--only", "one_cycle"]
    ended = subprocess.run(words, capture_output=True, text=True, check=False)
    said = ended.stdout + ended.stderr + (tmp_path / "log").read_text()
    assert ended.returncode == 0, said
    table = (tmp_path / "table.md").read_text()
    assert table.count("equal: 1 tower, 2 towers, 2 processes") == 1, said
    assert "1 of them within 1e-05" in table
