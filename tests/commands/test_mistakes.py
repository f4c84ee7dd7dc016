"""A user's mistake: one line with the got and the expected value, exit code 2, nothing started."""

import shlex
import sys
from pathlib import Path

import pytest
from support.messages import expect_message
from support.runs import command, run
from support.typed_mistakes import MISTAKES, make

from quorate.__main__ import main

BROKEN = str(Path(__file__).parents[1] / "scripts" / "broken.py")

LOSSES = (
    *("None", "{'loss': out.mean().detach()}", "elsewhere(batch[0]).mean()"),
    *("{'loss': out.mean(), 'weight': 0}", "{'loss': out.mean(), 'accuracy': out}"),
)
# Setting -> values as Python has them.
OF_THE_TRAINER = {
    "augment": ("lambda batch: batch",),
    "clip_norm": ("float('inf')",),
    "collate": ("'x'", "lambda: 1"),
    "init_from": ("5",),
    "kernels": ("'mkl'",),
    "loss": ("None",),
    "no_such": ("1",),
    "optimizer": ("lambda: 1", "'adam'", "lambda params: None", "sgd(elsewhere.parameters())"),
    "order": ("'random'",),
    "run_dir": ("chr(0)",),
    "save_every_s": ("'often'",),
    "schedule": (
        *("5", "lambda optimizer: None", "torch.optim.lr_scheduler.ReduceLROnPlateau"),
        "lambda _: torch.optim.lr_scheduler.ConstantLR(sgd(elsewhere.parameters()))",
    ),
    "shards": ("2.0",),
    "soft_placement": ("'no'",),
    "totals": ("5", "{'a': 5}"),
    "update": ("5", "'bounded:1.5'"),
    "worker_timeout_s": ("-1",),
    "workers": ("[2]",),
}
OF_FIT = {
    "callbacks": ("5", "[5]", "[dict]"),
    "dataset": ("5", "TensorDataset(torch.ones(0, 3))", "(torch.zeros(3) for _ in 'ab')"),
    "epoch": ("1",),
    "max_time_s": ("float('nan')",),
    "shuffle": ("'no'",),
    "steps": ("'a'",),
    "validation": ("5", "[]"),
}
IN_A_SCRIPT = [
    *(("loss", value) for value in LOSSES),
    *(("trainer", name, value) for name, values in OF_THE_TRAINER.items() for value in values),
    *(("fit", name, value) for name, values in OF_FIT.items() for value in values),
]
# Mistakes beside those in the docs.
AT_THE_COMMAND = (
    *("mend", "verify --update-s 2 a.py", "doctor --workers 2 {BROKEN}"),
    *("run --devices gpu {BROKEN} fine", "run --devices cpu+cuda:77 {BROKEN} fine"),
    f"run --devices cpu --workers {10**20} {{BROKEN}} fine",
    "run --devices cpu --engine magic {BROKEN} fine",
    "run --devices cpu --update quorum:0 {BROKEN} fine",
    "run --devices cpu --shards 21 {BROKEN} trainer batch_size 64",
)


def the_line(captured: pytest.CaptureFixture[str]) -> str:
    """Return the only line of the errors."""
    (line,) = captured.readouterr().err.splitlines()
    assert line.startswith("quorate: ")
    return line


@pytest.mark.parametrize("words", IN_A_SCRIPT, ids=" ".join)
def test_a_mistake_in_a_script(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--devices", "cpu", "--workers", "2", BROKEN, *words]) == 2
    expect_message(the_line(capsys))


@pytest.mark.parametrize("typed", AT_THE_COMMAND)
def test_a_mistake_at_the_command(typed: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(typed.format(BROKEN=BROKEN).split()) == 2
    expect_message(the_line(capsys))


@pytest.mark.parametrize(
    ("typed", "line"),
    [row for rows in MISTAKES.values() for row in rows],
    ids=lambda text: text[:60],
)
def test_a_mistake_ends_in_the_line_that_the_docs_have(
    typed: str,
    line: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    make(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])  # gets the folder of a module
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert main(shlex.split(typed)[1:]) == 2
    assert the_line(capsys) == line


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="ranks are forked")
def test_a_loop_of_ranks_that_is_to_be_looked_at(tmp_path: Path) -> None:
    """A loop of ranks under verify or bench would lose the ranks' part without a word."""
    engine = ("--engine", "collective", "--workers", "2")  # of a process's first loop
    record = ("--record", str(tmp_path), "--record-updates", "2")
    found = run(command(BROKEN, "fine", options=(*engine, *record)))
    assert (found.code, len(found.err.splitlines())) == (2, 1)
    assert "got 'collective', expected processes or towers here" in found.err
