"""Ranks that do not fit together are refused before anything else, by one line on each host."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch.distributed
from support.messages import expect_error
from support.runs import SCRIPTS, Ended, run

from quorate.errors import SettingError, UserError
from quorate.transports.collective.hello import Hello, require_alike

OWN = Hello("10.0.0.1", "host", "cpu", "2.13.0", "ab", None)
TORCHRUN = pytest.mark.skipif(not torch.distributed.is_available(), reason="no distributed")

# One rank: computes on the device that is named, and is told of the others.
MEETS = """
import sys, torch, quorate
from quorate.coordination.rules import Sync
from quorate.machine.devices import Group
from quorate.services.display.uncaught import fold_tracebacks
from quorate.transports.collective.company import Company
fold_tracebacks()  # as a Trainer does
device = torch.device(sys.argv[1 + int(__import__("os").environ["RANK"])])
company = Company([Group([device])], quorate.Workers(), Sync())
company.meet(device, 60)
"""
OTHER_BUILD = "import torch\ntorch.__version__ = '2.99.0'\n"


def torchrun(*words: str, number: int = 2) -> Ended:
    start = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(number)]
    start += ["--monitor-interval", "0.1"]
    start += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    return run([*start, *words])


def one_line(ended: Ended) -> str:
    """Return the line that all ranks together have said, before a first step."""
    assert ended.code == 1, ended.said  # torchrun's own
    assert "step 1/" not in ended.out
    (line,) = re.findall(r"^quorate: .*$", ended.said, re.MULTILINE)
    assert re.search(r"exitcode *: 2 ", ended.err), ended.err
    assert "File" not in ended.said.partition("torch/distributed/elastic")[0]
    return str(line)


def test_who_differs_from_rank_0_is_named() -> None:
    require_alike([OWN, OWN._replace(address="10.0.0.2")])
    with expect_error(
        UserError, name="rank 2 differs from rank 0 in the kind of device", got="cuda"
    ):
        require_alike([OWN, OWN, OWN._replace(device="cuda", torch="2.12.0")])
    where, either = "rank 1 differs from rank 0 in the torch build", r"2\.1[23]\.0"
    with expect_error(UserError, name=where, got="2.12.0", expected="2.13.0", hide=either):
        require_alike([OWN, OWN._replace(torch="2.12.0", script="cd")])
    with expect_error(UserError, name="rank 1 differs from rank 0 in the script's text", got="cd"):
        require_alike([OWN, OWN._replace(script="cd")])
    with expect_error(SettingError, name="workers", got=3):
        require_alike([OWN, OWN._replace(workers=3)])


@pytest.mark.slow
@TORCHRUN
def test_a_rank_on_a_cpu_among_ranks_with_another_kind_of_device(tmp_path: Path) -> None:
    script = tmp_path / "meets.py"
    script.write_text(MEETS)
    line = one_line(torchrun(str(script), "cpu", "meta"))
    assert "rank 1 differs from rank 0 in the kind of device: got meta, expected cpu" in line


@pytest.mark.slow
@TORCHRUN
def test_another_build_of_torch_and_another_text(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(OTHER_BUILD)
    script = str(SCRIPTS / "ranks.py")
    begin = f'test $RANK = 1 && export PYTHONPATH="{tmp_path}:$PYTHONPATH"; '
    command = f'{begin} exec "{sys.executable}" "{script}" plain adam'
    line = one_line(torchrun("--no-python", "sh", "-c", command))
    assert "rank 1 differs from rank 0 in the torch build: got 2.99.0, expected" in line
    for rank in (0, 1):
        text = Path(script).read_text() + f"# {rank}\n"
        (tmp_path / f"ranks{rank}.py").write_text(text)
    command = f'exec "{sys.executable}" "{tmp_path}/ranks$RANK.py" plain adam'
    line = one_line(torchrun("--no-python", "sh", "-c", command))
    assert "rank 1 differs from rank 0 in the script's text: got" in line


@pytest.mark.slow
@TORCHRUN
def test_another_number_of_workers_and_another_engine() -> None:
    run = ("-m", "quorate", "run", "--devices", "cpu")
    script = (str(SCRIPTS / "ranks.py"), "plain", "adam")
    line = one_line(torchrun(*run, "--workers", "3", *script))
    assert "workers: got 3, expected 2, as torchrun has started 2 ranks; leave it to" in line
    line = one_line(torchrun(*run, "--engine", "collective", "--workers", "3", *script))
    assert "workers: got 3, expected 2, as torchrun has started 2 ranks" in line
    towers = torchrun(*run, "--engine", "towers", *script)
    assert "engine: got 'towers', expected collective, as torchrun has started 2" in towers.err


@pytest.mark.slow
@TORCHRUN
@pytest.mark.parametrize(
    ("what", "expected"),
    [
        ("shards", "rank 1 differs from rank 0 in shards: got 5, expected 4"),
        ("data", "rank 1 differs from rank 0 in the first rows of the dataset"),
    ],
)
def test_other_shards_and_other_data(what: str, expected: str) -> None:
    assert expected in one_line(torchrun(str(SCRIPTS / "ranks.py"), what, "adam"))
